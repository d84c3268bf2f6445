"""A stateful operator's state commits together with its batch, whatever is killed or lost on disk."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from integration.support import stateful
from integration.support.driver import ROOT
from integration.support.kafka import Admin, final_end_offsets, produce, read_back
from integration.support.processes import await_condition
from integration.support.stateful import check_running_counts
from kafka_eos_source.cli import main
from kafka_eos_source.errors import StateLostError, StateMismatchError
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.operator.task import ensure_changelog
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.reading.snapshot import Snapshot, of_changelog, of_folders
from kafka_eos_source.state.reading.stores import Changelog, folders

ROWS, PER_BATCH, KEYS = 600, 200, 17
SHARDS = 2


class Case:
    """A topic-to-topic query that counts rows per key."""

    def __init__(self, broker: str, topic: Callable[..., str], folder: Path, rows: int = ROWS) -> None:
        self.broker = broker
        self.source, self.sink = topic(2), topic(2)
        self.application = f"app-{self.sink}"
        self.changelog = f"{self.application}-counts-changelog"
        self.state_dir = folder / "state"
        self.checkpoint = str(folder / "checkpoint")
        self.wanted: Counter[str] = Counter()
        self.feed(rows)

    def feed(self, rows: int, first_key: int = 0) -> None:
        keys = [f"k{first_key + row % KEYS:02d}" for row in range(rows)]
        produce(self.broker, self.source, [str(row) for row in range(rows)], keys=keys)
        self.wanted.update(keys)

    def shared(self, **options: str) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.broker,
            "application.id": self.application,
            **options,
        }

    def spec(self, **state: Any) -> dict[str, Any]:
        return {
            "sources": [
                {
                    "format": "kafka-eos",
                    "options": {
                        "kafka.bootstrap.servers": self.broker,
                        "subscribe": self.source,
                        "startingOffsets": "earliest",
                        "maxOffsetsPerTrigger": str(PER_BATCH),
                    },
                }
            ],
            "state": {
                "options": self.shared(**{"state.dir": str(self.state_dir), **state.pop("options", {})}),
                "shards": SHARDS,
                **state,
            },
            "sink": {
                "format": "kafka-eos",
                "options": self.shared(topic=self.sink, checkpointLocation=self.checkpoint),
            },
        }

    def refused(self, spark: SparkSession, **state: Any) -> str:
        """Runs the query in a session, and returns the error with which it ends."""
        spec = self.spec(**state)
        (source,), sink = spec["sources"], spec["sink"]
        frame = spark.readStream.format(source["format"]).options(**source["options"]).load()
        counted = stateful.apply(frame.select("key", "value"), spec["state"])
        query = counted.writeStream.format(sink["format"]).options(**sink["options"])
        with pytest.raises(StreamingQueryException) as raised:
            query.trigger(availableNow=True).start().awaitTermination(120)
        return str(raised.value)

    def check(self) -> None:
        check_running_counts(self.wanted, read_back(self.broker, self.sink))

    def check_changelog(self, admin: Admin) -> None:
        """Checks that the last batch's transaction holds the changes of each shard, and their offset."""
        group = admin.group(group_of(self.application))
        last_batch = ROWS // PER_BATCH - 1
        ends = final_end_offsets(self.broker, self.changelog)
        for shard in range(SHARDS):
            offset, metadata = group[(self.changelog, shard)]
            token = Token.decode(metadata)
            assert token is not None
            assert token.batch_id == last_batch
            assert token.shard is not None
            assert offset == ends[shard] - 1, "everything except the commit's control record"
        kept = {
            record.key: record.value
            for record in read_back(self.broker, self.changelog)
            if record.key[:1] == b"\x01"
        }
        assert {key[5:].decode(): int(value) for key, value in kept.items()} == dict(self.wanted)


@pytest.fixture
def case(broker: str, topic: Callable[..., str], tmp_path: Path) -> Case:
    return Case(broker, topic, tmp_path)


#: Failpoints in the order in which a batch reaches them.
TASK_STEPS = [
    "state.after_open",
    "test.within_process",
    "state.after_process",
    "state.before_pending",
    "state.after_pending",
    "state.within_close",
    "state.after_emit",
    "state.after_promote",
]
COMMIT_STEPS = [
    "commit.after_check",
    "commit.within_changelog",
    "commit.after_flush",
    "commit.before_commit",
    "commit.after_commit",
    "commit.before_cleanup",
]


