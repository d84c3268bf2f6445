"""What people do to queries: copy, move, fork, another target, another guarantee, answers that stay.

Nothing is decided by a name that something else can have: each of these ends with the output exact, or with
an error that names what was found, before anything is written.
"""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import NewTopic

from integration.chaos.loop import Checkpoint
from integration.chaos.scenario import Scenario
from integration.support.kafka import TIMEOUT_SECONDS, Admin, produce, read_back
from kafka_eos_source.cli import main
from kafka_eos_source.operate.shared import ExitCode
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import derived_application_id, group_of

_COPIED = pytest.mark.fault("T360", "a checkpoint is copied or moved to another place", "stopped")
_CLONED = pytest.mark.fault(
    "T361", "a clone of the checkpoint at the same place writes another topic", "stopped"
)
_SWITCHED_OFF = pytest.mark.fault(
    "T54", "a rule is switched off; the others' tests must then fail", "its own"
)


def refused(scenario: Scenario, condition: str, **spec: object) -> str:
    """Starts the query, which must end with this condition and write nothing. Returns its log."""
    written = scenario.written()
    driver = scenario.start(**spec)  # type: ignore[arg-type]
    assert driver.wait() == 1, driver.tail()
    text = driver.log.read_text()
    assert f"[KAFKA_EOS.{condition}]" in text, driver.tail()
    assert scenario.written() == written, "nothing was written, not even a transaction that was aborted"
    return text


def values(scenario: Scenario, topic: str) -> list[str]:
    return sorted(each.value.decode() for each in read_back(scenario.bootstrap, topic))


def exact(scenario: Scenario) -> None:
    found = scenario.outcome()
    assert found.exactly_once, found


@_COPIED
def test_t360_a_copied_checkpoint_asks_and_is_forked_and_a_moved_one_continues(scenario: Scenario) -> None:
    scenario.feed(100)
    scenario.run()
    copy, moved = scenario.folder / "copy", scenario.folder / "moved"
    shutil.copytree(scenario.checkpoint, copy)
    other = scenario.admin.create(f"{scenario.sink}-of-the-copy", 1)
    scenario.feed(50)
    sink = {"topic": other}
    said = refused(scenario, "CHECKPOINT_MOVED", checkpoint=copy, sink=sink)
    assert str(scenario.checkpoint) in said
    assert str(copy) in said
    refused(scenario, "INVALID_OPTION", checkpoint=copy, sink={**sink, "onMovedCheckpoint": "fork"})
    assert values(scenario, other) == []
    fork = {**sink, "onMovedCheckpoint": "fork", "application.id": f"{scenario.application_id}-copy"}
    for _ in range(2):
        scenario.run(checkpoint=copy, sink=fork)
    assert values(scenario, other) == [value for _, value in scenario.sent[100:]]
    # the original is not affected, and continues where it was moved to
    scenario.checkpoint.rename(moved)
    refused(scenario, "CHECKPOINT_MOVED", checkpoint=moved)
    answer = {"onMovedCheckpoint": f"continue:{scenario.checkpoint}"}
    scenario.run(checkpoint=moved, sink=answer)
    exact(scenario)
    scenario.feed(20)
    shutil.copytree(moved, scenario.folder / "copied again")
    refused(scenario, "CHECKPOINT_MOVED", checkpoint=scenario.folder / "copied again", sink=answer)
    scenario.run(checkpoint=moved)
    exact(scenario)


def run_a_clone(scenario: Scenario, *mutations: str) -> str:
    """Runs a clone of the checkpoint with another topic, puts the original back, and returns that topic."""
    scenario.feed(100)
    scenario.run(mutations=mutations)
    original_place = scenario.folder / "original"
    shutil.copytree(scenario.checkpoint, original_place)
    other = scenario.admin.create(f"{scenario.sink}-of-the-clone", 1)
    scenario.feed(100)
    scenario.run(sink={"topic": other}, mutations=mutations)
    shutil.rmtree(scenario.checkpoint)
    shutil.copytree(original_place, scenario.checkpoint)
    scenario.feed(100)
    return other


@_CLONED
@pytest.mark.parametrize("jumps", [pytest.param(False, marks=pytest.mark.long), True])
def test_t361_the_original_never_skips_what_only_its_clones_topic_holds(
    scenario: Scenario, jumps: bool
) -> None:
    """A clone of the volume has the same path, so only the target in the token shows what happened."""
    source = {"application.id": scenario.application_id, "onRolledBackCheckpoint": ("read", "jump")[jumps]}
    other = run_a_clone(scenario)
    assert values(scenario, other) == [value for _, value in scenario.sent[100:200]]
    said = refused(scenario, "CHECKPOINT_ROLLED_BACK", source=source)
    assert f"wrote to topic '{other}', and this query writes to topic '{scenario.sink}'" in said
    # the fix that the message names: a query of its own from the position of this checkpoint on
    position = offset_log.read(str(scenario.checkpoint), 1)
    assert position is not None
    own = position.sources["0"]
    assert own is not None
    shutil.rmtree(scenario.checkpoint)
    scenario.application_id += "-again"
    scenario.run(source={"startingOffsets": offsets_of(own)})
    exact(scenario)


