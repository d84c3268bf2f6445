"""One schedule for each way in which a name, a copy or an answer came to mean something else.

People copy checkpoints, give a consumer the name of the application, run one job in two regions, and follow
the advice of an error message. `WANTED` says how each schedule must end. Steps that are alike in several
schedules are at the end of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tests.chain.model import COPIED, FAR, World
from tests.chain.product import answer
from tests.chain.query import OUTPUT, Query

#: How far the clock of one executor is ahead.
TEN_YEARS_MS = 10 * 365 * 24 * 3_600_000

# -- copies of a checkpoint, and other targets


def copied_checkpoint_with_another_topic(world: World) -> None:
    """A copy of the checkpoint runs with another topic; then the original continues."""
    _two_batches(world, Query(jumps=False))
    world.copy("q", "copy", topic=COPIED)
    _batches(world, "copy", 2)
    world.stop("copy")
    world.restart("q")
    world.batch("q")
    _batches(world, "q", 1)


def copied_checkpoint_with_another_topic_and_a_jump(world: World) -> None:
    """The same, and the source of the original jumps to the offsets that the copy has committed."""
    _two_batches(world, Query())
    world.copy("q", "copy", topic=COPIED)
    _batches(world, "copy", 2)
    world.stop("copy")
    world.restart("q")
    world.batch("q")
    _batches(world, "q", 1)


def old_copy_as_a_backfill(world: World) -> None:
    """An old copy of the checkpoint fills a new topic and a new sink while the original is stopped."""
    _two_batches(world, Query())
    _batches(world, "q", 2)
    world.stop("q")
    world.copy("q", "copy", age=3, topic=COPIED, sinks=(("one", "b"),))


def copies_with_two_topics_side_by_side(world: World) -> None:
    """The original and a copy with another topic run at the same time."""
    _two_batches(world, Query())
    world.copy("q", "copy", topic=COPIED)
    for _ in range(3):
        _batches(world, "copy", 1)
        _batches(world, "q", 1)


def copied_checkpoint_with_another_sink(world: World) -> None:
    """A copy of the checkpoint writes the same topic, and its sink has another target."""
    _two_batches(world, Query(sinks=(("one", "a"),)))
    world.copy("q", "copy", sinks=(("one", "b"),))
    _batches(world, "copy", 2)
    world.stop("copy")
    world.restart("q")
    world.batch("q")
    _batches(world, "q", 1)


def cloned_volume_with_another_topic(world: World) -> None:
    """A clone of the volume runs at the same path on another host, with another topic."""
    _two_batches(world, Query(jumps=False))
    world.copy("q", "copy", mounted=True, topic=COPIED)
    _batches(world, "copy", 2)
    world.stop("copy")
    world.restart("q")
    world.batch("q")
    _batches(world, "q", 1)


def cloned_volume_with_another_topic_and_a_jump(world: World) -> None:
    """The same, and the source of the original jumps to the offsets that the clone has committed."""
    _two_batches(world, Query())
    world.copy("q", "copy", mounted=True, topic=COPIED)
    _batches(world, "copy", 2)
    world.stop("copy")
    world.restart("q")
    world.batch("q")
    _batches(world, "q", 1)


def cloned_volume_with_another_sink(world: World) -> None:
    """A clone of the volume writes the same topic, and its sink has another target."""
    _two_batches(world, Query(sinks=(("one", "a"),)))
    world.copy("q", "copy", mounted=True, sinks=(("one", "b"),))
    _batches(world, "copy", 2)
    world.stop("copy")
    world.restart("q")
    world.batch("q")
    _batches(world, "q", 1)


def cloned_volume_whose_original_changes_its_topic_too(world: World) -> None:
    """A clone with another topic is refused; then the original takes this topic too."""
    _two_batches(world, Query())
    world.copy("q", "copy", mounted=True, topic=COPIED)
    _batches(world, "q", 1)
    world.restart("copy", limit=1)
    world.batch("copy")
    world.change("q", topic=COPIED)
    _batches(world, "q", 1)


def cloned_volume_with_the_same_target(world: World) -> None:
    """A clone of the volume and the original run in turns, with one target."""
    _two_batches(world, Query())
    world.copy("q", "copy", mounted=True)
    for _ in range(2):
        _batches(world, "copy", 1)
        world.restart("q")
        _batches(world, "q", 1)
        world.restart("copy")


def copied_checkpoint_continues_elsewhere(world: World) -> None:
    """The checkpoint is moved, and a person says so."""
    _two_batches(world, Query())
    place = world.places["q"]
    world.copy("q", "moved")
    world.stop("q")
    world.restart("moved", moved_checkpoint=f"continue:{place.checkpoint.folder}")
    _batches(world, "moved", 2)


def forked_checkpoint(world: World) -> None:
    """A copy becomes a query of its own, which begins at the offsets of the checkpoint."""
    _two_batches(world, Query())
    world.copy("q", "fork", topic=COPIED, application_id="forked-app")
    world.restart("fork", moved_checkpoint="fork")
    for _ in range(2):
        _batches(world, "fork", 1)
        _batches(world, "q", 1)


def changed_topic(world: World) -> None:
    """The option ``topic`` changes between two batches."""
    _two_batches(world, Query())
    world.change("q", topic=COPIED)
    _batches(world, "q", 2)


def changed_topic_with_a_batch_pending(world: World) -> None:
    """The option ``topic`` changes while a batch is in Kafka and not in Spark's commit log."""
    _two_batches(world, Query())
    world.produce(number=2)
    world.batch("q", interruptions=[("committed", world.kill)])
    world.change("q", topic=COPIED)
    _batches(world, "q", 1)


