"""A query is upgraded from the last version with tokens of format 1, and rolled back, over one checkpoint.

The older version is the code of an old commit, which runs in processes of its own. It commits batches, is
killed, and the current version continues. Going back works until the current version begins its first
transaction; after that the older version refuses to start, and the current one continues.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.chaos.conftest import scenario as scenario
from integration.chaos.scenario import Scenario
from integration.chaos.stateful import STORE
from integration.chaos.stateful_case import Case
from integration.support import old_version
from integration.support.driver import Driver
from kafka_eos_source.protocol import token

_UPGRADED = pytest.mark.fault(
    "T132", "the package is upgraded over a checkpoint, and both versions are killed", "the same step of both"
)
_ROLLED_BACK = pytest.mark.fault(
    "T133", "the package is rolled back over a checkpoint", "before and after the newer version commits"
)
_SWITCHED_OFF = pytest.mark.fault(
    "T54", "a rule is switched off; the others' tests must then fail", "its own"
)
#: The older version takes what the current one adds to the first-batch file for damage.
OLD_REFUSALS = ("identity.json is damaged", "has format 2; this version of kafka-eos reads format 1")


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"root": old_version.export(old_version.FORMAT_1, tmp_path_factory.mktemp("old"))}


def killed_in_both_versions(scenario: Scenario, old: dict[str, Path], step: str) -> None:
    """The older version is killed in its second batch, and the current one in its first."""
    scenario.feed(100)
    killed = scenario.start(f"{step}=kill-worker*2@{scenario.once('old')}", program=old)
    assert killed.wait() == -9, killed.tail()
    scenario.feed(60)
    killed = scenario.start(f"{step}=kill-worker@{scenario.once('new')}")
    assert killed.wait() == -9, killed.tail()


def refused_by(older: Driver, reason: str) -> None:
    assert older.wait() == 1, older.tail()
    assert reason in older.log.read_text(), older.tail()


@_UPGRADED
@_ROLLED_BACK
@pytest.mark.long
@pytest.mark.parametrize("step", ["commit.before_begin", "commit.within_produce", "commit.after_commit"])
def test_an_upgrade_that_is_killed_continues_and_a_rollback_is_refused(
    scenario: Scenario, old: dict[str, Path], step: str
) -> None:
    """The kill in the current version comes when it has written the first-batch file, or committed."""
    killed_in_both_versions(scenario, old, step)
    refused_by(scenario.start(program=old), OLD_REFUSALS[0])
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found
    scenario.feed(60)
    # somebody follows the message of the older version, and writes the file anew
    query_id = json.loads((scenario.checkpoint / "metadata").read_text())["id"]
    file = scenario.checkpoint / "kafka-eos" / "identity.json"
    file.write_text(
        json.dumps({"application_id": scenario.application_id, "query_id": query_id, "first_batch": 0})
    )
    written = scenario.written()
    refused_by(scenario.start(program=old), OLD_REFUSALS[1])
    assert scenario.written() == written
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@_SWITCHED_OFF
@pytest.mark.long
def test_t54_without_the_token_check_a_batch_of_the_older_version_is_written_twice(
    scenario: Scenario, old: dict[str, Path]
) -> None:
    """Proves that the test above can fail."""
    scenario.feed(100)
    killed = scenario.start(f"commit.after_commit=kill-worker*2@{scenario.once('old')}", program=old)
    assert killed.wait() == -9, killed.tail()
    scenario.run(mutations=["token check"])
    assert scenario.outcome().rows.doubled == 50


@_ROLLED_BACK
@pytest.mark.long
def test_a_rollback_before_the_first_commit_of_the_newer_version_works(
    scenario: Scenario, old: dict[str, Path]
) -> None:
    """The current version plans a batch, and is killed before it writes; the older one writes that batch."""
    scenario.feed(50)
    scenario.run(program=old)
    scenario.feed(60)
    killed = scenario.start(f"commit.after_token=kill-worker@{scenario.once('new')}")
    assert killed.wait() == -9, killed.tail()
    scenario.run(program=old)
    found = scenario.outcome()
    assert found.exactly_once, found
    scenario.feed(60)
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@_UPGRADED
@_ROLLED_BACK
@pytest.mark.long
@pytest.mark.parametrize("step", ["state.after_pending", "commit.after_commit"])
def test_state_stays_exact_over_an_upgrade_and_a_refused_rollback(
    broker: str,
    topic: Callable[..., str],
    tmp_path: Path,
    driver: Callable[..., Driver],
    old: dict[str, Path],
    step: str,
) -> None:
    """Databases and changelog of the older version are read, also when one database has to be restored."""
    case = Case(broker, topic, tmp_path)

    def start(failpoints: str = "", **program: Path) -> Driver:
        return driver(case.spec(), failpoints, module="integration.chaos.loop", **program)

    killed = start(f"{step}=kill-worker*3@{tmp_path / 'old'}", **old)
    assert killed.wait() == -9, killed.tail()
    case.feed(400)
    shutil.rmtree(case.state / case.application / STORE / "0")
    killed = start(f"{step}=kill-worker*2@{tmp_path / 'new'}")
    assert killed.wait() == -9, killed.tail()
    start().finish()
    case.check()
    case.feed(400)
    refused_by(start(**old), "has format 2; this version of kafka-eos reads format 1")
    shutil.rmtree(case.state)
    start().finish()
    case.check()


@pytest.mark.fault("T133b", "an older version of the package meets a token of the next format", "restart")
def test_a_token_of_the_next_format_is_refused_with_the_version_that_wrote_it(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next version is killed after a commit that Spark's log lacks; the current one writes nothing."""
    scenario.feed(100)
    killed = scenario.start(
        f"commit.after_commit=kill-worker*2@{scenario.once('next')}", mutations=["next format"]
    )
    assert killed.wait() == -9, killed.tail()
    written = scenario.written()
    current = scenario.start()
    assert current.wait() == 1, current.tail()
    said = current.log.read_text()
    assert "[KAFKA_EOS.NEWER_VERSION]" in said
    assert "written by kafka-eos 99.0.0" in said
    assert scenario.written() == written
    scenario.run(mutations=["next format"])
    monkeypatch.setattr(token, "FORMAT", token.FORMAT + 1)  # the test itself reads the tokens too
    monkeypatch.setattr(token, "READABLE", (*token.READABLE, token.FORMAT))
    found = scenario.outcome()
    assert found.exactly_once, found
