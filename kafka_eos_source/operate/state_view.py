"""Prints what the ``state`` commands found, as text or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from kafka_eos_source.operate.state_list import ChangelogShard, LocalShard
from kafka_eos_source.operate.state_restore import RestoredShard
from kafka_eos_source.operate.state_verify import Verified
from kafka_eos_source.operate.view import table_of
from kafka_eos_source.runtime.commands import json_text
from kafka_eos_source.state.reading.live import flat, text
from kafka_eos_source.state.reading.stores import Cut


def show_local(out: Console, root: str, shards: Sequence[LocalShard]) -> None:
    """Prints the databases in a state directory."""
    table = table_of(root)
    _columns(table, ("application.id", "store"), ("shard", "of", "batch", "offset", "pending", "bytes"))
    for each in shards:
        own = each.identity
        table.add_row(
            each.folder.application_id,
            each.folder.store,
            str(each.folder.shard),
            _or(own and own.shards),
            _or(each.batch and each.batch.batch_id),
            _or(each.next_offset),
            ", ".join(map(str, each.pending)),
            f"{each.size_bytes:,}",
            style="red" if each.problem else None,
        )
    out.print(table if shards else f"The folder {root!r} contains no state.")
    for each in shards:
        if each.problem:
            out.print(f"{each.folder.path}: {each.problem}")


def show_changelogs(out: Console, application_id: str, shards: Sequence[ChangelogShard]) -> None:
    """Prints the changelogs of a query."""
    table = table_of(f"changelogs of {application_id}")
    _columns(table, ("store", "partition"), ("log from", "stable", "log to", "committed", "lag", "batch"))
    for each in shards:
        table.add_row(
            each.store,
            str(each.tp),
            str(each.log.earliest),
            str(each.log.stable),
            str(each.log.end),
            _or(each.committed),
            str(each.lag),
            _or(each.token and each.token.batch_id),
            style="yellow" if each.log.stable < each.log.end else None,
        )
    out.print(table if shards else f"Kafka has no topic named {application_id}-…-changelog.")
    for problem in dict.fromkeys(each.problem for each in shards if each.problem):
        out.print(problem)


def listing_json(local: Sequence[LocalShard], changelogs: Sequence[ChangelogShard]) -> dict[str, Any]:
    """Returns databases and changelogs as a JSON object; null = not known, or not present."""
    return {
        "local": [
            {
                "application_id": each.folder.application_id,
                "store": each.folder.store,
                "shard": each.folder.shard,
                "shards": each.identity and each.identity.shards,
                "path": str(each.folder.path),
                "batch": each.batch and each.batch.batch_id,
                "next_offset": each.next_offset,
                "pending": list(each.pending),
                "bytes": each.size_bytes,
                "problem": each.problem or None,
            }
            for each in local
        ],
        "changelogs": [
            {
                "store": each.store,
                "topic": each.tp.topic,
                "partition": each.tp.partition,
                "earliest": each.log.earliest,
                "stable": each.log.stable,
                "log_end": each.log.end,
                "committed": each.committed,
                "lag": each.lag,
                "batch": each.token and each.token.batch_id,
                "problem": each.problem or None,
            }
            for each in changelogs
        ],
    }


def restore_json(cut: Cut, shards: Sequence[int], restored: Sequence[RestoredShard]) -> dict[str, Any]:
    """Returns what `state restore` would restore, and what it restored, as a JSON object.

    Args:
        cut: what Kafka holds of each shard.
        shards: the shards that the command was asked to restore.
        restored: the shards that it restored.
    """
    batches = {shard: cut.batches[shard] for shard in shards}
    return {
        "application_id": cut.application_id,
        "store": cut.store,
        "shards": [
            {"shard": shard, "batch": batch and batch.batch_id, "offset": cut.ends[shard]}
            for shard, batch in batches.items()
        ],
        "restored": [
            {
                "shard": each.shard,
                "batch": each.batch_id,
                "snapshot": each.snapshot_offset,
                "records": each.records,
                "promoted": each.promoted,
                "wiped": each.wiped,
                "ms": round(each.ms),
            }
            for each in restored
        ],
    }


def verified_json(each: Verified) -> dict[str, Any]:
    """Returns the result of one compared shard as a JSON object."""
    return {
        "shard": each.shard,
        "batch": each.batch_id,
        "offset": each.end,
        "entries": each.entries,
        "differing": each.differing,
        "differences": [{"kind": one.kind.value, "key": one.key.hex()} for one in each.differences],
    }


def show_rows(out: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints rows of a store, with a column for each field of key and value."""
    found = [flat(row) for row in rows]
    table = table_of(title)
    names = list(dict.fromkeys(name for row in found for name in row))
    for name in names:
        table.add_column(name)
    for row in found:
        table.add_row(*(text(row.get(name)) for name in names))
    out.print(table)


def row_json(row: Mapping[str, Any]) -> str:
    """Returns a row of a store as JSON on one line."""
    return json_text(row, default=text)


def show_restored(out: Console, each: RestoredShard) -> None:
    """Prints one restored shard."""
    how = "promoted its pending batch" if each.promoted else f"read {each.records:,} records"
    rate = f", {each.records / each.ms * 1000:,.0f} per second" if each.records and each.ms else ""
    at = each.snapshot_offset
    began = "" if at is None else f"began with the snapshot at changelog offset {at}, "
    wiped = f"; discarded the old database ({each.wiped})" if each.wiped else ""
    out.print(f"shard {each.shard}: at batch {each.batch_id}, {began}{how}{rate}{wiped}")


def show_verified(out: Console, each: Verified) -> None:
    """Prints the result of one compared shard."""
    batch = "no batch" if each.batch_id is None else f"batch {each.batch_id}"
    result = "identical" if not each.differing else f"{each.differing:,} keys differ"
    out.print(
        f"shard {each.shard}: {batch}, offset {each.end}, {each.entries:,} entries: {result}",
        style="red" if each.differing else None,
    )
    for one in each.differences:
        out.print(f"  {one.kind.value}: {one.key.hex()}")
    if each.differing > len(each.differences):
        out.print(f"  … and {each.differing - len(each.differences):,} more")


def _columns(table: Any, left: Sequence[str], right: Sequence[str]) -> None:
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")


def _or(value: object) -> str:
    return "" if value is None else str(value)