def changed_topic_of_a_rolled_back_checkpoint(world: World) -> None:
    """The checkpoint is restored from a backup, and the query then writes another topic."""
    _two_batches(world, Query())
    world.roll_back("q", 1, limit=3)
    world.change("q", topic=COPIED)
    _batches(world, "q", 1)


def two_drivers_on_one_checkpoint(world: World) -> None:
    """A second driver runs on the same checkpoint at the same time."""
    world.start(Query())
    world.produce(number=4)
    world.batch("q")
    for call in ("planned", "staged", "committed", "init"):
        world.produce(number=2)
        world.batch("q", interruptions=[(call, world.rival("q", 2))])


# -- foreign members and offsets in the group


def consumer_of_the_output_named_like_the_application(world: World) -> None:
    """A consumer of the output has the ``application.id`` as its ``group.id``."""
    world.start(Query(application_id="orders"))
    consumer = world.consume("orders", OUTPUT)
    for _ in range(3):
        _batches(world, "q", 2)
        consumer.poll()
        consumer.stop()


def consumer_of_the_source_named_like_the_application(world: World) -> None:
    """A consumer of the source has the ``application.id`` as its ``group.id``."""
    world.start(Query(application_id="orders"))
    consumer = world.consume("orders", "in")
    world.produce(number=6)
    consumer.poll()
    consumer.stop()
    world.produce(number=6)
    world.batch("q")


def live_consumer_in_the_group(world: World) -> None:
    """A query is given the group of a consumer of its source, and that consumer runs."""
    world.start(Query(group_id="team"))
    consumer = world.consume("team", "in")
    world.produce(number=2)
    consumer.poll()
    world.produce(number=4)
    world.batch("q")


def stopped_consumer_in_the_group(world: World) -> None:
    """A query is given the group of a consumer of its output, which does not run now."""
    world.start(Query(group_id="team"))
    consumer = world.consume("team", OUTPUT)
    world.write("others", OUTPUT, 1)
    consumer.poll()
    consumer.stop()
    for _ in range(3):
        _batches(world, "q", 1)


def consumer_of_the_output_that_comes_later(world: World) -> None:
    """A consumer of the output joins the group of a query that runs, and commits between its batches."""
    _two_batches(world, Query(group_id="team"))
    consumer = world.consume("team", OUTPUT)
    consumer.poll()
    consumer.stop()
    world.restart("q")
    _batches(world, "q", 1)


# -- proofs


def adopted_file_source(world: World) -> None:
    """A query of a file source loses its checkpoint, and adopts as FOREIGN_QUERY advises."""
    world.start(Query(sources=("files",)))
    for _ in range(3):
        world.add_file()
        world.batch("q")
    world.lose("q", adopt=False)
    world.batch("q")
    world.follow("q")


def adopted_source_of_another_cluster(world: World) -> None:
    """The same with a Kafka source on another cluster than the sink's."""
    world.open_region(FAR)
    world.start(Query(sources=("far:in",)))
    for _ in range(2):
        world.produce(number=4, region=FAR)
        world.batch("q")
    world.lose("q", adopt=False)
    world.batch("q")
    world.follow("q")


