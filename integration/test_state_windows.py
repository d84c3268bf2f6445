"""The window examples revise results within the grace period and complete each one once, despite kills."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples import flight_delays
from examples.page_views import GRACE_MS, SHARDS, SHORTEST_MS, WINDOW_MS, Application
from integration.support.driver import ROOT
from integration.support.kafka import produce, read_back

VIEWS, PER_BATCH, FLIGHTS = 300, 50, 4000
CATEGORIES = ("books", "films", "games", "music", "news")

#: Failpoints at which the driver dies: in a shard's task and on either side of the commit. It does not die on
#: the first pass, so that all three queries are running by then.
KILLS = {"state.after_pending": 4, "commit.before_commit": 2, "commit.after_commit": 2}

Key = tuple[str, int]


class View(NamedTuple):
    time_ms: int
    category: str
    period_ms: int


def views(number: int) -> list[View]:
    """Returns views, ten a second; some late within the grace period, some beyond it, some too short."""
    chance = random.Random(5)
    begin_ms = int(time.time() * 1000) - 3_600_000
    found = []
    for index in range(number):
        behind_ms = chance.choices(
            (0, chance.randrange(GRACE_MS), chance.randrange(2 * GRACE_MS, 4 * GRACE_MS)), (70, 25, 5)
        )[0]
        found.append(
            View(
                begin_ms + 100 * index - behind_ms,
                chance.choice(CATEGORIES),
                chance.randrange(SHORTEST_MS // 2, 3 * SHORTEST_MS),
            )
        )
    return found


def closing(after: Sequence[View]) -> list[View]:
    """Returns one view of every category, so much later that all earlier windows close."""
    last_ms = max(view.time_ms for view in after)
    return [View(last_ms + 60_000, category, SHORTEST_MS) for category in CATEGORIES]


class Model:
    """An independent model of the results that the given micro-batches of views must produce."""

    def __init__(self, batches: Sequence[Sequence[View]]) -> None:
        self.revisions: defaultdict[Key, list[int]] = defaultdict(list)
        self.late = 0
        counts: Counter[Key] = Counter()
        stream_ms: float = float("-inf")
        for batch in batches:
            kept = [view for view in batch if view.period_ms >= SHORTEST_MS]
            changed = set()
            for view in kept:
                key = view.category, view.time_ms // WINDOW_MS * WINDOW_MS
                if key[1] + WINDOW_MS + GRACE_MS <= stream_ms:
                    self.late += 1
                else:
                    counts[key] += 1
                    changed.add(key)
            for key in changed:
                self.revisions[key].append(counts[key])
            stream_ms = max([stream_ms, *(view.time_ms for view in kept)])
        self.complete = {key: [counts[key]] for key in counts if key[1] + WINDOW_MS + GRACE_MS <= stream_ms}


def micro_batches(application: Application, sent: Sequence[Sequence[View]]) -> list[list[View]]:
    """Returns the views of each micro-batch, according to Spark's offset log.

    Args:
        sent: the views sent to each partition.
    """
    folder = application.checkpoint / "offsets"
    starts, batches = [0] * len(sent), []
    for number in range(len([path for path in folder.iterdir() if path.name.isdecimal()])):
        last = (folder / str(number)).read_text().splitlines()[-1]
        ends = json.loads(last[last.index("{") :])[application.events]
        batches.append(
            [view for part, own in enumerate(sent) for view in own[starts[part] : ends[str(part)]]]
        )
        starts = [ends[str(part)] for part in range(len(sent))]
    assert sum(map(len, batches)) == sum(map(len, sent)), "the query has read everything"
    return batches


def results(broker: str, topic: str) -> dict[Key, list[int]]:
    """Returns the counts of each window in the order in which they were written."""
    found: defaultdict[Key, list[int]] = defaultdict(list)
    for record in read_back(broker, topic):
        row = json.loads(record.value or b"")
        assert record.key == f"{row['category']}@{row['window_start_ms']}".encode()
        found[row["category"], row["window_start_ms"]].append(row["views"])
    return dict(found)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.fault("S10", "the driver is killed while windows are revised and closed", "three moments")
def test_windows_are_revised_and_completed_once_although_drivers_are_killed(
    broker: str, topic: Callable[..., str], driver: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_views = views(VIEWS)
    events, sent = topic(2), [made_views[part::2] + closing(made_views) for part in range(2)]
    for part, own in enumerate(sent):
        produce(
            broker,
            events,
            [json.dumps({"category": view.category, "period_ms": view.period_ms}) for view in own],
            partition=part,
            timestamps_ms=[view.time_ms for view in own],
        )
    updates, final = (
        Application(broker, events, topic(SHARDS), emit, tmp_path) for emit in ("on_update", "on_close")
    )
    frame = flight_delays.in_order(FLIGHTS)
    flights = flight_delays.prepare(broker, frame, tmp_path / "flights", batches=6)
    flights.write(tmp_path / "flights.json")
    spec = {
        "applications": [{**vars(each), "folder": str(each.folder)} for each in (updates, final)],
        "flights": str(tmp_path / "flights.json"),
        "offsets_per_trigger": PER_BATCH,
    }
    module = "integration.support.windowed"
    for step, times in KILLS.items():
        once = tmp_path / f"once-{step}"
        killed = driver(spec, f"{step}=kill*{times}@{once}", module=module)
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
    driver(spec, module=module).finish()

    model = Model(micro_batches(updates, sent))
    assert results(broker, updates.output) == model.revisions
    assert updates.late_views() == model.late > 0
    assert any(len(counts) > 1 for counts in model.revisions.values()), "windows were revised"

    model = Model(micro_batches(final, sent))
    assert results(broker, final.output) == model.complete
    assert final.late_views() == model.late > 0
    assert len(model.complete) > 0.8 * len(model.revisions)

    assert flight_delays.verdict(frame, flights), capsys.readouterr().out
    assert len(list(flight_delays.complete(flights))) > 20


@pytest.mark.timeout(400)
def test_the_page_views_example_prints_revisions_and_complete_windows(broker: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "examples.page_views", "--bootstrap-servers", broker],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    steps = finished.stdout.strip().split("\n\n")
    written = [[line.strip() for line in step.splitlines() if "→" in line] for step in steps]
    assert written[2] == ["→ 12:00:00 to 12:00:05  books  2  revised, was 1"]
    assert written[4] == ["→ 12:00:00 to 12:00:05  music  2  revised, was 1"]
    assert written[5][2:] == [
        "→ 12:00:00 to 12:00:05  books  2  complete",
        "→ 12:00:00 to 12:00:05  music  2  complete",
    ]
    assert written[6] == ["→ dropped and counted: 1 view"]
    assert steps[-1] == "20 results, 1 late view dropped"


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.fault(
    "T182", "an event time is in the year 2262, and the driver is killed", "two stateful steps in Spark"
)
def test_two_stateful_steps_equal_a_batch_query_although_one_time_is_wrong(
    broker: str, topic: Callable[..., str], driver: Any, tmp_path: Path
) -> None:
    """The histogram of window counts equals that of plain Spark over the same records, in spite of all."""
    chance, begin_ms = random.Random(3), int(time.time() * 1000) - 3_600_000
    times = [begin_ms + 200 * index - chance.randrange(20_000) for index in range(300)]
    times.insert(50, 9_214_646_400_000)  # early, so that it would make most events late
    source, sink = topic(2), topic(2)
    for part in range(2):
        own = times[part::2]
        produce(
            broker, source, [str(each) for each in own], keys=[f"u{each % 5}" for each in own], partition=part
        )
    servers = {"kafka.bootstrap.servers": broker}
    ours = {**servers, "application.id": f"app-{sink}"}
    reading = {"subscribe": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "60"}
    spec = {
        "source": {**servers, **reading},
        "operator": {**ours, "state.dir": str(tmp_path / "state")},
        "sink": {**ours, "topic": sink, "checkpointLocation": str(tmp_path / "checkpoint")},
        "batch_result": str(tmp_path / "batch.json"),
        "counts": str(tmp_path / "counts.json"),
    }
    module, once = "integration.support.chained_windows", tmp_path / "once"
    killed = driver(spec, f"commit.after_commit=kill*3@{once}", module=module)
    assert killed.wait() != 0
    assert once.exists(), killed.tail()
    driver(spec, module=module).finish()

    written: defaultdict[str, list[str | None]] = defaultdict(list)
    for record in read_back(broker, sink):
        written[(record.key or b"").decode()].append(None if record.value is None else record.value.decode())
    newest = {key: values[-1] for key, values in written.items() if values[-1] is not None}
    assert newest == json.loads((tmp_path / "batch.json").read_text())
    assert sum(map(len, written.values())) > 2 * len(written), "results were revised"
    assert json.loads((tmp_path / "counts.json").read_text()) == {"future_rows": 1}
