"""The errors with which a verdict refuses a batch, and the identity file of a checkpoint a query.

Each function returns one error; its docstring states the reason for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kafka_eos_source.errors import (
    CheckpointAheadError,
    CheckpointMovedError,
    CheckpointRolledBackError,
    ForeignQueryError,
    GroupInUseError,
    GuaranteeChangedError,
    InvalidOptionError,
    KafkaEosError,
    NewerVersionError,
    OffsetsMovedError,
    OperatorError,
    StateMismatchError,
    TokenMissingError,
    UnavailableError,
)
from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.protocol.identity import target_topic
from kafka_eos_source.protocol.token import Token

if TYPE_CHECKING:
    from kafka_eos_source.commit.identity_file import Identity
    from kafka_eos_source.commit.verdict import Batch, Held

#: A message names this many partitions or members, and counts the others.
_NAMED = 5


def shared_group(batch: Batch, tp: TopicPartition, other: Token | None) -> ForeignQueryError:
    """Another transactional id commits its offsets to the same partitions of the group.

    ``other`` is the token on that partition; None if there is a mark, which holds only a hash of the id.
    """
    name = "another application.id" if other is None else f"application.id={other.application_id!r}"
    return ForeignQueryError(
        f"the offset of {tp} in the consumer group of this query was committed by {name}; this query has "
        f"application.id={batch.application_id!r}. Two transactional ids cannot share one group: neither "
        "would fence the other.",
        fix="give each query its own application.id and kafka.group.id.",
    )


def reads_dead_letters(topic: str, batch_id: int | None = None) -> InvalidOptionError:
    """A query reads the topic of its own dead letters.

    ``batch_id`` is the batch that finds it; None before the query starts.
    """
    return InvalidOptionError(
        f"option 'deadLetter.topic' has the value {topic!r}, which is a topic that the query reads; expected "
        "another topic. Each dead letter would come back as input."
        + ("" if batch_id is None else f" Nothing of batch {batch_id} was written."),
        fix="create a topic for the dead letters, and set 'deadLetter.topic' to its name. If "
        "subscribePattern matches that name, change the pattern so that it does not.",
    )


def guarantee_changed(batch: Batch, token: Token) -> GuaranteeChangedError:
    """Batches were written with ``at_least_once`` since the token, and the checkpoint does not record it."""
    return GuaranteeChangedError(
        f"batches of query {token.query_id} from batch {token.unproven_since} on were written with "
        "processing.guarantee=at_least_once, which leaves no token, and the checkpoint of this query "
        f"({batch.query_id}) does not record that. So it is new, or a copy from before the change, or the "
        "driver died at the change.",
        fix="start the query with its newest checkpoint and with at_least_once; then stop it and run "
        f"`kafka-eos adopt --checkpoint … --bootstrap-servers … --yes`. {_without_newest(token)}",
    )


def token_missing(batch: Batch, token_topic: str | None) -> TokenMissingError:
    """Batches of the query were committed, and Kafka has lost their token."""
    places = "" if token_topic is None else f", in the consumer group or in token.topic={token_topic!r}"
    if batch.versioned:
        fix = (
            f"check whether version {batch.batch_id} is in the output. If it is not, write it with "
            f".option('onMissingToken', 'assume_not_committed:{batch.batch_id}'). If it is, skip it, and "
            "write the next version with its own number in that option."
        )
    else:
        fix = (
            "if application.id, kafka.group.id or the brokers were changed, set them back. Otherwise look "
            f"for the rows of batch {batch.batch_id} in the output. If they are there, restart with "
            f".option('onMissingToken', 'assume_committed:{batch.batch_id}'); if they are not, with "
            f"'assume_not_committed:{batch.batch_id}'. A wrong answer loses or doubles the rows of the batch."
        )
    return TokenMissingError(
        f"Kafka holds no token of application.id={batch.application_id!r}{places}, although batches of "
        f"this query were committed. So Kafka cannot show whether batch {batch.batch_id} is in the output. "
        "The consumer group was deleted, its offsets expired (offsets.retention.minutes), or the topic whose "
        "offset carried the token was deleted.",
        fix=fix,
    )


def mirrored_token(batch: Batch, token: Token, group_id: str, cluster_id: str) -> TokenMissingError:
    """The token was copied from another cluster, so it does not show what this cluster holds."""
    lost = (
        "it then takes every version for a new one"
        if batch.versioned or batch.once
        else f"it then asks whether batch {batch.batch_id} is in the output here"
    )
    return TokenMissingError(
        f"the token of application.id={batch.application_id!r} in the consumer group {group_id!r} was "
        f"committed on the Kafka cluster {token.cluster_id!r}, and this is the cluster {cluster_id!r}: a "
        f"tool that mirrors clusters has copied it. It names batch {token.batch_id}, and does not show which "
        "rows this cluster holds.",
        fix="set kafka.bootstrap.servers back to the former cluster. If this cluster replaces it for good, "
        f"stop the mirroring of this group, delete the group here, and start the query: {lost}. Rows of "
        "earlier batches that were not mirrored are missing here.",
    )


def foreign_query(batch: Batch, token: Token) -> ForeignQueryError:
    """The transactional id belongs to another query."""
    return ForeignQueryError(
        f"application.id={batch.application_id!r} belongs to query {token.query_id} (last batch "
        f"{token.batch_id}, run {token.run_id or 'unknown'}), but this query is {batch.query_id}. It "
        "uses another checkpoint, or its checkpoint was lost and replaced.",
        fix="if the other query still runs or will run again, give this query its own application.id. If "
        "this query replaces it, start with an empty checkpoint, startingOffsets=group (with App: "
        "read(starting='group')) and the option 'onForeignQuery' of the sink set to 'adopt' (with App: "
        "write(options={…})); it then continues only if offsets prove that it starts where "
        "the other one stopped.",
    )


def _unless_asserted(token: Token, otherwise: str) -> str:
    """Returns the fix of a refused adoption: a safe way, and then what a person may assert."""
    return (
        f"{otherwise} If you know by other means that this query starts exactly where query {token.query_id} "
        f"stopped, set .option('onForeignQuery', 'adopt_unchecked:{token.query_id}'); if it does not, rows "
        "are lost or doubled."
    )


def adopted_without_proof(token: Token) -> CheckpointRolledBackError:
    """Not every source of the query can be compared with what the group holds, or none can."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: committed offsets do not show where each source of this query "
        "must start. A source does not read Kafka or reads another cluster, the group has no offset of any "
        "partition that this query reads, a topic was created again, or Spark keeps state of its own.",
        fix=_unless_asserted(token, "give this query a new application.id."),
    )


