"""Checks everything about a streaming query that can be known before it starts.

`check_query` is given the options of all parts of a query and the schema of its frame, and raises the first
mistake, cheapest checks first:

1. the options of each part, and whether the parts name one ``application.id`` and group,
2. the columns of the frame,
3. the checkpoint: whether it can be used, whose it is, and whether a query uses it now,
4. the brokers: their addresses, the login, the topics,
5. what Kafka holds of the query: whose token, and the state of which stores,
6. the targets of sinks outside Kafka.

The errors are those with which the query itself would fail later, made by the same functions. Only what is
certain is an error. What may pass (brokers that are slow, rights that brokers do not show, a query on another
host) is returned and logged as a warning, so that a check never prevents a restart which would succeed. The
checks write, create, join and fence nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs
from pyspark.sql.types import StructType

from kafka_eos_source.commit import refusals
from kafka_eos_source.commit.identity_file import IdentityFile, read_identity
from kafka_eos_source.commit.report_checks import stores_without_operator
from kafka_eos_source.commit.verdict import Batch, Held
from kafka_eos_source.datasource.sink import staging_of_stream
from kafka_eos_source.datasource.writer import FrameToWrite
from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidSchemaError,
    SinkUnavailableError,
    UnavailableError,
)
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.first_contact import Contact, contact, matching
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.options.checked import ReadOptions, WriteOptions
from kafka_eos_source.options.parse import parse_read, parse_write
from kafka_eos_source.plan.continuity import check_topics_of_checkpoint
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import adopts, anchor, derived_application_id, group_of
from kafka_eos_source.protocol.offset_log import LoggedOffsets, SourcePosition, is_kafka_offset_json
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.secrets import shown_text
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.options import StateOptions, parse_state

if TYPE_CHECKING:
    pass

_log = logging.getLogger(__name__)

#: How long to wait for the group's coordinator, after brokers have answered.
_GROUP_SECONDS = 3.0


@dataclass(frozen=True)
class RunningQuery:
    """A streaming query that is active in the session.

    Attributes:
        query_id: Spark's id of the query, which its checkpoint keeps.
        name: its name; None = it has none.
    """

    query_id: str
    name: str | None = None


def check_query(
    sources: Sequence[Mapping[str, str]],
    operators: Mapping[str, Mapping[str, str]],
    sink: Mapping[str, str],
    schema: StructType,
    running: Iterable[RunningQuery] = (),
) -> list[str]:
    """Checks a streaming query before it starts, from the process that would plan it.

    It takes some ms if the brokers answer, and at most about 10 s if they do not.

    Args:
        sources: options of each source ``format("kafka-eos")``.
        operators: options of each stateful operator, by the name of its store.
        sink: options of the sink, including ``checkpointLocation``, and ``queryName`` if the query has one.
        schema: schema of the frame that is written.
        running: the queries that are active in the session.

    Returns:
        Warnings, which are logged too.

    Raises:
        InvalidOptionError: if an option is wrong, or the parts of the query do not fit together.
        InvalidSchemaError: if the frame does not have the columns that the sink needs.
        CheckpointMovedError, GuaranteeChangedError: see `commit.identity_file.IdentityFile`.
        DataLossError: if the checkpoint is that of a query which reads other topics.
        UnavailableError: if the checkpoint or the brokers cannot be reached, or a topic does not exist.
        AuthorizationError: if brokers refuse the login or a request.
        ForeignQueryError: if the ``application.id`` belongs to another query.
        StateMismatchError: if an operator has another store than before.
        KafkaEosError: if a sink outside Kafka cannot write these rows, or a new query cannot reach it.
    """
    query = _Query(
        [parse_read(each, streaming=True) for each in sources],
        {store: parse_state(each) for store, each in operators.items()},
        parse_write(sink, streaming=True),
    )
    if query.is_exactly_once:
        staging_of_stream(query.sink)  # raises if there is no checkpoint
    frame = FrameToWrite.of(query.sink, schema)
    _check_changes(query, frame)
    if frame.columns.only_bad_records and query.sink.on_invalid_record == "fail":
        query.warnings.append(
            "the query reads with on_bad='dead-letter', but the option 'onInvalidRecord' of the sink has the "
            "value 'fail': the first bad record stops the query. Set the option to 'dead-letter', and "
            "'deadLetter.topic' to the topic for bad records; or to 'drop'."
        )
    query.checkpoint.check_usable()
    _check_names(query)
    _check_checkpoint(query)
    _check_running(query, list(running))
    answers = _check_brokers(query)
    if query.is_exactly_once and not answers.of(query.sink.kafka).silence:
        _check_token(query)
        _check_targets(query, frame)
    for each in query.warnings:
        _log.warning("%s", each)
    return query.warnings


# -- the checkpoint --------------------------------------------------------------------------------


class _Checkpoint:
    """What the checkpoint says. All is empty if there is none, as before the first start of a query.

    Args:
        location: URI or path; None = the query has none, which only `at_least_once` allows.

    Raises:
        InvalidOptionError: if no file system supports the location.
    """

    def __init__(self, location: str | None) -> None:
        self.location = location or ""
        self._place = None if location is None else file_system(location)

    def check_usable(self) -> None:
        """Checks that the checkpoint can be read, or created if it is on a local disk.

        Raises:
            UnavailableError: if it cannot.
        """
        if self._place is None:
            return
        self._reading(lambda: self.query_id)
        fs, path = self._place
        if self.query_id is not None or not isinstance(fs, pafs.LocalFileSystem):
            return
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
            why = "is no folder" if not os.path.isdir(path) else "is not writable for this user"
            raise UnavailableError(
                f"checkpointLocation={self.location!r} cannot be used: {path!r} {why}.",
                fix="correct checkpointLocation, or the permissions of that folder.",
            )

    @cached_property
    def query_id(self) -> str | None:
        """Spark's id of the query; None if there is no checkpoint yet."""
        if self._place is None:
            return None
        fs, path = self._place
        if fs.get_file_info(f"{path}/metadata").type != pafs.FileType.File:
            return None
        return offset_log.query_id(self.location)

    @cached_property
    def planned(self) -> int | None:
        """The newest batch in Spark's offset log; None if there is none."""
        if self.query_id is None:
            return None
        found = self._reading(lambda: offset_log.newest(self.location))
        return None if found is None else found.batch_id

    @cached_property
    def has_run(self) -> bool:
        """Whether a batch of the query has ended."""
        return self.query_id is not None and self._reading(
            lambda: offset_log.has_finished_batch(self.location)
        )

    @property
    def next_batch(self) -> int:
        """The batch that begins with the next start; the newest planned one if it may not have ended."""
        if self.planned is None:
            return 0
        fs, path = file_system(self.location)
        info = self._reading(lambda: fs.get_file_info(f"{path}/commits/{self.planned}"))
        return self.planned + 1 if info.type == pafs.FileType.File else self.planned

    def logged(self) -> LoggedOffsets | None:
        """Returns the newest entry of the offset log."""
        planned = self.planned
        return None if planned is None else self._reading(lambda: offset_log.read(self.location, planned))

    def _reading(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except OSError as error:
            raise UnavailableError(
                f"the checkpoint {shown_text(self.location)} cannot be read: {error}",
                fix="check checkpointLocation, that its storage answers, and the rights of this user.",
            ) from error


@dataclass
class _Query:
    """The checked options of all parts of a query, and its checkpoint."""

    sources: Sequence[ReadOptions]
    operators: Mapping[str, StateOptions]
    sink: WriteOptions
    warnings: list[str] = field(default_factory=list)
    #: whether Kafka holds a token of this query
    has_token: bool = False

    @cached_property
    def checkpoint(self) -> _Checkpoint:
        return _Checkpoint(self.sink.checkpoint_location)

    @property
    def is_exactly_once(self) -> bool:
        return self.sink.guarantee == "exactly_once"

    @property
    def derived_id(self) -> str:
        """The ``application.id`` of a query that does not set the option; "" before its first start."""
        query_id = self.checkpoint.query_id
        return "" if query_id is None else derived_application_id(query_id)

    @property
    def application_id(self) -> str:
        """The transactional id; "" if it is derived from a checkpoint that does not exist yet."""
        return self.sink.application_id or self.derived_id

    @property
    def group_id(self) -> str:
        """The consumer group of the token."""
        return group_of(self.application_id, self.sink.group_id)

    def changelog(self, store: str) -> str:
        """Returns the changelog topic of an operator."""
        return changelog_name(self.application_id, store)


def _check_changes(query: _Query, frame: FrameToWrite) -> None:
    """Checks that the state changes of the operators reach the sink."""
    if query.operators and frame.columns.changelog is None and not frame.in_read:
        stores = ", ".join(map(repr, query.operators))
        raise InvalidSchemaError(
            f"the frame has no column {CHANGELOG!r}, so the state changes of the operators with the stores "
            f"{stores} would not reach the sink, which commits them with the rows.",
            fix=f"keep the column {CHANGELOG!r} in each select() after an operator.",
        )


def _check_names(query: _Query) -> None:
    """Checks that all parts have one ``application.id`` and one group, as the commit does for each batch."""
    sink, derived = query.sink, query.derived_id
    ids = {"the sink": sink.application_id or derived}
    for store, each in query.operators.items():
        ids[f"the operator with the store {store!r}"] = each.application_id or derived
    for number, source in enumerate(query.sources):
        if source.application_id is not None:
            ids[f"source {number}"] = source.application_id
    if len(set(ids.values())) > 1:
        raise refusals.different_ids(ids, derived)
    groups = {"the sink": sink.group_id}
    for store, each in query.operators.items():
        groups[f"the operator with the store {store!r}"] = each.group_id
    if len(set(groups.values())) > 1:
        own = query.group_id if query.application_id else "(not set)"
        raise refusals.different_groups({part: group or own for part, group in groups.items()})


def _check_checkpoint(query: _Query) -> None:
    """Checks whose checkpoint it is: by its identity file, and by the topics that its batches have read."""
    checkpoint = query.checkpoint
    if checkpoint.query_id is None:
        return
    if query.is_exactly_once:
        try:
            has_identity = read_identity(checkpoint.location) is not None
        except OSError as error:
            raise refusals.identity_unusable(checkpoint.location, "read", error) from error
        if has_identity:
            IdentityFile.of(checkpoint.location, query.sink, checkpoint.query_id, 0)
    logged = checkpoint.logged()
    if logged is None or len(logged.sources) != len(query.sources):
        return  # the query also has sources of other formats, or Spark refuses the change
    if not all(source.fail_on_data_loss for source in query.sources):
        return

    def is_read(topic: str) -> bool:
        return any(source.subscription.has_topic(topic) for source in query.sources)

    for line in logged.sources.values():  # Spark matches sources by place or name; any of them may be meant
        if line is not None and is_kafka_offset_json(line):
            check_topics_of_checkpoint(SourcePosition.from_json(line).end, is_read)


# -- queries that run now --------------------------------------------------------------------------


def _check_running(query: _Query, running: Sequence[RunningQuery]) -> None:
    """Checks whether a query uses the checkpoint or the ``application.id`` now.

    Spark starts no query with the name of one that runs in the session. It ends a run of a query without a
    name when the query is started again (``spark.sql.streaming.stopActiveRunOnRestart``). Another name shows
    that it is meant to be another query.

    Raises:
        InvalidOptionError: if another query of the session has the checkpoint or the name.
    """
    checkpoint = query.checkpoint
    active = next((each for each in running if each.query_id == checkpoint.query_id), None)
    if active is not None and active.name != query.sink.query_name:
        named = "without a name" if active.name is None else repr(active.name)
        raise InvalidOptionError(
            f"checkpointLocation={checkpoint.location!r} is the checkpoint of query {named} "
            f"({active.query_id}), which runs in this session. Two queries cannot share a checkpoint: Spark "
            "would stop that one, and this one would continue from its offsets.",
            fix="give this query a checkpoint of its own; or, if it replaces the other one, stop that first "
            "with .stop().",
        )
    name = query.sink.query_name
    namesake = next((each for each in running if name is not None and each.name == name), None)
    if namesake is not None:
        raise InvalidOptionError(
            f"the query {name!r} ({namesake.query_id}) already runs in this session.",
            fix=f"stop it first: next(q for q in spark.streams.active if q.name == {name!r}).stop().",
        )
    if active is not None:
        query.warnings.append(
            f"query {active.query_id} runs with checkpointLocation={checkpoint.location!r} in this session; "
            "Spark stops that run when this one starts."
        )
        return
    pid = _alive_elsewhere(query.application_id, checkpoint.query_id, running)
    if pid is not None:
        query.warnings.append(
            f"a query with application.id={query.application_id!r} seems to run on this host (process "
            f"{pid}). If this start is meant to replace it, stop that one first: the later of two owners "
            "fences the earlier one. Otherwise give this query its own application.id and checkpoint."
        )


def _alive_elsewhere(
    application_id: str, query_id: str | None, running: Sequence[RunningQuery]
) -> int | None:
    """Returns the process that plans batches of this application for another session; None = none is known.

    It looks at the files of this host that `kafka-eos top` shows.
    """
    from kafka_eos_source.observe.figures import SourceState
    from kafka_eos_source.observe.journal import query_journal

    if not application_id or any(each.query_id == query_id for each in running):
        return None
    try:
        journal = query_journal(application_id)
    except OSError:
        return None
    for source in journal.sources if journal is not None else ():
        if source.state is not SourceState.STOPPED and source.writer.process.is_alive():
            return source.writer.process.pid
    return None


# -- brokers ---------------------------------------------------------------------------------------


class _Answers:
    """What each cluster of a query answered, by the properties of the connection."""

    def __init__(self) -> None:
        self._found: dict[str, Contact] = {}

    def of(self, kafka: Mapping[str, str]) -> Contact:
        return self._found[_key(kafka)]

    def add(self, kafka: Mapping[str, str], found: Contact) -> None:
        self._found[_key(kafka)] = found


@dataclass(frozen=True)
class _Use:
    """A topic that a part of the query uses.

    Attributes:
        doing: what it is looked up for, in the words of the part itself.
        operations: rights that the part needs.
    """

    doing: str
    operations: tuple[str, ...]


def _check_brokers(query: _Query) -> _Answers:
    """Asks each cluster once for all topics that the query uses there.

    Raises:
        UnavailableError: if no address can be reached, or a topic does not exist; or if no broker answers,
            and the query is new.
        AuthorizationError: if brokers refuse the login, or hide a topic.
        InvalidOptionError: if an operator uses another cluster than the sink.
    """
    uses: dict[str, tuple[Mapping[str, str], dict[str, _Use]]] = {}

    def uses_of(kafka: Mapping[str, str]) -> dict[str, _Use]:
        return uses.setdefault(_key(kafka), (kafka, {}))[1]

    for source in query.sources:
        topics = _named_topics(source)
        for name in topics:
            uses_of(source.kafka)[name] = _Use(f"looking up the topics {', '.join(topics)}", ("READ",))
        uses_of(source.kafka)
    sink = query.sink
    written = uses_of(sink.kafka)
    for topic, doing, operations in (
        (sink.topic, "looking up output topic", ("WRITE",)),
        (sink.dead_letter_topic, "looking up deadLetter.topic", ("WRITE",)),
        (sink.token_topic, "looking up token.topic", ("READ", "WRITE")),
    ):
        if topic is not None:
            read = written.get(topic)
            rights = (*operations, *(read.operations if read is not None else ()))
            written[topic] = _Use(f"{doing} {topic!r}" if read is None else read.doing, rights)
    for each in query.operators.values():
        uses_of(each.kafka)
    answers = _Answers()
    for kafka, used in uses.values():
        found = contact(admin_config(kafka), {name: use.doing for name, use in used.items()})
        answers.add(kafka, found)
        if found.silence:
            _report_silence(query, kafka, found.silence)
            continue
        for name, use in used.items():
            missing = sorted({each.title() for each in use.operations if not found.may(name, each)})
            if missing:
                query.warnings.append(
                    f"the login has no right to {' and '.join(missing)} topic {name!r}, as its brokers say. "
                    "`kafka-eos acls` prints all rights that a query needs."
                )
    _check_patterns(query, answers)
    _check_same_cluster(query, answers)
    _check_loops(query, answers)
    return answers


def _named_topics(source: ReadOptions) -> list[str]:
    what = source.subscription
    return list(what.topics or sorted({tp.topic for tp in what.partitions}))


def _report_silence(query: _Query, kafka: Mapping[str, str], why: str) -> None:
    text = f"no answer from Kafka at kafka.bootstrap.servers={kafka.get('bootstrap.servers')!r}: {why}."
    if not query.checkpoint.has_run:
        raise UnavailableError(
            text,
            fix="check the addresses, that the brokers run, and that kafka.security.protocol matches theirs.",
        )
    query.warnings.append(f"{text} The query has run before, so it waits for its brokers.")


def _check_patterns(query: _Query, answers: _Answers) -> None:
    for source in query.sources:
        what = source.subscription
        if what.kind != "subscribePattern" or answers.of(source.kafka).silence:
            continue
        names = matching(admin_config(source.kafka))
        if names is not None and not any(map(what.has_topic, names)):
            query.warnings.append(
                f"option 'subscribePattern' has the value {what.pattern!r}, which matches no topic that the "
                "login may see. The query waits until there is one."
            )


def _check_same_cluster(query: _Query, answers: _Answers) -> None:
    own = answers.of(query.sink.kafka).cluster_id
    for store, each in query.operators.items():
        other = answers.of(each.kafka).cluster_id
        if own and other and own != other:
            raise InvalidOptionError(
                f"the operator with the store {store!r} uses kafka.bootstrap.servers="
                f"{each.kafka.get('bootstrap.servers')!r}, the cluster {other}; the sink uses "
                f"{query.sink.kafka.get('bootstrap.servers')!r}, the cluster {own}. Expected the same "
                "cluster, because the sink writes the changes of the state.",
                fix="set kafka.bootstrap.servers on the sink and in the options of the operator to the same "
                "cluster.",
            )


def _check_loops(query: _Query, answers: _Answers) -> None:
    """Checks whether the query reads a topic that it writes.

    Raises:
        InvalidOptionError: if it reads its own dead letters.
    """
    sink = query.sink
    written = answers.of(sink.kafka).cluster_id
    for source in query.sources:
        read = answers.of(source.kafka).cluster_id
        if _key(source.kafka) != _key(sink.kafka) and (not read or read != written):
            continue  # another cluster, or perhaps another one
        what = source.subscription
        if sink.dead_letter_topic is not None and what.has_topic(sink.dead_letter_topic):
            raise refusals.reads_dead_letters(sink.dead_letter_topic)
        if sink.topic is not None and what.has_topic(sink.topic):
            query.warnings.append(
                f"option 'topic' has the value {sink.topic!r}, which is a topic that the query reads "
                f"({what.kind}: {what}): each record that it writes comes back as its input. If nothing in "
                "the query ends this loop, such as a filter or a number of attempts, write to another topic."
            )


def _key(kafka: Mapping[str, str]) -> str:
    return repr(sorted(admin_config(kafka).items()))


# -- what Kafka holds ------------------------------------------------------------------------------


def _check_token(query: _Query) -> None:
    """Checks whose token Kafka holds, and that each store of the last transaction still has an operator.

    Raises:
        ForeignQueryError: if the token belongs to another query.
        StateMismatchError: if a store was renamed.
        AuthorizationError: if the principal may not read the offsets of the group.
        OperatorError: if a token is damaged, or of a newer version.
    """
    if not query.application_id:
        return  # nobody else can have used an id that does not exist yet
    sink, checkpoint = query.sink, query.checkpoint
    certainly = {anchor(sink.anchor_topic, sink.topic)}
    try:
        offsets, pending = GroupOffsets(admin_config(sink.kafka)).now(
            query.group_id, certainly, Deadline.after_seconds(_GROUP_SECONDS)
        )
    except UnavailableError as error:
        query.warnings.append(error.message)
        return
    if pending:
        query.warnings.append(
            f"a transaction of application.id={query.application_id!r} is open: a driver of this query runs "
            "and commits, or died while it did. This start ends the transaction and fences that driver."
        )
    held = Held.of(query.application_id, offsets)
    token = held.whole_token
    if token is None:
        return
    if token.query_id != checkpoint.query_id:
        if not adopts(sink.foreign_query, token.query_id):
            own = checkpoint.query_id or "a new one"
            raise refusals.foreign_query(Batch(query.application_id, own, "", checkpoint.next_batch), token)
        return
    query.has_token = True
    _check_stores(query, held, token)


def _check_stores(query: _Query, held: Held, token: Token) -> None:
    topics = {query.changelog(store): store for store in query.operators}
    with_state = {tp.topic for tp, each in held.offsets.items() if Token.decode(each.metadata) is not None}
    new = [
        store
        for topic, store in topics.items()
        if topic not in with_state and query.operators[store].missing_state == "fail"
    ]
    gone = stores_without_operator(held, token.sequence, set(topics))
    if new and gone:
        raise refusals.renamed_store(new[0], gone, query.application_id, query.checkpoint.next_batch)


# -- sinks outside Kafka ---------------------------------------------------------------------------


def _check_targets(query: _Query, frame: FrameToWrite) -> None:
    """Lets each sink outside Kafka check its target and the columns, without any effect.

    A target that cannot be reached stops a new query, because its address or login is likely wrong. A query
    that has committed before is only warned of it, because the system may be back at the first batch.

    Raises:
        InvalidOptionError, InvalidSchemaError, OperatorError: if a sink cannot write such rows.
        SinkUnavailableError: if the sink of a new query cannot be reached.
    """
    if frame.plan is None:
        return
    from kafka_eos_source.sinks.watched import UNKNOWN_ID, check_targets

    sinks = [(route.spec, route.schema) for route in frame.plan.routes]
    for error in check_targets(sinks, application_id=query.application_id or UNKNOWN_ID).values():
        is_new = query.checkpoint.next_batch == 0 and not query.has_token
        if is_new or not isinstance(error, SinkUnavailableError):
            raise error
        query.warnings.append(error.message)
