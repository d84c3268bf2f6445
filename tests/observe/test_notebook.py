"""The panel of a notebook: its HTML, the thread that refreshes it, and the figures over Spark Connect."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import nbclient
import nbformat
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kafka_eos_source.observe import notebook
from kafka_eos_source.observe.draw import _ticks, panel
from kafka_eos_source.observe.figures import Event, EventKind, Outcome, Step, StepGroup
from kafka_eos_source.observe.journal import Journal
from kafka_eos_source.observe.notebook import view_of_reports
from kafka_eos_source.observe.source import with_figures
from kafka_eos_source.observe.view import QueryView, Status
from kafka_eos_source.protocol.offset_log import SourcePosition
from tests.observe.figures_kit import BATCH, DONE, LAST, NOW, T0, WAITING, batch, journal, seen

SECONDS = 60


def text_of(html: str) -> str:
    """Returns the text that a reader sees; fails if the markup is not well-formed."""
    return " ".join("".join(ElementTree.fromstring(html).itertext()).split())


# -- HTML ------------------------------------------------------------------------------------------


def test_the_panel_says_what_the_query_does() -> None:
    last = replace(LAST, counts={**LAST.counts, "shards": 2})
    source = replace(DONE, latest={T0: 20})
    text = text_of(panel(seen(journal(last, sources=(source,), waiting=replace(WAITING, at=NOW)))))
    for wanted in (
        "app/ä",
        "waiting",
        "acknowledge",
        "no answer",
        "offsets behind8",
        "10 records",
        "files",
        "late_rows",
    ):
        assert wanted in text, wanted


@given(
    batches=st.lists(
        st.tuples(
            st.sampled_from(Outcome),
            st.dictionaries(st.sampled_from([each.value for each in Step]), st.floats(0, 1e5)),
            st.integers(0, 3),
        ),
        max_size=70,
    )
)
def test_the_markup_is_well_formed_whatever_the_figures(
    batches: list[tuple[Outcome, dict[str, float], int]],
) -> None:
    found = journal(
        *(
            batch(number, NOW, outcome=outcome, seconds=seconds, counts={"retried": retried})
            for number, (outcome, seconds, retried) in enumerate(batches)
        )
    )
    text_of(panel(seen(found)))


def test_names_and_errors_cannot_add_markup() -> None:
    evil = "<script>alert(1)</script>"
    found = journal(
        replace(LAST, application_id=evil, outcome=Outcome.FAILED, error=evil, sinks={evil: {"rows": 1}}),
        sources=(replace(DONE, name=evil),),
    )
    html = panel(replace(seen(found), application_id=evil, status_text=evil))
    assert "<script" not in html
    assert evil in text_of(html)


@pytest.mark.parametrize("evil", ["[/x] [red]", ":warning:", "\x1b]0;title\x07\x1b[31m"])
def test_the_text_beside_the_panel_shows_names_and_errors_as_they_are(evil: str) -> None:
    event = Event(NOW, EventKind.RETRIED, evil)
    found = seen(journal(replace(LAST, events=(event,), sinks={evil: {"rows": 1}})))
    text = notebook._bundle(replace(found, application_id=evil, status_text=evil))["text/plain"]
    assert "\x1b" not in text
    assert "\x07" not in text
    shown = "".join(each if each.isprintable() else "\ufffd" for each in evil)
    assert text.count(shown) == 4, "name, status, sink and event"


@given(st.floats(1e-4, 1e6))
def test_ticks_are_few_and_round(longest: float) -> None:
    ticks = _ticks(longest)
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert ticks[-1] <= longest * 1.0001


# -- progress reports ------------------------------------------------------------------------------


def report(number: int, figures: Any, *, behind: int = 0, as_text: bool = False) -> dict[str, Any]:
    end = SourcePosition({T0: 10 * number}).to_dict()
    latest = with_figures(SourcePosition({T0: 10 * number + behind}).to_dict(), figures)
    return {
        "batchId": number,
        "timestamp": "2026-01-02T03:04:05.678Z",
        "numInputRows": 10,
        "inputRowsPerSecond": 5.0,
        "durationMs": {"triggerExecution": 250},
        "sources": [
            {"description": "in", "endOffset": end, "latestOffset": json.dumps(latest) if as_text else latest}
        ],
        "sink": {"numOutputRows": -1},
    }


def of_reports(
    *reports: dict[str, Any], runs: bool = True, works: bool = False, error: str = ""
) -> QueryView:
    return view_of_reports("query", reports, NOW, runs=runs, works=works, error=error)


@pytest.mark.parametrize("as_text", [False, True])
def test_reports_carry_the_figures_over_connect(as_text: bool) -> None:
    found = journal(*(batch(number, NOW - 10 + number) for number in range(3)))
    reports = [
        report(number, found.batches[max(0, number - 1)], behind=7, as_text=as_text) for number in range(4)
    ]
    shown = of_reports(*reports, works=True)
    assert [each.batch_id for each in shown.batches] == [0, 1, 2]
    assert shown.totals["records"] == 30
    assert shown.total_lag == 7
    assert (shown.status, shown.application_id) == (Status.RUNNING, BATCH.application_id)
    assert StepGroup.WRITE in shown.batches[0].seconds


def test_reports_of_another_source_show_sparks_numbers() -> None:
    shown = of_reports(report(1, None), report(2, None))
    assert [(each.batch_id, each.offsets_read, each.total_seconds) for each in shown.batches] == [
        (1, 10, 0.25),
        (2, 10, 0.25),
    ]
    assert shown.status is Status.IDLE
    assert shown.read_per_second == 5
    text_of(panel(shown))


def test_a_query_that_has_ended_says_so_over_connect() -> None:
    assert of_reports(runs=False).status is Status.STOPPED
    failed = of_reports(runs=False, error="TOKEN_MISSING")
    assert (failed.status, failed.status_text) == (Status.FAILED, "TOKEN_MISSING")


@example({"": {"²": 0}})  # a digit that is no number
@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_offsets_of_any_other_source_do_no_harm(offset: object) -> None:
    odd = {"sources": [{"latestOffset": offset, "endOffset": offset}], "durationMs": {}}
    text_of(panel(of_reports(odd)))


# -- watch -----------------------------------------------------------------------------------------


class FakeQuery:
    """A streaming query of a test."""

    def __init__(self, query_id: str) -> None:
        self.id = query_id
        self.isActive = True
        self.recentProgress: list[Any] = [report(1, None)]
        self.status: dict[str, Any] = {"isTriggerActive": False}
        self.failure: Exception | None = None

    def exception(self) -> Exception | None:
        return self.failure


class FakeNotebook:
    """Stands in for IPython's ``display`` and its handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: list[dict[str, str]] = []
        self.changed = threading.Condition()
        monkeypatch.setattr(notebook, "notebook_display", lambda: self.display)
        monkeypatch.setattr(notebook, "_watches", {})

    def display(self, frame: dict[str, str], *, raw: bool, display_id: bool) -> FakeNotebook:
        assert raw
        assert display_id
        return self.update(frame, raw=raw)

    def update(self, frame: dict[str, str], *, raw: bool) -> FakeNotebook:
        with self.changed:
            self.frames.append(frame)
            self.changed.notify_all()
        return self

    def await_text(self, wanted: str) -> None:
        with self.changed:
            found = self.changed.wait_for(lambda: wanted in self.frames[-1]["text/plain"], SECONDS)
        assert found, self.frames[-1]["text/plain"]


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> FakeNotebook:
    return FakeNotebook(monkeypatch)


