"""What pyproject.toml cannot say without a warning: the optional C libraries, and the tag of their wheel.

Without a C compiler the package installs all the same, and Python twins do the libraries' work. The libraries
use nothing of CPython, so one wheel of a platform is for all versions of Python. setuptools refuses that tag
for a Python without the GIL, which gets a wheel of its own version.
"""

import sysconfig

from setuptools import Extension, setup

HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")

LIBRARIES = [
    Extension(
        f"kafka_eos_source.native.{name}",
        [f"kafka_eos_source/native/{name}.c"],
        depends=["kafka_eos_source/native/buffers.h"],
        optional=True,
        py_limited_api=HAS_GIL,
    )
    for name in ("kernel", "avro", "protobuf")
]

setup(ext_modules=LIBRARIES, options={"bdist_wheel": {"py_limited_api": "cp310"}} if HAS_GIL else {})
