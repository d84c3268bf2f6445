"""Finds and loads the library files of the C kernel, or explains why that is not possible."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import sysconfig
from pathlib import Path

#: The version that the library must report. A library from another build of this package is not used.
VERSION = 7

#: The version that the library of the Avro codec must report.
AVRO_VERSION = 2

#: The libraries that the kernel consists of: that of records of Kafka, and those of the codecs.
LIBRARIES = ("kernel", "avro", "protobuf")

#: The file that the sources of all libraries include.
HEADER = "buffers.h"

#: The environment variable that turns off the kernel when it is set to 0.
VARIABLE = "KAFKA_EOS_NATIVE"

_OFF = frozenset({"0", "false", "no", "off"})


class KernelUnavailableError(Exception):
    """The kernel cannot be used. The text is a clause that gives the reason."""


def library_path(name: str = "kernel") -> Path:
    """Returns the path of a library, in a source tree and in an installation.

    A wheel has one library for all versions of Python. The other name is that of older builds.
    """
    suffixes = (".abi3.so", sysconfig.get_config_var("EXT_SUFFIX"))
    candidates = [Path(__file__).with_name(f"{name}{suffix}") for suffix in suffixes]
    return next((path for path in candidates if path.exists()), candidates[0])


def is_turned_off() -> bool:
    """Returns whether the environment turns off the kernel."""
    return os.environ.get(VARIABLE, "").strip().lower() in _OFF


def report_if_not_built() -> None:
    """Logs one line if the package that this process imported has no kernel.

    The user's own program says it, and the one process of each streaming query that plans its batches:
    Spark's Python processes search the driver's working directory first, so they may import another copy of
    the package than the program, such as a source checkout. Spark's many other processes say nothing.
    `kafka-eos doctor` reports it too.
    """
    program = _program()
    if library_path().exists() or is_turned_off() or program is None:
        return
    logging.getLogger("kafka_eos_source").warning(
        "%s runs without the C kernel of kafka-eos, and moves records with slower Python code: the package "
        "in %s was installed without it. Fix: kafka-eos doctor --fix builds it, or start the program in "
        "another folder if this is a source checkout. (%s=0 turns off the kernel and this message.)",
        program,
        Path(__file__).parents[1],
        VARIABLE,
    )


def _program() -> str | None:
    """Returns what this process is, if it should report a missing kernel; None if it should not."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = "" if spec is None else spec.name
    if module == "pyspark.sql.streaming.python_streaming_source_runner":
        return "the query"
    is_command = Path(sys.argv[0] if sys.argv else "").name == "kafka-eos"
    return None if is_command or module.startswith(("pyspark.", "kafka_eos_source.")) else "this program"


def load() -> ctypes.CDLL:
    """Loads the library that moves records between librdkafka and Arrow.

    Raises:
        KernelUnavailableError: if the kernel is turned off, was not built, or has another version.
    """
    return _load("kernel", "kafka_eos_kernel_version", VERSION)


def load_avro() -> ctypes.CDLL:
    """Loads the library that decodes and encodes Avro.

    Raises:
        KernelUnavailableError: if the kernel is turned off, was not built, or has another version.
    """
    if sys.byteorder != "little":
        raise KernelUnavailableError("it needs a little-endian machine")
    return _load("avro", "kafka_eos_avro_version", AVRO_VERSION)


def _load(name: str, version_function: str, wanted: int) -> ctypes.CDLL:
    if is_turned_off():
        raise KernelUnavailableError(f"{VARIABLE}={os.environ[VARIABLE]} turns it off")
    path = library_path(name)
    if not path.exists():
        raise KernelUnavailableError(
            "it was not built: no C compiler was found when the package was installed"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = library[version_function]()
    except (OSError, AttributeError) as failure:
        raise KernelUnavailableError(f"{path.name} cannot be loaded: {failure}") from failure
    if version != wanted:
        raise KernelUnavailableError(
            f"{path.name} has version {version}, but this package needs version {wanted}; "
            "install the package again"
        )
    return library
