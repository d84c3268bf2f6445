"""The records that a benchmark sends, and the expected results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 10
RECORD_BYTES = 110
#: How many bytes of each word are random in a value that compresses.
_WORD, _RANDOM = b"status=ok;route=/orders/", 8
_CHUNK = 100_000
#: Number of different values with compression; large enough that a producer's batch rarely repeats one.
_DIFFERENT = 4_096


@dataclass(frozen=True)
class Workload:
    """Records with uniformly random keys; each key's records are to be counted, or copied.

    Attributes:
        records: number of records.
        keys: maximum number of different keys.
        seed: seed for the order of the keys.
        partitions: number of partitions of the input topic.
        record_bytes: size of key and value together.
        compression: librdkafka's ``compression.type`` for the input and for what contenders write.
    """

    records: int = 2_000_000
    keys: int = 100_000
    seed: int = 5
    partitions: int = 4
    record_bytes: int = RECORD_BYTES
    compression: str = "none"

    def numbers(self) -> NDArray[np.int64]:
        """Returns the key of each record, as a number from 0."""
        return np.random.default_rng(self.seed).integers(0, self.keys, self.records)

    def truth(self) -> NDArray[np.int64]:
        """Returns the number of records of each key."""
        return np.bincount(self.numbers(), minlength=self.keys)

    def payloads(self) -> list[bytes]:
        """Returns the values, which records use in turn.

        They are random, so that compression helps no contender. With ``compression``, a quarter of each value
        is random, as in a log line, and neighbours differ.
        """
        size, random = self.record_bytes - KEY_BYTES, np.random.default_rng(self.seed)
        if self.compression == "none":
            return [random.bytes(size)]
        words = size // (len(_WORD) + _RANDOM) + 1
        return [
            b"".join(_WORD + random.bytes(_RANDOM) for _ in range(words))[:size] for _ in range(_DIFFERENT)
        ]

    def chunks(self) -> Iterator[list[bytes]]:
        """Returns the encoded keys in sending order."""
        numbers = self.numbers()
        for start in range(0, self.records, _CHUNK):
            yield [b"%010d" % number for number in numbers[start : start + _CHUNK].tolist()]


def key_numbers(keys: list[bytes]) -> NDArray[np.int64]:
    """Decodes keys into their numbers.

    Raises:
        ValueError: if a key is not one of this workload.
    """
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"a key is not {KEY_BYTES} bytes long")
    return np.frombuffer(b"".join(keys), dtype=f"S{KEY_BYTES}").astype(np.int64)
