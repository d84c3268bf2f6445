"""One schedule for each hole that the chain of tokens closes, as small as the model finds it.

Each schedule runs in a new `World`. In the code before the chain of tokens, all but the last few end in a
`Violation`: rows are lost or duplicated without an error.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.chain.cluster import Interruption
from tests.chain.model import World
from tests.chain.product import TopicPartition
from tests.chain.query import Query

IN = TopicPartition("in", 0)


def rolled_back_with_another_limit(world: World) -> None:
    """A checkpoint is restored from a backup, and the next run reads fewer offsets in one batch."""
    _two_batches(world, Query())
    world.roll_back("q", 1, limit=2)


def rolled_back_without_a_jump(world: World) -> None:
    """The same, but the source does not know the application.id, so it cannot jump."""
    _two_batches(world, Query(jumps=False))
    world.roll_back("q", 1, limit=2)


def rolled_back_with_more_input_and_no_jump(world: World) -> None:
    """After a rollback, the next batch reads beyond the committed offsets, and the source cannot jump."""
    _two_batches(world, Query(jumps=False))
    world.produce(number=2)
    world.roll_back("q", 1)


def recreated_source_after_the_read(world: World) -> None:
    """The topic is recreated after the records of a batch were read and before they are committed."""
    world.start(Query())
    world.produce(number=2)

    def recreate() -> None:
        world.recreate("in")
        world.produce(number=3)

    world.batch("q", interruptions=[("staged", recreate)])


def rolled_back_with_more_input(world: World) -> None:
    """A checkpoint is restored from a backup, and its next batch reads beyond the committed offsets."""
    _two_batches(world, Query())
    world.produce(number=2)
    world.roll_back("q", 1)


def rolled_back_two_sources_on_one_partition(world: World) -> None:
    """Two sources read one partition, and the checkpoint is rolled back to where one of them was ahead."""
    _two_batches(world, Query(sources=("eos:in", "eos:in")))
    world.roll_back("q", 1, limit=1)


def rolled_back_opaque_source(world: World) -> None:
    """After a rollback, the same offset of a file source stands for one more file."""
    world.start(Query(sources=("files",)))
    for _ in range(2):
        world.add_file()
        world.batch("q")
    world.roll_back("q", 1)
    world.add_file()


def rolled_back_stateful(world: World) -> None:
    """The state of a query is ahead of the checkpoint, and the batches after it have other boundaries."""
    _two_batches(world, Query(stateful=True))
    world.roll_back("q", 1, limit=2)


def moved_offsets(world: World) -> None:
    """A person resets the offsets of the group, and the checkpoint is rolled back."""
    _two_batches(world, Query())
    world.produce(number=4)
    world.reset(_group(world), IN, 12)
    world.roll_back("q", 1, limit=0)


def lost_token_of_the_first_batch(world: World) -> None:
    """The group is deleted after the first batch was committed, and before Spark logged the commit."""
    world.start(Query())
    world.produce(number=2)
    world.batch("q", interruptions=[("committed", world.kill)])
    world.forget(_group(world))


def recreated_source_during_a_replay(world: World) -> None:
    """A batch is planned, its topic is recreated, and the replay reads the new one at the old offsets."""
    world.start(Query(tolerant=True))
    world.produce(number=2)
    world.batch("q", interruptions=[("planned", world.kill)])
    world.recreate("in")
    world.produce(number=3)


def adopted_after_a_recreated_source(world: World) -> None:
    """A topic is recreated before a replay; then a new checkpoint starts from the group."""
    world.start(Query(tolerant=True))
    world.produce(number=2)
    world.batch("q", interruptions=[("planned", world.kill)])
    world.recreate("in")
    world.produce(number=3)
    world.batch("q")
    world.lose("q")


def recreated_source_while_rows_are_written(world: World) -> None:
    """The topic is recreated after a batch was staged; then a new checkpoint starts from the group."""
    world.start(Query(tolerant=True))
    for number in (2, 4):
        world.produce(number=number)
        world.batch("q", interruptions=[("staged", lambda: world.recreate("in"))] if number == 4 else [])
    world.produce(number=3)
    world.lose("q")


def recreated_output_during_a_commit(world: World) -> None:
    """The output topic is recreated after the records were flushed and before the commit."""
    world.start(Query())
    world.produce(number=2)
    world.batch("q", interruptions=[("flush:after", lambda: world.recreate("out"))])


def adopted_without_fencing(world: World) -> None:
    """A query with another transactional id adopts a shared group, and the first query keeps running."""
    world.start(Query(group_id="shared"))
    world.produce(number=2)
    world.batch("q")
    world.share(Query("other", application_id="other-app", group_id="shared"), adopt=True)
    world.batch("other")
    world.produce(number=2)
    world.batch("q")
    world.batch("other")


def prepared_sink_dropped_by_adoption(world: World) -> None:
    """A batch is in Kafka and prepared in a sink when a query with another id adopts the group."""
    sinks = (("one", "a"), ("two", "b"))
    world.start(Query(group_id="shared", sinks=sinks))
    world.produce(number=2)
    world.batch("q", interruptions=[("sink_commit", world.kill)])
    world.share(Query("other", application_id="other-app", group_id="shared", sinks=sinks), adopt=True)
    world.batch("other")
    world.produce(number=2)
    world.batch("other")


def two_sinks_on_one_target(world: World) -> None:
    """Two sinks of one query write to the same place."""
    world.start(Query(sinks=(("one", "a"), ("two", "a"))))
    world.produce(number=2)


def names_of_batch_writes_that_collide(world: World) -> None:
    """Two batch writers have composed names that look alike."""
    world.write("orders", "eu-west", 3)
    world.write("orders-eu", "west", 2)


def expired_start_of_an_adoption(world: World) -> None:
    """The offset of one partition expired before a new checkpoint starts from the group's offsets."""
    _two_batches(world, Query())
    world.forget(_group(world), [IN])
    world.lose("q")


