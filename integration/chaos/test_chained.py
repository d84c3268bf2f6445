"""Two stateful steps in a row stay exact while late events revise the first one and its driver is killed.

The tests run the operators in the chaos loop, without Spark. `integration/test_state_windows.py` runs such a
query in Spark.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.chaos.chained import GRACE_MS, WINDOW_MS, WINDOWS, Event, expected
from integration.chaos.loop import Checkpoint
from integration.support.driver import Driver
from integration.support.kafka import produce, read_back
from kafka_eos_source.protocol.offset_log import SourcePosition

EVENTS, PER_BATCH, PARTITIONS = 600, 60, 2
BEGIN_MS = 1_700_000_000_000

#: Failpoints at which the driver dies, and at which pass. Both steps pass those of the state.
KILLS = {
    "state.before_pending": 3,
    "state.after_pending": 6,
    "state.after_emit": 2,
    "commit.before_commit": 2,
    "commit.after_commit": 2,
}
#: Those at which it also dies with results that are held back.
HELD_KILLS = ("state.after_pending", "commit.before_commit", "commit.after_commit")


def events(number: int) -> list[Event]:
    """Returns events, ten a second; a third is late, by less than the grace."""
    chance = random.Random(11)
    found = []
    for index in range(number):
        late_ms = chance.choices((0, chance.randrange(GRACE_MS - 10_000)), (2, 1))[0]
        found.append(Event(f"user{chance.randrange(4)}", BEGIN_MS + 100 * index - late_ms))
    return found


def closing(after: Sequence[Event]) -> list[Event]:
    """Returns one event of each user that is so late that all windows before close."""
    last_ms = max(event.time_ms for event in after)
    return [Event(user, last_ms + 10 * GRACE_MS) for user in sorted({event.user for event in after})]


class Chain:
    """The query with its topics and its state."""

    def __init__(self, broker: str, topic: Callable[..., str], folder: Path) -> None:
        self.broker = broker
        self.source, self.sink = topic(PARTITIONS), topic(PARTITIONS)
        self.application = f"app-{self.sink}"
        self.checkpoint, self.state = folder / "checkpoint", folder / "state"
        self.made = events(EVENTS)
        self.made += closing(self.made)
        self.sent = [self.made[part::PARTITIONS] for part in range(PARTITIONS)]
        for part, own in enumerate(self.sent):
            produce(
                broker,
                self.source,
                [str(event.time_ms) for event in own],
                keys=[event.user for event in own],
                partition=part,
            )

    def spec(self, **more: Any) -> dict[str, Any]:
        servers = {"kafka.bootstrap.servers": self.broker}
        reading = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(PER_BATCH)}
        ours = {**servers, "application.id": self.application}
        return {
            "source": {**servers, **reading, "subscribe": self.source},
            "sink": {**ours, "topic": self.sink, "checkpointLocation": str(self.checkpoint)},
            "chained": {**ours, "state.dir": str(self.state)},
            "checkpoint": str(self.checkpoint),
            **more,
        }

    def batches(self) -> Iterator[list[Event]]:
        """Yields the events of each micro-batch, according to the offset log."""
        log, starts = Checkpoint(self.checkpoint), [0] * PARTITIONS
        for number in range(log.newest("offsets") + 1):
            end = {tp.partition: at for tp, at in SourcePosition.from_dict(log.offsets(number)).end.items()}
            ends = [end.get(part, starts[part]) for part in range(PARTITIONS)]
            yield [event for part, own in enumerate(self.sent) for event in own[starts[part] : ends[part]]]
            starts = ends
        assert starts == [len(own) for own in self.sent], "the query has read everything"

    def written(self) -> dict[str, list[str]]:
        """Returns the committed values of each key, in order."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for record in read_back(self.broker, self.sink):
            found[(record.key or b"").decode()].append((record.value or b"").decode())
        return dict(found)

    def batch_result(self) -> dict[str, str]:
        """Returns the histogram that one pass over all events computes, as a batch query would."""
        windows = Counter((event.user, event.time_ms // WINDOW_MS) for event in self.made)
        return {str(events): str(number) for events, number in Counter(windows.values()).items()}

    def check(self, *, held: bool) -> None:
        """Checks every record of the output against the model, and the newest against the batch result."""
        written = self.written()
        assert written == expected(list(self.batches()), held=held)
        assert sum(map(len, written.values())) > 2 * len(written), "results were revised"
        newest = {key: values[-1] for key, values in written.items() if values[-1] != "none"}
        if held:  # nothing closes the windows of the last events, so their results are still held back
            newest["1"] = str(int(newest.get("1", "0")) + len(closing(self.made)))
        assert newest == self.batch_result()


@pytest.fixture
def chain(broker: str, topic: Callable[..., str], tmp_path: Path) -> Chain:
    return Chain(broker, topic, tmp_path)


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(
            False,
            marks=pytest.mark.fault(
                "T179", "the driver is killed while two stateful steps revise results", "five moments"
            ),
        ),
        pytest.param(
            True,
            marks=pytest.mark.fault(
                "T180", "the driver is killed while results are held back in the state", "three moments"
            ),
        ),
    ],
    ids=["at_once", "held_back"],
)
def test_revisions_reach_the_second_step_once_although_drivers_are_killed(
    chain: Chain, driver: Callable[..., Driver], tmp_path: Path, held: bool
) -> None:
    """The driver dies around the commit; local state is lost in between, and comes from the changelogs."""
    kills = {step: times for step, times in KILLS.items() if not held or step in HELD_KILLS}
    for number, (step, times) in enumerate(kills.items()):
        once = tmp_path / f"once-{number}"
        killed = driver(chain.spec(held=held), f"{step}=kill*{times}@{once}", module="integration.chaos.loop")
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
        if step == "state.after_pending":
            shutil.rmtree(chain.state / chain.application / WINDOWS)
        if step == "commit.before_commit":
            shutil.rmtree(chain.state)
    driver(chain.spec(held=held), module="integration.chaos.loop").finish()
    chain.check(held=held)


@pytest.mark.fault("T181", "the state changes of the first of two stateful steps are dropped", "between both")
def test_lost_state_of_the_first_step_fails_the_batch_before_kafka(
    chain: Chain, driver: Callable[..., Driver]
) -> None:
    """The second step passes on its own changes only."""
    broken = driver(chain.spec(mutations=["packets before"]), module="integration.chaos.loop")
    assert broken.wait() == 1
    assert (
        f"KAFKA_EOS.STATE_LOST] state changes of batch 0 are lost: the operator of {chain.application}-"
        in (broken.log.read_text())
    )
    assert chain.written() == {}


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_token_check_a_replay_revises_twice(
    chain: Chain, driver: Callable[..., Driver]
) -> None:
    """Proves that T179 can fail: a batch that Kafka holds is written again."""
    killed = driver(chain.spec(), "commit.after_commit=kill*2", module="integration.chaos.loop")
    assert killed.wait() != 0
    driver(chain.spec(mutations=["token check"]), module="integration.chaos.loop").wait()
    model = expected(list(chain.batches()), held=False)
    assert sum(map(len, chain.written().values())) > sum(map(len, model.values()))


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_a_wrong_removed_result_is_noticed(chain: Chain, driver: Callable[..., Driver]) -> None:
    """Proves that T179 compares revisions: the first step removes its newest result, not the emitted one."""
    driver(chain.spec(mutations=["removed result"]), module="integration.chaos.loop").finish()
    assert chain.written() != expected(list(chain.batches()), held=False)
