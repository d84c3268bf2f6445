"""Each record is in the output once, at whichever step of a commit the driver or its workers are killed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration.support.driver import run_until_killed
from integration.support.kafka import Admin, end_offsets, produce, read_back, values
from integration.support.sink_kills import killed_at
from integration.support.tools import console_consumer, transactions
from kafka_eos_source import local_checkpoints
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Token

#: Enough rows for four batches. A killed driver leaves its batch to the next driver.
ROWS = 400
#: Failpoints in the order in which a batch reaches them.
STEPS = [
    "stage.after_close",
    "commit.after_check",
    "commit.after_init",
    "commit.after_token",
    "commit.before_begin",
    "commit.within_produce",
    "commit.after_flush",
    "commit.before_commit",
    "commit.after_commit",
    "commit.before_cleanup",
]


def spec(source: str, source_topic: str, sink: str, sink_topic: str, checkpoint: str, **options: str) -> Any:
    return {
        "sources": [
            {
                "format": "kafka-eos",
                "options": {
                    "kafka.bootstrap.servers": source,
                    "subscribe": source_topic,
                    "startingOffsets": "earliest",
                    "maxOffsetsPerTrigger": "100",
                },
            }
        ],
        "sink": {
            "format": "kafka-eos",
            "options": {
                "kafka.bootstrap.servers": sink,
                "topic": sink_topic,
                "checkpointLocation": checkpoint,
                "staging.inline.bytes": "100",
                **options,
            },
        },
    }


@pytest.mark.fault("T05", "the driver is killed", "after send_offsets")
@pytest.mark.timeout(600)
def test_records_are_written_once_although_the_driver_is_killed_before_kafkas_commit(
    broker: str, admin: Admin, topic: Callable[..., str], driver: Any, checkpoint: str, tmp_path: Path
) -> None:
    """A killed driver neither loses nor duplicates records, and leaves nothing behind in Kafka or on disk.

    The second start also sends rows through `map_in_read` and changes how Spark writes the checkpoint's
    files, which a query may do. The tests of the demo and of staged reads kill a driver after Kafka's commit,
    and `integration.chaos.test_kills` at the other steps, without Spark.
    """
    source, sink = topic(2), topic(2)
    wanted = [f"{row:05d}" for row in range(ROWS)]
    produce(broker, source, wanted, keys=wanted)
    query = spec(broker, source, broker, sink, checkpoint, **{"application.id": f"app-{sink}"})
    changes = [{}, {"conf": local_checkpoints(), "in_read": True}]
    killed_at(driver, query, tmp_path, ["commit.before_commit"], changes)

    assert values(read_back(broker, sink)) == wanted
    # Kafka's own consumer reads the same records
    assert sorted(console_consumer(broker, sink, ROWS + 1)) == wanted
    # the committed offsets are the source's ends, and the token is that of the last batch
    group = admin.group(group_of(f"app-{sink}"))
    ends = end_offsets(broker, source)
    assert {number: group[(source, number)][0] for number in ends} == ends
    token = Token.decode(group[(sink, 0)][1])
    assert token is not None
    assert token.batch_id == ROWS // 100 - 1
    # no transaction is open in Kafka, and no staged file is left in the checkpoint
    assert transactions(broker)[f"app-{sink}"] == "CompleteCommit"
    staged = list(Path(checkpoint, "kafka-eos", "staging").rglob("*.arrow"))
    assert staged == []


@pytest.mark.fault("T08", "the Python process that commits is killed", "ten steps")
@pytest.mark.timeout(600)
@pytest.mark.long
def test_records_are_written_once_although_the_committing_process_is_killed_at_every_step(
    broker: str, topic: Callable[..., str], driver: Any, checkpoint: str, tmp_path: Path
) -> None:
    """The committing Python process is killed once at every step; the query is restarted in its session."""
    source, sink = topic(2), topic(2)
    wanted = [f"{row:05d}" for row in range(ROWS)]
    produce(broker, source, wanted, keys=wanted)
    query = spec(broker, source, broker, sink, checkpoint)
    query["restarts"] = len(STEPS)
    armed = ",".join(f"{step}=kill-worker@{tmp_path}/once-{step}" for step in STEPS)
    driver(query, armed).finish()
    reached = {path.name.removeprefix("once-") for path in tmp_path.glob("once-*")}
    assert reached == set(STEPS)
    assert values(read_back(broker, sink)) == wanted


@pytest.mark.timeout(600)
def test_copying_between_clusters_is_exactly_once_although_drivers_are_killed(
    broker: str,
    admin: Admin,
    other_cluster: str,
    topic: Callable[..., str],
    driver: Any,
    checkpoint: str,
    tmp_path: Path,
) -> None:
    """Between two clusters, only the anchor partition carries a token.

    The test needs no Spark, for which the clusters make no difference (`integration.chaos.loop`).
    """
    source = topic(2)
    sink = Admin(other_cluster).create("copied", 2)
    wanted = [f"{row:05d}" for row in range(400)]
    produce(broker, source, wanted)
    query = spec(broker, source, other_cluster, sink, checkpoint, **{"application.id": "copy"})
    loop = {
        "source": query["sources"][0]["options"],
        "sink": query["sink"]["options"],
        "checkpoint": checkpoint,
    }
    start = partial(driver, module="integration.chaos.loop")
    killed_at(start, loop, tmp_path, ["commit.before_commit", "commit.after_commit"])
    assert values(read_back(other_cluster, sink)) == wanted
    group = Admin(other_cluster).group(group_of("copy"))
    assert set(group) == {(sink, 0)}, "only the anchor partition carries a token"


@pytest.mark.timeout(600)
@pytest.mark.long
def test_foreach_batch_in_update_mode_is_exactly_once_although_processes_are_killed(
    broker: str, topic: Callable[..., str], driver: Any, checkpoint: str, tmp_path: Path
) -> None:
    source, sink = topic(1), topic(2)
    produce(broker, source, [str(row % 7) for row in range(300)])
    query = spec(broker, source, broker, sink, checkpoint, txnAppId=f"counts-{sink}")
    query["select"] = ["CAST(value AS STRING) AS word"]
    query["count_by"] = "word"
    query["checkpoint"] = checkpoint
    for name in ("checkpointLocation", "staging.inline.bytes"):
        query["sink"]["options"].pop(name)
    # first the committing process is killed, then the driver with everything it started
    armed = {"commit.after_commit": "kill-worker", "test.after_foreach_batch": "kill"}
    run_until_killed(driver, {**query, "restarts": 1}, tmp_path, armed)
    driver(query).finish()
    records = read_back(broker, sink)
    assert len(records) == 3 * 7, "each of three batches updates each of seven words once"
    last = {record.key: int(record.value or b"0") for record in records}
    assert sum(last.values()) == 300
