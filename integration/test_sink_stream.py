"""``writeStream.format("kafka-eos")`` on a real broker: replays, zombies, other sources and lost tokens."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from integration.support import broker as brokers
from integration.support.driver import Driver, await_condition
from integration.support.kafka import Admin, end_offsets, final_end_offsets, produce, read_back, values
from integration.support.query import Query
from integration.support.sink_stream import LOOP, rows, spec, without_spark
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.protocol.token import Token


@pytest.fixture
def query(spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> Query:
    return Query(spark, broker, topic(2), topic(2), checkpoint)


def token(admin: Admin, group: str, topic: str) -> Token:
    found = Token.decode(admin.group(group)[(topic, 0)][1])
    assert found is not None
    return found


@pytest.mark.core
def test_a_query_from_topic_to_topic_commits_records_offsets_and_token(
    query: Query, broker: str, admin: Admin
) -> None:
    produce(broker, query.source, rows(0, 500))
    query.run()
    produce(broker, query.source, rows(500, 700))
    query.run()
    assert values(read_back(broker, query.sink)) == rows(0, 700)
    # the committed offsets are the source's ends, so lag tools work
    group = admin.group(query.group)
    assert {number: group[(query.source, number)][0] for number in (0, 1)} == end_offsets(
        broker, query.source
    )
    assert token(admin, query.group, query.sink).batch_id == 1
    assert token(admin, query.group, query.sink).rows == 200


@pytest.mark.fault("T01", "commits/N is deleted", "restart")
@pytest.mark.core
def test_a_replay_of_a_committed_batch_is_skipped(query: Query, broker: str) -> None:
    produce(broker, query.source, rows(0, 100))
    query.run()
    ends = final_end_offsets(broker, query.sink)
    query.forget_commit(0)
    query.run()
    assert end_offsets(broker, query.sink) == ends, "the replay wrote something"
    produce(broker, query.source, rows(100, 150))
    query.run()
    assert values(read_back(broker, query.sink)) == rows(0, 150)


@pytest.mark.core
def test_a_checkpoint_of_sparks_own_connector_is_continued(query: Query, broker: str, admin: Admin) -> None:
    """A query can switch from Spark's own Kafka connector and keep its checkpoint.

    The test makes such a checkpoint from one of this project, by removing the key "@", the project's folder
    and the token.
    """
    produce(broker, query.source, rows(0, 100))
    query.run()
    produce(broker, query.source, rows(100, 130))
    query.run()
    import json

    for path in Path(query.checkpoint, "offsets").glob("[0-9]*"):
        lines = path.read_text().splitlines()
        offset = json.loads(lines[-1])
        offset.pop("@")
        path.write_text("\n".join([*lines[:-1], json.dumps(offset, separators=(",", ":"))]))
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    shutil.rmtree(Path(query.checkpoint, "kafka-eos"))
    admin.delete_group(query.group)
    query.forget_commit(1)  # the query was stopped in the middle of a batch

    produce(broker, query.source, rows(130, 200))
    query.run()
    query.run()  # with PySpark 4.0 a run that replays a batch does nothing else
    found = values(read_back(broker, query.sink))
    assert found == sorted(rows(0, 200) + rows(100, 130)), (
        "only the last at-least-once batch is repeated, once"
    )
    assert token(admin, query.group, query.sink).batch_id == 2


def test_a_union_of_two_kafka_sources_commits_the_offsets_of_both(
    query: Query, broker: str, admin: Admin, topic: Callable[..., str]
) -> None:
    second = topic(1)
    produce(broker, query.source, rows(0, 50))
    produce(broker, second, rows(50, 90))
    query.run(query.frame().unionByName(query.frame(second)))
    query.forget_commit(0)
    query.run(query.frame().unionByName(query.frame(second)))
    assert values(read_back(broker, query.sink)) == rows(0, 90)
    group = admin.group(query.group)
    assert group[(second, 0)][0] == 40
    assert sum(group[(query.source, number)][0] for number in (0, 1)) == 50


def test_a_query_that_does_not_read_kafka_is_exactly_once(
    query: Query, broker: str, admin: Admin, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()

    def files() -> DataFrame:
        return query.spark.readStream.text(str(folder)).selectExpr("CAST(NULL AS STRING) AS key", "value")

    (folder / "a.txt").write_text("\n".join(rows(0, 50)))
    query.run(files())
    query.forget_commit(0)
    (folder / "b.txt").write_text("\n".join(rows(50, 80)))
    query.run(files())
    assert values(read_back(broker, query.sink)) == rows(0, 80)
    assert set(admin.group(query.group)) == {(query.sink, 0)}, "only the anchor partition carries a token"


@pytest.mark.fault("T67", "a restored checkpoint of a file source, and one more file", "restart")
def test_a_batch_of_an_opaque_source_is_never_skipped_by_its_batch_id(
    query: Query, broker: str, tmp_path: Path
) -> None:
    """A batch of a file source is not skipped because its id was committed: it may hold other files.

    After a restore, Spark plans the same batch id and the same offset for a different set of files.
    """
    folder, copy = tmp_path / "files", tmp_path / "copy"
    folder.mkdir()

    def run() -> None:
        frame = query.spark.readStream.schema("value string").text(str(folder))
        query.run(frame.selectExpr("CAST(NULL AS STRING) AS key", "value"))

    (folder / "0.txt").write_text("first\n")
    run()
    shutil.copytree(query.checkpoint, copy)
    (folder / "1.txt").write_text("second\n")
    run()
    shutil.rmtree(query.checkpoint)
    shutil.copytree(copy, query.checkpoint)
    (folder / "2.txt").write_text("third\n")
    with pytest.raises(PySparkException, match="CHECKPOINT_ROLLED_BACK"):
        run()
    assert values(read_back(broker, query.sink)) == ["first", "second"]


def test_complete_mode_writes_the_whole_result_in_each_batch(query: Query, broker: str) -> None:
    def run() -> None:
        counts = query.frame().selectExpr("CAST(value AS STRING) AS word").groupBy("word").count()
        writer = (
            counts.selectExpr("word AS key", "CAST(count AS STRING) AS value")
            .writeStream.outputMode("complete")
            .format("kafka-eos")
            .option("kafka.bootstrap.servers", broker)
            .option("topic", query.sink)
            .option("checkpointLocation", query.checkpoint)
        )
        assert writer.trigger(availableNow=True).start().awaitTermination(120)

    produce(broker, query.source, ["a", "b", "a"])
    run()
    produce(broker, query.source, ["b"])
    run()
    found = sorted((r.offset, r.key, r.value) for r in read_back(broker, query.sink))
    assert sorted((key, value) for _, key, value in found) == [
        (b"a", b"2"),
        (b"a", b"2"),
        (b"b", b"1"),
        (b"b", b"2"),
    ]


@pytest.mark.fault("T48", "a batch without rows", "commit")
def test_a_batch_without_rows_commits_its_offsets(query: Query, broker: str, admin: Admin) -> None:
    produce(broker, query.source, rows(0, 50))
    query.run(query.frame().where("value IS NULL"))
    assert read_back(broker, query.sink, committed=False) == []
    group = admin.group(query.group)
    assert {number: group[(query.source, number)][0] for number in (0, 1)} == end_offsets(
        broker, query.source
    )


@pytest.mark.fault("T42", "the checkpoint is deleted", "restart")
def test_a_new_query_continues_at_the_committed_offsets(query: Query, broker: str, tmp_path: Path) -> None:
    application_id = f"app-{uuid.uuid4().hex[:8]}"
    produce(broker, query.source, rows(0, 50))
    query.run(application__id=application_id)
    produce(broker, query.source, rows(50, 80))
    shutil.rmtree(query.checkpoint)  # the checkpoint is lost

    def go_on(**options: str) -> None:
        frame = query.frame(startingOffsets="group", **{"application.id": application_id})
        query.run(frame, application__id=application_id, **options)

    with pytest.raises(PySparkException, match=r"KAFKA_EOS\.FOREIGN_QUERY.*onForeignQuery"):
        go_on()
    shutil.rmtree(query.checkpoint)
    go_on(onForeignQuery="adopt")
    assert values(read_back(broker, query.sink)) == rows(0, 80)


def test_adoption_is_refused_anywhere_but_at_the_committed_offsets(query: Query, broker: str) -> None:
    application_id = f"app-{uuid.uuid4().hex[:8]}"
    produce(broker, query.source, rows(0, 50))
    query.run(application__id=application_id)
    shutil.rmtree(query.checkpoint)
    with pytest.raises(PySparkException, match=r"CHECKPOINT_ROLLED_BACK.*startingOffsets=group"):
        query.run(application__id=application_id, onForeignQuery="adopt")
    assert values(read_back(broker, query.sink)) == rows(0, 50)


def test_another_application_id_on_the_same_checkpoint_is_refused(query: Query, broker: str) -> None:
    produce(broker, query.source, rows(0, 50))
    query.run()
    produce(broker, query.source, rows(50, 60))
    with pytest.raises(
        PySparkException, match=r"batches of this checkpoint were committed with application\.id"
    ):
        query.run(application__id="another")
    assert values(read_back(broker, query.sink)) == rows(0, 50)


@pytest.mark.fault("T41", "the group is deleted", "restart with a replay")
def test_a_lost_group_is_an_error_and_both_of_its_fixes_work(query: Query, broker: str, admin: Admin) -> None:
    for first in (0, 20):
        produce(broker, query.source, rows(first, first + 20))
        query.run()
    query.forget_commit(1)
    admin.delete_group(query.group)
    with pytest.raises(PySparkException, match=r"TOKEN_MISSING.*onMissingToken"):
        query.run()
    query.run(onMissingToken="assume_committed:1")
    assert values(read_back(broker, query.sink)) == rows(0, 40)
    assert token(admin, query.group, query.sink).batch_id == 1

    query.forget_commit(1)
    admin.delete_group(query.group)
    query.run(onMissingToken="assume_not_committed:1")
    assert values(read_back(broker, query.sink)) == sorted(rows(0, 40) + rows(20, 40)), (
        "assume_not_committed must write the batch again"
    )


@pytest.mark.fault("T43", "the checkpoint is restored from three batches ago", "restart")
def test_a_rolled_back_checkpoint_skips_batches_that_kafka_holds(
    query: Query, broker: str, tmp_path: Path
) -> None:
    for first in range(0, 80, 20):
        produce(broker, query.source, rows(first, first + 20))
        query.run()
        if first == 0:
            shutil.copytree(query.checkpoint, tmp_path / "old")
    ends = final_end_offsets(broker, query.sink)
    shutil.rmtree(query.checkpoint)
    shutil.copytree(tmp_path / "old", query.checkpoint)
    query.run()
    assert end_offsets(broker, query.sink) == ends
    produce(broker, query.source, rows(80, 100))
    query.run()
    assert values(read_back(broker, query.sink)) == rows(0, 100)


def test_the_checkpoint_must_be_an_option(query: Query, broker: str, tmp_path: Path) -> None:
    """A query that relied on the session's setting continues in the folder that the fix names."""
    produce(broker, query.source, rows(0, 5))
    setting = "spark.sql.streaming.checkpointLocation"
    query.spark.conf.set(setting, str(tmp_path))
    try:
        writer = query.frame().writeStream.format("kafka-eos").option("kafka.bootstrap.servers", broker)
        writer = writer.option("topic", query.sink).queryName("named").trigger(availableNow=True)
        with pytest.raises(
            PySparkException, match="option 'checkpointLocation' is not set on the sink"
        ) as no:
            writer.start().awaitTermination(60)
        assert f"spark.conf.get('{setting}') + '/named'" in str(no.value)
        assert read_back(broker, query.sink, committed=False) == []
        assert (tmp_path / "named" / "offsets" / "0").exists(), "Spark has planned the batch there"
        writer.option("checkpointLocation", f"{tmp_path}/named").start().awaitTermination(60)
    finally:
        query.spark.conf.unset(setting)
    assert values(read_back(broker, query.sink)) == rows(0, 5)