def adopted_with_one_source_of_two_compared(world: World) -> None:
    """The same with a Kafka source that can be compared and a file source that cannot."""
    world.start(Query(sources=("eos:in", "files")))
    for _ in range(2):
        world.produce(number=2)
        world.add_file()
        world.batch("q")
    world.lose("q", adopt=False)
    world.batch("q")
    world.follow("q")


def adopted_with_spark_state(world: World) -> None:
    """The same with ``dropDuplicates``, whose state was in the lost checkpoint."""
    _two_batches(world, Query(distinct=True))
    world.lose("q", adopt=False)
    world.batch("q")
    world.follow("q")
    world.repeat()


# -- names


def applications_whose_changelogs_have_one_name(world: World) -> None:
    """``app`` with the store ``eu-agg`` and ``app-eu`` with ``agg``; their first batches overlap."""
    world.excuses.add("joined names")
    world.start(Query(stateful=True, store="eu-agg"))
    other = Query("other", ("eos:in2",), application_id="app-eu", stateful=True, store="agg")
    world.start(other)
    world.produce(number=6)
    world.produce("in2", number=3)
    world.batch("q", interruptions=[("staged", lambda: world.batch("other"))])
    world.produce("in2", number=6)
    world.batch("other")
    world.produce(number=1)
    world.batch("q")
    world.lose_state(0)
    world.produce(number=4)
    world.batch("q")


def application_id_of_the_operator_only(world: World) -> None:
    """The ``application.id`` is set on the operator and forgotten on the sink."""
    world.start(Query(application_id=None, operator_id="app", stateful=True, jumps=False))
    _refused_before_it_writes(world)


def application_id_of_the_sink_only(world: World) -> None:
    """The sink and the operator have different values of ``application.id``."""
    world.start(Query(operator_id="forgotten", stateful=True))
    _refused_before_it_writes(world)


def renamed_store(world: World) -> None:
    """The option ``store`` changes, and the user follows the advice of the error."""
    _two_batches(world, Query(stateful=True))
    world.change("q", store="totals")
    world.excuses.add("renamed store")
    _batches(world, "q", 1)
    world.follow("q")
    _batches(world, "q", 1)


def lost_checkpoint_without_an_application_id(world: World) -> None:
    """The checkpoint is lost, and the query has the names that were derived from it."""
    _two_batches(world, Query(application_id=None, jumps=False))
    world.lose("q", adopt=False, from_group=False)
    _batches(world, "q", 1)


# -- clocks and logs


def clock_of_one_executor_ahead(world: World) -> None:
    """The clock of one executor is ten years ahead for one batch."""
    _two_batches(world, Query(stateful=True))
    world.skew(1, TEN_YEARS_MS)
    world.produce(number=4)
    world.batch("q", host=1)
    world.skew(1, 0)
    for _ in range(2):
        _batches(world, "q", 1)


def refilled_log(world: World) -> None:
    """The log of a source is cut below the position of the query and grows beyond it again."""
    _two_batches(world, Query())
    world.truncate("in", 0, 4)
    world.produce(number=8)


def refilled_log_while_the_query_is_stopped(world: World) -> None:
    """The same, and the query starts again after that."""
    _two_batches(world, Query())
    world.truncate("in", 0, 4)
    world.produce(number=8)
    world.restart("q")


def refilled_log_before_a_replay(world: World) -> None:
    """A batch is in Kafka and not in Spark's commit log when its input is cut and replaced."""
    _two_batches(world, Query())
    world.produce(number=4)
    world.batch("q", interruptions=[("committed", world.kill)])
    world.truncate("in", 0, 4)
    world.produce(number=8)


def changelog_without_its_beginning(world: World) -> None:
    """The beginning of a changelog is removed, and the shards restore on a new host."""
    _two_batches(world, Query(stateful=True))
    for topic in [each for each in world.cluster.topics if each.endswith("-changelog")]:
        world.cut_changelog(topic)
    world.lose_state(0)
    world.produce(number=4)
    world.batch("q")


# -- two regions


def two_regions_with_one_sink(world: World) -> None:
    """One job runs in two regions with one target; one driver dies between Kafka's commit and the sink's."""
    _two_regions(world)
    world.produce(number=2)
    world.batch("q", interruptions=[("sink_commit", world.kill)])
    world.produce(number=2, region=FAR)
    world.restart("west")
    world.batch("west")