def adopted_with_another_target(batch: Batch, token: Token) -> CheckpointRolledBackError:
    """The other query wrote somewhere else, so its offsets say nothing about this query's target."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: {_targets(batch, token)}. Its committed offsets do not show "
        "which rows the target of this query holds.",
        fix=_unless_asserted(
            token, "set the topic and the sinks of the other query; or give this query a new application.id."
        ),
    )


def handed_over_with_another_target(batch: Batch, token: Token) -> CheckpointRolledBackError:
    """`kafka-eos adopt` handed over the offsets of a query that wrote somewhere else."""
    return CheckpointRolledBackError(
        f"`kafka-eos adopt` handed application.id={batch.application_id!r} over to this query: "
        f"{_targets(batch, token)}. Its committed offsets do not show which rows the target of this query "
        "holds.",
        fix="set the topic and the sinks of the former query; to write to others from its last offset on, "
        "change them after one batch. Or start a new checkpoint with a new application.id, and set "
        "startingOffsets.",
    )


def older_than_token(batch: Batch, token: Token) -> CheckpointRolledBackError:
    """After ``at_least_once``: the checkpoint is older than the last batch that left a token."""
    return CheckpointRolledBackError(
        f"batch {batch.batch_id}, the newest in Spark's commit log, is older than transaction "
        f"{token.sequence} with batch {token.batch_id}, which Kafka holds of application.id="
        f"{batch.application_id!r}: the checkpoint was restored from a copy. With a token of batch "
        f"{batch.batch_id}, the query would write the batches after it again.",
        fix=f"restore the newest checkpoint, and run the command again. {_without_newest(token)}",
    )


def _without_newest(token: Token) -> str:
    """Returns what a person can do after ``at_least_once`` if the newest checkpoint is lost."""
    return (
        "If it is lost, start with an empty checkpoint, startingOffsets=group and .option('onForeignQuery', "
        f"'adopt_unchecked:{token.query_id}'): the query begins where the last batch with a token ended, and "
        "writes again what at_least_once has written since."
    )


def adopted_moved_offsets(token: Token, moved: list[TopicPartition]) -> CheckpointRolledBackError:
    """Another program committed offsets of the group after the other query stopped."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: another program has committed the offsets of {_list(moved)} "
        "in its consumer group, so they do not show where that query stopped.",
        fix=_unless_asserted(
            token, "give this query a new application.id and an empty checkpoint, and set startingOffsets."
        ),
    )


