"""The exactly-once sink: tasks stage rows (package `stage`), and the driver commits them (package `commit`).

Usually the tasks that write stage the rows. With ``write=`` of `map_in_read`, the tasks that read do: the
driver's planning process makes the sink and pickles it to them, as Spark does with the writer of other
queries. Each of them stages its rows and yields one row: its *report*, which contains the commit message that
a task of the sink would otherwise send. The tasks of the sink only collect these reports, and the commit
checks that none is missing or doubled (`commit.report_checks`).

No task contacts a broker, so code that only the driver needs is imported inside the functions that use it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidOptionError, RestartQueryError, StagedReadError
from kafka_eos_source.in_read.staged import STAGED, StagedRun, described
from kafka_eos_source.in_read.step import MapInRead, step_in_read
from kafka_eos_source.model import OffsetRange, ReadTask, StagedRead, WrittenPart
from kafka_eos_source.options.checked import ReadOptions, WriteOptions
from kafka_eos_source.protocol import offset_log, records
from kafka_eos_source.protocol.identity import derived_application_id
from kafka_eos_source.protocol.offset_log import PlannedBatch
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.spark.packet_senders import recorded_senders
from kafka_eos_source.spark.pickled import from_row, to_row
from kafka_eos_source.spark.schema import SinkColumns, check_frame, only_changelog, takes_records
from kafka_eos_source.spark.worker import StreamingTask, running_task
from kafka_eos_source.stage.files import StagingFolder, location_of_query
from kafka_eos_source.stage.row_rules import RecordLimits, with_small_batches
from kafka_eos_source.stage.task import StagedTask, Staging

if TYPE_CHECKING:
    from pyspark.sql import Row

    from kafka_eos_source.stage.fanout import Plan
    from kafka_eos_source.stage.staging import SealingPlan


@dataclass
class CommitMessage(WriterCommitMessage):
    """What one task attempt staged or wrote, for the driver that commits it.

    Attributes:
        staged: what it staged; None if the task wrote its rows itself, or only passes on `reports`.
        planned: `StagedSink.planned` of the writer that the task received.
        written: what the task wrote itself; None if it staged its rows.
        record_bytes: size of the largest record that the topics accept; None if the task does not know it.
        refusing: `fanout.Plan.refusing` of the task, by which it kept rows.
        read: the offsets that the staged rows cover, if the task that read them staged them.
        rows: schema of the staged rows, as Spark's JSON, if this is the first task of its read; else "". In a
            union of frames of `map_in_read`, the driver has no other way to learn it.
        reports: messages of such tasks, which this task received as rows of the frame.
    """

    staged: StagedTask | None
    planned: PlannedBatch | None = None
    written: WrittenPart | None = None
    record_bytes: int | None = None
    refusing: frozenset[str] = frozenset()
    read: StagedRead | None = None
    rows: str = ""
    reports: tuple[CommitMessage, ...] = ()


def of_every_task(messages: Iterable[WriterCommitMessage | None]) -> list[CommitMessage]:
    """Returns the messages of a batch in which every task succeeded.

    Raises:
        RestartQueryError: if the message of a task is missing, because its rows would be missing too.
    """
    found = list(messages)
    missing = [number for number, each in enumerate(found) if not isinstance(each, CommitMessage)]
    if missing:
        raise RestartQueryError(
            f"Spark asks to commit a batch, but {len(missing)} of its {len(found)} tasks (the first is task "
            f"{missing[0]}) sent no commit message: Spark passed {found[missing[0]]!r}. The rows of these "
            "tasks would be lost.",
            fix="start the query or the write again, which repeats the batch. Readers see nothing of it yet.",
        )
    return of_successful_tasks(found)


def of_successful_tasks(messages: Iterable[WriterCommitMessage | None]) -> list[CommitMessage]:
    """Returns the messages of the tasks that succeeded. Spark passes None for the others."""
    return [each for each in messages if isinstance(each, CommitMessage)]


def with_reported(messages: Iterable[CommitMessage]) -> list[CommitMessage]:
    """Returns the messages, and after them those in their reports, in the order of the tasks that read."""
    messages = list(messages)
    reported = [(each.read, each) for message in messages for each in message.reports]
    in_order = sorted(reported, key=lambda found: (found[0].frame, found[0].task) if found[0] else ("", 0))
    return [*messages, *(each for _, each in in_order)]


def staged_tasks(messages: Iterable[CommitMessage]) -> list[StagedTask]:
    """Returns what the tasks of these messages staged."""
    return [each.staged for each in messages if each.staged is not None]


def sink_columns(options: WriteOptions, schema: StructType) -> tuple[SinkColumns, Plan | None]:
    """Returns the columns of a stream's sink, and what goes to sinks outside Kafka; None if there are none.

    Raises:
        InvalidSchemaError: if the frame lacks a column that the sink needs, or a column has the wrong type.
        InvalidOptionError: if the frame lacks a column that a sink outside Kafka needs.
    """
    kafka = not options.sinks or takes_records(schema, topic_option=options.topic)
    columns = (
        check_frame(schema, topic_option=options.topic, include_timestamp=options.include_timestamp)
        if kafka
        else only_changelog(schema)
    )
    columns = replace(columns, escaped_names=options.header_names == "escape")
    if not options.sinks:
        return columns, None
    from kafka_eos_source.stage.fanout import Plan

    return columns, Plan.of(options.sinks, schema, kafka=kafka)


@dataclass(frozen=True)
class StagedSink:
    """Exactly-once sink: tasks stage rows, the driver commits them.

    Attributes:
        options: options of the sink.
        columns: positions of the columns in the frame.
        folder: staging folder.
        name: name of a batch write in the staging folder; "" for a stream, which uses the batch id.
        plan: columns and rows that go to sinks outside Kafka; None if there are none.
        in_read: whether the tasks that read stage the rows.
    """

    options: WriteOptions
    columns: SinkColumns
    folder: StagingFolder
    name: str
    plan: Plan | None = None
    in_read: bool = False

    @classmethod
    def of_stream(
        cls, options: WriteOptions, columns: SinkColumns, plan: Plan | None, *, in_read: bool
    ) -> StagedSink:
        """Returns the sink of a streaming query.

        Raises:
            InvalidOptionError: if ``checkpointLocation`` is not set.
            UnavailableError: if the staging folder is not writable.
        """
        return cls(options, columns, StagingFolder.at(*staging_of_stream(options)), "", plan, in_read)

    def __getstate__(self) -> dict[str, Any]:
        """Adds what the tasks receive from the driver. Spark never pickles the writer that commits."""
        self.prepare()
        return dict(self.__dict__)

    def prepare(self) -> None:
        """Looks up what the driver passes to the tasks: plan, limits, sealing, rules. Called on the driver.

        Raises:
            KafkaEosError: if the offset log cannot be read, the brokers do not say which records the topic
                accepts, or a sink outside Kafka cannot hold such rows.
        """
        _ = self.planned, self.limits, self.sealing, self.cluster_id, self.destinations

    @cached_property
    def limits(self) -> RecordLimits | None:
        """What the topic accepts; None if an invalid row fails the batch, so that no task has to know."""
        options = self.options
        if not self.sets_aside:
            return None
        from kafka_eos_source.stage.row_rules import record_limits

        return record_limits(options.kafka, options.topic, options.dead_letter_topic)

    @cached_property
    def sealing(self) -> SealingPlan | None:
        """How the tasks encode rows as record batches; None if they stage rows."""
        from kafka_eos_source.stage.staging import sealing_plan

        options = self.options
        return sealing_plan(options.kafka, options.topic)

    @cached_property
    def cluster_id(self) -> str:
        """Kafka's id of the sink's cluster, which sinks outside Kafka need; "" if there are none."""
        if self.plan is None:
            return ""
        from kafka_eos_source.commit import open_sinks

        return open_sinks.cluster_id(self.options, renew=True)

    @cached_property
    def planned(self) -> PlannedBatch | None:
        """The newest entry of the offset log; None if the log is empty, and in a batch write.

        Spark pickles a new writer for each micro-batch, between the entry of the batch in the offset log and
        its first task. The tasks report this entry to the driver, where another writer commits.
        """
        return None if self.name else offset_log.newest(str(self.options.checkpoint_location))

    @cached_property
    def destinations(self) -> Plan | None:
        """`plan`, with the rules of the sinks outside Kafka, whose targets are made ready.

        Raises:
            InvalidSchemaError: if a column of the frame cannot be staged again.
            KafkaEosError: as `open_sinks.make_ready`.
        """
        if self.plan is None:
            return None
        from kafka_eos_source.commit import open_sinks

        plan = replace(open_sinks.make_ready(self.options, self.plan), sets_aside=self.sets_aside)
        plan.check_kept()
        return plan

    @property
    def sets_aside(self) -> bool:
        """Whether invalid rows are set aside; otherwise they fail the batch."""
        return self.options.on_invalid_record != "fail"

    def write_frame(self, batches: Iterable[pa.RecordBatch]) -> CommitMessage:
        """Stages Arrow batches with all columns of the frame, for Kafka and for sinks outside Kafka."""
        task = _task()
        return self._message(task, self._staging(task, self.limits, self.destinations).batches(batches))

    def write_rows(self, rows: Iterable[Row]) -> CommitMessage:
        """Stages Spark's rows with all columns of the frame, for Kafka only."""
        task = _task()
        return self._message(task, self._staging(task, self.limits, self.destinations).rows(rows))

    def collect(self, reports: Iterable[memoryview]) -> CommitMessage:
        """Returns a message that contains the messages of tasks that staged what they read.

        Args:
            reports: the reports of these tasks, which are the rows of the frame.

        Raises:
            StagedReadError: as `messages_in`.
        """
        found = messages_in(reports, self.options, _task())
        if not found:  # the batch reads nothing, such as one that only renews the token
            return self.write_frame(())
        return CommitMessage(None, self.planned, reports=found)

    def _message(self, task: StreamingTask, staged: StagedTask) -> CommitMessage:
        # only now: an operator in this task starts when `stage` reads its first row
        staged = replace(staged, part=replace(staged.part, senders=recorded_senders(task)))
        limits, plan = self.limits, self.destinations
        return CommitMessage(
            staged,
            self.planned,
            record_bytes=None if limits is None else limits.record_bytes,
            refusing=frozenset() if plan is None else plan.refusing,
        )

    def _staging(self, task: StreamingTask, limits: RecordLimits | None, plan: Plan | None) -> Staging:
        """Returns how a batch is staged.

        Args:
            task: names query, run and batch.
            limits: what the topic accepts; None if an invalid row fails the batch.
            plan: destinations of the rows; None if all go to Kafka.
        """
        options, folder = self.options, self.folder
        application_id = options.application_id or derived_application_id(task.query_id)
        origin = {records.APPLICATION: application_id}
        if not self.name:
            # fails at the start of the query, not when a batch is first too large for the commit messages
            folder.check_shared()
            origin[records.BATCH] = task.batch_id
        return Staging(
            columns=self.columns,
            folder=folder,
            batch=self.name or task.batch_id,
            inline_bytes=options.staging_inline_bytes,
            run_id=task.run_id,
            topic=options.topic,
            sealing=self.sealing,
            limits=limits,
            dead_letter_topic=options.dead_letter_topic,
            origin=origin,
            plan=plan,
            application_id=application_id,
            cluster_id=self.cluster_id,
        )

    def commit_micro_batch(self, messages: Sequence[CommitMessage], batch_id: int) -> None:
        from kafka_eos_source.commit import micro_batch

        messages = with_reported(messages)
        micro_batch.commit_micro_batch(
            self._options_of_commit(messages),
            self.folder,
            self._as_staged(messages),
            batch_id,
            self.plan,
            {each.planned for each in messages},
            [each.read for each in messages if each.read is not None] if self.in_read else None,
            None if self.plan is None else partial(self._staging_on_driver, messages, batch_id),
        )

    def _staging_on_driver(self, messages: Sequence[CommitMessage], batch_id: int) -> Staging:
        """Returns how the driver stages rows again: as the tasks did, with the limits that they knew."""
        sizes = [each.record_bytes for each in messages if each.record_bytes is not None]
        runs = [each.part.run_id for each in staged_tasks(messages) if each.part.run_id]
        query_id = offset_log.query_id(require_checkpoint(self.options))
        task = StreamingTask(query_id, str(batch_id), runs[0] if runs else "")
        return self._staging(task, RecordLimits(min(sizes)) if sizes else None, self.plan)

    def _as_staged(self, messages: Sequence[CommitMessage]) -> list[StagedTask]:
        """Returns what the tasks of these messages staged, with the columns and the plan of each.

        A task whose frame is not known, because the report of the frame's first task is missing, gets none;
        `check_staged_reads` refuses the batch then.
        """
        if self.plan is None:
            return staged_tasks(messages)
        frames = {
            (each.read.frame, each.read.plan): sink_columns(
                self.options, StructType.fromJson(parse_json(each.rows))
            )
            for each in messages
            if each.read is not None and each.rows
        }
        found = []
        for each in messages:
            if each.staged is None:
                continue
            columns: SinkColumns | None = self.columns
            plan: Plan | None = self.plan
            if each.read is not None:
                columns, plan = frames.get((each.read.frame, each.read.plan), (None, None))
            if plan is not None:
                plan = replace(plan, refusing=each.refusing, sets_aside=self.sets_aside)
            found.append(replace(each.staged, columns=columns, plan=plan))
        return found

    def commit_batch_write(self, messages: Sequence[CommitMessage]) -> None:
        from kafka_eos_source.commit import micro_batch

        options = self._options_of_commit(messages)
        micro_batch.commit_batch_write(options, self.folder, self.name, staged_tasks(messages))

    def _options_of_commit(self, messages: Sequence[CommitMessage]) -> WriteOptions:
        """Returns the options with which the driver commits what these tasks staged."""
        sizes = [each.record_bytes for each in messages if each.record_bytes is not None]
        if not sizes:
            return self.options
        return replace(self.options, kafka=with_small_batches(self.options.kafka, min(sizes)))

    def discard(self, messages: Sequence[CommitMessage], batch_id: int | None = None) -> None:
        """Deletes the staged files that these messages name. A batch write has no batch id.

        Spark also calls this after a failed commit, so it must not delete anything else. What sinks outside
        Kafka have prepared stays: the commit token decides whether they commit or abort it.
        """
        files = [name for each in staged_tasks(with_reported(messages)) for name in each.files]
        self.folder.remove_parts(self.name or str(batch_id), files)
        if self.plan is not None:
            from kafka_eos_source.commit import open_sinks

            open_sinks.ask_again(self.options)  # a rule of a sink may have failed the batch


