"""What is sent, and what must come of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 10
RECORD_BYTES = 110
#: Of a value that is not random: so many bytes of each word are.
_WORD, _RANDOM = b"status=ok;route=/orders/", 8
_CHUNK = 100_000
#: With compression: so many that a batch of a producer holds hardly two that are the same.
_DIFFERENT = 4_096


@dataclass(frozen=True)
class Workload:
    """Records with uniformly random keys; each key's records are to be counted, or copied.

    Attributes:
        records: how many.
        keys: how many different ones at most.
        seed: of the keys' order.
        partitions: of the topic that is read.
        record_bytes: of key and value together.
        compression: librdkafka's ``compression.type`` of what is sent, and of what contenders write.
    """

    records: int = 2_000_000
    keys: int = 100_000
    seed: int = 5
    partitions: int = 4
    record_bytes: int = RECORD_BYTES
    compression: str = "none"

    def numbers(self) -> NDArray[np.int64]:
        """The key of each record, as a number from 0."""
        return np.random.default_rng(self.seed).integers(0, self.keys, self.records)

    def truth(self) -> NDArray[np.int64]:
        """Records of each key."""
        return np.bincount(self.numbers(), minlength=self.keys)

    def payloads(self) -> list[bytes]:
        """The records' values, in turn: random, so that nobody gains by compressing them; with
        ``compression`` a quarter of each is, as in a line of a log, and none is that of its neighbours."""
        size, random = self.record_bytes - KEY_BYTES, np.random.default_rng(self.seed)
        if self.compression == "none":
            return [random.bytes(size)]
        words = size // (len(_WORD) + _RANDOM) + 1
        return [
            b"".join(_WORD + random.bytes(_RANDOM) for _ in range(words))[:size] for _ in range(_DIFFERENT)
        ]

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