def other_topics(batch: Batch) -> InvalidOptionError:
    """A version of a series of batch writes was written before, to other topics."""
    return InvalidOptionError(
        f"txnVersion={batch.batch_id} of application.id={batch.application_id!r} was written before, and not "
        f"to the same topics: this write has rows for {', '.join(map(repr, batch.topics[:_NAMED]))}"
        f"{_others(batch.topics)}. Nothing was written now.",
        fix="write the rows of all topics in one write; or give each write of one version a txnAppId of its "
        "own.",
    )


def adopted_start_not_logged(token: Token) -> CheckpointRolledBackError:
    """The batch does not record where it starts, so an adoption cannot be checked."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: the start of this query is not known, so it cannot be "
        "compared with where the other query stopped. Spark's own Kafka source does not log where its "
        "first batch starts.",
        fix="read with format('kafka-eos'), an empty checkpoint and startingOffsets=group.",
    )


def adopted_with_shared_partitions(batch: Batch, token: Token) -> CheckpointRolledBackError:
    """Two sources read one partition, so one committed offset cannot tell where both of them stopped."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: two sources of this query read {_list(sorted(batch.shared))}. "
        "The group holds one offset for each partition, that of the slower source, so the position of the "
        "faster source is not known.",
        fix="restore the other checkpoint; or give this query a new application.id and an empty checkpoint, "
        "and set startingOffsets of each source.",
    )


def adopted_offsets_deleted(token: Token, unknown: list[TopicPartition]) -> CheckpointRolledBackError:
    """The group lost offsets of the other query, so its last position is not known."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: the group has no offset of {_list(unknown)}, and it lost "
        "offsets that the other query committed. So the position where that query stopped is not known.",
        fix="restore the other checkpoint; or give this query a new application.id and an empty checkpoint, "
        "and set startingOffsets to where it should start.",
    )


def adopted_from_another_offset(
    token: Token, tp: TopicPartition, start: int | None, stopped: int
) -> CheckpointRolledBackError:
    """The batch does not start at the offset where the other query stopped."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: this query starts {tp} at offset "
        f"{'unknown' if start is None else start}, but the other query stopped at {stopped}.",
        fix="start with an empty checkpoint and startingOffsets=group: in the present one the first batch is "
        "planned, so that the option has no effect.",
    )


def group_has_members(batch: Batch, group_id: str, members: Sequence[str]) -> GroupInUseError:
    """Consumers are members of the query's group; each would overwrite the offsets of the other."""
    shown = ", ".join(members[:_NAMED]) + _others(members)
    return GroupInUseError(
        f"the consumer group {group_id!r} of application.id={batch.application_id!r} has members: {shown}. "
        "Expected none, because a query is no member of its group: the members and the query would "
        "overwrite the offsets of each other.",
        fix="give these consumers another group.id, and restart the query; or, if the group is theirs, give "
        "the query a group of its own (leave out kafka.group.id). To read on where the consumers stop, end "
        "them first, and start the query with a new checkpoint and startingOffsets=group.",
    )


def group_has_offsets(
    batch: Batch, group_id: str, held: Held, found: list[TopicPartition]
) -> GroupInUseError:
    """The query is new, and the group has offsets that another program committed."""
    starts = batch.starts or {}
    read = [tp for tp in found if tp in starts]
    expected = f", or {_offsets(starts, read)}, where the query starts" if read else ""
    return GroupInUseError(
        f"another program committed offsets in the consumer group {group_id!r} of application.id="
        f"{batch.application_id!r}: {_offsets(held.committed, found)}; expected none{expected}. The query "
        "would overwrite them.",
        fix="give the write a group of its own (leave out kafka.group.id)."
        if batch.versioned or batch.once
        else "give the query a group of its own (leave out kafka.group.id). If the other program has ended "
        "for good, start the query with a new checkpoint and startingOffsets=group to read on where it "
        "stopped; or, if nobody needs these offsets any more, start once with "
        f".option('onMovedOffsets', 'overwrite:{batch.batch_id}').",
    )


