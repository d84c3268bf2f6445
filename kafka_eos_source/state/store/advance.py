"""What a commit will make of a store's records, decided before anything is written. No database, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from kafka_eos_source.errors import OffsetWentBackError, StateMismatchError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.store.pending import Header
from kafka_eos_source.state.store.records import Committed, Offsets


def advanced(
    store: str,
    committed: Committed,
    offsets: Mapping[TopicPartition, int],
    position: Offsets,
    batch: BatchRecord | None,
    *,
    forget_offsets: bool = False,
) -> Committed:
    """What the records will say.

    Args:
        store: name, for messages.
        committed: what they say now.
        offsets, batch, forget_offsets: as `TransactionalStateStore.commit`.
        position: input offsets that the data will reflect besides those it does.

    Raises:
        ValueError: no offsets, or one that is None or negative.
        OffsetWentBackError: an offset is lower than the one stored.
    """
    if forget_offsets and offsets:
        raise ValueError("offsets to set and to forget in one commit")
    if not offsets and not forget_offsets:
        raise ValueError("no changelog offsets; forget_offsets=True forgets them all")
    for tp, offset in offsets.items():
        if offset is None or offset < 0:
            raise ValueError(f"changelog offset of {tp.topic}-{tp.partition} is {offset}")
        stored = committed.offsets.get(tp)
        if stored is not None and offset < stored:
            raise OffsetWentBackError(
                f"store {store}: changelog offset of {tp.topic}-{tp.partition} would go back from {stored} "
                f"to {offset}",
                fix="the changelog was truncated or made anew: remove the local state, it is restored",
            )
    return replace(
        committed,
        offsets=MappingProxyType({} if forget_offsets else {**committed.offsets, **offsets}),
        position=furthest(committed.position, position),
        batch=batch or committed.batch,
    )


def promotable(store: str, headers: Sequence[Header], record: BatchRecord, committed: Committed) -> Header:
    """The pending attempt that ``record`` names, if it was made on the state that is committed.

    Raises:
        StateMismatchError: it is not kept, or was made on other state.
    """
    header = next((each for each in headers if same_batch(each.batch.record, record)), None)
    if header is None:
        raise StateMismatchError(
            f"store {store} keeps no changes of batch {record.batch_id}, attempt {record.attempt}",
            fix="restore from the changelog",
        )
    if committed.restoring or not same_batch(header.batch.base, committed.batch):
        raise StateMismatchError(
            f"store {store}: the changes of batch {record.batch_id} were made on the state of batch "
            f"{_name(header.batch.base)}; this is of batch {_name(committed.batch)}",
            fix="restore from the changelog",
        )
    return header


def same_batch(one: BatchRecord | None, other: BatchRecord | None) -> bool:
    """The same attempt of the same batch of the same query; what else is recorded may differ."""
    if one is None or other is None:
        return one is other
    return (one.query_id, one.batch_id, one.attempt) == (other.query_id, other.batch_id, other.attempt)


def furthest(one: Offsets, other: Offsets) -> Offsets:
    """For each partition the larger offset."""
    return MappingProxyType({**one, **{tp: max(at, one.get(tp, at)) for tp, at in other.items()}})


def _name(record: BatchRecord | None) -> str:
    return "none" if record is None else f"{record.batch_id} (attempt {record.attempt})"
