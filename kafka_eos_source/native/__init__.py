"""The C kernel: five source files, whose compiled libraries this module finds and loads.

Every installation contains them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from kafka_eos_source.errors import KernelUnavailableError

#: The libraries of the kernel, and the version that each must report. A library from another build of this
#: package is not used.
VERSIONS = {"kernel": 10, "avro": 3, "json": 1, "json_text": 1, "protobuf": 3}

_HERE = Path(__file__).parent
_HOW_TO_INSTALL = (
    f"install the package into the Python {sys.executable}: a wheel contains the kernel, and "
    "'pip install .' in a clone compiles it (docs/deploying.md)."
)


def candidates(name: str) -> Iterator[Path]:
    """Yields the places where a library may be: next to this module, then wherever the package is installed.

    Spark's Python processes search the driver's working directory first. In a clone of the repository they
    import the sources, beside which there is no library unless the package was installed with ``-e``.
    """
    yield _HERE / f"{name}.so"
    for folder in sys.path:
        path = Path(folder or ".").resolve() / "kafka_eos_source" / "native"
        if path != _HERE:
            yield path / f"{name}.so"


@lru_cache(maxsize=len(VERSIONS))
def load(name: str) -> ctypes.CDLL:
    """Loads a library, the first that has the version of this package.

    Args:
        name: of the library, a key of `VERSIONS`.

    Raises:
        KernelUnavailableError: if there is none, or it cannot be used. It names each file and the reason.
    """
    if sys.byteorder != "little":
        raise KernelUnavailableError(
            "the C kernel of kafka-eos does not support this machine, which stores the highest byte first.",
            fix="run the query on x86-64, arm64 or another little-endian processor.",
        )
    refused = []
    for path in candidates(name):
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
            version = library[f"kafka_eos_{name}_version"]()
        except (OSError, AttributeError) as failure:
            refused.append(f"{path} cannot be loaded: {failure}")
            continue
        if version == VERSIONS[name]:
            return library
        refused.append(f"{path} has version {version}, but this package needs version {VERSIONS[name]}")
    reasons = "; ".join(refused) or f"there is no {name}.so in {_HERE}, and none in a folder of sys.path"
    raise KernelUnavailableError(f"the C kernel of kafka-eos cannot be used: {reasons}.", fix=_HOW_TO_INSTALL)


def check() -> None:
    """Loads all libraries, so that a broken installation fails before a query starts.

    Raises:
        KernelUnavailableError: if a library is missing or cannot be used.
    """
    for name in VERSIONS:
        load(name)
