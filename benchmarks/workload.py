"""The records that a benchmark sends, and the expected results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from typing import Any

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

    def sent(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """Returns keys and values in sending order."""
        values = cycle(self.payloads())
        for keys in self.chunks():
            yield list(zip(keys, islice(values, len(keys)), strict=True))

    @property
    def documents(self) -> Mapping[str, Any]:
        """What a program must know of the values: ``schema``, ``columns``; empty if they are no documents."""
        return {}

    def wrong_record(self, key: bytes, value: bytes) -> str:  # noqa: ARG002
        """Returns what is wrong with a record of the output; empty if nothing is, or it cannot be known."""
        return ""


#: The fields that each document begins with: name and type in Spark's DDL.
_FLIGHT = (
    ("carrier", "STRING"),
    ("dest", "STRING"),
    ("dep_delay", "INT"),
    ("flight", "INT"),
    ("origin", "STRING"),
    ("tailnum", "STRING"),
    ("time_hour", "TIMESTAMP"),
)
#: The types of further fields, in turn, and how many bytes a document has for each further field.
_FURTHER, _FURTHER_BYTES = ("INT", "DOUBLE", "BOOLEAN", "STRING"), 50
_CARRIERS, _AIRPORTS = ("UA", "B6", "EV", "DL", "AA"), ("JFK", "LGA", "EWR", "IAH", "MIA", "ORD")
#: A flight is late, and stays, if its delay is larger.
LATE_MINUTES = 60


@dataclass(frozen=True)
class Documents(Workload):
    """Flights as JSON documents, of which the late ones stay, half of them.

    The document of a record follows from its key. Documents have more fields than are declared if they are
    large, and fewer if many are declared.

    Attributes:
        document_bytes: size of a document; the smallest has 120 bytes.
        fields: number of declared fields.
        chosen: number of fields in the output; 0 = all declared ones.
        bad: share of documents that do not fit: one half is cut off, in the other, ``dep_delay`` is a text.
    """

    document_bytes: int = 120
    fields: int = 3
    chosen: int = 0
    bad: float = 0.0

    @property
    def title(self) -> str:
        """The documents in words."""
        fields = f"{self.fields} declared fields, {len(self.columns)} chosen"
        return f"documents of {self.document_bytes:,} bytes, {fields}, {self.bad:.0%} bad"

    @property
    def schema(self) -> str:
        """The declared fields in Spark's DDL."""
        return ", ".join(f"{name} {kind}" for name, kind in self._fields(self.fields))

    @property
    def columns(self) -> Sequence[str]:
        """Names of the fields that the output has."""
        return [name for name, _ in self._fields(self.chosen or self.fields)]

    @property
    def documents(self) -> Mapping[str, Any]:
        return {
            "schema": self.schema,
            "columns": list(self.columns),
            "late": LATE_MINUTES,
            "bad": self.bad > 0,
        }

    def truth(self) -> NDArray[np.int64]:
        numbers = np.arange(self.keys)
        stay = np.array([document["dep_delay"] > LATE_MINUTES for document in self._documents])
        bad = self._bad[numbers % _DIFFERENT]
        return super().truth() * (stay[numbers % _DIFFERENT] & ~bad)

    def sent(self) -> Iterator[list[tuple[bytes, bytes]]]:
        values = self.payloads()
        for keys in self.chunks():
            yield [(key, values[int(key) % _DIFFERENT]) for key in keys]

    def payloads(self) -> list[bytes]:
        """Returns the documents; that of a key is found by its number."""
        found: list[bytes] = []
        for document, is_bad in zip(self._documents, self._bad.tolist(), strict=True):
            text = json.dumps(document, separators=(",", ":"))
            if is_bad and len(found) % 2:
                text = text[:-20]
            elif is_bad:
                text = json.dumps({**document, "dep_delay": "late"}, separators=(",", ":"))
            found.append(text.encode())
        return found

    def wrong_record(self, key: bytes, value: bytes) -> str:
        document = self._documents[int(key) % _DIFFERENT]
        expected = {name: document[name] for name in self.columns if name in document}
        found = json.loads(value)
        for each in (expected, found):  # how an instant is written differs
            each.pop("time_hour", None)
        return "" if found == expected else f"the value of key {key!r} is {found}, expected {expected}"

    @cached_property
    def _documents(self) -> list[dict[str, Any]]:
        return list(self._made())

    @cached_property
    def _bad(self) -> NDArray[np.bool_]:
        return np.random.default_rng(self.seed + 1).random(_DIFFERENT) < self.bad

    @staticmethod
    def _fields(count: int) -> list[tuple[str, str]]:
        further = range(max(0, count - len(_FLIGHT)))
        return [*_FLIGHT[:count], *((f"f{at:03d}", _FURTHER[at % len(_FURTHER)]) for at in further)]

    def _made(self) -> Iterator[dict[str, Any]]:
        random = np.random.default_rng(self.seed)
        for _ in range(_DIFFERENT):
            late = random.random() < 0.5
            document: dict[str, Any] = {
                "carrier": _CARRIERS[random.integers(len(_CARRIERS))],
                "flight": int(random.integers(1000, 9999)),
                "origin": _AIRPORTS[random.integers(len(_AIRPORTS))],
                "dest": _AIRPORTS[random.integers(len(_AIRPORTS))],
                "dep_delay": int(random.integers(61, 900) if late else random.integers(-20, 61)),
                "tailnum": f"N{random.integers(10_000, 99_999)}",
                "time_hour": f"2013-{random.integers(1, 13):02d}-17T{random.integers(24):02d}:00:00Z",
            }
            room = self.document_bytes - len(json.dumps(document, separators=(",", ":")))
            kinds = len(_FURTHER)
            for at in range(max(0, room // (_FURTHER_BYTES * kinds)) * kinds):
                document[f"f{at:03d}"] = (
                    int(random.integers(0, 1_000_000)),
                    round(float(random.random()) * 1000, 3),
                    bool(random.integers(2)),
                    random.bytes(70).hex()[:150],
                )[at % kinds]
            yield document


def key_numbers(keys: list[bytes]) -> NDArray[np.int64]:
    """Decodes keys into their numbers.

    Raises:
        ValueError: if a key is not one of this workload.
    """
    if any(len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"a key is not {KEY_BYTES} bytes long")
    return np.frombuffer(b"".join(keys), dtype=f"S{KEY_BYTES}").astype(np.int64)