@pytest.mark.timeout(600)
@pytest.mark.fault("S01", "the Python process of a stateful task is killed", "eight steps")
@pytest.mark.fault("S02", "the committing process is killed while state commits", "six steps")
@pytest.mark.long
def test_state_stays_exact_although_a_worker_is_killed_at_every_step(
    case: Case, driver: Any, tmp_path: Path
) -> None:
    spec = case.spec()
    steps = [*TASK_STEPS, *COMMIT_STEPS]
    spec["restarts"] = len(steps)
    armed = ",".join(f"{step}=kill-worker@{tmp_path}/once-{step}" for step in steps)
    driver(spec, armed).finish()
    reached = {path.name.removeprefix("once-") for path in tmp_path.glob("once-*")}
    assert reached == set(steps)
    case.check()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.fault("T162", "a stateful task is killed while its changes go to disk", "three steps")
def test_t162_state_on_disk_stays_exact_although_workers_are_killed_in_slices_and_in_promotion(
    case: Case, driver: Any, tmp_path: Path
) -> None:
    spec = case.spec(options={"statestore.uncommitted.max.bytes": "400"})
    steps = {"state.after_spill": 2, "state.after_seal": 1, "state.apply_slice": 1}
    spec["restarts"] = len(steps)
    armed = ",".join(f"{step}=kill-worker*{n}@{tmp_path}/once-{step}" for step, n in steps.items())
    driver(spec, armed).finish()
    reached = {path.name.removeprefix("once-") for path in tmp_path.glob("once-*")}
    assert reached == set(steps)
    case.check()


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs a path that differs by process")
@pytest.mark.timeout(600)
@pytest.mark.fault("S07", "an executor is killed, its disk with it", "after the changes are pending")
@pytest.mark.long
def test_shards_that_move_from_killed_executors_restore_their_state(
    case: Case, driver: Any, tmp_path: Path, own_spark_home: Path
) -> None:
    """The new executor has no state of the shard, or an older one."""
    spec = case.spec(options={"state.dir": "/proc/self/cwd/state"})
    spec["conf"] = {
        "spark.master": "local-cluster[2,1,1024]",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.executorEnv.PYTHONPATH": str(ROOT),
    }
    steps = ["state.after_pending", "state.after_emit"]
    armed = ",".join(f"{step}=kill-executor@{tmp_path}/once-{step}" for step in steps)
    driver(spec, armed).finish()
    assert all((tmp_path / f"once-{step}").exists() for step in steps)
    case.check()


@pytest.mark.fault(
    "T200",
    "the driver is killed, the host's state is lost, and the changelog's start moves to its snapshots",
    "in an open transaction, after the changes are pending",
)
@pytest.mark.fault(
    "T392",
    "damaged manifests and links lie beside the only snapshots that a host without state can use",
    "before it starts",
)
@pytest.mark.parametrize("commits", [2, pytest.param(3, marks=pytest.mark.long)])
def test_t200_t392_a_host_that_lost_its_state_begins_with_the_snapshots_of_committed_batches(
    broker: str, topic: Callable[..., str], admin: Admin, driver: Any, tmp_path: Path, commits: int
) -> None:
    """The batch that is pending when the driver dies must not be in the snapshot: it runs again.

    If the driver dies in its second commit, the snapshots hold all that is committed. If in its third one,
    the changelog has another batch, which lacks keys of the snapshots and has keys that they lack. The driver
    and the command have to pass over damaged manifests that seem to be newer.
    """
    case, spec, shared = _without_host(broker, topic, admin, driver, tmp_path, commits)
    for shard in range(SHARDS):
        _add_damaged(shared / case.application / "counts" / str(shard))
    driver(spec).finish()
    case.check()
    kafka = check_consumer({"bootstrap.servers": broker})
    with_snapshots = Changelog(case.application, "counts", group_of(case.application), kafka, str(shared))
    assert _counts(with_snapshots) == case.wanted
    with pytest.raises(StateLostError, match="begins at offset"):  # only the snapshots have these keys
        _counts(replace(with_snapshots, snapshot_location=None))
    words = [case.application, "--store", "counts", "--bootstrap-servers", broker]
    words += ["--state-dir", str(tmp_path / "restored"), "--snapshot-location", str(shared), "--yes"]
    restored = CliRunner().invoke(main, ["state", "restore", *words])
    assert restored.exit_code == 0, restored.output
    assert restored.stdout.count("began with the snapshot at changelog offset") == SHARDS
    with of_folders(folders(tmp_path / "restored"), None, Deadline.after_seconds(60)) as snapshot:
        assert _counts_in(snapshot) == case.wanted


