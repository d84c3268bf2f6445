"""What pyproject.toml cannot say without a warning: the optional C libraries, and the tag of their wheel.

Without a C compiler the package installs all the same, and Python twins do the libraries' work. The libraries
use nothing of CPython, so one wheel of a platform is for all versions of Python. setuptools refuses that tag
for a Python without the GIL, which gets a wheel of its own version.
"""

import sysconfig

from setuptools import Extension, setup

HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")

KERNEL = Extension(
    "kafka_eos_source.native.kernel",
    ["kafka_eos_source/native/kernel.c"],
    optional=True,
    py_limited_api=HAS_GIL,
)

PROTOBUF = Extension(
    "kafka_eos_source.native.protobuf",
    ["kafka_eos_source/native/protobuf.c"],
    optional=True,
    py_limited_api=HAS_GIL,
)

setup(ext_modules=[KERNEL, PROTOBUF], options={"bdist_wheel": {"py_limited_api": "cp310"}} if HAS_GIL else {})
