"""Exactly-once on Spark's ``local-cluster``, where executors are separate processes that can fail alone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration.support.driver import Driver
from integration.support.faults import MEASURES, Measures
from integration.support.kafka import Admin, end_offsets, produce, read_back
from integration.support.processes import await_condition
from kafka_eos_source.embedded import java
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Token

ROWS, ROWS_A_BATCH = 200, 100
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
REACHED_SECONDS = 120.0
#: For tests that need no executors, which take ten seconds to start.
NO_EXECUTORS = {"spark.master": "local[2]"}

pytestmark = [pytest.mark.timeout(400)]


class Cluster:
    """A topic-to-topic query on two executors, and the check of its result.

    Every batch has two tasks, and each task stages a file.
    """

    def __init__(
        self,
        broker: str,
        admin: Admin,
        topic: Callable[..., str],
        driver: Callable[..., Driver],
        folder: Path,
    ) -> None:
        self._broker, self._admin, self._start = broker, admin, driver
        self.source, self.sink = topic(2), topic(2)
        self.folder, self.checkpoint = folder, folder / "checkpoint"
        self.wanted = [f"{row:05d}" for row in range(ROWS)]
        self._drivers = 0
        produce(broker, self.source, self.wanted, keys=self.wanted)

    def moment(self, name: str) -> Path:
        """Returns the path of a file that a failpoint creates when it fires."""
        return self.folder / f"at-{name}"

    def start(
        self,
        failpoints: str = "",
        conf: Mapping[str, str] | None = None,
        sink: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Driver:
        kafka = {"kafka.bootstrap.servers": self._broker}
        reader = {
            "subscribe": self.source,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(ROWS_A_BATCH),
            "minPartitions": "2",
        }
        writer = {
            "topic": self.sink,
            "checkpointLocation": str(self.checkpoint),
            "application.id": f"app-{self.sink}",
            "staging.inline.bytes": "100",
        }
        self._drivers += 1
        return self._start(
            {
                "sources": [{"format": "kafka-eos", "options": kafka | reader}],
                "sink": {"format": "kafka-eos", "options": kafka | writer | dict(sink or {})},
                "conf": {
                    "spark.master": "local-cluster[2,1,1024]",
                    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                    **(conf or {}),
                },
                **more,
            },
            failpoints,
        )

    def nothing_visible(self) -> bool:
        """Checks that the output holds no record and no control record, whatever the isolation level."""
        return set(end_offsets(self._broker, self.sink).values()) == {0}

    def staged_files(self) -> list[Path]:
        return list(self.folder.rglob("*.arrow"))

    def verdict(self) -> Measures:
        """Checks the result: each record once, offsets at the end, no open transaction, no staged file.

        Raises:
            AssertionError: if one of these does not hold.
        """
        found = Counter((record.value or b"").decode() for record in read_back(self._broker, self.sink))
        expected = Counter(self.wanted)
        group = self._admin.group(group_of(f"app-{self.sink}"))
        token = Token.decode(group[(self.sink, 0)][1])
        assert token is not None
        measures = Measures(
            drivers=self._drivers,
            batches=token.batch_id + 1,
            rows=ROWS,
            lost=(expected - found).total(),
            doubled=(found - expected).total(),
        )
        assert found == expected, measures
        ends = end_offsets(self._broker, self.source)
        assert {number: group[(self.source, number)][0] for number in ends} == ends
        assert token.batch_id == ROWS // ROWS_A_BATCH - 1
        assert self._admin.stable_offsets(self.sink) == end_offsets(self._broker, self.sink)
        assert self.staged_files() == []
        return measures


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest,
    broker: str,
    admin: Admin,
    topic: Callable[..., str],
    driver: Callable[..., Driver],
    tmp_path: Path,
    own_spark_home: Path,
) -> Cluster:
    return Cluster(broker, admin, topic, driver, tmp_path)


@pytest.fixture
def report_measures(request: pytest.FixtureRequest) -> Callable[[Measures], None]:
    """Attaches measures to the test's report, for the table in `docs/faults.md`."""
    return lambda measures: request.node.user_properties.append((MEASURES, asdict(measures)))


def executor_of(worker: psutil.Process) -> psutil.Process:
    """Returns the executor JVM whose task a Python worker runs."""
    return next(each for each in worker.parents() if each.name() == "java" and EXECUTOR in each.cmdline())


def resume_if_alive(worker: psutil.Process) -> None:
    """Resumes a stopped process, unless Spark has ended it in the meantime."""
    try:
        worker.resume()
    except psutil.NoSuchProcess:
        return


@pytest.mark.fault("T10", "a task fails on its executor after it staged", "staging")
@pytest.mark.fault("T12", "an executor is killed", "staging")
def test_rows_are_written_once_although_an_executor_is_killed_and_a_task_fails_while_staging(
    cluster: Cluster, report_measures: Callable[[Measures], None]
) -> None:
    staging, failed = cluster.moment("staging"), cluster.moment("failed")
    driver = cluster.start(f"stage.before_close=stop@{staging},stage.after_close=raise@{failed}")
    await_condition(staging.exists, REACHED_SECONDS, "a task is staging")
    await_condition(failed.exists, REACHED_SECONDS, "the attempt on the other executor has staged, and fails")
    worker = driver.stopped_worker()
    executor = executor_of(worker)
    assert executor.pid != driver.jvm().pid
    executor.kill()
    # the worker outlives its executor and completes its file after others have staged the same rows
    executor.wait(30)
    resume_if_alive(worker)
    driver.finish()
    report_measures(cluster.verdict())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2 without being told")
