"""The kernel's library file: where it is, whether it fits, and why not."""

from __future__ import annotations

import ctypes
import os
import sysconfig
from pathlib import Path

#: What ``kafka_eos_kernel_version`` must say: a library of another build of this package is not used.
VERSION = 3

#: Set to 0, the kernel is not used.
VARIABLE = "KAFKA_EOS_NATIVE"

_OFF = frozenset({"0", "false", "no", "off"})


class KernelUnavailableError(Exception):
    """Why the kernel is not in use; its text is a clause."""


def library_path() -> Path:
    """Where setuptools puts the library, in place or installed."""
    return Path(__file__).with_name(f"kernel{sysconfig.get_config_var('EXT_SUFFIX')}")


def load() -> ctypes.CDLL:
    """The library.

    Raises:
        KernelUnavailableError: switched off, not built, or of another version.
    """
    if os.environ.get(VARIABLE, "").strip().lower() in _OFF:
        raise KernelUnavailableError(f"{VARIABLE}={os.environ[VARIABLE]} switches it off")
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
            f"{path.name} has version {version}, this package wants {VERSION}; install the package again"
        )
    return library
