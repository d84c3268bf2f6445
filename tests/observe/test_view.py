"""What people see of the figures: pure functions of lines, with any clock and any set of live processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from kafka_eos_source.cli import main
from kafka_eos_source.observe import draw
from kafka_eos_source.observe.figures import (
    Outcome,
    SourceState,
    StepGroup,
)
from kafka_eos_source.observe.journal import Journal, QueryJournal, SourceFile
from kafka_eos_source.observe.lines import this_writer
from kafka_eos_source.observe.view import QueryView, Status
from kafka_eos_source.observe.wording import duration, lag, rate, size, status, transactions
from kafka_eos_source.operate import top
from kafka_eos_source.operate.topics import GroupLag, PartitionLag
from kafka_eos_source.protocol.token import Token
from tests.observe.figures_kit import (
    BATCH,
    DONE,
    LAST,
    NOW,
    SOURCE,
    T0,
    WAITING,
    WRITER,
    batch,
    journal,
    seen,
)


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        (journal(LAST, sources=(DONE,)), Status.IDLE, ""),
        (
            journal(LAST, sources=(replace(DONE, reason="minOffsetsPerTrigger=5: 2 …"),)),
            Status.WAITING,
            "minOff",
        ),
        (
            journal(LAST, sources=(replace(DONE, state=SourceState.PLANNED, planned={T0: 14}),)),
            Status.RUNNING,
            "Spark has run the tasks of a micro-batch for 1000 s",
        ),
        (
            journal(LAST, sources=(replace(DONE, state=SourceState.ASKING, reason="refused"),)),
            Status.WAITING,
            "brokers do not answer the source: refused",
        ),
        (journal(LAST, sources=(replace(DONE, state=SourceState.STOPPED),)), Status.STOPPED, ""),
        (
            journal(
                replace(LAST, outcome=Outcome.FAILED, error="TOKEN_MISSING"),
                sources=(replace(DONE, state=SourceState.STOPPED),),
            ),
            Status.FAILED,
            "TOKEN_MISSING",
        ),
        (
            journal(LAST, sources=(DONE,), waiting=replace(WAITING, at=NOW, retried=0)),
            Status.WAITING,
            "batch 7: waiting until the brokers acknowledge the records (no answer)",
        ),
        (
            journal(LAST, sources=(DONE,), waiting=replace(WAITING, at=NOW, step="lost")),
            Status.RETRYING,
            "batch 7: pausing before the next try (no answer)",
        ),
        (journal(LAST, sources=(DONE,), waiting=replace(WAITING, at=NOW - 30)), Status.IDLE, ""),
        (journal(batch(7, NOW - 2)), Status.RUNNING, ""),
        (journal(LAST), Status.IDLE, ""),
        (QueryJournal("app"), Status.STOPPED, ""),
    ],
)
def test_the_status_of_a_query(found: QueryJournal, expected: Status, text: str) -> None:
    shown = seen(found)
    assert (shown.status, shown.status_text[: len(text)]) == (expected, text)
    json.dumps(shown.to_json())


def test_a_killed_driver_has_stopped_whatever_its_files_say() -> None:
    found = journal(
        LAST,
        sources=(replace(DONE, state=SourceState.PLANNED, planned={T0: 14}),),
        waiting=replace(WAITING, at=NOW),
    )
    assert seen(found, WRITER.process, WRITER.driver).status is Status.STOPPED
    assert seen(journal(LAST), WRITER.driver).status is Status.STOPPED


def test_rates_cover_the_last_minute_although_lines_were_dropped() -> None:
    batches = [
        batch(number, NOW - 100 + number, counts={"records": 10, "offsets_read": 12}) for number in range(100)
    ]
    found = journal(*batches)
    shown = seen(found)
    assert shown.records_per_second == pytest.approx(10, rel=0.05)
    assert shown.read_per_second == pytest.approx(12, rel=0.05)
    fewer = seen(replace(found, batches=(*found.batches[:39], *found.batches[90:])))
    assert fewer.records_per_second == pytest.approx(10, rel=0.05), "totals bridge the gap"


def test_a_new_run_has_its_own_rate_and_totals() -> None:
    old = [batch(number, NOW - 30 + number, run_id="old", counts={"records": 1000}) for number in range(10)]
    new = [batch(number, NOW - 10 + number, counts={"records": 10}, seconds={}) for number in range(10)]
    shown = seen(journal(*old, *new))
    assert shown.totals["records"] == 100
    assert shown.records_per_second == pytest.approx(10, rel=0.1)
    assert len(shown.batches) == 20
    other = [replace(each, query_id="another query") for each in old]
    assert len(seen(journal(*other, *new)).batches) == 10, "a new checkpoint begins a new history"


def test_the_lag_counts_from_the_newest_committed_batch() -> None:
    source = replace(DONE, start={T0: 4}, planned={T0: 12}, latest={T0: 20}, behind_since={"in": NOW - 3})
    before = seen(journal(batch(6, NOW - 20), sources=(source,)))
    assert before.lag["in"].offsets == 16
    after = seen(journal(LAST, sources=(source,)))
    assert (after.lag["in"].offsets, after.lag["in"].seconds, after.total_lag) == (8, 3, 8)
    assert after.lag["in"].partitions == {0: 8}
    assert seen(journal(LAST)).total_lag is None


def test_the_token_has_the_age_of_the_last_transaction() -> None:
    shown = seen(journal(LAST, batch(8, NOW - 5, sequence=None, outcome=Outcome.SKIPPED)))
    assert (shown.token_at, shown.sequence) == (LAST.ended_at, LAST.sequence)


def test_words() -> None:
    assert [duration(each) for each in (0.0004, 0.0123, 0.9996, 12.3, 59.6, 100, 3661, 1e6)] == [
        "0 ms",
        "12 ms",
        "1.0 s",
        "12 s",
        "60 s",
        "1 min 40 s",
        "1 h 01 min",
        "11 days",
    ]
    assert [size(each) for each in (0, 1023, 1536, 5 << 30)] == [
        "0 bytes",
        "1,023 bytes",
        "1.5 KiB",
        "5.0 GiB",
    ]
    assert [rate(each) for each in (0, 0.25, 1234.5)] == ["0", "0.2", "1,234"]
    assert transactions({"committed": 3, "aborted": 0, "unknown": 1}) == "3 committed, 1 of unknown outcome"
    shown = seen(journal(LAST, sources=(replace(DONE, latest={T0: 20}, behind_since={"in": NOW - 3}),)))
    assert lag(shown.lag) == "8 (over 3.0 s)"
    assert status(shown) == "waiting for data for 20 s"


# -- the terminal ----------------------------------------------------------------------------------


def drawn(views: list[QueryView], width: int, *, colour: bool = False, height: int | None = None) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=colour,
        no_color=not colour,
        color_system="256" if colour else None,
    )
    console.print(draw.frame(views, height))
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 79, 80, 200])
def test_a_frame_fits_the_terminal(width: int) -> None:
    full = journal(
        *(
            batch(number, NOW - 10 + number / 10, counts={**BATCH.counts, "shards": 2})
            for number in range(90)
        ),
        sources=(replace(DONE, latest={T0: 2_000_000}),),
        waiting=replace(WAITING, at=NOW),
    )
    for views in ([seen(full)], [seen(full), seen(journal(LAST))]):
        lines = drawn(views, width).splitlines()
        assert max(map(len, lines)) <= width
        assert any(line.startswith("app/ä") for line in lines[:2])


def test_without_colours_letters_tell_the_steps_apart() -> None:
    shown = seen(journal(LAST))
    text = drawn([shown], 100)
    assert "\x1b" not in text
    assert "tttt" in text
    assert "w write" in text
    assert "\x1b" in drawn([shown], 100, colour=True)


def test_a_bar_shows_the_parts_in_proportion() -> None:
    shown = seen(journal(batch(7, NOW, seconds={"tasks": 3.0, "flush": 1.0}))).batches[0]
    assert draw.bar(shown, 4.0, 40, colour=False).plain == "t" * 30 + "w" * 10
    assert draw.bar(shown, 8.0, 40, colour=False).plain == "t" * 15 + "w" * 5
    assert draw.bar(shown, 2.0, 40, colour=False).plain == "t" * 39 + "›"
    assert shown.seconds == {StepGroup.TASKS: 3.0, StepGroup.WRITE: 1.0}


def test_the_list_of_batches_fits_the_height() -> None:
    shown = seen(journal(*(batch(number, NOW) for number in range(50))))
    assert len(drawn([shown], 100, height=24).splitlines()) <= 24


def test_nothing_to_show() -> None:
    assert "during the last seven days" in drawn([], 100)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def recorded() -> Callable[..., None]:
    def record(application_id: str, ended_at: float, **more: Any) -> None:
        journal = Journal(application_id)
        journal.finished(batch(7, ended_at, application_id=application_id, **more))

    return record


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["top", *arguments])


def test_top_shows_the_queries_of_the_host(recorded: Callable[..., None]) -> None:
    recorded("old", time.time() - 7200)
    recorded("older", time.time() - 3 * 24 * 3600)
    recorded("new", time.time(), writer=this_writer())
    SourceFile("s").write(replace(SOURCE, application_id="new", at=time.time(), writer=this_writer()))
    found = [json.loads(line) for line in run("--json").stdout.splitlines()]
    assert [each["application_id"] for each in found] == ["new", "old", "older"], "the newest first"
    assert found[0]["totals"]["records"] == 10
    assert found[0]["lag"]["in"]["offsets"] == 2
    assert "older" in run("--once").stdout
    for number in range(20):
        recorded(f"ended-{number}", time.time() - 60 * number)
    shown = [json.loads(line)["application_id"] for line in run("--json").stdout.splitlines()]
    assert shown == ["new", *(f"ended-{number}" for number in range(20))]
    everything = run("--json", "--all").stdout.splitlines()
    assert [json.loads(line)["application_id"] for line in everything[-2:]] == ["old", "older"]
    assert "old" in run("--once", "old").stdout


def test_top_refreshes_in_a_terminal_until_ctrl_c(recorded: Callable[..., None], shared: Path) -> None:
    """The figures change while it runs, and the terminal shows again what it showed before."""
    recorded("first", time.time())
    main_side, terminal_side = pty.openpty()
    # a test run in the background ignores SIGINT, and its child processes inherit that
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kafka_eos_source.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "top", "--interval", "50ms"]
    environment = {
        **os.environ,
        "TMPDIR": str(shared),
        "TERM": "xterm-256color",
        "COLUMNS": "100",
        "LINES": "30",
    }
    with subprocess.Popen(
        command, stdin=terminal_side, stdout=terminal_side, stderr=terminal_side, env=environment
    ) as running:
        os.close(terminal_side)
        out = b""

        def read_more() -> bytes:
            assert select.select([main_side], [], [], 60.0)[0], out
            return os.read(main_side, 4096)

        try:
            while b"first" not in out:
                out += read_more()
            recorded("second", time.time())
            while b"second" not in out:
                out += read_more()
            running.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # the terminal is gone when the process has ended
                deadline = time.monotonic() + 60.0
                while time.monotonic() < deadline and (more := read_more()):
                    out += more
        except BaseException:
            running.kill()
            raise
        assert running.wait(60) == 0
    os.close(main_side)
    assert b"\x1b[?1049h" in out, "the alternate screen"
    assert out.rstrip().endswith((b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l", b"\x1b[?1049l"))
    assert b"Traceback" not in out


@pytest.mark.parametrize("interval", ["0s", "9ms", "2h", "999999999999999d"])
def test_top_refuses_an_interval_without_a_pause_or_without_an_end(interval: str) -> None:
    result = CliRunner().invoke(main, ["top", "--once", "--interval", interval])
    assert result.exit_code == 1
    assert "expected a time from 10ms to 1h" in result.stderr


def test_top_ends_quietly_if_its_output_is_closed(shared: Path) -> None:
    command = f'exec "{sys.executable}" -m kafka_eos_source.cli top --once >&-'
    done = subprocess.run(
        command, shell=True, env={**os.environ, "TMPDIR": str(shared)}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_top_says_why_it_shows_nothing() -> None:
    assert run("--once").exit_code == 0
    missing = run("--once", "app")
    assert missing.exit_code == 1
    assert "--bootstrap-servers" in missing.stderr


def test_top_refuses_figures_that_another_user_planted(shared: Path) -> None:
    (shared / f"kafka-eos-live-{os.getuid()}").symlink_to(shared)
    refused = run("--json")
    assert refused.exit_code == 1
    assert "kafka-eos-live" in refused.stdout, "with --json, errors are JSON too"


def test_a_query_elsewhere_shows_what_kafka_knows() -> None:
    token = Token("app", "query", "run", 4, 3, "a", "b", 1000)
    shown = top.remote_view("app", token, GroupLag("app", NOW, [PartitionLag(T0, 5, 9, False)]))
    assert (shown.status, shown.total_lag, shown.sequence) == (Status.ELSEWHERE, 4, 4)
    assert "batch 3 is committed, with 1,000 records" in drawn([shown], 100)
