"""T44 for every limit: a restored checkpoint whose batches have other boundaries, with and without state."""

from __future__ import annotations

import pytest
from chain_model import World
from chain_query import Query

from kafka_eos_source.errors import CheckpointRolledBackError

#: Records before the copy of the checkpoint, after it, and after it was restored.
BEFORE, AFTER, LATER = 50, 200, 50
LIMITS = range(1, BEFORE + AFTER + LATER + 1)


def restored(query: Query, limit: int) -> BaseException | None:
    """Runs the query over a restored checkpoint; raises `Violation` if a row is lost or doubled.

    Returns:
        The error that the query was refused with; None if it caught up.
    """
    world = World()
    try:
        world.start(query)
        for records in (BEFORE, AFTER):
            world.produce(number=records)
            world.batch("q")
        world.roll_back("q", 1, limit=limit)
        world.produce(number=LATER)
        world.catch_up(batches=BEFORE + AFTER + LATER)
        return world.places["q"].refused
    finally:
        world.close()


@pytest.mark.parametrize("stateful", [False, True], ids=["stateless", "stateful"])
@pytest.mark.parametrize("first", range(1, 11))
def test_t44_with_every_limit_from_1_to_300(first: int, stateful: bool) -> None:
    """A source that jumps heals with every limit; one that reads again heals where a batch ends as before."""
    for limit in LIMITS[first - 1 :: 10]:
        assert restored(Query(stateful=stateful), limit) is None, limit
        refused = restored(Query(stateful=stateful, told=False), limit)
        heals = AFTER % limit == 0
        assert (refused is None) is heals, (limit, refused)
        assert heals or isinstance(refused, CheckpointRolledBackError)
