"""T53: a short soak; ``./dev soak 600`` runs longer."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from integration.chaos.soak import report
from integration.chaos.soak.cluster import BrokenBrokerError
from integration.chaos.soak.conductor import Conductor, Settings, WrongError
from integration.chaos.soak.folder import HeldError, RunFolder
from integration.support import processes
from integration.support.driver import ROOT
from integration.support.faults import MEASURES
from integration.support.processes import await_condition

_RESUMED = pytest.mark.fault(
    "T148", "the soak itself ends or is killed, and is resumed", "between two chunks; within one"
)
_SECONDS = 800.0


def run(folder: RunFolder, settings: Settings, minutes: float, said: list[str]) -> None:
    try:
        with folder.held():
            Conductor(folder, settings, said.append).run(minutes)
    except BrokenBrokerError as error:
        pytest.skip(str(error))


@pytest.mark.fault("T53", "any of these at random, every few seconds", "any")
@_RESUMED
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


class Command:
    """The soak's command on one folder. Each session's output goes to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.run = RunFolder(folder / "run")
        self._folder = folder
        self._sessions: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        self._log = self._folder / f"session-{len(self._sessions)}.log"
        command = [sys.executable, "-u", "-m", "integration.chaos.soak", *words]
        with open(self._log, "wb") as out:
            session = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        self._sessions.append(session)
        return session

    def said(self) -> str:
        """What the last session has said."""
        return self._log.read_text(errors="replace")

    def await_condition(
        self, session: subprocess.Popen[bytes], what: str, condition: Callable[[], bool]
    ) -> None:
        """Waits while the session runs; skips the test if a broker broke its promise meanwhile."""
        await_condition(lambda: condition() or session.poll() is not None, _SECONDS, what)
        if session.poll() is not None and "STOPPED" in self.said():
            pytest.skip(self.said())
        assert condition(), self.said()

    def processes(self) -> list[psutil.Process]:
        """The processes that sessions started and that live."""
        return processes.marked(processes.SOAK, str(self.run.path))

    def close(self) -> None:
        """Kills everything."""
        for session in self._sessions:
            session.kill()
            session.wait()
        processes.kill_marked(processes.SOAK, str(self.run.path))


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    with closing(Command(tmp_path)) as made:
        yield made


@_RESUMED
@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("is_judged", [True, False], ids=["while_a_chunk_is_deleted", "within_a_chunk"])
def test_t148_a_soak_that_was_killed_is_resumed(
    request: pytest.FixtureRequest, command: Command, is_judged: bool
) -> None:
    """Brokers and queries lose their parent; a driver that is paused at that moment cannot notice it."""
    folder = command.run
    session = command.start("30", "--chunk", "20", "--faults", "3", "--keep", str(folder.path))
    command.await_condition(session, "a chunk is judged", lambda: folder.chunks.last() is not None)
    if not is_judged:
        before = _faults(folder)
        command.await_condition(session, "the next chunk has faults", lambda: _faults(folder) > before)
        with pytest.raises(HeldError, match="another process runs the soak"), folder.held():
            pass
    loop = next(each for each in command.processes() if "integration.chaos.loop" in each.info["cmdline"])
    loop.suspend()
    session.kill()
    session.wait()
    assert _sessions(folder) == 1
    resumed = command.start("0.4", "--resume", str(folder.path))
    command.await_condition(resumed, "the session has begun", lambda: _sessions(folder) == 2)
    assert not processes.is_alive(loop)
    command.await_condition(resumed, "the session has ended", lambda: resumed.poll() is not None)
    assert resumed.returncode == 0, command.said()
    found = report.figures(folder)
    request.node.user_properties.append((MEASURES, report.measures(found)))
    assert found["good"], command.said()
    assert found["chunks"] >= 2
    assert not command.processes()


def _faults(folder: RunFolder) -> int:
    return sum(1 for each in folder.faults if each["kind"] == "fault")


def _sessions(folder: RunFolder) -> int:
    return sum(1 for each in folder.events if each["kind"] == "session")


@pytest.mark.fault("T147", "a row of an external sink is deleted", "before a chunk is judged")
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