def offsets_moved(
    batch: Batch, token: Token | None, group_id: str, held: Held, moved: list[TopicPartition]
) -> OffsetsMovedError:
    """Another program committed offsets in the consumer group of the query.

    ``token`` is the newest token; None if Kafka has lost it.
    """
    read = [tp for tp in moved if tp in (batch.starts or {})]
    at = f"; the checkpoint is at {_offsets(batch.starts or {}, read)}" if read else ""
    return OffsetsMovedError(
        f"another program committed the offsets of {_list(moved)} in the consumer group {group_id!r} of "
        f"application.id={batch.application_id!r}"
        f"{'' if token is None else f' after batch {token.batch_id}'}: they do not carry the mark "
        f"of a transaction of this query. Committed now: {_offsets(held.committed, moved)}{at}.",
        fix="make sure that the other program no longer uses the group. Then, to continue from the "
        "checkpoint, which neither loses nor doubles rows, restart with .option('onMovedOffsets', "
        f"'overwrite:{batch.batch_id}')."
        + (
            " To continue from the moved offsets instead, start with an empty checkpoint, "
            "startingOffsets=group and .option('onForeignQuery', "
            f"'adopt_unchecked:{token.query_id}'): records that the offsets were moved past are then lost, "
            "and records that they were moved back to are written again."
            if read and token is not None
            else ""
        ),
    )


def not_continued(batch: Batch, token: Token, held: Held) -> KafkaEosError:
    """The batch neither continues what Kafka holds nor is part of it.

    Returns:
        `CheckpointAheadError` if batches between are missing; otherwise `CheckpointRolledBackError`.
    """
    committed = held.committed
    known = sorted(tp for tp in batch.ends or {} if tp in committed)
    starts, ends = batch.starts or {}, batch.ends or {}
    differing = [
        tp for tp in known if starts.get(tp) != committed[tp] or (ends[tp] > committed[tp]) is batch.jump
    ] or known
    ahead = (
        bool(known) and all(starts.get(tp, 0) >= committed[tp] for tp in known)
        if batch.comparable
        else batch.batch_id > token.batch_id
    )
    ranges = (
        f" Offsets of the batch: {_ranges(starts, ends, differing)}; committed: "
        f"{_offsets(committed, differing)}."
        if differing
        else ""
    )
    transaction = (
        f"transaction {token.sequence} with batch {token.batch_id}"
        if token.sequence > 0
        else "the transaction that recorded where the query starts"
    )
    text = (
        f"batch {batch.batch_id} does not continue the last transaction that Kafka holds of application.id="
        f"{batch.application_id!r}: {transaction}.{ranges}"
    )
    if token.target != batch.target:
        return (CheckpointAheadError if ahead else CheckpointRolledBackError)(
            f"{text} T{_targets(batch, token)[1:]}, so offsets do not show which rows the target of this "
            "query holds. Probably a copy of this checkpoint ran with another topic or other sinks.",
            fix="find out which rows are missing in this query's target: those between its own position and "
            "the committed offsets. If the topic or the sinks of this query were changed, set them back. To "
            "write the missing rows, start a new checkpoint with a new application.id, and set "
            "startingOffsets to the position of this checkpoint, which `kafka-eos inspect` shows.",
        )
    if ahead:
        return CheckpointAheadError(
            f"{text} The batches between them were written elsewhere or lost.",
            fix="point the sink at the cluster and application.id that it wrote before. If that is not "
            "possible, start a new checkpoint: with startingOffsets=group and .option('onForeignQuery', "
            "'adopt'), the query reads the records between again and writes them here, too; with a new "
            "application.id and startingOffsets at the position of this checkpoint, which `kafka-eos "
            "inspect` shows, they stay missing in this output.",
        )
    why = (
        "A part of its input is in the output already."
        if batch.comparable
        else "The query has sources other than Kafka, two sources on one partition, a recreated topic, or "
        "Spark's own state, so offsets cannot show which part of its input is in the output already."
    )
    return CheckpointRolledBackError(
        f"{text} {why}",
        fix="restore the newest checkpoint; or, if all sources read Kafka and Spark keeps no state of its "
        "own, either set application.id and onRolledBackCheckpoint=jump on the source, so that it continues "
        "from the offsets that Kafka holds, or start a new checkpoint with startingOffsets=group and "
        ".option('onForeignQuery', 'adopt').",
    )


