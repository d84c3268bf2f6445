"""`watch_state`: the rows it shows, their marks, and when it ends."""

from __future__ import annotations

import datetime as dt
import tempfile
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nbclient
import nbformat
import pyarrow as pa
import pytest
from rich.console import Console

from kafka_eos_source.errors import InvalidOptionError, NotUpToBoundError
from kafka_eos_source.observe import notebook
from kafka_eos_source.observe.draw import Mark, StateTable, as_html, as_text
from kafka_eos_source.observe.journal import Journal
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import tumbling
from kafka_eos_source.state.reading import live
from kafka_eos_source.state.reading.live import LiveTable, flat, text, watch_state
from kafka_eos_source.state.reading.query import StateQuery
from kafka_eos_source.state.vector.processor import AggregateProcessor
from tests.observe.figures_kit import BATCH
from tests.state.local_state import APP, STORE, Machine, rows_of

FLIGHTS = pa.schema([("origin", pa.string())])
SECONDS = 60


@pytest.fixture(autouse=True)
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a host without figures of other queries, and so have the processes that it starts."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(notebook, "_names", {})


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, AggregateProcessor(FLIGHTS, ["origin"], {"n": agg.count()}), ["origin"])


def committed(machine: Machine, batch_id: int, *origins: str) -> None:
    machine.batch(batch_id, rows_of(FLIGHTS, [(origin,) for origin in origins]))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)


def table_of(machine: Machine, rows: int = 20, **more: Any) -> LiveTable:
    return LiveTable(
        lambda: StateQuery(state_dir=machine.root, timeout_ms=200),
        more.pop("runs", lambda: True),
        title="app",
        rows=rows,
        **more,
    )


def shown(table: StateTable) -> dict[str, tuple[str, Mark]]:
    at = [list(table.columns).index(name) for name in ("origin", "n")]
    return {row[at[0]]: (row[at[1]], mark) for row, mark in zip(table.rows, table.marks, strict=True)}


def printed(table: StateTable, height: int | None = None) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(as_text(table, height))
    return console.export_text()


def text_of(html: str) -> str:
    """Returns the text that a reader sees; fails if the markup is not well-formed."""
    return " ".join(" ".join(ElementTree.fromstring(html).itertext()).split())


def test_rows_that_the_newest_batch_added_or_changed_are_marked(machine: Machine) -> None:
    committed(machine, 0, "JFK", "LGA")
    live_table = table_of(machine)
    first, runs = live_table.look()
    assert runs
    assert shown(first) == {"JFK": ("1", Mark.NONE), "LGA": ("1", Mark.NONE)}
    assert first.facts == "batch 0, 3 shards, 2 rows"
    committed(machine, 1, "JFK", "EWR")
    expected = {"JFK": ("2", Mark.CHANGED), "LGA": ("1", Mark.NONE), "EWR": ("1", Mark.NEW)}
    for _ in range(2):
        second, _ = live_table.look()
        assert shown(second) == expected
    committed(machine, 2)
    third, _ = live_table.look()
    assert {mark for _, mark in shown(third).values()} == {Mark.NONE}
    live_table.close()


def test_the_number_of_rows_is_bounded(machine: Machine) -> None:
    committed(machine, 0, *(f"A{n:03d}" for n in range(100)))
    live_table = table_of(machine, rows=7)
    table, _ = live_table.look()
    assert len(table.rows) == len(table.marks) == 7
    assert "the first 7 rows" in table.facts
    live_table.close()
    with StateQuery(state_dir=machine.root) as state:
        every = list(state.all())
        assert len(state.head(1_000)) == len(every) == 100
        for rows in (1, 7, 99, 100):
            head = state.head(rows)
            assert len(head) == rows
            assert all(row in every for row in head)
            assert {(row["key"]["origin"], row["partition_id"]) for row in head} <= {
                (row["key"]["origin"], row["partition_id"]) for row in every
            }


