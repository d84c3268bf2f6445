"""T53: a short soak; ``./dev soak 600`` runs longer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from integration.chaos.soak import report
from integration.chaos.soak.cluster import BrokenBrokerError
from integration.chaos.soak.conductor import Conductor, Settings, WrongError
from integration.chaos.soak.folder import RunFolder
from integration.support.faults import MEASURES


def run(folder: RunFolder, settings: Settings, minutes: float, said: list[str]) -> None:
    try:
        Conductor(folder, settings, said.append).run(minutes)
    except BrokenBrokerError as error:
        pytest.skip(str(error))


@pytest.mark.fault("T53", "any of these at random, every few seconds", "any")
@pytest.mark.fault("T148", "the soak itself ends and is resumed", "between two chunks")
@pytest.mark.timeout(900)
@pytest.mark.long
def test_t53_t148_random_faults_neither_lose_nor_duplicate_records(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Two sessions of one run; the second one continues with the data, the totals and the fault numbers."""
    settings = Settings(random.SystemRandom().randrange(100_000), chunk_seconds=30, fault_seconds=3)
    folder, said = RunFolder(tmp_path / "run"), list[str]()
    folder.begin(**vars(settings))
    run(folder, settings, 0.5, said)
    run(RunFolder(tmp_path / "run"), settings, 0.5, said)
    found = report.write(folder)
    request.node.user_properties.append((MEASURES, report.measures(found)))
    assert found["good"], "\n".join(said)
    assert (found["sessions"], found["chunks"]) == (2, 2)
    assert sum(found["faults"].values()) >= 2, said
    assert all(each["transactions"] for each in found["queries"].values()), found["queries"]


@pytest.mark.fault(
    "T147", "a row of an external sink is deleted, and one is doubled", "before a chunk is judged"
)
@pytest.mark.timeout(900)
@pytest.mark.long
def test_t147_the_judge_notices_what_happens_to_an_external_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that a real run can be judged wrong."""
    from integration.chaos.soak.readers import Sinks

    values = Sinks.values

    def tampered(self: Sinks) -> dict[str, list[str]]:
        self._run("DELETE FROM output WHERE rowid = (SELECT min(rowid) FROM output)")
        return values(self)

    monkeypatch.setattr(Sinks, "values", tampered)
    settings = Settings(0, chunk_seconds=15, fault_seconds=0)
    folder = RunFolder(tmp_path / "run")
    folder.begin(**vars(settings))
    with pytest.raises(WrongError, match="sql: missing"):
        run(folder, settings, 0.25, [])
    found = report.figures(folder)
    assert not found["good"]
    assert found["sums"]["sink_faults"] == 2, "one row of each of the two queries with a database"