# -- the parts of a query --------------------------------------------------------------------------


def different_ids(
    ids: Mapping[str, str], derived: str, nothing: str = "", more: str = ""
) -> InvalidOptionError:
    """The parts of a query have different values of ``application.id``.

    Args:
        ids: the value of each part, by a name for people; "" = not set.
        derived: the value of a query that does not set the option; "" = it has no id yet.
        nothing: a sentence that says what was not written, with a space before it.
        more: what else may help, with a space before it.
    """
    values = ", ".join(
        f"{part} {name!r}{' (derived, because it is not set)' if name == derived else ''}"
        if name
        else f"{part} (not set)"
        for part, name in ids.items()
    )
    return InvalidOptionError(
        f"the parts of one query have different values of 'application.id': {values}. Expected one "
        f"value.{nothing}",
        fix="set .option('application.id', …) on the sink, and in the options of each stateful operator, "
        f"to the same value; a source may leave it out.{more}",
    )


def different_groups(groups: Mapping[str, str], nothing: str = "") -> InvalidOptionError:
    """The parts of a query use different consumer groups; the arguments are those of `different_ids`."""
    values = ", ".join(f"{part} {group!r}" for part, group in groups.items())
    return InvalidOptionError(
        f"the parts of one query use different consumer groups: {values}. Expected one group.{nothing}",
        fix="set .option('kafka.group.id', …) on the sink, and in the options of each stateful operator, "
        "to the same value, or leave it out everywhere.",
    )


def renamed_store(
    store: str, gone: Sequence[str], application_id: str, batch_id: int, nothing: str = ""
) -> StateMismatchError:
    """An operator has a store without state, and the state of another store has no operator.

    Args:
        store: the store without state.
        gone: stores that the last transaction committed, and that no operator has now.
        application_id: of the query.
        batch_id: of the next batch.
        nothing: a sentence that says what was not written, with a space before it.
    """
    names = ", ".join(map(repr, gone))
    return StateMismatchError(
        f"store {store!r} of application.id {application_id!r} does not exist yet, and batch {batch_id} has "
        f"no operator for the state of {names}, which the last batch had.{nothing}",
        fix=f"if the operator was renamed, set its store to {names} again: the state is in the changelog of "
        f"that name. If {store!r} belongs to a new operator that should begin with empty state, and the "
        f"state of {names} is no longer needed, start once with onMissingState=new:{batch_id} on the "
        "operator.",
    )


# -- the identity file of a checkpoint --------------------------------------------------------------


def unproven_batches(found: Identity) -> GuaranteeChangedError:
    """Batches of the checkpoint were written with ``at_least_once`` since the last token."""
    return GuaranteeChangedError(
        f"batches of this checkpoint from batch {found.unproven_since} on were written with "
        "processing.guarantee=at_least_once, which leaves no token. So Kafka cannot show which of them are "
        f"in the output: the newest token of application.id={found.application_id!r} is older.",
        fix="stop the query and run `kafka-eos adopt --checkpoint … --bootstrap-servers … --yes`, which "
        "commits a token for the newest batch in Spark's commit log. Then start the query with exactly_once. "
        "A batch that Spark has planned and not logged is then written again, as at_least_once permits.",
    )


def checkpoint_moved(found: Identity, wanted: Identity) -> CheckpointMovedError:
    """The checkpoint is at another location than before, and nobody has said what that means."""
    return CheckpointMovedError(
        f"the checkpoint at {wanted.location} ran before at {found.location} (query {found.query_id}, "
        f"application.id={found.application_id!r}): it was moved or copied. Two copies of a checkpoint that "
        "run, even one after the other, would lose each other's records.",
        fix="if the checkpoint was moved, or restored from a backup, and nothing will run at the former "
        f"location again, set .option('onMovedCheckpoint', 'continue:{found.location}') on the sink. If this "
        "is a copy, set .option('onMovedCheckpoint', 'fork') and a new application.id: the copy then is a "
        "query of its own, which begins at the offsets of the checkpoint.",
    )