@pytest.mark.fault("T11", "speculation on, one slow task", "staging")
@pytest.mark.long
def test_of_two_task_attempts_that_stage_rows_only_one_is_committed(
    cluster: Cluster, report_measures: Callable[[Measures], None]
) -> None:
    staged = cluster.moment("staged")
    driver = cluster.start(
        # the file is complete, but the task has not reported it yet
        f"stage.after_close=stop@{staged}",
        {
            "spark.speculation": "true",
            "spark.speculation.interval": "50ms",
            "spark.speculation.minTaskRuntime": "500ms",
            "spark.speculation.quantile": "0.5",
            "spark.executorEnv.JAVA_HOME": str(_java_with_hosts(cluster.folder / "java")),
        },
    )
    await_condition(staged.exists, REACHED_SECONDS, "an attempt has staged")
    slow = driver.stopped_worker()
    (batch,) = {each.parent for each in cluster.staged_files()}
    await_condition(lambda: not batch.exists(), REACHED_SECONDS, "the batch is committed without it")
    resume_if_alive(slow)
    driver.finish()
    report_measures(cluster.verdict())


def _java_with_hosts(home: Path) -> Path:
    """Returns a ``JAVA_HOME`` whose ``java`` gives each executor a different host name.

    Spark never starts a speculative attempt on the host of the first attempt (``TaskSetManager``), and
    ``local-cluster`` has only one host.
    """
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(
        f"""#!{sys.executable}
import os, sys
arguments = sys.argv[1:]
number = int(arguments[arguments.index("--executor-id") + 1])
arguments[arguments.index("--hostname") + 1] = f"127.0.0.{{number + 2}}"
os.execv({java.find()!r}, ["java", *arguments])
"""
    )
    script.chmod(0o755)
    return home


@pytest.mark.fault("T09", "query.stop()", "before and after Kafka's commit")
def test_stopping_a_query_while_it_commits_neither_loses_nor_duplicates_records(
    cluster: Cluster, report_measures: Callable[[Measures], None]
) -> None:
    """query.stop() interrupts a commit before and after Kafka holds the batch.

    The committing process is paused until Spark stops the query, which waits for it. The first time the
    process then dies with its transaction open. The second time it resumes, so that Kafka holds a batch that
    Spark has not logged as committed.
    """
    before, after = cluster.moment("before"), cluster.moment("after")
    driver = cluster.start(
        f"commit.before_commit=stop@{before},commit.after_commit=stop@{after}",
        NO_EXECUTORS,
        stops=[str(before), str(after)],
    )
    driver.await_text(f"QUERY STOPPING at {before.name}")
    driver.stopped_worker().kill()
    driver.await_text(f"QUERY STOPPING at {after.name}")
    driver.stopped_worker().resume()
    driver.finish()
    assert driver.log.read_text().count("QUERY STOPPED") == 2
    report_measures(cluster.verdict())


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs a path that differs by process")
@pytest.mark.fault("T15", "the staging folder is not shared", "start")
def test_a_staging_folder_that_executors_do_not_share_is_refused(cluster: Cluster) -> None:
    """A staging folder that executors do not share is refused at the start, even if rows fit into messages.

    The path contains the working directory, which differs in each process.
    """
    directory = cluster.folder / "driver"
    directory.mkdir()
    options = {"staging.location": "/proc/self/cwd/staging", "staging.inline.bytes": "1000000"}
    conf = {"spark.master": "local-cluster[1,1,1024]", "spark.task.maxFailures": "1"}
    driver = cluster.start(conf=conf, sink=options, directory=str(directory))
    assert driver.wait() != 0
    said = driver.log.read_text()
    assert list(directory.glob("staging/query-*/shared-path")), f"the driver made none where it runs:\n{said}"
    assert "KAFKA_EOS.INVALID_OPTION" in said, driver.tail()
    assert "the staging folder '/proc/self/cwd/staging/query-" in said
    assert "is not shared: the executor" in said
    assert cluster.nothing_visible()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mounts a file system of 1 MiB, or skips the test."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "kafka-eos-test", str(disk)]
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount a small tmpfs")
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {shlex.join(mount)}: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.fault("T14", "the staging disk is full", "staging")
def test_a_full_staging_disk_fails_the_batch_and_the_query_continues_when_there_is_space(
    cluster: Cluster, small_disk: Path, report_measures: Callable[[Measures], None]
) -> None:
    filler, freed = small_disk / "filler", cluster.moment("freed")
    filler.write_bytes(b"x" * ((1 << 20) - (32 << 10)))
    # 50 KB a task
    select = ["rpad(CAST(key AS STRING), 1000, 'x') AS key", "value"]
    driver = cluster.start(
        conf=NO_EXECUTORS,  # which also means a single attempt per task
        sink={"staging.location": str(small_disk)},
        restarts=1,
        restart_when=str(freed),
        select=select,
    )
    driver.await_text("QUERY FAILED")
    said = driver.log.read_text()
    assert "KAFKA_EOS.UNAVAILABLE" in said, driver.tail()
    assert f"the staging folder '{small_disk}/query-" in said
    assert "No space left on device" in said
    assert cluster.staged_files() == []
    assert cluster.nothing_visible()
    filler.unlink()
    freed.touch()
    driver.finish()
    report_measures(cluster.verdict())