def _add_damaged(folder: Path) -> None:
    """Adds damaged manifests that seem to be newer than the newest one of a shard, and a link."""
    sound = max(folder.glob("*.json"))
    text = sound.read_text()
    damaged = (
        "[" * 200_000,
        '{"format": 1, "files": 7}',
        text.replace('"next_offset":', '"next_offset": 1e400, "was":'),
        text.replace('"size_bytes":', '"size_bytes": "1", "was":'),
    )
    for number, content in enumerate(damaged, 1):
        newer = f"{int(sound.name[:20]) + number:020d}{sound.name[20:38]}{number:032x}.json"
        (folder / newer).write_text(content)
    (folder / f"{sound.name[:38]}{'f' * 32}.json").symlink_to("/etc/passwd")


def _without_host(
    broker: str, topic: Callable[..., str], admin: Admin, driver: Any, tmp_path: Path, commits: int
) -> tuple[Case, Any, Path]:
    """Kills a driver in its commit; deletes its state, and of the changelog what the snapshots hold.

    Returns:
        The query, its specification, and the folder of snapshots.
    """
    case = Case(broker, topic, tmp_path, rows=0)
    for first_key in (0, KEYS, KEYS // 2):
        case.feed(PER_BATCH, first_key)
    shared = tmp_path / "snapshots"
    spec = case.spec(
        options={"state.snapshot.location": str(shared), "state.snapshot.interval.ms": "3600000"}
    )
    once = tmp_path / "once"
    first = driver(spec, f"commit.before_commit=stop*{commits}@{once}")
    folder = shared / case.application / "counts"

    def offsets() -> list[int]:
        newest = [max(folder.glob(f"{shard}/*.json"), default=None) for shard in range(SHARDS)]
        return [int(path.name[:20]) for path in newest if path is not None]

    await_condition(lambda: once.exists() and len(offsets()) == SHARDS, 120, "snapshots of all shards")
    first.kill()
    shutil.rmtree(case.state_dir)
    admin.configure(case.changelog, {"cleanup.policy": "compact,delete"})
    for shard, offset in enumerate(offsets()):
        await_condition(
            partial(admin.deleted_records, case.changelog, shard, offset),
            30,
            "the broker knows the new policy",
        )
    admin.configure(case.changelog, {"cleanup.policy": "compact"})
    return case, spec, shared


def _counts(changelog: Changelog) -> Counter[str]:
    deadline = Deadline.after_seconds(60)
    with of_changelog(changelog, changelog.cut(deadline), range(SHARDS), deadline) as snapshot:
        return _counts_in(snapshot)


def _counts_in(snapshot: Snapshot) -> Counter[str]:
    pairs = [pair for each in snapshot.states.values() for pair in each.view.all()]
    return Counter({key[5:].decode(): int(value) for key, value in pairs if key[:1] == b"\x01"})


@pytest.mark.fault("S06", "a projection drops the state's column", "between operator and sink")
def test_a_projection_that_drops_state_changes_fails_the_batch_before_kafka(
    case: Case, spark: SparkSession
) -> None:
    said = case.refused(spark, drop="column")
    assert f"the operator of {case.changelog} ran, but none of its state changes reached the sink" in said
    assert read_back(case.broker, case.sink) == []


@pytest.mark.fault(
    "T435",
    "the driver is killed while state commits, and a user's steps stand between operator and sink",
    "before and after the commit",
)
def test_t435_state_survives_a_users_steps_although_the_driver_is_killed(
    case: Case, admin: Admin, driver: Any, tmp_path: Path
) -> None:
    """Steps such as `select` and `where` do not name the column with state changes.

    Records, offsets and changelog commit together, and the number of shards is fixed. The test below proves
    that this one fails if `where` drops the rows with state changes.
    """
    for number, step in enumerate(("commit.before_commit", "commit.after_commit*2")):
        once = tmp_path / f"once-{number}"
        name, _, times = step.partition("*")
        killed = driver(case.spec(steps="all"), f"{name}=kill*{times or 1}@{once}")
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
    driver(case.spec(steps="all")).finish()
    case.check()
    case.check_changelog(admin)
    # the operator makes the same check on the driver
    with pytest.raises(StateMismatchError, match="has 2 partitions; the operator has 3 shards"):
        ensure_changelog(parse_state(case.shared()), case.changelog, 3)


@pytest.mark.fault("T436", "a `where` of Spark stands in the query", "between operator and sink")
def test_t436_with_the_where_of_spark_the_same_query_loses_its_state(case: Case, spark: SparkSession) -> None:
    """Proves that the test above can fail: the first batch is refused, and nothing is written."""
    assert "KAFKA_EOS.STATE_LOST" in case.refused(spark, steps="where of Spark")
    assert read_back(case.broker, case.sink) == []
