"""Finds and loads the library file of the C kernel, or explains why that is not possible."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from pathlib import Path

#: The version that the library must report. A library from another build of this package is not used.
VERSION = 3

#: The environment variable that turns off the kernel when it is set to 0.
VARIABLE = "KAFKA_EOS_NATIVE"

_OFF = frozenset({"0", "false", "no", "off"})


class KernelUnavailableError(Exception):
    """The kernel cannot be used. The text is a clause that gives the reason."""


def library_path() -> Path:
    """Returns the path of the library, in a source tree and in an installation."""
    return Path(__file__).with_name(f"kernel{sysconfig.get_config_var('EXT_SUFFIX')}")


def load() -> ctypes.CDLL:
    """Loads the library.

    Raises:
        KernelUnavailableError: if the kernel is turned off, was not built, or has another version.
    """
    if os.environ.get(VARIABLE, "").strip().lower() in _OFF:
        raise KernelUnavailableError(f"{VARIABLE}={os.environ[VARIABLE]} turns it off")
    path = library_path()
    if not path.exists():
        raise KernelUnavailableError(
            "it was not built: no C compiler was found when the package was installed"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = library.kafka_eos_kernel_version()
    except (OSError, AttributeError) as failure:
        raise KernelUnavailableError(f"{path.name} cannot be loaded: {failure}") from failure
    if version != VERSION:
        raise KernelUnavailableError(
            f"{path.name} has version {version}, but this package needs version {VERSION}; "
            "install the package again"
        )
    return library
