"""Checksums of staged parts: CRC-32C with the C kernel, else CRC-32, which takes five times as long."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

#: Names of the two checksums.
CRC32, CRC32C = "CRC-32", "CRC-32C"


def fastest() -> str:
    """Returns the fastest checksum that this process can compute."""
    from kafka_eos_source.kafka.kernel import choice  # loads a Kafka client

    return CRC32 if choice().kernel is None else CRC32C


def updating(kind: str) -> Callable[[Any, int], int]:
    """Returns a function for the checksum of bytes that follow others.

    It takes the bytes, as an object with a buffer, and the checksum of those before them; 0 = there are none.

    Args:
        kind: `CRC32` or `CRC32C`.

    Raises:
        LookupError: if this process cannot compute it. Tasks use `CRC32C` only if the process can that plans
            the batch on the driver.
    """
    if kind == CRC32:
        return zlib.crc32
    from kafka_eos_source.kafka.kernel import choice

    kernel = choice().kernel
    if kind != CRC32C or kernel is None:
        raise LookupError(f"{kind}: {choice().why_not or 'it is not known'}")

    def update(data: Any, before: int) -> int:
        array = np.frombuffer(data, np.uint8)
        return int(kernel.crc32c(before, array.ctypes.data, array.nbytes))

    return update