# -- tests that start separate drivers


@pytest.mark.long  # `test_pauses` does the same without Spark, at three steps
@pytest.mark.fault("T24", "a driver comes back after another went on", "token, produce, commit")
@pytest.mark.timeout(400)
def test_a_paused_driver_is_fenced_after_another_took_over(
    query: Query, broker: str, driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """Driver A pauses in its transaction, B takes over its checkpoint, A resumes: A is fenced."""
    produce(broker, query.source, rows(0, 300))
    plan = spec(broker, query.source, query.sink, query.checkpoint, 100)
    once = tmp_path / "once"
    zombie = driver(plan, f"commit.before_commit=stop@{once}")
    await_condition(once.exists, 120, "the first driver stops itself")
    stopped = zombie.stopped_worker()
    driver(without_spark(plan), module=LOOP).finish()
    assert values(read_back(broker, query.sink)) == rows(0, 300)
    ends = final_end_offsets(broker, query.sink)
    os.kill(stopped.pid, signal.SIGCONT)
    assert zombie.wait() != 0
    assert "KAFKA_EOS.FENCED" in zombie.log.read_text() or "concurrently" in zombie.log.read_text()
    assert values(read_back(broker, query.sink)) == rows(0, 300)
    assert end_offsets(broker, query.sink) == ends, "the zombie wrote something"


@pytest.mark.fault("T10", "a task fails after it staged", "staging")
@pytest.mark.fault("T28", "every commit in another Python process", "always")
@pytest.mark.timeout(400)
def test_commits_in_changing_processes_and_failed_tasks_are_exactly_once(
    query: Query, broker: str, driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """Each commit runs in a different Python process, and a task fails after it staged its rows."""
    produce(broker, query.source, rows(0, 200))
    conf = {"spark.python.worker.reuse": "false", "spark.master": "local[2,3]"}
    plan = spec(broker, query.source, query.sink, query.checkpoint, 100, conf=conf)
    plan["sink"]["options"]["staging.inline.bytes"] = "100"
    once = tmp_path / "once"
    running = driver(plan, f"stage.after_close=raise@{once}")
    running.finish()
    assert once.exists(), "an attempt failed"
    assert values(read_back(broker, query.sink)) == rows(0, 200)
    result = running.result()
    assert result["progress"][-1]["numInputRows"] == 100
    assert result["progress"][-1]["id"] == result["query_id"]


@pytest.mark.timeout(400)
def test_a_query_survives_a_restart_of_the_broker(
    driver: Callable[..., Driver], checkpoint: str, tmp_path: Path
) -> None:
    with EmbeddedKafka(java_options=brokers.JAVA_OPTIONS) as kafka:
        admin = Admin(kafka.bootstrap_servers)
        source, sink = admin.create("in", 2), admin.create("out", 2)
        produce(kafka.bootstrap_servers, source, rows(0, 400))
        once = tmp_path / "once"
        plan = spec(kafka.bootstrap_servers, source, sink, checkpoint, 100)
        running = driver(without_spark(plan), f"commit.after_flush=stop@{once}", module=LOOP)
        await_condition(once.exists, 120, "the driver is inside its transaction")
        kafka.kill_node(1)
        kafka.start_node(1)
        running.resume()
        running.finish()
        assert values(read_back(kafka.bootstrap_servers, sink)) == rows(0, 400)
