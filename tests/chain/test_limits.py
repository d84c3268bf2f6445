"""T44: a restored checkpoint whose next batches have other boundaries, for every limit."""

from __future__ import annotations

import pytest

from kafka_eos_source.errors import CheckpointRolledBackError
from tests.chain.model import World
from tests.chain.query import Query

#: Number of records before the backup of the checkpoint, after it, and after the restore.
BEFORE, AFTER, LATER = 10, 40, 10
LIMITS = range(1, BEFORE + AFTER + LATER + 1)


def restored(query: Query, limit: int) -> BaseException | None:
    """Runs a query on a restored checkpoint.

    Returns:
        The error that refused the query; None if it caught up.

    Raises:
        Violation: if a row is lost or duplicated.
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
def test_t44_a_restored_checkpoint_is_safe_with_every_limit_up_to_all_records(stateful: bool) -> None:
    """A source that jumps heals with every limit; another one only if a batch ends where one ended before."""
    for limit in LIMITS:
        assert restored(Query(stateful=stateful), limit) is None, limit
        refused = restored(Query(stateful=stateful, jumps=False), limit)
        heals = AFTER % limit == 0
        assert (refused is None) is heals, (limit, refused)
        assert heals or isinstance(refused, CheckpointRolledBackError)