def first_start_beside_a_prepared_batch(world: World) -> None:
    """The same, and the other region starts for the first time; its user follows the advice of the error."""
    sinks = (("one", "a"),)
    world.open_region(FAR)
    world.start(Query(sinks=sinks))
    world.produce(number=2)
    world.batch("q", interruptions=[("sink_commit", world.kill)])
    world.start(Query("west", region=FAR, sinks=sinks))
    world.produce(number=2, region=FAR)
    world.batch("west")
    world.follow("west")


# -- the guarantee, and answers


def guarantee_changed_and_changed_back(world: World) -> None:
    """exactly_once, then at_least_once, then exactly_once again; the user follows the advice of the error."""
    _two_batches(world, Query())
    world.guarantee("q", "at_least_once")
    _batches(world, "q", 2)
    world.guarantee("q", "exactly_once")
    _batches(world, "q", 1)
    world.follow("q")


def guarantee_changed_back_with_a_jump(world: World) -> None:
    """The same, and a checkpoint from before the change is restored."""
    _two_batches(world, Query())
    world.guarantee("q", "at_least_once")
    _batches(world, "q", 2)
    world.roll_back("q", 2)
    world.guarantee("q", "exactly_once")
    _batches(world, "q", 1)


def assume_not_committed_that_stays(world: World) -> None:
    """The answer for one restart stays in the job; later the group is deleted with a batch pending."""
    _answered(world, "assume_not_committed", "staged")
    world.produce(number=2)
    world.batch("q", interruptions=[("committed", world.kill)])
    world.forget(world.places["q"].group)
    world.batch("q")


def assume_committed_that_stays(world: World) -> None:
    """The same with the other answer, and the pending batch is not in Kafka."""
    _answered(world, "assume_committed", "committed")
    world.produce(number=2)
    world.batch("q", interruptions=[("staged", world.kill)])
    world.forget(world.places["q"].group)
    world.batch("q")


def adopt_that_stays(world: World) -> None:
    """``onForeignQuery=adopt`` stays in the job; then a file source loses its checkpoint again."""
    world.start(Query(sources=("files",)))
    world.add_file()
    world.batch("q")
    world.lose("q", adopt=False)
    world.restart("q", adopt=True, keeps_adopt=True)
    world.add_file()
    world.batch("q")


def overwrite_that_stays(world: World) -> None:
    """``onMovedOffsets=overwrite`` stays in the job; then a consumer uses the group of the query."""
    _two_batches(world, Query(group_id="team"))
    world.restart("q", moved_offsets=answer("overwrite", 1))
    consumer = world.consume("team", "in")
    world.produce(number=4)
    consumer.poll()
    consumer.stop()
    world.restart("q")
    world.produce(number=4)
    world.batch("q")


#: Conditions that end a schedule, where several errors would do.
MOVED = frozenset({"CHECKPOINT_MOVED"})
OTHER_TARGET = frozenset({"CHECKPOINT_ROLLED_BACK", "CHECKPOINT_AHEAD"})
IN_USE = frozenset({"GROUP_IN_USE"})
UNPROVEN = frozenset({"FOREIGN_QUERY", "CHECKPOINT_ROLLED_BACK"})
FOREIGN_STATE = frozenset({"", "STATE_MISMATCH", "CHANGELOG", "FOREIGN_QUERY"})

