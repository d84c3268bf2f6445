"""Somebody resets or deletes a query's group with Kafka's own tool, whose work the query survives or refuses.

``kafka-consumer-groups.sh`` works on the group of a running query too: the query commits its offsets in
transactions and never joins the group, so to Kafka the group looks unused. The offsets that the tool writes
have no metadata, and so neither a token nor a mark.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration.chaos.conftest import scenario as scenario
from integration.chaos.scenario import Scenario
from integration.chaos.stateful import STORE
from integration.chaos.stateful_case import Case
from integration.support import tools
from integration.support.driver import START_AND_RUN_SECONDS, Driver
from integration.support.processes import await_condition
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.identity import group_of

_TO = ("--reset-offsets", "--execute")
_LONG = pytest.mark.long
_RESET = pytest.mark.fault(
    "T130", "the group's offsets are reset by Kafka's tool", "stopped, running, within the transaction"
)
_DELETED = pytest.mark.fault(
    "T131", "the group or its offsets are deleted by Kafka's tool", "stopped, running, within the transaction"
)
_SWITCHED_OFF = pytest.mark.fault(
    "T54", "a rule is switched off; the others' tests must then fail", "its own"
)

MOVED, MISSING = "KAFKA_EOS.OFFSETS_MOVED", "KAFKA_EOS.TOKEN_MISSING"


@dataclass(frozen=True)
class Intervention:
    """What an operator does to the group of a query.

    Attributes:
        arguments: arguments of ``kafka-consumer-groups.sh``, for the names of the source and output topic.
        refused: the condition with which the next start refuses; None if the query continues.
    """

    arguments: Callable[[str, str], tuple[str, ...]]
    refused: str | None


#: The output topic carries the anchor, and the first source partition carries the token too.
INTERVENTIONS: Mapping[str, Intervention] = {
    "reset everything": Intervention(lambda *_: (*_TO, "--all-topics", "--to-earliest"), MISSING),
    "shift the source back": Intervention(
        lambda source, _: (*_TO, "--topic", source, "--shift-by", "-10"), MOVED
    ),
    "reset the source forward": Intervention(
        lambda source, _: (*_TO, "--topic", source, "--to-latest"), MOVED
    ),
    "reset both tokens": Intervention(
        lambda source, out: (*_TO, "--topic", f"{source}:0", "--topic", out, "--to-earliest"), MISSING
    ),
    "reset the anchor": Intervention(lambda _, out: (*_TO, "--topic", out, "--to-earliest"), MOVED),
    "delete the group": Intervention(lambda *_: ("--delete",), MISSING),
    "delete all offsets": Intervention(
        lambda source, out: ("--delete-offsets", "--topic", source, "--topic", out), MISSING
    ),
    "delete both tokens": Intervention(
        lambda source, out: ("--delete-offsets", "--topic", f"{source}:0", "--topic", out), MISSING
    ),
    "delete the source's offsets": Intervention(
        lambda source, _: ("--delete-offsets", "--topic", source), None
    ),
    "delete the anchor": Intervention(lambda _, out: ("--delete-offsets", "--topic", out), None),
}


def intervene(scenario: Scenario, name: str) -> None:
    arguments = INTERVENTIONS[name].arguments(scenario.source, scenario.sink)
    tools.consumer_groups(scenario.bootstrap, group_of(scenario.application_id), *arguments)


def _interventions(*quick: str) -> list[pytest.ParameterSet]:
    """Returns all interventions as parameters; only those in ``quick`` run with the short tests."""
    return [
        pytest.param(
            name,
            marks=[_DELETED if name.startswith("delete") else _RESET, *([] if name in quick else [_LONG])],
        )
        for name in INTERVENTIONS
    ]


def continues(scenario: Scenario, name: str, *, is_held: bool) -> None:
    """Starts the query with new input; if it must refuse, follows the runbook. No record may be affected.

    Args:
        scenario: the query, stopped.
        name: the intervention that went before.
        is_held: whether Kafka holds the batch that Spark repeats, as a person finds out by the runbook.
    """
    scenario.feed(50)
    condition = INTERVENTIONS[name].refused
    if condition is not None:
        written = scenario.written()
        driver = scenario.start()
        assert driver.wait() == 1, driver.tail()
        assert f"[{condition}]" in driver.log.read_text(), driver.tail()
        assert scenario.written() == written, "nothing was written, not even a transaction that was aborted"
    if condition == MISSING:
        answer = "assume_committed" if is_held else "assume_not_committed"
        policies = {"onMissingToken": f"{answer}:{scenario.planned}"}
        if name.startswith("reset"):
            driver = scenario.start(sink=policies)
            assert driver.wait() == 1, driver.tail()
            assert f"[{MOVED}]" in driver.log.read_text(), driver.tail()
            policies["onMovedOffsets"] = f"overwrite:{scenario.planned}"
        scenario.run(sink=policies)
    elif condition == MOVED:
        scenario.run(sink={"onMovedOffsets": f"overwrite:{scenario.planned}"})
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.parametrize("name", _interventions())
def test_an_intervention_while_the_query_is_stopped(scenario: Scenario, name: str) -> None:
    scenario.feed(100)
    scenario.run()
    intervene(scenario, name)
    continues(scenario, name, is_held=False)


@pytest.mark.parametrize("name", _interventions())
def test_an_intervention_while_the_query_runs_and_is_killed_after_its_next_commit(
    scenario: Scenario, name: str
) -> None:
    """The next transaction commits all offsets and tokens again, so no trace of the intervention is left."""
    scenario.feed(100)
    driver = scenario.start(
        f"commit.after_commit=kill-worker*3@{scenario.once('third')}", available_now=False
    )
    driver.await_text("BATCH 1")
    intervene(scenario, name)
    scenario.feed(50)
    assert driver.wait() == -9, driver.tail()
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.parametrize("name", _interventions("delete the group"))
def test_an_intervention_within_a_transaction_whose_driver_is_killed_after_the_commit(
    scenario: Scenario, name: str
) -> None:
    """Kafka holds the batch, Spark does not know that, and the intervention removed what the batch committed.

    Kafka removes offsets of open transactions too, and a reset that comes after them wins.
    """
    _killed_after_intervention(scenario, name)
    continues(scenario, name, is_held=True)


@_SWITCHED_OFF
def test_t54_without_the_promised_token_a_batch_whose_group_was_deleted_is_written_twice(
    scenario: Scenario,
) -> None:
    """Proves that the test above can fail."""
    _killed_after_intervention(scenario, "delete the group")
    scenario.run(mutations=["promised token"])
    assert scenario.outcome().rows.doubled == 50


def _killed_after_intervention(scenario: Scenario, name: str) -> None:
    """Intervenes when a batch has its offsets in the open transaction; kills the driver after the commit."""
    scenario.feed(50)
    scenario.run()
    scenario.feed(50)
    killed = f"commit.after_commit=kill-worker@{scenario.once('committed')}"
    driver = scenario.stopped_at("commit.before_commit", then=killed)
    intervene(scenario, name)
    driver.resume()
    assert driver.wait() == -9, driver.tail()
    assert scenario.outcome().rows.found == 100


@pytest.mark.parametrize(
    "mutations",
    [pytest.param((), marks=[_RESET, _LONG]), pytest.param(("mark check",), marks=[_SWITCHED_OFF, _LONG])],
)
def test_a_group_that_was_reset_to_match_a_restored_checkpoint_is_refused(
    scenario: Scenario, mutations: tuple[str, ...]
) -> None:
    """Checkpoint and offsets agree, and only the missing marks show that the output is further than both.

    Somebody restores the checkpoint from a copy, and the offsets from an export of the same moment.
    """
    scenario.feed(50)
    scenario.run()
    copy = scenario.folder / "copy"
    shutil.copytree(scenario.checkpoint, copy)
    source = ("--reset-offsets", "--topic", scenario.source)
    export, group = scenario.folder / "offsets.csv", group_of(scenario.application_id)
    said = tools.consumer_groups(
        scenario.bootstrap,
        group_of(scenario.application_id),
        *source,
        "--to-current",
        "--dry-run",
        "--export",
    )
    export.write_text("".join(f"{line}\n" for line in said.splitlines() if line.startswith("in-")))
    scenario.feed(200)
    killed = scenario.start(f"commit.after_commit=kill-worker*4@{scenario.once('fourth')}")
    assert killed.wait() == -9, killed.tail()
    shutil.rmtree(scenario.checkpoint)
    shutil.copytree(copy, scenario.checkpoint)
    tools.consumer_groups(
        scenario.bootstrap,
        group_of(scenario.application_id),
        *source,
        "--from-file",
        str(export),
        "--execute",
    )
    driver = scenario.start(mutations=mutations)
    code, found = driver.wait(), scenario.outcome()
    if mutations:
        assert found.rows.doubled == 200, found
        return
    assert code == 1, driver.tail()
    assert f"[{MOVED}]" in driver.log.read_text(), driver.tail()
    # the runbook's other fix: a new checkpoint starts where somebody says that the output ends
    tools.consumer_groups(scenario.bootstrap, group, *source, "--to-latest", "--execute")
    former = offset_log.query_id(str(scenario.checkpoint))
    shutil.rmtree(scenario.checkpoint)
    scenario.feed(50)
    scenario.run(
        source={"startingOffsets": "group", "application.id": scenario.application_id},
        sink={"onForeignQuery": f"adopt_unchecked:{former}"},
    )
    found = scenario.outcome()
    assert found.exactly_once, found


#: What an operator does to the offsets of a changelog topic, and whether the commit too has lost its token.
CHANGELOG_INTERVENTIONS: Mapping[str, tuple[Callable[[str], tuple[str, ...]], bool]] = {
    "reset one shard": (lambda changelog: (*_TO, "--topic", f"{changelog}:0", "--to-earliest"), False),
    "reset everything": (lambda _: (*_TO, "--all-topics", "--to-earliest"), True),
    "delete the changelog's offsets": (lambda changelog: ("--delete-offsets", "--topic", changelog), False),
    "delete the group": (lambda _: ("--delete",), True),
}


@_LONG
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=_DELETED if name.startswith("delete") else _RESET)
        for name in CHANGELOG_INTERVENTIONS
    ],
)
def test_state_stays_exact_although_a_changelogs_offsets_change_within_a_transaction(
    broker: str, topic: Callable[..., str], tmp_path: Path, driver: Callable[..., Driver], name: str
) -> None:
    """The driver is killed after the commit; the changelog itself tells which batch it ends with."""
    case = Case(broker, topic, tmp_path)
    arguments, is_token_lost = CHANGELOG_INTERVENTIONS[name]

    def start(failpoints: str = "", **spec: Any) -> Driver:
        return driver(case.spec(**spec), failpoints, module="integration.chaos.loop")

    start().finish()
    case.feed(100)
    stopped, killed = tmp_path / "stopped", tmp_path / "killed"
    running = start(f"commit.before_commit=stop@{stopped},commit.after_commit=kill-worker@{killed}")
    await_condition(stopped.exists, START_AND_RUN_SECONDS, "the offsets are in the transaction")
    running.await_stopped()
    changelog = f"{case.application}-{STORE}-changelog"
    tools.consumer_groups(broker, group_of(case.application), *arguments(changelog))
    running.resume()
    assert running.wait() == -9, running.tail()
    case.feed(100)
    fixed = {}
    if is_token_lost:
        refused = start()
        assert refused.wait() == 1, refused.tail()
        assert f"[{MISSING}]" in refused.log.read_text(), refused.tail()
        planned = offset_log.newest(str(case.checkpoint))
        assert planned is not None
        fixed = {"onMissingToken": f"assume_committed:{planned.batch_id}"}
        if name == "reset everything":  # the offsets of the sources lack the marks, too
            fixed["onMovedOffsets"] = f"overwrite:{planned.batch_id}"
    start(sink=fixed).finish()
    case.check()
    case.feed(100)
    start().finish()
    case.check()
