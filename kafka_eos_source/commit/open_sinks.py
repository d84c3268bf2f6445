"""The sinks of queries that stay open in this process between batches, and what is known of their targets.

Before the first batch, the driver makes the targets ready and asks for their rules for rows. Both the process
that commits and, if the tasks that read stage the rows, the process that plans do so.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import pyarrow as pa

from kafka_eos_source.commit.two_phase import Sinks
from kafka_eos_source.errors import (
    KafkaEosError,
    OperatorError,
    RestartQueryError,
    SinkFailedError,
    UnavailableError,
)
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.observe.trace import Trace
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import derived_application_id
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.sinks import targets
from kafka_eos_source.sinks.contract import SinkContext, Staged, TwoPhaseSink
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.specs import SinkSpec
from kafka_eos_source.sinks.watched import WatchedSink
from kafka_eos_source.stage.fanout import Plan, Route, SinkPart, StagedForSink
from kafka_eos_source.stage.files import StagingFolder

_log = logging.getLogger(__name__)

#: Number of queries whose sinks stay open in one process. The least recently used ones are closed first.
_MOST_QUERIES = 8
#: Time limit for making a target ready before the first batch.
_READY_SECONDS = 30.0

#: The rules of a target for rows are asked for again after this time, in seconds.
_RULES_SECONDS = 60.0

#: Marks of queries that have not failed for this long are deleted, in seconds.
_MARKS_SECONDS = 7 * 24 * 3600.0

#: If refused rows fail the batch, its error shows this many of them.
SHOWN_REFUSED = 3

#: Key in `_ready` for the check that no two sinks write to one target.
_TARGETS = ""

#: The planning process asks again for the cluster's id after this time, in seconds, and then does not wait
#: longer for the answer than this, in ms.
_CLUSTER_SECONDS, _RENEW_MS = 60.0, 3_000

#: By connection properties: when the brokers reported the id of their cluster, and the id.
_clusters: dict[str, tuple[float, str]] = {}

_Key = tuple[str, ...]


@dataclass(frozen=True)
class _Ready:
    """What this process knows of a target that is ready.

    Attributes:
        rules: the sink's rules for rows.
        refuses_rows: whether it may refuse rows.
        at: when it said so, in seconds of `time.monotonic`.
    """

    rules: tuple[RowRule, ...] = ()
    refuses_rows: bool = False
    at: float = field(default_factory=time.monotonic)


_opened: OrderedDict[_Key, Mapping[str, TwoPhaseSink]] = OrderedDict()
_ready: dict[tuple[_Key, str], _Ready] = {}

#: By application id: the mark of `_folder` with which `_ready` was learned.
_marks: dict[str, str] = {}


def store_location(checkpoint: str, name: str) -> str:
    """Returns the folder in the checkpoint where a sink may keep its own notes."""
    return f"{checkpoint.rstrip('/')}/kafka-eos/sinks/{name}"


def cluster_id(options: WriteOptions, *, renew: bool = False) -> str:
    """Returns Kafka's id of the sink's cluster, and asks the brokers if this process does not know it yet.

    The sinks need it before a producer is initialised: it is part of the names of all that they store. The
    commit compares it with the cluster that its producer found (`ownership.take_ownership`).

    Args:
        options: options of the query.
        renew: whether to ask again after a minute. If no broker answers then, the known id is returned.

    Raises:
        UnavailableError: if no broker answers within ``commitTimeoutMs``.
        OperatorError: if the brokers do not report an id.
    """
    key = _brokers(options)
    at, known = _clusters.get(key, (0.0, ""))
    if known and not (renew and time.monotonic() - at > _CLUSTER_SECONDS):
        return known
    try:
        with TopicAdmin(options.kafka) as admin:
            limit_ms = _RENEW_MS if known else options.commit_timeout_ms
            found = admin.cluster_id(Deadline.after_ms(limit_ms))
        if not found:
            raise OperatorError(
                f"the brokers of kafka.bootstrap.servers={options.kafka.get('bootstrap.servers')!r} do not "
                "report the id of their cluster, by which sinks outside Kafka tell their work from that of "
                "other clusters.",
                fix="use brokers that report a cluster id (Kafka's do), or leave out the option 'sinks'.",
            )
    except UnavailableError:
        if not known:
            raise
        found = known  # the next batches do not wait for the same answer
    _clusters[key] = time.monotonic(), found
    return found


def opened(options: WriteOptions, application_id: str) -> Mapping[str, TwoPhaseSink]:
    """Returns the sinks of the query by name, and opens them if this process has not done so yet.

    Raises:
        InvalidOptionError: if the options of a sink are not valid.
        KafkaEosError: as `cluster_id`.
    """
    cluster = cluster_id(options)
    key = _key(options, application_id)
    found = _opened.get(key)
    if found is not None and any(sink.context.cluster_id != cluster for sink in found.values()):
        _close(_opened.pop(key))
        found = None
    if found is None:
        enough = SHOWN_REFUSED if options.on_invalid_record == "fail" else None
        found = _opened[key] = open_all(
            options.sinks, application_id, cluster, options.checkpoint_location, enough
        )
    _opened.move_to_end(key)
    while len(_opened) > _MOST_QUERIES:
        _close(_opened.popitem(last=False)[1])
    return found


def open_all(
    specs: Sequence[SinkSpec],
    application_id: str,
    cluster_id: str,
    checkpoint: str | None,
    enough_refused: int | None = None,
) -> dict[str, TwoPhaseSink]:
    """Creates and opens the sinks, and returns them by name. If one cannot be opened, closes the others.

    Args:
        specs: the sinks.
        application_id, cluster_id: the query.
        checkpoint: location of its checkpoint; None = the sinks have no folder for notes.
        enough_refused: as in `SinkContext`.
    """
    found: dict[str, TwoPhaseSink] = {}
    with ExitStack() as opened_before:
        for spec in specs:
            built = spec.build()
            sink = found[spec.name] = WatchedSink(built, spec.naming)
            store = None if checkpoint is None else NotesFolder(store_location(checkpoint, spec.name))
            secrets = spec.secrets(built)
            sink.open(SinkContext(spec.name, application_id, cluster_id, store, secrets, enough_refused))
            opened_before.callback(sink.close)
        opened_before.pop_all()
    return found


def close(options: WriteOptions, application_id: str) -> None:
    """Closes the sinks of the query. After an error the next commit opens new connections.

    It also asks for the cluster's id again, in case the bootstrap servers now lead to another cluster.
    """
    _clusters.pop(_brokers(options), None)
    sinks = _opened.pop(_key(options, application_id), None)
    if sinks is not None:
        _close(sinks)


def ask_again(options: WriteOptions) -> None:
    """Closes the sinks of the query; every process of this host asks them again before its next batch.

    Called after a batch has failed: its error may say that the next start asks again. Does not raise.
    """
    try:
        application_id = _application_id(options)
        close(options, application_id)
        _folder().write(f"{application_id}.mark", uuid.uuid4().hex)
        _folder().tidy(_MARKS_SECONDS)
    except (KafkaEosError, OSError, UnicodeDecodeError) as error:
        _log.info("the next batch may use rules of sinks that are up to a minute old: %s", error)


def _forget_if_marked(query: _Key, application_id: str) -> None:
    """Forgets what this process knows of the targets of a query if `ask_again` was called since."""
    try:
        mark = _folder().read(f"{application_id}.mark") or ""
    except (OSError, UnicodeDecodeError) as error:
        _log.info("cannot read whether to ask sinks again (application.id=%r): %s", application_id, error)
        return
    if _marks.get(application_id, "") != mark:
        _marks[application_id] = mark
        for each in [each for each in _ready if each[0] == query]:
            del _ready[each]


def _folder() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-ask-again")


def make_ready(options: WriteOptions, plan: Plan) -> Plan:
    """Makes the sinks' targets ready, and returns the plan with their rules for rows.

    The driver calls it for every batch. A target is made ready once; its rules are asked for again after a
    minute, because somebody may change the table, and after a batch has failed.

    Raises:
        InvalidOptionError: if two sinks write to the same target.
        InvalidOptionError, InvalidSchemaError, OperatorError: if a sink cannot write rows of this schema.
    """
    application_id = _application_id(options)
    query = _key(options, application_id)
    _forget_if_marked(query, application_id)
    if (query, _TARGETS) not in _ready:
        targets.refuse_shared(opened(options, application_id))
        _ready[query, _TARGETS] = _Ready()
    rules: dict[str, tuple[RowRule, ...]] = {}
    refusing: set[str] = set()
    for route in plan.routes:
        name = route.spec.name
        key = (query, f"{name}:{route.schema}")
        known = _ready.get(key)
        if known is None or time.monotonic() - known.at > _RULES_SECONDS:
            known = _asked(options, application_id, route, known)
            if known is None:  # the tasks keep the rows if the sink may refuse some
                sink = opened(options, application_id)[name]
                known = _Ready(refuses_rows=sink.refuses_rows)
                close(options, application_id)
            else:
                _ready[key] = known
        rules[name] = known.rules
        if known.refuses_rows:
            refusing.add(name)
    return replace(plan, rules=rules, refusing=frozenset(refusing))


def _asked(options: WriteOptions, application_id: str, route: Route, known: _Ready | None) -> _Ready | None:
    """Makes the target of a sink ready if it is not, and asks for its rules.

    Returns:
        None if the target cannot be made ready now; ``known`` if it only does not say its rules.
    """
    name = route.spec.name
    sink = opened(options, application_id)[name]
    try:
        if known is None:
            sink.make_ready(route.schema, Deadline.after_seconds(_READY_SECONDS))
        rules = tuple(sink.row_rules(route.schema, Deadline.after_seconds(_READY_SECONDS)))
    except Exception as error:
        if known is None and isinstance(error, OperatorError | RestartQueryError):
            raise
        _log.warning(  # if it persists, prepare reports it
            "the target of sink %r %s: %s",
            name,
            "cannot be made ready yet" if known is None else "does not say its rules for rows now",
            sink.context.secrets.hide(f"{error!r}"),
        )
        if known is None:
            return None
        close(options, application_id)
        return replace(known, at=time.monotonic())
    _check_rules(name, rules, route.schema)
    return _Ready(rules, sink.refuses_rows)


def _check_rules(name: str, rules: Iterable[RowRule], schema: pa.Schema) -> None:
    """Raises SinkFailedError if a rule does not fit the columns of the sink, so that tasks would fail."""
    for rule in rules:
        try:
            column = pa.nulls(0, schema.field(rule.column).type)
            rule.broken(column)
            rule.message(column.type)
        except Exception as error:
            raise SinkFailedError(
                f"sink {name!r} has a rule for rows that does not fit its columns, {rule!r}: {error!r}.",
                fix="correct the sink's row_rules().",
            ) from error


def work(
    options: WriteOptions,
    plan: Plan,
    folder: StagingFolder,
    application_id: str,
    batch_id: int,
    parts: Iterable[SinkPart],
    trace: Trace | None = None,
    before: Sinks | None = None,
) -> Sinks:
    """Returns the sinks with their staged rows, for the commit of one batch.

    Args:
        before: the sinks with their rows before some tasks' rows were staged again; None if none were.

    Raises:
        StagedPartError: if a staged part is missing or damaged.
        InvalidOptionError: if the options of a sink are not valid.
    """
    by_sink: dict[str, list[SinkPart]] = {}
    for part in parts:
        by_sink.setdefault(part.sink, []).append(part)
    staged: dict[str, Staged] = {}
    for route in plan.routes:
        if (name := route.spec.name) in by_sink:
            known = None if before is None else before.staged.get(name)
            known = known if isinstance(known, StagedForSink) else None
            staged[name] = StagedForSink(folder, str(batch_id), route.schema, by_sink[name], known)
    return Sinks(opened(options, application_id), staged, batch_id, trace)


def _brokers(options: WriteOptions) -> str:
    return repr(sorted(options.kafka.items()))


def _key(options: WriteOptions, application_id: str) -> _Key:
    of_sinks = (spec.key for spec in options.sinks)
    return application_id, options.checkpoint_location or "", options.on_invalid_record, *of_sinks


def _application_id(options: WriteOptions) -> str:
    if options.application_id or options.checkpoint_location is None:
        return options.application_id or ""
    return derived_application_id(offset_log.query_id(options.checkpoint_location))


def _close(sinks: Mapping[str, TwoPhaseSink]) -> None:
    for name, sink in sinks.items():
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything
            _log.info("closing sink %r failed: %s", name, sink.context.secrets.hide(str(error)))
