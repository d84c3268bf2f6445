"""Versions of a store's values: what each version consists of, and the codecs that read all of them.

::

    version 1       0x01 │ columns
    version n > 1   n (1 byte) │ check (3 bytes) │ columns

A change of the query that changes the columns of a value begins a new version. Values are not rewritten then:
each one names its version, so values of all versions may be mixed in a database and in its changelog. They
are converted when they are read, and written in the newest version when their group changes. The store's
description lists the versions (`evolution`). *check* is a hash of the columns. It catches a value whose
version is not the one in the description.

A value consists of *parts*, each with an id that no other part of the store ever gets. So the values of an
aggregate that was removed and added again are not confused, and an aggregate may be renamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from kafka_eos_source.errors import StateMismatchError
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints, RowCodec
from kafka_eos_source.state.encoding.describe import fields_from_json, fields_to_json, type_to_json
from kafka_eos_source.state.vector.lists import ListCodec, Lists

#: Largest number of a version, because a value has one byte for it.
MAX_VERSIONS = 255

_CHECK_BYTES = 3
_NO_COLUMNS = pa.schema([])


@dataclass(frozen=True)
class Part:
    """A part of a value: the state of one aggregate, or one column of a function's state.

    Attributes:
        id: identifies the part in all versions of the store.
        name: name of the aggregate's result, or of the column.
        declared: declaration of the aggregate (`Aggregate.to_json`); None for a column.
        fields: columns of the part.
    """

    id: int
    name: str
    declared: Any
    fields: tuple[pa.Field, ...]


@dataclass(frozen=True)
class Version:
    """One version of a store's values.

    Attributes:
        number: number of the version, from 1.
        parts: the parts, in the order of their columns.
    """

    number: int
    parts: tuple[Part, ...]

    @property
    def fields(self) -> list[pa.Field]:
        """Columns of all parts."""
        return [field for part in self.parts for field in part.fields]

    @cached_property
    def columns(self) -> list[Any]:
        """What the bytes of a value depend on, as JSON values; without the names of aggregates."""
        return [
            [
                part.id,
                part.name if part.declared is None else part.declared,
                [[type_to_json(field.type), field.nullable] for field in part.fields],
            ]
            for part in self.parts
        ]

    @cached_property
    def lead(self) -> bytes:
        """Bytes with which every value of this version begins."""
        if self.number == 1:
            return b"\x01"
        hashed = sha256(json.dumps(without_zones(self.columns)).encode()).digest()
        return bytes([self.number]) + hashed[:_CHECK_BYTES]

    def to_json(self) -> dict[str, Any]:
        """Returns the version as JSON values, as the store's description lists it."""
        parts = [[part.id, part.name, part.declared, fields_to_json(part.fields)] for part in self.parts]
        return {"number": self.number, "parts": parts}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Version:
        """Returns the version that `to_json` wrote."""
        parts = (
            Part(id_, name, declared, tuple(fields_from_json(fields)))
            for id_, name, declared, fields in written["parts"]
        )
        return cls(written["number"], tuple(parts))


def only_version(columns: Iterable[pa.Field]) -> tuple[Version, ...]:
    """Returns the versions of a store whose values always had these columns."""
    return (Version(1, (Part(0, "", None, tuple(columns)),)),)


def without_zones(written: Any) -> Any:
    """Returns the JSON of types without time zones, which only affect how an instant is displayed."""
    if isinstance(written, dict):
        return {name: without_zones(value) for name, value in written.items()}
    if isinstance(written, (list, tuple)):
        if len(written) == 3 and written[0] == "timestamp" and written[2] is not None:
            return [*written[:2], "UTC"]
        return [without_zones(value) for value in written]
    return written


_Decoded = TypeVar("_Decoded")