def offsets_of(logged: str) -> str:
    """Returns the offsets of a logged position as the option ``startingOffsets``."""
    return json.dumps({topic: each for topic, each in json.loads(logged).items() if topic != "@"})


@_SWITCHED_OFF
def test_t54_without_targets_in_tokens_the_original_misses_what_its_clone_wrote(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    run_a_clone(scenario, "targets")
    scenario.run(mutations=["targets"])
    found = scenario.outcome()
    assert (found.rows.missing, found.rows.doubled) == (100, 0), found


@pytest.mark.fault("T362", "a new checkpoint adopts, and offsets cannot prove where it starts", "start")
def test_t362_an_adoption_without_a_proof_is_refused(scenario: Scenario) -> None:
    """Spark's own state and another target cannot be compared, whatever the offsets are."""
    scenario.feed(100)
    scenario.run()
    former = offset_log.query_id(str(scenario.checkpoint))
    group = {"startingOffsets": "group", "application.id": scenario.application_id}
    adopts = {"onForeignQuery": "adopt"}
    scenario.feed(50)
    stateful = scenario.folder / "stateful"
    (stateful / "state").mkdir(parents=True)
    said = refused(scenario, "CHECKPOINT_ROLLED_BACK", checkpoint=stateful, source=group, sink=adopts)
    assert f"'adopt_unchecked:{former}'" in said
    other = scenario.admin.create(f"{scenario.sink}-other", 1)
    new = scenario.folder / "new"
    said = refused(
        scenario, "CHECKPOINT_ROLLED_BACK", checkpoint=new, source=group, sink={**adopts, "topic": other}
    )
    assert f"wrote to topic '{scenario.sink}', and this query writes to topic '{other}'" in said
    assert values(scenario, other) == []
    # an assertion about another query is none about this one
    wrong = {"onForeignQuery": "adopt_unchecked:another"}
    refused(scenario, "FOREIGN_QUERY", checkpoint=stateful, source=group, sink=wrong)
    asserted = {"onForeignQuery": f"adopt_unchecked:{former}"}
    scenario.run(checkpoint=stateful, source=group, sink=asserted)
    exact(scenario)


@pytest.mark.fault("T363", "exactly_once, at_least_once and exactly_once on one checkpoint", "restart")
@pytest.mark.parametrize(
    "pending", [pytest.param("no batch", marks=pytest.mark.long), "a batch", "a batch that Kafka holds"]
)
def test_t363_the_way_back_to_exactly_once_is_one_command(scenario: Scenario, pending: str) -> None:
    """A pending batch is one that the driver of at_least_once wrote before it died, and Spark did not log."""
    scenario.feed(100)
    scenario.run()
    scenario.feed(100)
    weaker = {"processing.guarantee": "at_least_once"}
    is_held = pending.endswith("holds")
    if is_held:
        killed = scenario.start(f"commit.after_commit=kill-worker@{scenario.once('held')}")
        assert killed.wait() == -9, killed.tail()
        killed = scenario.start(f"direct.after_flush=kill@{scenario.once('weaker')}", sink=weaker)
        assert killed.wait() != 0, killed.tail()
    elif pending == "a batch":
        killed = scenario.start(f"direct.after_flush=kill*2@{scenario.once('weaker')}", sink=weaker)
        assert killed.wait() != 0, killed.tail()
    else:
        scenario.run(sink=weaker)
    scenario.feed(50)
    said = refused(scenario, "GUARANTEE_CHANGED")
    assert "kafka-eos adopt" in said
    where = ["--checkpoint", str(scenario.checkpoint), "--bootstrap-servers", scenario.bootstrap]
    command = CliRunner().invoke(main, ["adopt", *where, "--yes"])
    assert command.exit_code == 0, command.output
    assert ("which Kafka holds" if is_held else "The query writes it whole") in command.output
    scenario.run()
    found = scenario.outcome()
    assert found.rows.missing == 0, found
    repeated = 0 if pending == "no batch" else 50
    assert found.rows.doubled == repeated, "what at_least_once had written of the pending batch"
    scenario.feed(30)
    scenario.run()
    assert scenario.outcome().rows.missing == 0


@pytest.mark.fault(
    "T370", "exactly_once, at_least_once and exactly_once on a checkpoint restored from before", "restart"
)
def test_t370_a_checkpoint_from_before_at_least_once_is_refused(scenario: Scenario) -> None:
    """The restored checkpoint does not know that batches left no token, and the token in Kafka does."""
    _restored_from_before_at_least_once(scenario)
    said = refused(scenario, "GUARANTEE_CHANGED")
    assert "does not record that" in said
    where = ["--checkpoint", str(scenario.checkpoint), "--bootstrap-servers", scenario.bootstrap]
    command = CliRunner().invoke(main, ["adopt", *where, "--yes"])
    assert "GUARANTEE_CHANGED" in command.output or "at_least_once" in command.output, command.output
    refused(scenario, "GUARANTEE_CHANGED")


@_SWITCHED_OFF
def test_t54_without_a_mark_in_the_token_a_checkpoint_from_before_at_least_once_doubles(
    scenario: Scenario,
) -> None:
    """Proves that the test above can fail."""
    _restored_from_before_at_least_once(scenario, "mark of at_least_once")
    scenario.run()
    assert scenario.outcome().rows.doubled == 100


def _restored_from_before_at_least_once(scenario: Scenario, *mutations: str) -> None:
    copy = scenario.folder / "copy"
    scenario.feed(100)
    scenario.run()
    shutil.copytree(scenario.checkpoint, copy)
    scenario.feed(100)
    scenario.run(sink={"processing.guarantee": "at_least_once"}, mutations=[*mutations])
    shutil.rmtree(scenario.checkpoint)
    shutil.copytree(copy, scenario.checkpoint)


@_SWITCHED_OFF
def test_t54_without_a_trace_of_at_least_once_the_query_names_another_cause(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    scenario.feed(100)
    scenario.run()
    scenario.feed(100)
    scenario.run(sink={"processing.guarantee": "at_least_once"}, mutations=["trace of at_least_once"])
    scenario.feed(50)
    refused(scenario, "CHECKPOINT_AHEAD")


def answered_for_ever(scenario: Scenario, *mutations: str) -> None:
    """An answer stays in the program; later the group is deleted while a batch is pending."""
    answer = {"onMissingToken": "assume_not_committed:0"}
    scenario.feed(50)
    scenario.run(sink=answer)
    scenario.feed(50)
    killed = scenario.start(f"commit.after_commit=kill-worker@{scenario.once('later')}", sink=answer)
    assert killed.wait() == -9, killed.tail()
    for future in scenario.admin.client.delete_consumer_groups([group_of(scenario.application_id)]).values():
        future.result(TIMEOUT_SECONDS)
    if mutations:
        scenario.run(sink=answer, mutations=mutations)
        return
    said = refused(scenario, "TOKEN_MISSING", sink=answer)
    assert "'assume_committed:1'" in said
    scenario.run(sink={"onMissingToken": "assume_committed:1"})


@pytest.mark.fault(
    "T364", "an answer to a lost token stays in the program, and a token is lost later", "restart"
)
def test_t364_an_answer_acts_for_the_batch_that_it_names(scenario: Scenario) -> None:
    answered_for_ever(scenario)
    exact(scenario)


@_SWITCHED_OFF
def test_t54_an_answer_for_every_batch_doubles_a_later_one(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    answered_for_ever(scenario, "numbers of answers")
    assert scenario.outcome().rows.doubled == 50


@pytest.mark.fault("T365", "a checkpoint loses its file metadata with a batch pending", "stopped")
def test_t365_a_checkpoint_without_its_query_id_writes_no_batch_again(scenario: Scenario) -> None:
    """The application.id is the one that follows from the query id, so Kafka has no token of the new one."""
    scenario.feed(100)
    Checkpoint(scenario.checkpoint)
    former = (scenario.checkpoint / "metadata").read_text()
    scenario.application_id = derived_application_id(offset_log.query_id(str(scenario.checkpoint)))
    killed = scenario.start(f"commit.after_commit=kill-worker*2@{scenario.once('pending')}")
    assert killed.wait() == -9, killed.tail()
    (scenario.checkpoint / "metadata").unlink()
    Checkpoint(scenario.checkpoint)  # as Spark does
    new = {"application.id": derived_application_id(offset_log.query_id(str(scenario.checkpoint)))}
    said = refused(scenario, "OPERATOR", sink=new)
    assert former.replace(" ", "") in said
    (scenario.checkpoint / "metadata").write_text(former)
    scenario.run()
    exact(scenario)


@pytest.mark.fault("T366", "an old copy of the logs is restored after a time of at_least_once", "stopped")
def test_t366_the_way_back_does_not_write_batches_with_a_token_again(scenario: Scenario) -> None:
    scenario.feed(100)
    scenario.run()
    logs, kept = ("offsets", "commits"), scenario.folder / "kept"
    shutil.copytree(scenario.checkpoint, kept)
    scenario.feed(100)
    scenario.run()
    scenario.feed(50)
    scenario.run(sink={"processing.guarantee": "at_least_once"})
    for log in logs:
        shutil.rmtree(scenario.checkpoint / log)
        shutil.copytree(kept / log, scenario.checkpoint / log)
    refused(scenario, "GUARANTEE_CHANGED")
    where = ["--checkpoint", str(scenario.checkpoint), "--bootstrap-servers", scenario.bootstrap]
    command = CliRunner().invoke(main, ["adopt", *where, "--yes"])
    assert command.exit_code == ExitCode.NEEDS_A_PERSON, command.output
    assert "CHECKPOINT_ROLLED_BACK: batch 1" in command.output
    refused(scenario, "GUARANTEE_CHANGED")
    group = {"startingOffsets": "group", "application.id": scenario.application_id}
    new = {"checkpoint": scenario.folder / "new", "source": group}
    refused(scenario, "GUARANTEE_CHANGED", **new, sink={"onForeignQuery": "adopt"})
    # the fix that the message names
    asserted = f"adopt_unchecked:{offset_log.query_id(str(scenario.checkpoint))}"
    scenario.run(**new, sink={"onForeignQuery": asserted})
    found = scenario.outcome().rows
    assert (found.missing, found.doubled) == (0, 50), "what at_least_once has written"


@pytest.mark.fault("T367", "kafka-eos adopt hands over the offsets of another topic", "stopped")
def test_t367_a_query_that_was_handed_over_does_not_begin_in_another_topic(scenario: Scenario) -> None:
    """Otherwise what the clone has written to its own topic would be missing."""
    other = run_a_clone(scenario)
    shutil.rmtree(scenario.checkpoint)
    group = {"startingOffsets": "group", "application.id": scenario.application_id}
    refused(scenario, "FOREIGN_QUERY", source=group)
    where = ["--checkpoint", str(scenario.checkpoint), "--bootstrap-servers", scenario.bootstrap]
    named = [scenario.application_id, "--topic", scenario.sink]
    command = CliRunner().invoke(main, ["adopt", *where, *named, "--yes"])
    assert command.exit_code == 0, command.output
    said = refused(scenario, "CHECKPOINT_ROLLED_BACK", source=group)
    assert f"wrote to topic '{other}', and this query writes to topic '{scenario.sink}'" in said
    scenario.run(source=group, sink={"topic": other})
    assert values(scenario, other) == [value for _, value in scenario.sent[100:]]


@pytest.mark.fault(
    "T368", "a mirror copies the group to another cluster, earlier or later than rows", "start"
)
@pytest.mark.parametrize("late", ["group", "rows"])
def test_t368_a_token_of_another_cluster_proves_nothing(
    scenario: Scenario, other_cluster: str, late: str
) -> None:
    """The sink writes to one cluster; a mirror copies topic and group to the cluster of the source."""
    there, group = Admin(other_cluster), group_of(scenario.application_id)
    there.client.create_topics([NewTopic(scenario.sink, 2, 1)])[scenario.sink].result(TIMEOUT_SECONDS)
    sink = {"kafka.bootstrap.servers": other_cluster}
    scenario.feed(50)
    scenario.run(sink=sink)
    tokens, rows = there.group(group), read_back(other_cluster, scenario.sink)
    scenario.feed(50)
    killed = scenario.start(f"commit.after_commit=kill-worker@{scenario.once('pending')}", sink=sink)
    assert killed.wait() == -9, killed.tail()
    if late == "rows":
        tokens = there.group(group)
    else:
        rows = read_back(other_cluster, scenario.sink)
    produce(
        scenario.bootstrap,
        scenario.sink,
        [each.value.decode() for each in rows],
        keys=[each.key.decode() for each in rows],
    )
    scenario.admin.commit(group, tokens)
    said = refused(scenario, "TOKEN_MISSING")
    assert "a tool that mirrors clusters has copied it" in said
    # the fix that the message names
    scenario.admin.client.delete_consumer_groups([group])[group].result(TIMEOUT_SECONDS)
    assert "of batch 1 in the output" in refused(scenario, "TOKEN_MISSING")
    answer = "assume_not_committed:1" if late == "rows" else "assume_committed:1"
    scenario.run(sink={"onMissingToken": answer})
    found = scenario.outcome().rows
    assert (found.missing, found.doubled) == (0, 0), found
