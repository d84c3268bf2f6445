"""The command line of the soak: ``./dev soak MINUTES``, or ``python -m integration.chaos.soak MINUTES``."""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import click

from integration.chaos.soak import report
from integration.chaos.soak.cluster import BrokenBrokerError
from integration.chaos.soak.conductor import Conductor, Settings, StuckError, WrongError
from integration.chaos.soak.folder import HeldError, RunFolder

_GOOD, _WRONG, _BROKEN_BROKER = 0, 1, 2
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("minutes", type=float, default=10.0)
@click.option("--seed", type=int, default=None, help="Replays the schedule of faults of an earlier run.")
@click.option("--keep", type=_FOLDER, default=None, help="Folder for a new run; by default a temporary one.")
@click.option("--resume", type=_FOLDER, default=None, help="Continues the run in this folder for MINUTES.")
@click.option("--report", "reported", type=_FOLDER, default=None, help="Only prints the report of a run.")
@click.option(
    "--faults",
    type=float,
    default=Settings.fault_seconds,
    show_default=True,
    help="Mean seconds between faults; 0 = no faults.",
)
@click.option(
    "--rows", type=float, default=Settings.rows_per_second, show_default=True, help="Input rows per second."
)
@click.option(
    "--chunk", type=float, default=Settings.chunk_seconds, show_default=True, help="Seconds of a chunk."
)
@click.option(
    "--stuck",
    type=float,
    default=Settings.stuck_seconds,
    show_default=True,
    help="Seconds without a commit after which a query is helped, so that the run fails.",
)
def main(
    minutes: float,
    seed: int | None,
    keep: Path | None,
    resume: Path | None,
    reported: Path | None,
    faults: float,
    rows: float,
    chunk: float,
    stuck: float,
) -> None:
    """Runs queries under random faults for MINUTES, and judges every chunk of what they write.

    The exit code is 0 if everything is there exactly once and no query needed help, 1 if not, and 2 if a
    broker broke its own promise. Ctrl-C ends the run after the chunk that is under way.
    """
    if sum(each is not None for each in (keep, resume, reported)) > 1:
        raise click.UsageError("--keep, --resume and --report exclude each other.")
    run = RunFolder(resume or reported or keep or Path(tempfile.mkdtemp(prefix="kafka-eos-soak-")))
    if (resume or reported) and not run.exists:
        raise click.UsageError(f"{run.path} holds no run.")
    if reported:
        _end(run)
    last = run.chunks.last()
    if resume and last is not None and not last["good"]:
        raise click.UsageError(f"chunk {last['chunk']} of this run is wrong; its folder keeps the evidence.")
    if not resume:
        seed = random.SystemRandom().randrange(100_000) if seed is None else seed
        try:
            run.begin(**asdict(Settings(seed, rows, chunk, faults, stuck)))
        except FileExistsError as error:
            raise click.UsageError(str(error)) from error
    settings = Settings(**run.settings())
    began = time.monotonic()

    def tell(line: str) -> None:
        click.echo(f"{time.strftime('%H:%M:%S')} {time.monotonic() - began:8.1f} s  {line}")

    tell(f"seed {settings.seed}, {minutes:g} minutes, in {run.path}")
    try:
        with run.held():
            conductor = Conductor(run, settings, tell)
            _stop_at_signals(conductor)
            conductor.run(minutes)
    except HeldError as error:
        raise click.UsageError(str(error)) from error
    except BrokenBrokerError as error:
        click.echo(f"STOPPED {error}")
        report.write(run)
        sys.exit(_BROKEN_BROKER)
    except (WrongError, StuckError) as error:
        click.echo(f"WRONG {error}")
        click.echo(report.markdown(report.write(run)))
        sys.exit(_WRONG)
    _end(run)


def _stop_at_signals(conductor: Conductor) -> None:
    """Makes Ctrl-C and SIGTERM end the run in order; the second one ends it at once."""

    def stop(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        click.echo(f"{name}: the chunk under way is judged first; once more to give it up")
        conductor.stop()
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)


def _end(run: RunFolder) -> None:
    found = report.write(run)
    click.echo(report.markdown(found))
    sys.exit(_GOOD if found["good"] else _WRONG)


if __name__ == "__main__":
    main()
