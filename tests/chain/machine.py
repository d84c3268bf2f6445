"""The state machine of the chain model: Hypothesis chooses the events, and shrinks failing schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kafka_eos_source.errors import AbortableError, FencedError, RetriableError
from tests.chain.cluster import Interruption
from tests.chain.model import COPIED, EVENTS, FAR, World
from tests.chain.product import TopicPartition
from tests.chain.query import OUTPUT, Query
from tests.chain.sinks import BROKEN, DOWN, SYSTEMS

#: Queries that the model starts. Two Kafka sources may share a partition; two sinks may share a system.
QUERIES = (
    Query(),
    Query(sources=("eos:in", "eos:in2")),
    Query(tolerant=True),
    Query(jumps=False),
    Query(sources=("eos:in", "eos:in")),
    Query(sources=("spark:in",)),
    Query(sources=("eos:in", "files")),
    Query(sources=("files",)),
    Query(sources=("rate",)),
    Query(distinct=True),
    Query(stateful=True),
    Query(sinks=(("one", "a"), ("two", "b"))),
    Query(sinks=(("one", "a"), ("two", "a"))),
    Query(group_id="shared"),
)

#: Events through which a name, a copy or an answer comes to mean something else.
IDENTITY_PERILS = frozenset(
    {
        "advice",
        "answers",
        "changelog",
        "clocks",
        "consumers",
        "guarantee",
        "names",
        "proofs",
        "regions",
        "targets",
        "truncation",
    }
)

#: Kinds of events that may go wrong. A machine without any of them still kills and restarts drivers.
PERILS = IDENTITY_PERILS | {
    "faults",
    "rivals",
    "rollback",
    "loss",
    "copy",
    "reset",
    "expiry",
    "recreate",
    "sharing",
    "sinks",
    "writes",
}

#: Sources whose offsets nobody can compare with those of a group.
_OPAQUE = {"files", "rate"}
_CALLS = ("init", "init:after", "group_offsets", "begin", "send", "send:after", "flush:after", "send_offsets")
_COMMITS = ("send_offsets:after", "commit", "commit:after")
_ERRORS = (RetriableError, AbortableError, FencedError)
_PARTITIONS = (
    TopicPartition("in", 0),
    TopicPartition("in", 1),
    TopicPartition("in2", 0),
    TopicPartition(OUTPUT, 0),
)
_TOPICS = ("in", OUTPUT)

_faults = st.tuples(
    st.just("fault"), st.sampled_from(_CALLS + _COMMITS), st.sampled_from(range(len(_ERRORS)))
)
_kills = st.tuples(st.just("kill"), st.integers(1, 40), st.just(0))
_rivals = st.tuples(st.just("rival"), st.integers(1, 40), st.integers(1, 3))
_stale = st.tuples(st.just("stale"), st.sampled_from(("group_offsets", "shard_offset")), st.integers(1, 3))
_recreations = st.tuples(st.just("recreate"), st.integers(1, 40), st.integers(0, 1))
_INTERRUPTIONS = st.one_of(_kills, _kills, _faults, _faults, _rivals, _recreations, _stale)


class ChainMachine(RuleBasedStateMachine):
    """Generates schedules. A subclass can narrow ``perils`` and ``queries``."""

    perils: ClassVar[frozenset[str]] = PERILS
    queries: ClassVar[tuple[Query, ...]] = QUERIES

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.names: list[str] = []
        self.active: frozenset[str] = frozenset()

    @initialize(
        number=st.integers(0, 50),
        active=st.tuples(*[st.integers(0, 32)] * 3),
        identity=st.integers(0, 32),
    )
    def start(self, number: int, active: tuple[int, ...], identity: int) -> None:
        """Starts a query with a few perils. With all of them, most queries would be refused early."""
        EVENTS["schedule"] += 1
        others, own = sorted(self.perils - IDENTITY_PERILS), sorted(self.perils & IDENTITY_PERILS)
        chosen = {others[each % len(others)] for each in active if others}
        if own and (identity % 3 or not others):
            chosen.add(own[identity % len(own)])
        self.active = frozenset(chosen)
        query = self.queries[number % len(self.queries)]
        self.world.start(query)
        self.names.append(query.name)
        for at in (0, 1):
            self.world.produce(partition=at, number=2)

    @rule(partition=st.integers(0, 2), number=st.integers(1, 4), gap=st.booleans())
    def produce(self, partition: int, number: int, gap: bool) -> None:
        topic = "in2" if partition == 2 else "in"
        self.world.produce(topic, partition % 2, number, gap)

    @precondition(lambda self: {"files", "rate"} & set(self.query().sources))
    @rule(number=st.integers(1, 2))
    def outside(self, number: int) -> None:
        self.world.tick(number)
        for _ in range(number):
            self.world.add_file()

    @rule(at=st.integers(0, 1), partition=st.integers(0, 1), batches=st.integers(1, 3))
    def work(self, at: int, partition: int, batches: int) -> None:
        for _ in range(batches):
            self.world.produce(partition=partition, number=2)
            self.world.batch(self.name(at))

    @rule(at=st.integers(0, 1))
    def idle(self, at: int) -> None:
        """No record arrives for so long that the query has to renew its token."""
        self.world.idle()
        self.world.batch(self.name(at))

    @rule(at=st.integers(0, 1), worker=st.integers(0, 1), host=st.integers(0, 1))
    def batch(self, at: int, worker: int, host: int) -> None:
        self.world.batch(self.name(at), worker=worker, host=host)

    @rule(at=st.integers(0, 1), interruptions=st.lists(_INTERRUPTIONS, min_size=1, max_size=2))
    def troubled_batch(self, at: int, interruptions: list[tuple[str, Any, int]]) -> None:
        name = self.name(at)
        chosen = [
            (call, action)
            for kind, call, number in interruptions
            if (action := self.action(kind, number, name)) is not None
        ]
        self.world.batch(name, interruptions=chosen)

    @rule(at=st.integers(0, 1), new_process=st.booleans(), limit=st.integers(0, 4))
    def restart(self, at: int, new_process: bool, limit: int) -> None:
        self.world.restart(self.name(at), new_process=new_process, limit=limit)

    # on a restored checkpoint, at_least_once writes again what is in the output, as that guarantee permits
    @precondition(lambda self: "rollback" in self.active and "guarantee" not in self.active)
    @rule(at=st.integers(0, 1), age=st.integers(0, 4), limit=st.integers(0, 4))
    def roll_back(self, at: int, age: int, limit: int) -> None:
        self.world.roll_back(self.name(at), age, limit=limit)

    # at_least_once writes again what the lost checkpoint had written, as that guarantee permits
    @precondition(
        lambda self: (
            "loss" in self.active
            and "guarantee" not in self.active
            and self.query().is_kafka_only
            and self.query().jumps
        )
    )
    @rule(at=st.integers(0, 1), adopt=st.booleans(), from_group=st.booleans())
    def lose_checkpoint(self, at: int, adopt: bool, from_group: bool) -> None:
        self.world.lose(self.name(at), adopt=adopt, from_group=from_group)

    @precondition(lambda self: "copy" in self.active and len(self.names) == 1)
    @rule()
    def copy_checkpoint(self) -> None:
        self.world.copy(self.names[0], "copy")
        self.names = list(self.world.places)

    @precondition(lambda self: "sharing" in self.active and len(self.names) == 1)
    @rule(adopt=st.booleans())
    def share_group(self, adopt: bool) -> None:
        first = self.query()
        other = Query("other", first.sources, "other-app", self.group(), sinks=first.sinks)
        self.world.share(other, adopt=adopt)
        self.names = list(self.world.places)

    @precondition(lambda self: "reset" in self.active)
    @rule(tp=st.sampled_from(_PARTITIONS), offset=st.integers(0, 9))
    def reset(self, tp: TopicPartition, offset: int) -> None:
        self.world.reset(self.group(), tp, offset)

    @precondition(lambda self: "expiry" in self.active)
    @rule(tps=st.none() | st.sets(st.sampled_from(_PARTITIONS), min_size=1))
    def forget(self, tps: set[TopicPartition] | None) -> None:
        self.world.forget(self.group(), tps)

    @precondition(lambda self: "recreate" in self.active)
    @rule(topic=st.sampled_from(_TOPICS))
    def recreate(self, topic: str) -> None:
        if topic == OUTPUT or not any(each.startswith("spark:") for each in self.query().sources):
            self.world.recreate(topic)

    @precondition(lambda self: self.query().sinks)
    @rule(
        call=st.sampled_from(("prepare", "commit", "abort", "recover")),
        times=st.integers(1, 3),
        fatal=st.booleans(),
        system=st.sampled_from("ab"),
    )
    def sink_fails(self, call: str, times: int, fatal: bool, system: str) -> None:
        if "sinks" in self.perils:
            EVENTS[f"sink fails at {call}"] += 1
            self.world.faulted = True
            SYSTEMS[system].answers.setdefault(call, []).extend([BROKEN if fatal else DOWN] * times)

    @precondition(lambda self: self.query().stateful)
    @rule(host=st.integers(0, 1))
    def lose_state(self, host: int) -> None:
        self.world.lose_state(host)

    @precondition(lambda self: "writes" in self.active)
    @rule(
        who=st.sampled_from((("orders", "eu-west"), ("orders-eu", "west"))),
        version=st.integers(0, 3),
        at=st.integers(0, 20),
    )
    def write(self, who: tuple[str, str], version: int, at: int) -> None:
        self.world.write(*who, version, at)

    # -- names, copies and answers

    @precondition(lambda self: "targets" in self.active and len(self.names) == 1)
    @rule(what=st.sampled_from(("topic", "sinks")), age=st.integers(0, 2), mounted=st.booleans())
    def copy_to_another_target(self, what: str, age: int, mounted: bool) -> None:
        query = self.query()
        changes: dict[str, object] = {"topic": COPIED}
        if what == "sinks" and query.sinks:
            changes = {"sinks": tuple((name, "b" if at == "a" else "a") for name, at in query.sinks)}
        self.world.copy(self.names[0], "copy", age=age, mounted=mounted, **changes)
        self.names = list(self.world.places)

    # of clones at one path that both change their topic, see `identity.UNPROTECTED`
    @precondition(lambda self: "targets" in self.active and not self.query().sinks and not self.is_cloned())
    @rule(at=st.integers(0, 1), topic=st.sampled_from((OUTPUT, COPIED)))
    def change_topic(self, at: int, topic: str) -> None:
        if self.world.places[self.name(at)].query.topic != topic:
            self.world.change(self.name(at), topic=topic)

    @precondition(lambda self: "consumers" in self.active)
    @rule(
        topic=st.sampled_from(("in", OUTPUT)),
        in_group=st.booleans(),
        polls=st.integers(0, 2),
        stops=st.booleans(),
    )
    def consume(self, topic: str, in_group: bool, polls: int, stops: bool) -> None:
        world = self.world
        if not world.consumers:
            world.consume(self.group() if in_group else self.query().application_id or "", topic)
        for _ in range(polls):
            world.consumers[0].poll()
        if stops:
            world.consumers[0].stop()
        for name in self.names:
            world.restart(name)  # a query that runs looks at its group now and then only

    @precondition(lambda self: "proofs" in self.active and (_OPAQUE & self.kinds() or self.query().distinct))
    @rule(repeats=st.booleans())
    def lose_unproven(self, repeats: bool) -> None:
        self.world.lose(self.names[0], adopt=True)
        if repeats and self.query().distinct:
            self.world.repeat()

    @precondition(lambda self: "names" in self.active and self.query().stateful and len(self.names) == 1)
    @precondition(lambda self: not self.world.cluster.written)  # another store would be refused for itself
    @rule(overlap=st.booleans())
    def join_names(self, overlap: bool) -> None:
        """Starts ``app-counts`` with a store whose changelog has the name of that of ``app``."""
        query = self.query()
        self.world.excuses.add("joined names")
        other = replace(query, name="other", application_id="app-eu", store="agg", sources=("eos:in2",))
        self.world.change(query.name, store="eu-agg")
        self.world.start(other)
        self.names = list(self.world.places)
        if overlap:
            self.world.produce("in2", number=2)
            self.world.batch(query.name, interruptions=[("staged", lambda: self.world.batch("other"))])

    @precondition(lambda self: "clocks" in self.active and self.query().stateful)
    @rule(host=st.integers(0, 1), ahead=st.sampled_from((0, 0, 30_000, 3_600_000, 1 << 40)))
    def skew(self, host: int, ahead: int) -> None:
        self.world.skew(host, ahead)

    @precondition(lambda self: "truncation" in self.active and "spark" not in self.kinds())
    @rule(partition=st.integers(0, 1), lost=st.integers(1, 4), refilled=st.integers(0, 6))
    def truncate(self, partition: int, lost: int, refilled: int) -> None:
        self.world.truncate("in", partition, lost)
        self.world.produce(partition=partition, number=refilled)

    @precondition(lambda self: "changelog" in self.active and self.query().stateful)
    @rule()
    def cut_changelog(self) -> None:
        for topic in list(self.world.cluster.topics):
            if topic.endswith("-changelog"):
                self.world.cut_changelog(topic)

    @precondition(lambda self: "regions" in self.active and self.kinds() == {"eos"} and len(self.names) == 1)
    @rule()
    def open_region(self) -> None:
        query = self.query()
        self.world.open_region(FAR)
        self.world.start(replace(query, name="west", region=FAR))
        self.names = list(self.world.places)

    @precondition(lambda self: "west" in self.names)
    @rule(partition=st.integers(0, 1), number=st.integers(1, 3), restarts=st.booleans())
    def work_there(self, partition: int, number: int, restarts: bool) -> None:
        if restarts:
            self.world.restart("west")
        self.world.produce(partition=partition, number=number, region=FAR)
        self.world.batch("west")

    @precondition(lambda self: "guarantee" in self.active and self.is_plain())
    @rule(at=st.integers(0, 1), number=st.integers(0, 2))
    def change_guarantee(self, at: int, number: int) -> None:
        name = self.name(at)
        once = self.world.places[name].settings.guarantee == "exactly_once"
        self.world.guarantee(name, "at_least_once" if once else "exactly_once")
        self.world.produce(number=number)
        self.world.batch(name)

    @precondition(lambda self: "answers" in self.active and self.is_plain() and self.kinds() == {"eos"})
    @rule(tps=st.none() | st.sets(st.sampled_from(_PARTITIONS), min_size=1))
    def answer_a_lost_group(self, tps: set[TopicPartition] | None) -> None:
        """Deletes the group, and answers for the batch that is refused. The answer stays in the job."""
        name = self.names[0]
        self.world.forget(self.group(), tps)
        self.world.restart(name)
        self.world.batch(name)
        if self.world.places[name].ending == "TOKEN_MISSING":
            self.world.answer(name)

    @precondition(lambda self: self.active & {"answers", "regions"})
    @rule(at=st.integers(0, 1), call=st.sampled_from(("staged", "committed", "sink_commit")))
    def leave_a_batch_pending(self, at: int, call: str) -> None:
        name = self.name(at)
        self.world.produce(number=2, region=self.world.places[name].query.region)
        self.world.batch(name, interruptions=[(call, self.world.kill)])

    @precondition(lambda self: "advice" in self.active and self.world.places[self.names[0]].ending)
    @rule()
    def follow_advice(self) -> None:
        self.world.follow(self.names[0])

    def teardown(self) -> None:
        try:
            if self.names:
                self.world.catch_up()
        finally:
            self.world.close()

    # -- private

    def query(self) -> Query:
        return self.world.places[self.names[0]].query

    def is_plain(self) -> bool:
        return not (self.query().stateful or self.query().sinks)

    def is_cloned(self) -> bool:
        return any(place.checkpoint.stored is not None for place in self.world.places.values())

    def kinds(self) -> set[str]:
        return {each.partition(":")[0] for each in self.query().sources}

    def group(self) -> str:
        return self.world.places[self.names[0]].group

    def name(self, at: int) -> str:
        return self.names[at % len(self.names)]

    def action(self, kind: str, number: int, name: str) -> Callable[[], None] | None:
        world = self.world
        if kind == "kill":
            return world.kill
        if kind == "fault" and "faults" in self.active:
            return world.fail(_ERRORS[number])
        if kind == "stale" and "faults" in self.active:
            return world.stale(number)
        if kind == "rival" and "rivals" in self.active:
            return world.rival(name, number)
        if kind == "recreate" and "recreate" in self.active:
            topic = _TOPICS[number]
            if topic == OUTPUT or not any(each.startswith("spark:") for each in self.query().sources):
                return lambda: world.recreate(topic)
        return None


__all__ = ["IDENTITY_PERILS", "PERILS", "QUERIES", "ChainMachine", "Interruption"]
