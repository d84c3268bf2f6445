"""Keyed count: what is sent, and what must come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 10
RECORD_BYTES = 110
_CHUNK = 100_000


@dataclass(frozen=True)
class Workload:
    """Records with uniformly random keys; each key's records are to be counted.

    Attributes:
        records: how many.
        keys: how many different ones at most.
        seed: of the keys' order.
        partitions: of the topics.
    """

    records: int = 2_000_000
    keys: int = 100_000
    seed: int = 5
    partitions: int = 4

    def numbers(self) -> NDArray[np.int64]:
        """The key of each record, as a number from 0."""
        return np.random.default_rng(self.seed).integers(0, self.keys, self.records)

    def truth(self) -> NDArray[np.int64]:
        """Records of each key."""
        return np.bincount(self.numbers(), minlength=self.keys)

    def payload(self) -> bytes:
        """The value of every record: random, so that nobody gains by compressing it within itself."""
        return np.random.default_rng(self.seed).bytes(RECORD_BYTES - KEY_BYTES)

    def chunks(self) -> Iterator[list[bytes]]:
        """The keys, in order, as they are sent."""
        numbers = self.numbers()
        for start in range(0, self.records, _CHUNK):
            yield [b"%010d" % number for number in numbers[start : start + _CHUNK].tolist()]


def key_numbers(keys: list[bytes]) -> NDArray[np.int64]:
    """The numbers of keys as they are sent.

    Raises:
        ValueError: a key is none of ours.
    """
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"a key is not {KEY_BYTES} bytes long")
    return np.frombuffer(b"".join(keys), dtype=f"S{KEY_BYTES}").astype(np.int64)