def _task() -> StreamingTask:
    task = running_task()
    if task is None:
        raise RuntimeError("the sink's write method was called outside a Spark task")
    return task


def staging_of_stream(options: WriteOptions) -> tuple[str, str]:
    """Returns the staging folder of a streaming query, and the options that decide it, for errors.

    Raises:
        InvalidOptionError: if ``checkpointLocation`` is not set.
    """
    location = location_of_query(require_checkpoint(options), options.staging_location)
    if options.staging_location is None:
        return location, "checkpointLocation or staging.location"
    return location, "staging.location"


def require_checkpoint(options: WriteOptions) -> str:
    """Returns the checkpoint of a streaming query.

    Spark lets a query without this option use a folder below the session's
    ``spark.sql.streaming.checkpointLocation``: named like the query, or with a new random name at each start
    of a query without a name. It tells a Python sink neither.

    Raises:
        InvalidOptionError: if ``checkpointLocation`` is not set.
    """
    if options.checkpoint_location is not None:
        return options.checkpoint_location
    setting = "spark.sql.streaming.checkpointLocation"
    chosen = f"spark.conf.get({setting!r}) + {'/' + (options.query_name or 'NAME')!r}"
    why = (
        "that is the folder that Spark uses for this query name"
        if options.query_name
        else "without queryName, Spark uses another folder at each start, and no query continues"
    )
    raise InvalidOptionError(
        "option 'checkpointLocation' is not set on the sink. The sink reads from the checkpoint which "
        f"offsets belong to a batch, and Spark does not pass on the session's {setting}.",
        fix=f"add .option('checkpointLocation', …) to writeStream; where the session sets {setting}: "
        f".option('checkpointLocation', {chosen}); {why}.",
    )