#: How each schedule must end: the conditions that may refuse each query. A query that is not named must
#: catch up; "" means that it may. No record may be lost, doubled or misplaced in any of them.
WANTED: dict[Callable[[World], None], Mapping[str, Collection[str]]] = {
    copied_checkpoint_with_another_topic: {"copy": MOVED},
    copied_checkpoint_with_another_topic_and_a_jump: {"copy": MOVED},
    old_copy_as_a_backfill: {"copy": MOVED},
    copies_with_two_topics_side_by_side: {"copy": MOVED},
    copied_checkpoint_with_another_sink: {"copy": MOVED},
    cloned_volume_with_another_topic: {"q": OTHER_TARGET},
    cloned_volume_with_another_topic_and_a_jump: {"q": OTHER_TARGET},
    cloned_volume_with_another_sink: {"q": OTHER_TARGET | {"SINK_FAILED"}},
    cloned_volume_with_the_same_target: {},
    copied_checkpoint_continues_elsewhere: {},
    forked_checkpoint: {},
    changed_topic: {},
    changed_topic_with_a_batch_pending: {},
    changed_topic_of_a_rolled_back_checkpoint: {"q": OTHER_TARGET},
    consumer_of_the_output_named_like_the_application: {},
    consumer_of_the_source_named_like_the_application: {},
    live_consumer_in_the_group: {"q": IN_USE},
    stopped_consumer_in_the_group: {"q": IN_USE},
    consumer_of_the_output_that_comes_later: {"q": IN_USE | {"OFFSETS_MOVED"}},
    adopted_file_source: {"q": UNPROVEN},
    adopted_source_of_another_cluster: {"q": UNPROVEN},
    adopted_with_one_source_of_two_compared: {"q": UNPROVEN},
    adopted_with_spark_state: {"q": UNPROVEN},
    applications_whose_changelogs_have_one_name: {"q": FOREIGN_STATE, "other": FOREIGN_STATE},
    clock_of_one_executor_ahead: {},
    refilled_log: {"q": {"DATA_LOSS"}},
    refilled_log_while_the_query_is_stopped: {"q": {"DATA_LOSS"}},
    refilled_log_before_a_replay: {"q": {"DATA_LOSS"}},
    two_regions_with_one_sink: {},
    first_start_beside_a_prepared_batch: {},
    guarantee_changed_and_changed_back: {"q": {"GUARANTEE_CHANGED"}},
    guarantee_changed_back_with_a_jump: {"q": {"GUARANTEE_CHANGED"}},
    changelog_without_its_beginning: {"q": {"STATE_LOST"}},
    assume_not_committed_that_stays: {"q": {"TOKEN_MISSING"}},
    assume_committed_that_stays: {"q": {"TOKEN_MISSING"}},
    adopt_that_stays: {"q": UNPROVEN},
    overwrite_that_stays: {"q": IN_USE | {"OFFSETS_MOVED"}},
    application_id_of_the_operator_only: {"q": {"INVALID_OPTION"}},
    application_id_of_the_sink_only: {"q": {"INVALID_OPTION"}},
    renamed_store: {"q": {"STATE_MISMATCH"}},
    two_drivers_on_one_checkpoint: {},
}

#: What nothing protects. The names of the query were in the checkpoint that was lost; and a token knows the
#: target of the last batch only, so records that a clone at the same path wrote to a former target look as if
#: they were in the present one.
UNPROTECTED = (
    lost_checkpoint_without_an_application_id,
    cloned_volume_whose_original_changes_its_topic_too,
)


def play(hole: Callable[[World], None]) -> dict[str, str]:
    """Runs a schedule to its end, and lets every query catch up that was not stopped.

    Returns:
        The condition that refuses each query in the end; "" if it has caught up.

    Raises:
        Violation: if a record is lost, doubled or misplaced, or a query is refused without a reason.
    """
    world = World()
    try:
        hole(world)
        world.catch_up()
        return {name: place.ending for name, place in world.places.items()}
    finally:
        world.close()


# -- steps that are alike


def _batches(world: World, name: str, number: int) -> None:
    for _ in range(number):
        world.produce(number=4)
        world.batch(name)


def _two_batches(world: World, query: Query) -> None:
    world.start(query)
    _batches(world, query.name, 2)


def _two_regions(world: World) -> None:
    """Starts one job on two clusters, with one target outside Kafka."""
    sinks = (("one", "a"),)
    world.open_region(FAR)
    world.start(Query(sinks=sinks))
    world.start(Query("west", region=FAR, sinks=sinks))
    world.produce(number=2)
    world.batch("q")
    world.produce(number=2, region=FAR)
    world.batch("west")


def _refused_before_it_writes(world: World) -> None:
    world.excuses.add("misconfigured")
    _batches(world, "q", 1)
    if world.cluster.written:
        world.complaint("batch 0 was written, although no later batch can be")
    _batches(world, "q", 1)


def _answered(world: World, missing: str, call: str) -> None:
    """Loses the group with a batch pending that died at a call, and answers what happened to this batch."""
    _two_batches(world, Query())
    world.produce(number=2)
    world.batch("q", interruptions=[(call, world.kill)])
    world.forget(world.places["q"].group)
    world.restart("q", missing=answer(missing, 2))
    world.batch("q")
    _batches(world, "q", 1)