def test_the_panel_refreshes_itself_until_the_query_ends(pages: FakeNotebook) -> None:
    query = FakeQuery("query")
    watching = notebook.watch(query, 0.01)
    assert watching is not None
    pages.await_text("waiting for data")
    query.status = {"isTriggerActive": True}
    pages.await_text("running")
    query.failure, query.isActive = RuntimeError("TOKEN_MISSING: …\nmore lines"), False
    pages.await_text("TOKEN_MISSING")
    watching._thread.join(SECONDS)
    assert not watching._thread.is_alive()
    assert "more lines" not in pages.frames[-1]["text/plain"]
    text_of(pages.frames[-1]["text/html"])


def test_a_second_panel_replaces_the_first(pages: FakeNotebook) -> None:
    query = FakeQuery("query")
    first, second = notebook.watch(query, 0.01), notebook.watch(query, 0.01)
    assert first is not None
    assert second is not None
    assert not first._thread.is_alive()
    assert second._thread.is_alive()
    second.stop()
    assert not second._thread.is_alive()
    second.stop()


def test_a_query_that_has_ended_gets_one_frame(pages: FakeNotebook) -> None:
    query = FakeQuery("query")
    query.isActive = False
    watching = notebook.watch(query)
    assert watching is not None
    assert len(pages.frames) == 1
    watching.stop()


def test_the_panel_ends_with_the_session(pages: FakeNotebook) -> None:
    class Gone(FakeQuery):
        @property
        def status(self) -> dict[str, Any]:
            if len(pages.frames) > 1:
                raise ConnectionError("the session is closed")
            return {}

        @status.setter
        def status(self, _value: object) -> None: ...

    watching = notebook.watch(Gone("query"), 0.01)
    assert watching is not None
    watching._thread.join(SECONDS)
    assert not watching._thread.is_alive()


def test_the_files_of_the_host_are_preferred_and_spark_decides_whether_it_runs(pages: FakeNotebook) -> None:
    Journal(BATCH.application_id).finished(BATCH)
    query = FakeQuery(BATCH.query_id)
    query.isActive = False
    found, runs = notebook.view_of(query)
    assert (found.application_id, found.status, runs) == (BATCH.application_id, Status.STOPPED, False)


def test_a_script_prints_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    assert notebook.watch(FakeQuery("query")) is None
    assert "waiting for data" in capsys.readouterr().out


def test_a_kernel_updates_the_output_of_the_cell() -> None:
    """With a real kernel: the cell ends at once, and its output changes while later cells run."""
    cells = [
        "import sys, threading; sys.path.insert(0, '.')\n"
        "from tests.observe.test_notebook import FakeQuery\n"
        "from kafka_eos_source import watch\n"
        "query = FakeQuery('in a kernel')",
        "panel = watch(query, 0.02)\npanel",
        "query.status = {'isTriggerActive': True}\nthreading.Event().wait(0.5)\nquery.isActive = False\n"
        "panel._thread.join(60); assert not panel._thread.is_alive()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    (output,) = book.cells[1].outputs
    assert output.output_type == "display_data"
    assert "stopped" in text_of(output.data["text/html"])
    assert "stopped" in output.data["text/plain"]
    assert book.cells[2].outputs == []