def test_the_newest_windows_come_first(tmp_path: Path) -> None:
    schema = pa.schema([("origin", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    window = tumbling("1 minute", on="at", grace="1 hour")
    processor = AggregateProcessor(schema, ["origin"], {"n": agg.count()}, window=window)
    machine = Machine(tmp_path, processor, ["origin"])
    noon = dt.datetime(2026, 11, 21, 12, tzinfo=dt.timezone.utc)
    origins = ("JFK", "LGA", "EWR", "BOS")
    rows = [(origin, noon + dt.timedelta(minutes=n)) for n in range(5) for origin in origins]
    machine.batch(0, rows_of(schema, rows))
    machine.commit()
    for shard in range(machine.shards):
        machine.promote(shard)
    with StateQuery(state_dir=machine.root) as state:
        ends = [row["key"]["window_end"] for row in state.all()]
        head = state.head(4)
    assert [row["key"]["window_end"] for row in head] == sorted(ends, reverse=True)[:4]


def test_a_store_that_does_not_exist_yet_is_awaited(machine: Machine) -> None:
    live_table = table_of(machine)
    table, _ = live_table.look(is_first=True)
    assert "there is no state of" in table.problem
    assert not table.rows
    committed(machine, 0, "JFK")
    table, _ = live_table.look()
    assert (table.problem, shown(table)) == ("", {"JFK": ("1", Mark.NONE)})
    live_table.close()


def test_the_last_rows_stay_while_the_state_cannot_be_read(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(machine, 0, "JFK")
    live_table = table_of(machine)
    live_table.look()
    with monkeypatch.context() as patch:

        def refresh(_: StateQuery) -> None:
            raise NotUpToBoundError("the store is being restored.")

        patch.setattr(StateQuery, "refresh", refresh)
        table, _ = live_table.look()
    assert "being restored" in table.problem
    assert shown(table) == {"JFK": ("1", Mark.NONE)}
    assert live_table.look()[0].problem == ""
    live_table.close()


def test_mistakes_of_the_caller_are_raised_at_once(machine: Machine) -> None:
    committed(machine, 0, "JFK")
    with pytest.raises(InvalidOptionError, match="stateVarName is 'visits'"):
        watch_state(APP, state_dir=machine.root, variable="visits")
    with pytest.raises(InvalidOptionError, match="neither state_dir nor kafka"):
        watch_state("app", "store")
    for wrong in ({"rows": 0}, {"interval": 0.0}):
        with pytest.raises(InvalidOptionError, match="expected at least one row"):
            watch_state(APP, state_dir=machine.root, **wrong)


def test_a_script_prints_one_table(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    committed(machine, 0, "JFK")
    assert watch_state(APP, state_dir=machine.root) is None
    printed_text = capsys.readouterr().out
    assert f"{APP} / {STORE}" in printed_text
    assert "JFK" in printed_text


class FakeQuery:
    """A query as ``start()`` returns it. Its figures say whose it is from the first micro-batch on."""

    def __init__(self, has_committed: bool = True) -> None:
        self.isActive = True
        self.id = uuid.uuid4()
        self.recentProgress: list[object] = []
        self.status = {"isTriggerActive": False}
        if has_committed:
            self.commit()

    def commit(self) -> None:
        Journal(APP).finished(replace(BATCH, application_id=APP, query_id=str(self.id)))

    def exception(self) -> None:
        return None


def test_a_notebooks_table_ends_with_the_query_and_shows_its_last_batch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[str] = []
    changed = threading.Condition()

    class Handle:
        def update(self, frame: dict[str, str], *, raw: bool) -> None:
            assert raw
            with changed:
                frames.append(frame["text/plain"])
                changed.notify_all()

    def show(frame: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert display_id
        Handle().update(frame, raw=raw)
        return Handle()

    monkeypatch.setattr(live, "notebook_display", lambda: show)
    query = FakeQuery(has_committed=False)
    watching = watch_state(query, interval=0.01, state_dir=machine.root)  # type: ignore[arg-type]
    assert watching is not None
    assert "the application.id of the query is not known yet" in " ".join(frames[-1].split())
    query.commit()
    committed(machine, 0, "JFK")
    with changed:
        assert changed.wait_for(lambda: "JFK" in frames[-1], SECONDS), frames[-1]
    committed(machine, 1, "LGA")
    query.isActive = False
    watching._thread.join(SECONDS)
    assert not watching._thread.is_alive()
    assert "LGA" in frames[-1]
    before = len(frames)
    ended = watch_state(query, state_dir=machine.root)  # type: ignore[arg-type]
    assert ended is not None
    assert len(frames) == before + 1, "a query that has ended gets one frame"
    ended.stop()


def test_a_kernel_shows_the_table_while_the_query_runs(machine: Machine) -> None:
    """With a real kernel: the cell ends at once, and its output changes while later cells run."""
    committed(machine, 0, "JFK")
    cells = [
        "import sys, threading; sys.path.insert(0, '.')\n"
        "from tests.state.reading.test_live import FakeQuery\n"
        "from kafka_eos_source import watch_state\n"
        "query = FakeQuery()",
        f"table = watch_state(query, interval=0.02, state_dir={str(machine.root)!r})\ntable",
        "query.isActive = False\ntable._thread.join(60); assert not table._thread.is_alive()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    (output,) = book.cells[1].outputs
    assert output.output_type == "display_data"
    assert "JFK" in text_of(output.data["text/html"])
    assert "JFK" in output.data["text/plain"]
    assert book.cells[2].outputs == []


def test_ctrl_c_ends_the_screen_of_a_terminal(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(machine, 0, "JFK")

    class Terminal(Console):
        def __init__(self, **more: Any) -> None:
            super().__init__(force_terminal=True, width=80, height=20, **more)

    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    monkeypatch.setattr(notebook, "Console", Terminal)
    monkeypatch.setattr("kafka_eos_source.observe.notebook.threading.Event", Interrupted)
    closed: list[StateQuery] = []
    close = StateQuery.close

    def note_and_close(self: StateQuery) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(StateQuery, "close", note_and_close)
    assert watch_state(APP, state_dir=machine.root) is None
    assert closed


def test_cells_cannot_add_markup_or_commands_to_a_terminal() -> None:
    evil = "<script>alert(1)</script>[red]\x1b]0;x\x07"
    table = StateTable(evil, evil, [evil], [[evil]], [Mark.NEW], evil)
    html = as_html(table)
    assert "<script" not in html
    assert text_of(html).count("<script>alert(1)</script>[red]") == 5
    assert "\x1b" not in html
    shown_text = printed(table)
    assert "\x1b" not in shown_text
    assert "[red]" in shown_text


def test_wide_and_long_tables_are_cut() -> None:
    table = StateTable(
        "t", "f", [f"c{n}" for n in range(30)], [["x" * 500 + "\ny"] * 30] * 50, [Mark.NONE] * 50
    )
    html = as_html(table)
    assert "x" * 61 not in html
    assert "c15" in html
    assert "c16" not in html
    assert len(printed(table, 10).splitlines()) < 10


def test_rows_become_columns_without_losing_a_name() -> None:
    row = {"key": {"n": 1, "partition_id": 2}, "value": {"n": 3, "m": b"\xff"}, "partition_id": 0}
    assert flat(row) == {"n": 1, "partition_id": 2, "value.n": 3, "m": b"\xff", "column.partition_id": 0}
    assert [text(each) for each in (None, b"\xff", "ä", 1.5, [1, b"a"])] == [
        "null",
        "ff",
        "ä",
        "1.5",
        '[1, "61"]',
    ]
