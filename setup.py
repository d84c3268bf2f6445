"""The one thing that pyproject.toml cannot say without a warning: the optional C kernel.

Without a C compiler the package installs all the same, and its Python twin does the kernel's work.
"""

from setuptools import Extension, setup

KERNEL = Extension("kafka_eos_source.native.kernel", ["kafka_eos_source/native/kernel.c"], optional=True)

setup(ext_modules=[KERNEL])