def changed_table(name: str) -> InvalidOptionError:
    """A static table that SQL texts join differs from the one with which the checkpoint was last used."""
    return InvalidOptionError(
        f"the static table {name!r}, which the query joins in SQL, has other rows or columns than when the "
        "checkpoint was last used. The result would change without a trace.",
        fix="pass the former table; or, if the change is meant, pass options={'onChangedTable': 'continue'} "
        "to App.write for one start. To begin anew, use a new checkpoint and a new application.id.",
    )


def fork_with_same_id(wanted: Identity) -> InvalidOptionError:
    """A fork has the ``application.id`` of the original."""
    return InvalidOptionError(
        f"option 'onMovedCheckpoint' has the value 'fork', but application.id={wanted.application_id!r} is "
        "that of the original query; expected another one.",
        fix="set a new application.id on the sink, the source and the operators of the copy.",
    )


def query_id_replaced(found: Identity, wanted: Identity) -> OperatorError:
    """Spark has created another query id for the checkpoint, in the middle of its batches."""
    return OperatorError(
        f"the batches of the checkpoint at {wanted.location} were committed by query {found.query_id}, but "
        f"its file 'metadata' now names query {wanted.query_id}, which Spark created because the file was "
        f"missing, or it was replaced. Whether batch {wanted.first_batch} is in the output is recorded under "
        "the former id.",
        fix=f'stop the query, write {{"id":"{found.query_id}"}} to the file "metadata" in the checkpoint, '
        "delete the file '.metadata.crc' if there is one, and start the query again. If this is the "
        "checkpoint of another query that was put here, use a place of its own.",
    )


def other_application(found: Identity, wanted: Identity) -> InvalidOptionError:
    """The batches of the checkpoint were committed with another ``application.id``."""
    return InvalidOptionError(
        f"the batches of this checkpoint were committed with application.id={found.application_id!r}, but "
        f"the query now has application.id={wanted.application_id!r}, for which Kafka holds no token.",
        fix=f"set application.id={found.application_id!r} again (in an App, the id). A query with another "
        "application.id needs a new checkpoint, and startingOffsets where it should begin.",
    )


def identity_damaged(file: str, location: str, error: Exception) -> OperatorError:
    """The identity file is not what this package writes."""
    return OperatorError(
        f"{file} is damaged ({error}); expected application_id, query_id, first_batch and location.",
        fix="restore it from a copy of the checkpoint; or write it by hand: application_id is the query's "
        "application.id, query_id is the id in the checkpoint's file 'metadata', first_batch is 0, and "
        f"location is {location!r}.",
    )


def identity_of_newer_version(file: str, unknown: Sequence[str], writer: str) -> NewerVersionError:
    """The identity file has keys of a newer version, which may forbid what this version would do next."""
    return NewerVersionError(
        f"{file} has keys that this version of kafka-eos does not know: {', '.join(unknown)}. It was written "
        f"by {writer}.",
        fix=f"run the query with {writer} (docs/upgrading.md).",
    )


def identity_unusable(checkpoint: str, what: str, error: OSError) -> UnavailableError:
    """The identity file cannot be read or written."""
    return UnavailableError(
        f"the identity file in checkpoint {checkpoint!r} cannot be {what}: {error}.",
        fix="give the driver permission to read and write the checkpoint, or free disk space; then restart "
        "the query.",
    )


# -- parts of texts --------------------------------------------------------------------------------


def _targets(batch: Batch, token: Token) -> str:
    """Returns a clause that says where the token's transaction and the batch write."""
    held, own = target_topic(token.target), target_topic(batch.target)
    if held != own:
        return f"that transaction wrote to {held}, and this query writes to {own}"
    return "that transaction wrote to other sinks outside Kafka than this query"


def _list(partitions: list[TopicPartition]) -> str:
    return ", ".join(str(tp) for tp in partitions[:_NAMED]) + _others(partitions)


def _offsets(offsets: Offsets, partitions: list[TopicPartition]) -> str:
    named = ", ".join(f"{tp} at {offsets.get(tp, 'none')}" for tp in partitions[:_NAMED])
    return named + _others(partitions)


def _ranges(starts: Offsets, ends: Offsets, partitions: list[TopicPartition]) -> str:
    named = ", ".join(f"{tp} [{starts.get(tp, '?')}, {ends[tp]})" for tp in partitions[:_NAMED])
    return named + _others(partitions)


def _others(found: Collection[object]) -> str:
    return f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