class _Versions:
    """Finds the version of each value, and converts columns of older versions to the newest one.

    Args:
        versions: all versions, oldest first.
        before: number of columns before those of the parts; they are the same in all versions.
    """

    def __init__(self, versions: Sequence[Version], before: int = 0) -> None:
        self.by_number = {version.number: version for version in versions}
        self.newest = versions[-1]
        self._before = before

    def decode_newest(self, decode: Callable[[pa.BinaryArray], _Decoded], values: pa.BinaryArray) -> _Decoded:
        """Decodes values of the newest version.

        Raises:
            StateMismatchError: if a value has a version that the store's description does not list.
            ValueError: if a value is damaged.
        """
        try:
            return decode(values)
        except ValueError:
            self.split(values)  # raises if the version is the reason
            raise

    def split(self, values: pa.BinaryArray) -> dict[int, Ints] | None:
        """Returns the positions of the values of each version; None if all values are of the newest one.

        A null counts as a value of the newest version.

        Raises:
            StateMismatchError: if the store's description does not list the version of a value.
        """
        present = binary.valid(values)
        starts = binary.offsets(values).astype(np.int64)
        numbers = np.full(len(values), self.newest.number, np.int64)
        has_bytes = present & (starts[1:] > starts[:-1])
        numbers[has_bytes] = binary.data(values)[starts[:-1][has_bytes]]
        if bool((numbers == self.newest.number).all()):
            return None
        found = {int(number): np.flatnonzero(numbers == number) for number in np.unique(numbers)}
        unknown = sorted(found.keys() - self.by_number.keys())
        if unknown:
            raise StateMismatchError(
                f"a value has version {unknown[0]}, but the store's description lists the versions "
                f"{sorted(self.by_number)}.",
                fix="the store is damaged; remove its folder, and it is restored from the changelog.",
            )
        return found

    def convert(self, number: int, columns: Sequence[pa.Array], length: int) -> list[pa.Array]:
        """Returns columns of a version as columns of the newest version."""
        version = self.by_number[number]
        if version is self.newest:
            return list(columns)
        at, own = self._before, {}
        for part in version.parts:
            own[part.id] = columns[at : at + len(part.fields)]
            at += len(part.fields)
        converted = list(columns[: self._before])
        for part in self.newest.parts:
            if part.id in own:
                pairs = zip(own[part.id], part.fields, strict=True)
                converted += [column.cast(field.type) for column, field in pairs]
            else:
                converted += RowCodec(pa.schema(part.fields)).decode(pa.nulls(length, pa.binary()))
        return converted


class VersionedRows:
    """Encodes values in the newest version, and decodes values of all versions; otherwise as `RowCodec`.

    Args:
        versions: all versions, oldest first.
    """

    def __init__(self, versions: Sequence[Version]) -> None:
        self._versions = _Versions(versions)
        self._codecs = {
            version.number: RowCodec(pa.schema(version.fields), lead=version.lead) for version in versions
        }
        self._newest = self._codecs[self._versions.newest.number]

    def encode(self, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Returns one value for each row; see `RowCodec.encode`."""
        return self._newest.encode(columns)

    def decode(self, values: pa.BinaryArray) -> list[pa.Array]:
        """Returns the columns of the newest version; see `RowCodec.decode`.

        Raises:
            ValueError, StateMismatchError: if a value is damaged, or of an unknown version.
        """
        found = self._versions.split(values) if len(self._codecs) > 1 else None
        if found is None:
            return self._versions.decode_newest(self._newest.decode, values)
        parts = [
            self._versions.convert(number, self._codecs[number].decode(values.take(pa.array(own))), len(own))
            for number, own in found.items()
        ]
        return _in_order(parts, np.argsort(np.concatenate(list(found.values()))))


class VersionedLists:
    """Encodes lists of rows in the newest version, and decodes lists of all versions; see `ListCodec`.

    Args:
        before: columns of a row before those of the versions.
        versions: all versions, oldest first.
    """

    def __init__(self, before: Sequence[pa.Field], versions: Sequence[Version]) -> None:
        self._versions = _Versions(versions, len(before))
        self._codecs = {
            version.number: ListCodec(pa.schema([*before, *version.fields]), version.lead)
            for version in versions
        }
        self._newest = self._codecs[self._versions.newest.number]
        #: Columns of a row in the newest version.
        self.schema = self._newest.rows.schema

    def encode(self, due_ms: Ints, counts: Ints, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Encodes one value per key; see `ListCodec.encode`."""
        return self._newest.encode(due_ms, counts, columns)

    def decode(self, values: pa.BinaryArray) -> Lists:
        """Decodes values of all versions; see `ListCodec.decode`.

        Raises:
            ValueError, StateMismatchError: if a value is damaged, or of an unknown version.
        """
        found = self._versions.split(values) if len(self._codecs) > 1 else None
        if found is None:
            return self._versions.decode_newest(self._newest.decode, values)
        parts, keys = [], []
        due_ms, counts = np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
        for number, own in found.items():
            lists = self._codecs[number].decode(values.take(pa.array(own)))
            rows = int(lists.counts.sum())
            parts.append(self._versions.convert(number, lists.columns, rows))
            keys.append(np.repeat(own, lists.counts))
            counts[own] = lists.counts
            due_ms[own] = np.asarray(lists.due_ms.fill_null(0), np.int64)
        columns = _in_order(parts, np.argsort(np.concatenate(keys), kind="stable"))
        return Lists(pa.array(due_ms, mask=~binary.valid(values)), counts, columns)


def _in_order(parts: Sequence[Sequence[pa.Array]], order: Ints) -> list[pa.Array]:
    """Concatenates columns of several versions, and brings their rows into the given order."""
    index = pa.array(order)
    return [pa.concat_arrays(columns).take(index) for columns in zip(*parts, strict=True)]
