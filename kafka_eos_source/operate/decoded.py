"""Decodes records of a schema registry for people: each with its own writer schema, as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from kafka_eos_source.operate.records import TopicRecord
from kafka_eos_source.registry.catalog import catalog
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.records import Frame, Messages, decode_foreign, foreign_decoder, frames, paths


def decoded(records: Iterable[TopicRecord], registry: Mapping[str, Any]) -> list[TopicRecord]:
    """Returns records with keys and values as JSON, where they have the frame of a schema registry.

    Bytes without a frame, that their schema does not describe, or of which Python has no object, stay as they
    are: the reader wants to see them too.

    Args:
        records: the records.
        registry: options of the registry.

    Raises:
        RegistryUnavailableError: if the registry does not answer.
        AuthorizationError, OperatorError: if it refuses the request.
    """
    found = list(records)
    keys = _texts([each.key for each in found], registry)
    values = _texts([each.value for each in found], registry)
    return [
        replace(record, key=key, value=value) for record, key, value in zip(found, keys, values, strict=True)
    ]


def _texts(messages: list[bytes | None], registry: Mapping[str, Any]) -> list[bytes | None]:
    column = Messages.of(pa.array(messages, pa.binary()))
    groups, _ = frames(column)
    schemas = catalog(registry).of_ids(each.schema_id for each in groups) if groups else {}
    texts = list(messages)
    for group in groups:
        writer = schemas[group.schema_id]
        if isinstance(writer, str):
            continue
        deeper = paths(column, group)[0] if writer.format == "PROTOBUF" else [group]
        for frame in deeper:
            _decode(column, frame, writer, texts)
    return texts


def _decode(column: Messages, frame: Frame, writer: Schema, texts: list[bytes | None]) -> None:
    """Replaces the messages of a frame in ``texts`` by their JSON."""
    decoder = foreign_decoder(frame, writer, None, None)
    if isinstance(decoder, str):
        return
    done = decode_foreign(decoder, column.column.take(pa.array(frame.rows)), frame.start)
    for at, (row, value) in enumerate(zip(frame.rows.tolist(), done.values, strict=True)):
        if at not in done.errors:
            with suppress(OverflowError, ValueError):  # of a time after the year 9999, as a rule
                texts[row] = json.dumps(value.as_py(), ensure_ascii=False, default=_as_json).encode()


def _as_json(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