# ------------------------------------------------------------------ staging in the tasks that read

_SCHEMA = pa.schema([pa.field(STAGED, pa.binary())])


class StagingTask(InputPartition):
    """One reading task of a batch that stages its rows.

    Args:
        read: what it covers; its attempts differ in `StagedRead.task_attempt_id`.
        sink: the sink, as the driver made it for this batch.
        query_id: id of the query whose checkpoint the sink's options name.
        rows: `CommitMessage.rows`.
    """

    def __init__(self, read: StagedRead, sink: StagedSink, query_id: str, rows: str = "") -> None:
        super().__init__(None)
        self.ranges = read.ranges
        self._read = read
        self._sink = sink
        self._query_id = query_id
        self._rows = rows

    def read_task(self, frame: str) -> ReadTask:
        """Returns which task of the batch this is, for the packets of bad records of a frame."""
        return ReadTask(frame, self._read.plan, self._read.task, self._read.tasks)

    def run(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stages the rows of this task attempt, and yields its report as the only row of the frame.

        Raises:
            InvalidOptionError: if another query reads the frame than the one for which it is staged.
            RestartQueryError: if another driver has planned a batch in the same checkpoint.
            KafkaEosError: as `StagedSink.write_frame`.
        """
        task = running_task()
        if task is None:
            raise RuntimeError("the source's read method was called outside a Spark task")
        self._check_query(task)
        message = self._sink.write_frame(rows)
        read = replace(self._read, task_attempt_id=uuid.uuid4().hex)
        message = replace(message, read=read, rows=self._rows)
        report = pa.array([report_of(message, self._sink.options, task)], pa.binary())
        yield pa.RecordBatch.from_arrays([report], schema=_SCHEMA)

    def _check_query(self, task: StreamingTask) -> None:
        checkpoint = self._sink.options.checkpoint_location
        if task.query_id != self._query_id:
            raise InvalidOptionError(
                f"write= of map_in_read has checkpointLocation={checkpoint!r}, the checkpoint of query "
                f"{self._query_id}, but query {task.query_id or '(none)'} reads the frame.",
                fix="call map_in_read for each query with the options of its own sink, and write the frame "
                "only with them.",
            )
        planned = self._sink.planned
        if planned is None or str(planned.batch_id) != task.batch_id:
            newest = "empty" if planned is None else f"at batch {planned.batch_id}"
            raise RestartQueryError(
                f"a task reads for batch {task.batch_id}, but the offset log in checkpointLocation="
                f"{checkpoint!r} is {newest}: another driver uses the same checkpoint, somebody edited it, "
                "or the query tracks its progress asynchronously (asyncProgressTrackingEnabled), which "
                "writes the log later. Nothing of the batch was committed.",
                fix="do nothing if another driver should continue; otherwise stop it, remove the option "
                "asyncProgressTrackingEnabled if it is set, and start this query again.",
            )


class StagingPlan:
    """Turns the planned ranges of each batch into tasks that stage their rows; lives on the driver.

    Args:
        frame: id of the frame.
        rows: schema of the rows that its function returns.
        options: options of the sink.
        lossy: whether the source accepts lost records.
    """

    def __init__(self, frame: str, rows: StructType, options: WriteOptions, *, lossy: bool) -> None:
        self._frame = frame
        self._rows = rows
        self._options = options
        self._lossy = lossy
        self._run: StagedRun | None = None

    def close(self) -> None:
        """Says that the run has ended."""
        if self._run is not None:
            self._run.end()

    @classmethod
    def of(cls, options: ReadOptions) -> StagingPlan:
        """Returns the plan for a source whose options include those of a sink.

        Raises:
            InvalidOptionError: if the option that `map_in_read` sets is malformed.
        """
        step = step_in_read(options)
        assert options.sink is not None
        assert isinstance(step, MapInRead)
        return cls(step.frame, step.rows, options.sink, lossy=not options.fail_on_data_loss)

    def check(self) -> None:
        """Checks that the sink accepts such rows.

        Raises:
            InvalidSchemaError, InvalidOptionError: if it does not.
        """
        sink_columns(self._options, self._rows)

    def tasks(
        self, start: dict[str, Any], end: dict[str, Any], planned: Sequence[tuple[OffsetRange, ...]]
    ) -> list[InputPartition]:
        """Returns the tasks of one batch. Called after Spark has written the batch to the offset log.

        A batch of which nothing is left to read has one task, so that its report shows that. The commit
        expects it of each source that `in_read.staged` finds in the offset log. So whether there is one must
        depend on the end position as well: if Spark repeats batch 0, ``start`` is a new initial offset.

        Args:
            start, end: positions of the source, as Spark passes them.
            planned: the ranges of each task.

        Raises:
            InvalidOptionError: if there is no checkpoint at ``checkpointLocation``.
            UnavailableError: if the staging folder is not writable.
            KafkaEosError: as `StagedSink.prepare`.
        """
        from kafka_eos_source.protocol.offset_log import SourcePosition

        if self._run is None:
            self._run = StagedRun(str(self._options.checkpoint_location))
        position = SourcePosition.from_dict(end)
        if not planned:
            if not position.has_records or position == SourcePosition.from_dict(start):
                return []
            planned = [()]
        sink = StagedSink.of_stream(self._options, *sink_columns(self._options, self._rows), in_read=True)
        # PySpark pickles the tasks after it has sent Spark their number, so Spark would take the text of an
        # error there for the length of a task
        sink.prepare()
        query_id = offset_log.query_id(str(self._options.checkpoint_location))
        plan, of_position = uuid.uuid4().hex, position.digest
        return [
            StagingTask(
                StagedRead(
                    frame=self._frame,
                    plan=plan,
                    position=of_position,
                    task=number,
                    tasks=len(planned),
                    task_attempt_id="",
                    ranges=ranges,
                    lossy=self._lossy,
                ),
                sink,
                query_id,
                self._rows.json() if number == 0 else "",
            )
            for number, ranges in enumerate(planned)
        ]


def report_of(message: Any, options: WriteOptions, task: StreamingTask) -> bytes:
    """Returns the commit message of a task that read, as a row for a task of the sink."""
    return to_row(message, _key(options, task))


def messages_in(reports: Iterable[memoryview], options: WriteOptions, task: StreamingTask) -> tuple[Any, ...]:
    """Returns the commit messages in the reports that a task of the sink received.

    Raises:
        StagedReadError: if a row of the frame is no report for the batch of the task and this sink.
    """
    key = _key(options, task)
    try:
        return tuple(from_row(each, key) for each in reports)
    except ValueError as error:
        raise StagedReadError(
            f"a row of column {STAGED!r} is no report of a task that read for batch {task.batch_id} with the "
            f"options of this sink: {error}.",
            fix="write the frame that map_in_read returned without changes: do not cache it, and combine it "
            "only with frames of map_in_read that have the same write=.",
        ) from error


def _key(options: WriteOptions, task: StreamingTask) -> bytes:
    """Returns the key that signs the reports of one batch for one sink.

    It consists of what identifies the two. So the signature protects against accidents, such as rows of
    another batch or of another frame, and not against people: who can run code in the query knows the key.
    """
    known = (task.query_id, task.run_id, task.batch_id, described(options))
    return json.dumps(known, sort_keys=True).encode()
