"""Rules of commits and promotions: what they record, and when they are refused.

The functions are pure: they use no database and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from kafka_eos_source.errors import OffsetWentBackError, StateMismatchError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.store.pending import PendingHeader
from kafka_eos_source.state.store.records import StoreMetadata


def next_metadata(
    store: str,
    current: StoreMetadata,
    offsets: Mapping[TopicPartition, int],
    batch: BatchRecord | None,
    *,
    forget_offsets: bool = False,
) -> StoreMetadata:
    """Returns the metadata that a commit writes.

    Args:
        store: its name, for error messages.
        current: the metadata before the commit.
        offsets, batch, forget_offsets: as in `TransactionalStateStore.commit`.

    Raises:
        ValueError: if there is no offset, or an offset is None or negative.
        OffsetWentBackError: if an offset is lower than the one stored.
    """
    if forget_offsets and offsets:
        raise ValueError("forget_offsets=True excludes changelog offsets; pass one or the other.")
    if not offsets and not forget_offsets:
        raise ValueError("a commit needs changelog offsets; forget_offsets=True removes all of them.")
    for tp, offset in offsets.items():
        if offset is None or offset < 0:
            raise ValueError(f"the changelog offset of {tp} is {offset}; expected at least 0.")
        stored = current.offsets.get(tp)
        if stored is not None and offset < stored:
            raise OffsetWentBackError(
                f"the changelog offset of {tp} in store {store} would go back from {stored} to {offset}.",
                fix="the changelog was truncated, or deleted and created again. Keep the local state, which "
                "may be the only copy of what the changelog lost, and restore the topic from a copy; "
                "otherwise start the query with a new application.id and a new checkpoint.",
            )
    return replace(
        current,
        offsets=MappingProxyType({} if forget_offsets else {**current.offsets, **offsets}),
        batch=batch or current.batch,
    )


def find_promotable(
    store: str, headers: Sequence[PendingHeader], record: BatchRecord, current: StoreMetadata
) -> PendingHeader:
    """Returns the pending attempt of a batch if it was computed on the committed state.

    Raises:
        StateMismatchError: if that attempt is not pending, or was computed on other state.
    """
    header = next((each for each in headers if same_batch(each.batch.record, record)), None)
    if header is None:
        raise StateMismatchError(
            f"store {store} has no pending changes of batch {record.batch_id}, attempt "
            f"{record.task_attempt_id}.",
            fix="restore the store from its changelog.",
        )
    if current.restoring or not same_batch(header.batch.base, current.batch):
        raise StateMismatchError(
            f"the pending changes of batch {record.batch_id} in store {store} were computed on the state of "
            f"batch {_name(header.batch.base)}; the store holds the state of batch {_name(current.batch)}"
            f"{', and a restore of it is not finished' if current.restoring else ''}.",
            fix="restore the store from its changelog.",
        )
    return header


def same_batch(one: BatchRecord | None, other: BatchRecord | None) -> bool:
    """Returns whether both name the same attempt of the same batch; other fields may differ."""
    if one is None or other is None:
        return one is other
    mine, theirs = ((each.query_id, each.batch_id, each.task_attempt_id) for each in (one, other))
    return mine == theirs


def _name(record: BatchRecord | None) -> str:
    return "none" if record is None else f"{record.batch_id} (attempt {record.task_attempt_id})"
