"""Compiles the C libraries. setuptools runs this file as its script, and pip imports it as the build backend.

The libraries use nothing of CPython, so one wheel of a platform is for all versions of Python. They need a C
compiler and no headers of Python. Where there is no compiler, pip installs one for the time of the build:
the package ziglang, which contains clang.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, build_meta, setup
from setuptools.build_meta import *  # noqa: F403  what pip expects of a backend
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

#: What the libraries include, and a function of the C library.
_PROGRAM = """#include <stdint.h>
#include <stdlib.h>
#include <string.h>
void *probe(void) { return malloc(8); }
"""
_ZIG = "ziglang>=0.13,<0.18"
_USUAL = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"


@cache
def _compiler():
    """Returns the command of a compiler that works; None if there is none.

    Python names the compiler that built it, which this machine may not have. A compiler without the headers
    of the C library is of no use.
    """
    commands = [_USUAL] if os.environ.get("CC") else [_USUAL, "cc", "gcc", "clang"]
    return next((command for command in commands if _works(shlex.split(command))), None)


def _works(command):
    if shutil.which(command[0]) is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(_PROGRAM)
        arguments = [*command, "-fPIC", "-shared", "-o", str(source.with_suffix(".so")), str(source)]
        return subprocess.run(arguments, capture_output=True, check=False).returncode == 0


def _lacking():
    return [] if _compiler() or os.environ.get("CC") else [_ZIG]


def get_requires_for_build_wheel(config_settings=None):
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_lacking()]


def get_requires_for_build_editable(config_settings=None):
    return [*build_meta.get_requires_for_build_editable(config_settings), *_lacking()]


class BuildLibraries(build_ext):
    def build_extensions(self):
        compiler = _compiler()
        if compiler == _USUAL:
            super().build_extensions()  # with Python's own flags
        elif compiler is not None:
            self._build_with(*shlex.split(compiler))
        elif not os.environ.get("CC") and find_spec("ziglang"):
            with tempfile.TemporaryDirectory() as folder:
                os.environ["ZIG_GLOBAL_CACHE_DIR"] = os.environ["ZIG_LOCAL_CACHE_DIR"] = folder
                # otherwise zig compiles for the processor of this machine, and not of those with the wheel
                self._build_with(sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline", "-s")
        else:
            found = f"CC={_USUAL} does not work" if os.environ.get("CC") else "there is none that works"
            sys.exit(
                f"The build of kafka-eos-source needs a C compiler, and {found}: install gcc or clang with "
                "the headers of the C library (Debian: apt-get install gcc libc6-dev; macOS: xcode-select "
                f"--install), or the package '{_ZIG}' with pip, or install a wheel of kafka-eos-source."
            )

    def _build_with(self, *command):
        self.compiler.set_executables(compiler_so=[*command, "-O3", "-fPIC"], linker_so=[*command, "-shared"])
        super().build_extensions()

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


#: Headers that only one library has.
HEADERS = {"json": ("json_scalars",)}


if __name__ == "__main__":
    setup(
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
        ext_modules=[
            Extension(
                f"kafka_eos_source.native.{name}",
                [f"kafka_eos_source/native/{name}.c"],
                depends=[
                    f"kafka_eos_source/native/{header}.h" for header in ("buffers", *HEADERS.get(name, ()))
                ],
            )
            for name in ("kernel", "avro", "json", "json_text", "protobuf")
        ],
    )
