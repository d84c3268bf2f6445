"""Another user of the host, or of the storage, changes what a query keeps in files.

Size and CRC-32C of what is staged stay what they were, so only owner, mode and digest can tell.
"""

from __future__ import annotations

import os
import shutil

import pytest

from integration.chaos.scenario import Scenario
from integration.support.damage import forged
from integration.support.kafka import read_back

#: A user id that only owns files of these tests.
OTHER = 61_002
#: Rows always go to files.
IN_FILES = {"staging.inline.bytes": "0"}
#: So few that tasks stage rows, whose bytes are in the file as they are, and no record batches.
FEW = 20
TRUE, FORGED = b"000003", b"999993"
#: Failpoints: the task has staged its rows; the driver has verified them, and has sent none.
STAGED, VERIFIED = "stage.after_close", "commit.after_check"

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


def replace_rows(scenario: Scenario, owner: int) -> None:
    """Replaces a value in every staged part that has it; the file then belongs to ``owner``."""
    replaced = 0
    for path in (scenario.checkpoint / "kafka-eos" / "staging").rglob("*.arrow"):
        data = path.read_bytes()
        if TRUE in data:
            path.unlink()
            path.write_bytes(forged(data, TRUE, FORGED, data.index(TRUE) + len(TRUE)))
            os.chown(path, owner, owner)
            replaced += 1
    assert replaced == 1


def attacked(scenario: Scenario, step: str, owner: int, *mutations: str) -> str:
    """Replaces rows while the query stands still at a step; returns its log."""
    scenario.feed(FEW)
    stopped = scenario.stopped_at(step, sink=IN_FILES, mutations=mutations)
    replace_rows(scenario, owner)
    stopped.resume()
    stopped.wait()
    return stopped.log.read_text()


def output(scenario: Scenario) -> list[bytes | None]:
    """Returns the values in the output; the bytes that make the CRC fit are no text."""
    return [each.value for each in read_back(scenario.bootstrap, scenario.sink)]


@needs_root
@pytest.mark.fault("T381", "another user creates the staging folder before the query", "start")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_t381_a_staging_folder_of_another_user_is_refused(scenario: Scenario, mode: int) -> None:
    shared = scenario.folder / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    staging = shared / "staging"
    staging.mkdir()
    staging.chmod(mode)
    os.chown(staging, OTHER, OTHER)
    scenario.feed(FEW)
    refused = scenario.start(sink={**IN_FILES, "staging.location": str(staging)})
    assert refused.wait() == 1
    assert f"{str(staging)!r} (owner: user id {OTHER}, mode {mode:04o}) belongs" in refused.log.read_text()
    assert not list(staging.iterdir()), "nothing was written there"
    shutil.rmtree(staging)
    scenario.run(sink={**IN_FILES, "staging.location": str(staging)})
    found = scenario.outcome()
    assert found.exactly_once, found


@needs_root
@pytest.mark.fault(
    "T382", "another user replaces staged rows on a disk of the host; size and CRC fit", "commit"
)
@pytest.mark.parametrize("step", [STAGED, VERIFIED])
def test_t382_rows_of_another_user_are_never_sent(scenario: Scenario, step: str) -> None:
    assert "may be forged" in attacked(scenario, step, OTHER)
    assert scenario.outcome().rows.found == 0, "nothing of the batch is visible"
    scenario.run(sink=IN_FILES)
    found = scenario.outcome()
    assert found.exactly_once, found


@needs_root
@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_check_of_owners_forged_rows_are_sent(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    attacked(scenario, VERIFIED, OTHER, "owner of staged rows")
    assert FORGED in output(scenario)


@pytest.mark.fault(
    "T383", "staged rows are replaced on storage that others write to; size and CRC fit", "commit"
)
def test_t383_rows_replaced_on_shared_storage_are_never_sent(scenario: Scenario) -> None:
    log = attacked(scenario, STAGED, os.getuid(), "shared storage")
    assert "is not what its task wrote: size and CRC-32C fit" in log
    assert scenario.outcome().rows.found == 0, "nothing of the batch is visible"
    scenario.run(sink=IN_FILES)
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_digest_of_staged_rows_forged_ones_are_sent(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    attacked(scenario, STAGED, os.getuid(), "shared storage", "digest of staged rows")
    assert FORGED in output(scenario)


@pytest.mark.fault("T384", "staged rows are replaced on shared storage after they were verified", "commit")
def test_t384_the_rows_that_were_verified_are_sent(scenario: Scenario) -> None:
    attacked(scenario, VERIFIED, os.getuid(), "shared storage")
    found = scenario.outcome()
    assert found.exactly_once, found
