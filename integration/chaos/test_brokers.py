"""Brokers are killed and the network is cut: the same driver process finishes without being restarted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

from integration.chaos.brokers import QUICK, await_in_sync, coordinator, leader, undisturbed_end
from integration.chaos.conftest import Proxied, report_measures
from integration.chaos.interleaved import Interleaved, without_the_abort_rule
from integration.chaos.scenario import Scenario
from integration.support import broker as brokers
from integration.support.driver import Driver
from integration.support.kafka import produce
from integration.support.processes import await_condition
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.topic import CommittedShard, changelog_client

_SECONDS = 120.0


@pytest.fixture(scope="module")
def three() -> Iterator[EmbeddedKafka]:
    version = brokers.version(os.environ)
    with EmbeddedKafka(3, config=QUICK, java_options=brokers.JAVA_OPTIONS, **version) as kafka:
        yield kafka


@pytest.fixture
def on_three(
    request: pytest.FixtureRequest, three: EmbeddedKafka, tmp_path: Path, driver: Callable[..., Driver]
) -> Iterator[Scenario]:
    made = Scenario(three.bootstrap_servers, tmp_path, driver)
    yield made
    report_measures(request.node, made)
    for node in three.nodes:
        three.start_node(node)


@pytest.mark.fault("T29", "the leader of an output partition is killed", "while it runs")
def test_t29_a_query_continues_when_the_leader_of_an_output_partition_is_killed(
    on_three: Scenario, three: EmbeddedKafka
) -> None:
    on_three.feed(100)
    driver = on_three.start(available_now=False)
    driver.await_text("BATCH 0")
    three.kill_node(leader(on_three, on_three.sink, 0))
    on_three.feed(100)
    undisturbed_end(on_three, driver)


_OF_TRANSACTIONS = pytest.mark.fault("T30", "the transaction coordinator is killed", "init, flush, commit")
#: `tests/commit/test_errors.py` has the errors of these coordinators, at each request.
_LONG = [_OF_TRANSACTIONS, pytest.mark.long]
_OF_GROUPS = pytest.mark.fault("T31", "the group coordinator is killed", "send_offsets")


@pytest.mark.parametrize(
    ("of", "at", "at_time"),
    [
        pytest.param(
            "__transaction_state", "commit.after_init", 1, marks=[_OF_TRANSACTIONS, pytest.mark.long]
        ),
        pytest.param(
            "__transaction_state", "commit.after_flush", 2, marks=[_OF_TRANSACTIONS, pytest.mark.long]
        ),
        pytest.param("__transaction_state", "commit.before_commit", 2, marks=_OF_TRANSACTIONS),
        pytest.param("__consumer_offsets", "commit.after_flush", 2, marks=_OF_GROUPS),
    ],
)
def test_t30_t31_a_commit_continues_when_a_coordinator_is_killed(
    on_three: Scenario, three: EmbeddedKafka, of: str, at: str, at_time: int
) -> None:
    on_three.feed(150)
    driver = on_three.stopped_at(at, at_time=at_time)
    three.kill_node(coordinator(on_three, of))
    driver.resume()
    driver.finish()
    found = on_three.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T32", "every broker restarts, one after the other", "while it runs")
def test_t32_a_query_continues_while_every_broker_restarts_in_turn(
    on_three: Scenario, three: EmbeddedKafka
) -> None:
    on_three.feed(50)
    driver = on_three.start(available_now=False)
    driver.await_text("BATCH 0")
    for node in three.nodes:
        three.kill_node(node)
        on_three.feed(50)
        three.start_node(node)
    undisturbed_end(on_three, driver)


@pytest.mark.fault(
    "T320", "an unclean leader election cuts the source's log, which is filled again", "while it runs"
)
def test_t320_an_unclean_election_is_reported_and_the_log_read_from_the_cut_on(
    on_three: Scenario, three: EmbeddedKafka
) -> None:
    first, second, _ = three.nodes
    on_three.source = on_three.admin.create_on(
        f"{on_three.source}-cut",
        [[first, second]],
        min_insync_replicas="1",
        unclean_leader_election_enable="true",
    )
    on_three.feed(60)
    await_in_sync(on_three)
    three.stop_node(second)
    on_three.feed(40)
    driver = on_three.start(available_now=False)
    await_condition(lambda: on_three.outcome().rows.found == 100, _SECONDS, "the query has read 100 records")
    three.kill_node(first)
    three.start_node(second)
    on_three.feed(80)
    assert driver.wait() == 1
    said = driver.log.read_text()
    assert f"LOG_WAS_CUT: {on_three.source}-0: the query is at offset 100" in said
    assert "the log was cut at offset 60" in said
    assert on_three.outcome().rows.found == 100
    on_three.run(source={"failOnDataLoss": "false"})
    found = on_three.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T324", "leaders change in order, again and again", "while it runs, and at restarts")
def test_t324_a_clean_change_of_leaders_is_no_loss(on_three: Scenario, three: EmbeddedKafka) -> None:
    """The source has transactions, a partition that is idle, and one that was never written."""
    replicas = [*three.nodes]
    idle = on_three.admin.create_on(f"{on_three.source}-idle", [replicas, replicas[::-1]])
    sent = [("idle", f"{number}") for number in range(4)]
    produce(on_three.bootstrap, idle, [value for _, value in sent[:3]], keys=["idle"] * 3, partition=0)
    on_three.sent += sent[:3]
    subscribed = {"subscribe": f"{on_three.source},{idle}"}
    source = Interleaved(on_three)
    driver = on_three.start(available_now=False, source=subscribed)
    for node in three.nodes[:2]:
        three.stop_node(node)
        source.feed(2)
        three.start_node(node)
        await_in_sync(on_three)
        on_three.admin.elect_preferred_leaders()
        source.feed(2)
    undisturbed_end(on_three, driver)
    three.stop_node(leader(on_three, idle, 0))
    on_three.run(source=subscribed)
    produce(on_three.bootstrap, idle, ["3"], keys=["idle"], partition=0)
    on_three.sent += sent[3:]
    produce(on_three.bootstrap, idle, ["first"], keys=["new"], partition=1)
    on_three.sent.append(("new", "first"))
    source.feed(1)
    on_three.run(source=subscribed)
    found = on_three.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T301", "a broker hangs: its connections stay open, and it answers nothing", "four steps")
@pytest.mark.parametrize(
    ("of", "at"),
    [
        ("the source", "commit.before_begin"),
        ("the output", "commit.within_produce"),
        ("__consumer_offsets", "commit.after_flush"),
        ("__transaction_state", "commit.before_commit"),
    ],
)
def test_t301_the_successor_of_a_broker_that_hangs_is_asked_before_any_request_times_out(
    on_three: Scenario, three: EmbeddedKafka, of: str, at: str
) -> None:
    """Requests may wait for longer than the whole commit, or the read, may take."""
    on_three.feed(150)
    source = {"kafka.socket.timeout.ms": "60000", "kafkaConsumer.pollTimeoutMs": "45000"}
    sink = {"kafka.socket.timeout.ms": "60000", "commitTimeoutMs": "45000"}
    driver = on_three.stopped_at(at, at_time=2, source=source, sink=sink)
    if of.startswith("__"):
        hung = coordinator(on_three, of)
    else:
        hung = leader(on_three, on_three.source if of == "the source" else on_three.sink, 0)
    three.pause_node(hung)
    try:
        driver.resume()
        driver.finish()
    finally:
        three.resume_node(hung)
    await_in_sync(on_three)
    found = on_three.outcome()
    assert found.exactly_once, found


@pytest.mark.long
@pytest.mark.fault(
    "T191", "every broker restarts while producers commit and abort", "tasks read; native client"
)
def test_t191_a_query_reads_only_committed_records_while_every_broker_restarts(
    on_three: Scenario, three: EmbeddedKafka
) -> None:
    source = Interleaved(on_three)
    source.feed(10)
    driver = on_three.start(available_now=False)
    driver.await_text("BATCH 0")
    for node in three.nodes:
        three.kill_node(node)
        source.feed(5)
        three.start_node(node)
    undisturbed_end(on_three, driver)


@pytest.mark.fault(
    "T192", "the driver is killed; aborted transactions in the input", "within the transaction"
)
@pytest.mark.parametrize(
    "has_rule",
    [
        pytest.param(True, id="rule"),
        pytest.param(False, id="without the abort rule", marks=pytest.mark.long),
    ],
)
def test_t192_a_killed_driver_reads_only_committed_records_again(
    on_three: Scenario, tmp_path: Path, has_rule: bool
) -> None:
    program = None if has_rule else {"root": without_the_abort_rule(tmp_path)}
    Interleaved(on_three).feed(15)
    for step in ("commit.within_produce", "commit.before_commit", "commit.after_commit") if has_rule else ():
        killed = on_three.start(f"{step}=kill@{on_three.once(step)}")
        assert killed.wait() != 0, f"{step}: the driver was not killed:\n{killed.tail()}"
        assert on_three.once(step).exists(), f"{step} was not reached:\n{killed.tail()}"
    on_three.run(program=program)
    found = on_three.outcome()
    assert found.exactly_once == has_rule, found


@pytest.mark.fault("T33", "the network is cut for 5 s; transaction timeout 60 s and 2 s", "produce, flush")
@pytest.mark.parametrize(
    ("timeout_ms", "at"),
    [(60_000, "commit.within_produce"), (2_000, "commit.after_flush")],
    ids=["shorter-than-the-transaction-timeout", "longer"],
)
def test_t33_a_query_continues_after_the_network_was_cut(
    behind_proxy: Scenario, proxied: Proxied, timeout_ms: int, at: str
) -> None:
    behind_proxy.feed(150)
    options = {"kafka.transaction.timeout.ms": str(timeout_ms), "kafka.socket.timeout.ms": "1000"}
    driver = behind_proxy.stopped_at(at, at_time=2, sink=options)
    driver.resume()
    proxied.proxy.cut_for(seconds=5.0)
    driver.finish()
    found = behind_proxy.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T146", "the group coordinator leaves the cluster", "a stateful task reads its token")
def test_t146_a_stateful_task_reads_its_token_after_the_group_coordinator_left(
    on_three: Scenario, three: EmbeddedKafka
) -> None:
    """`Admin.commit` stands for a query that has committed a token."""
    group, tp = f"group-{on_three.sink}", TopicPartition(on_three.sink, 0)

    def has_token() -> bool:
        try:
            on_three.admin.commit(group, {(tp.topic, tp.partition): (0, "token")})
        except KafkaException:  # the coordinator of a new cluster is loading
            return False
        return True

    await_condition(has_token, _SECONDS, "the group has a token")
    with changelog_client({"bootstrap.servers": three.bootstrap_servers}) as consumer:
        shard = CommittedShard(consumer, group, tp)
        before = shard.offset(Deadline.after_seconds(_SECONDS))
        assert before is not None
        three.kill_node(coordinator(on_three, "__consumer_offsets", group))
        assert shard.offset(Deadline.after_seconds(_SECONDS)) == before


@pytest.mark.long
@pytest.mark.fault("T91", "the only replica of an output partition is down", "commit")
def test_t91_a_partition_without_a_leader_gets_no_commit_marker(
    on_three: Scenario, three: EmbeddedKafka
) -> None:
    """Kafka 4.1 to 4.3 leave the batch invisible (KAFKA-20734) until the query's next transaction commits."""
    on_three.feed(50)
    # the internal topics exist once a query has run
    on_three.run(sink={"application.id": "first"}, checkpoint=on_three.folder / "first")
    coordinators = {
        coordinator(on_three, internal_topic)
        for internal_topic in ("__transaction_state", "__consumer_offsets")
    }
    alone = next(node for node in three.nodes if node not in coordinators)
    on_three.admin.delete(on_three.sink)
    on_three.sink = on_three.admin.create_on(f"{on_three.sink}-alone", [alone, alone])
    on_three.run()

    on_three.feed(50)
    driver = on_three.stopped_at("commit.before_commit")
    three.kill_node(alone)
    await_condition(lambda: leader(on_three, on_three.sink, 0) == -1, _SECONDS, "the partition has no leader")
    driver.resume()
    driver.await_text("BATCH 1")
    three.start_node(alone)
    driver.finish()
    print("after", on_three.outcome())

    on_three.feed(50)
    on_three.run()
    found = on_three.outcome()
    assert found.exactly_once, found
