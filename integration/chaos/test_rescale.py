"""`kafka-eos state rescale` is killed in every slice, and between them: the state is exact afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from integration.chaos.stateful import STORE
from integration.chaos.stateful_case import Case
from integration.support.driver import Driver
from integration.support.kafka import Admin, produce, read_back
from integration.support.rescaling import killed_at

#: The changelog has about 200 records, so that there are a few slices in each shard.
SLICE = 25
#: Each shard has more than four slices of this size.
SMALL = 12
BEFORE, AFTER = "rescale.slice.before_commit", "rescale.slice.after_commit"

_EACH_SLICE = pytest.mark.fault(
    "T176", "`kafka-eos state rescale` is killed", "before and after the commit of each of its transactions"
)
_BETWEEN = pytest.mark.fault(
    "T177", "`kafka-eos state rescale` is killed; then the query runs", "after some of its transactions"
)
_MOVING = pytest.mark.fault(
    "T178", "the query starts while its state is moved", "after the copy, and while the changelog is filled"
)
_SWITCHED_OFF = pytest.mark.fault(
    "T54", "a rule is switched off; the others' tests must then fail", "its own"
)


class Counts:
    """A query that counts rows by key, in a number of shards that changes.

    Args:
        case: topics and state of the query.
        driver: starts a driver process.
    """

    def __init__(self, case: Case, driver: Callable[..., Driver]) -> None:
        self.case = case
        self._start = partial(driver, module="integration.chaos.loop")

    def feed(self) -> None:
        """Sends one row for each of many keys, so that each record of the changelog counts."""
        keys = [f"once-{number:03}" for number in range(120)]
        produce(self.case.broker, self.case.source, keys)
        self.case.wanted.update(keys)

    def start(self, shards: int) -> Driver:
        return self._start(self.case.spec(aggregates=["rows"], shards=shards))

    def run(self, shards: int) -> None:
        self.start(shards).finish()

    def words(self, shards: int) -> list[str]:
        case = self.case
        where = [case.application, "--bootstrap-servers", case.broker, "--store", STORE]
        return ["state", "rescale", "--shards", str(shards), "--yes", *where]

    @property
    def is_exact(self) -> bool:
        """Whether the newest output of each key counts all of its rows."""
        newest = {
            each.key: json.loads(each.value or b"{}") for each in read_back(self.case.broker, self.case.sink)
        }
        return newest == {key.encode(): {"rows": rows} for key, rows in self.case.wanted.items()}


@pytest.fixture
def counts(broker: str, topic: Callable[..., str], tmp_path: Path, driver: Callable[..., Driver]) -> Counts:
    found = Counts(Case(broker, topic, tmp_path), driver)
    found.feed()
    found.run(2)
    return found


@pytest.mark.parametrize(
    "mutations",
    [
        pytest.param((), marks=_EACH_SLICE, id="killed"),
        pytest.param(("rescale journal",), marks=[_SWITCHED_OFF, pytest.mark.long], id="mutated"),
    ],
)
def test_t176_a_rescale_that_is_killed_in_each_slice_continues_there(
    counts: Counts, admin: Admin, mutations: tuple[str, ...]
) -> None:
    """Each run is killed in its first or second slice, so a run that began anew would never finish."""
    killed, output = killed_at(
        [BEFORE, AFTER] * 40, counts.words(5), slice_records=SLICE, mutations=mutations
    )
    assert "continuing at offset" in output
    assert killed.count(AFTER) >= 6, output
    assert "has 5 shards now" in output
    counts.feed()
    try:
        counts.run(5)
    except AssertionError:
        assert mutations, "the query failed"
        return
    assert counts.is_exact is not bool(mutations)
    topics = admin.client.list_topics(timeout=10).topics
    assert f"{counts.case.application}-{STORE}-changelog-rescale" not in topics


@pytest.mark.parametrize(
    "mutations",
    [
        pytest.param((), marks=[_BETWEEN, pytest.mark.long], id="continued"),
        pytest.param(("rescale cut",), marks=[_SWITCHED_OFF, pytest.mark.long], id="mutated"),
    ],
)
def test_t177_a_query_that_ran_since_a_killed_copy_is_copied_anew(
    counts: Counts, mutations: tuple[str, ...]
) -> None:
    # Killed within the second shard. Without the rule, the first shard is then not copied again, and lacks
    # what the query writes next. How many slices come before depends on how the query divided its rows into
    # batches.
    output = ""
    while "of shard 1" not in output:
        killed, output = killed_at([AFTER] * 2, counts.words(5), slice_records=SMALL, mutations=mutations)
        assert killed == [AFTER] * 2
    assert "records to topic" not in output, "the copy is complete"
    counts.feed()
    counts.run(2)  # until the copy is complete, nothing has changed
    assert counts.is_exact
    killed, output = killed_at([""], counts.words(5), slice_records=SLICE, mutations=mutations)
    assert not killed
    assert ("copying from the beginning" in output) is not bool(mutations)
    counts.feed()
    counts.run(5)
    assert counts.is_exact is not bool(mutations)


@_MOVING
@pytest.mark.long
def test_t178_a_query_whose_state_is_half_moved_refuses_to_start_and_names_the_command(
    counts: Counts,
) -> None:
    counts.feed()
    before = len(read_back(counts.case.broker, counts.case.sink))
    for steps, shards in ((["rescale.after_copy"], 2), (["rescale.after_remake", AFTER], 5)):
        killed, output = killed_at(steps, counts.words(5), slice_records=SLICE)
        assert killed == steps, output
        refused = counts.start(shards)
        assert refused.wait() == 1, refused.tail()
        said = refused.log.read_text()
        assert "is being moved to 5 shards" in said, refused.tail()
        assert "run that command again" in said
        assert len(read_back(counts.case.broker, counts.case.sink)) == before, "nothing was written"
    killed, output = killed_at([""], [*counts.words(5), "--json"], slice_records=SLICE)
    assert not killed
    assert "offsets of an earlier run" in output
    shown = [json.loads(line) for line in output.splitlines() if line.startswith('{"stage"')]
    assert len(shown) >= 3
    assert all(each["offsets_done"] < each["offsets_total"] for each in shown[:-1])
    assert shown[-1]["offsets_done"] == shown[-1]["offsets_total"]
    counts.run(5)
    assert counts.is_exact