def adopted_with_two_sources_on_one_partition(world: World) -> None:
    """Two sources read one partition, one is ahead, and a new checkpoint starts both from the group."""
    world.start(Query(sources=("eos:in", "eos:in")))
    world.produce(number=2)

    def more_for_the_second_source() -> None:
        process = world.current()
        process.interruptions.append(Interruption(len(process.calls) + 1, lambda: world.produce(number=2)))

    world.batch("q", interruptions=[("latest", more_for_the_second_source)])
    world.lose("q")


def rolled_back_one_source_of_two(world: World) -> None:
    """A checkpoint is restored; one source must jump, and the other one only has new records."""
    world.start(Query(sources=("eos:in", "eos:in2")))
    for topic in ("in2", "in"):
        world.produce(topic, number=2)
        world.batch("q")
    world.produce("in2", number=2)
    world.roll_back("q", 1)


def adopted_from_the_wrong_start(world: World) -> None:
    """A new checkpoint adopts, and its source starts from the beginning instead of from the group."""
    _two_batches(world, Query())
    world.lose("q", from_group=False)


def killed_before_the_first_commit(world: World) -> None:
    """The driver dies just before it commits the first batch of the query."""
    world.start(Query())
    world.produce(number=2)
    world.batch("q", interruptions=[("send_offsets:after", world.kill), ("flush:after", world.kill)])
    world.batch("q", interruptions=[("commit", world.kill)])


def stale_token_for_the_owner(world: World) -> None:
    """A new owner reads its token from a coordinator that was cut off one transaction ago."""
    _two_batches(world, Query())
    world.produce(number=4)
    world.batch("q", interruptions=[("committed", world.kill)])
    world.batch("q", interruptions=[("group_offsets", world.stale(1))])


def stale_token_for_prepared_sinks(world: World) -> None:
    """A new owner reads an old token, and a newer one names a batch that is prepared in sinks."""
    _two_batches(world, Query(sinks=(("one", "a"), ("two", "b"))))
    world.produce(number=2)
    world.batch("q", interruptions=[("sink_commit", world.kill)])
    world.batch("q", interruptions=[("group_offsets", world.stale(1))])


def shared_group_behind_a_stale_coordinator(world: World) -> None:
    """A second query shares the group, and a coordinator that was cut off returns no offsets."""
    world.start(Query(group_id="shared"))
    world.produce(number=2)
    world.batch("q")
    world.share(Query("other", application_id="other-app", group_id="shared"), adopt=False)
    world.batch("other", interruptions=[("group_offsets", world.stale(2))])


def stale_token_for_a_shard(world: World) -> None:
    """A shard reads its token from a coordinator that was cut off, and continues from an older state."""
    _two_batches(world, Query(stateful=True))
    world.produce(number=4)
    world.batch("q", interruptions=[("shard_offset", world.stale(1))], host=1)


def rival_while_a_first_shard_opens(world: World) -> None:
    """Another driver commits the first batch after a shard of a slower driver has found no token."""
    world.start(Query(stateful=True))
    world.produce(number=4)
    world.batch("q", interruptions=[("restore", world.rival("q"))])


HOLES: dict[str, Callable[[World], None]] = {
    each.__name__: each
    for each in (
        rolled_back_with_another_limit,
        rolled_back_without_a_jump,
        rolled_back_with_more_input,
        rolled_back_with_more_input_and_no_jump,
        recreated_source_after_the_read,
        rolled_back_two_sources_on_one_partition,
        rolled_back_opaque_source,
        rolled_back_stateful,
        moved_offsets,
        lost_token_of_the_first_batch,
        recreated_source_during_a_replay,
        adopted_after_a_recreated_source,
        recreated_source_while_rows_are_written,
        recreated_output_during_a_commit,
        adopted_without_fencing,
        prepared_sink_dropped_by_adoption,
        two_sinks_on_one_target,
        names_of_batch_writes_that_collide,
        expired_start_of_an_adoption,
        adopted_with_two_sources_on_one_partition,
        rolled_back_one_source_of_two,
        adopted_from_the_wrong_start,
        killed_before_the_first_commit,
        stale_token_for_the_owner,
        stale_token_for_a_shard,
        stale_token_for_prepared_sinks,
        shared_group_behind_a_stale_coordinator,
        rival_while_a_first_shard_opens,
    )
}


def play(hole: Callable[[World], None]) -> World:
    """Runs a schedule to its end, and lets every query catch up.

    Raises:
        Violation: if a record is lost or duplicated, or a query is refused without a reason.
    """
    world = World()
    try:
        hole(world)
        world.catch_up()
    finally:
        world.close()
    return world


def _group(world: World) -> str:
    return world.places["q"].group


def _two_batches(world: World, query: Query) -> None:
    world.start(query)
    for _ in range(2):
        world.produce(number=4)
        world.batch("q")
