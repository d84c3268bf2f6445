"""The steps of a micro-batch, whose duration is measured, and the groups in which people see them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Step(Enum):
    """One step of a micro-batch. Those of the commit are in the table of moves (`commit.steps.MOVES`)."""

    TASKS = "tasks"  #: Spark plans the batch and runs its tasks: from its offset log entry to the commit call
    VERIFY = "verify"  #: the commit reads the checkpoint and verifies the staged parts
    OPEN = "open"  #: checks whether the producer of the previous batch can be used again
    INIT = "init"  #: a new producer fences older owners
    TOKEN = "token"  #: reads what Kafka holds, and decides
    GENESIS = "genesis"  #: the genesis token is committed; the batch itself comes next
    CHECK = "check"  #: checks that output topics and partitions exist
    PREPARE = "prepare"  #: sinks outside Kafka prepare the batch
    BEGIN = "begin"
    PRODUCE = "produce"
    FLUSH = "flush"
    OFFSETS = "offsets"
    COMMIT = "commit"
    FINISH = "finish"  #: Kafka has committed; sinks outside Kafka commit
    COMMITTED = "committed"  #: this call committed the batch
    SKIPPED = "skipped"  #: Kafka already held the batch
    LOST = "lost"  #: this try failed; another one may follow
    TIDY = "tidy"  #: deletes the staged parts, in the staging folder and in the sinks


class StepGroup(Enum):
    """What a person sees of the steps: few groups, in the order in which they happen."""

    TASKS = "tasks"
    VERIFY = "verify"
    DECIDE = "decide"
    WRITE = "write"
    COMMIT = "commit"
    SINKS = "sinks"
    RETRY = "retry"
    TIDY = "tidy"


GROUPS: Mapping[Step, StepGroup] = {
    Step.TASKS: StepGroup.TASKS,
    Step.VERIFY: StepGroup.VERIFY,
    Step.OPEN: StepGroup.DECIDE,
    Step.INIT: StepGroup.DECIDE,
    Step.TOKEN: StepGroup.DECIDE,
    Step.GENESIS: StepGroup.DECIDE,
    Step.CHECK: StepGroup.WRITE,
    Step.PREPARE: StepGroup.SINKS,
    Step.BEGIN: StepGroup.WRITE,
    Step.PRODUCE: StepGroup.WRITE,
    Step.FLUSH: StepGroup.WRITE,
    Step.OFFSETS: StepGroup.COMMIT,
    Step.COMMIT: StepGroup.COMMIT,
    Step.FINISH: StepGroup.SINKS,
    Step.COMMITTED: StepGroup.TIDY,
    Step.SKIPPED: StepGroup.TIDY,
    Step.LOST: StepGroup.RETRY,
    Step.TIDY: StepGroup.TIDY,
}

#: What each step does, for a reader who watches a query that stands still in it.
DOING: Mapping[Step, str] = {
    Step.TASKS: "Spark runs the tasks of the batch",
    Step.VERIFY: "verifying the staged rows",
    Step.OPEN: "checking the producer of the previous batch",
    Step.INIT: "initialising the transactional id",
    Step.TOKEN: "reading the token from Kafka",
    Step.GENESIS: "beginning the chain of tokens",
    Step.CHECK: "checking the output topics",
    Step.PREPARE: "sinks outside Kafka prepare the batch",
    Step.BEGIN: "beginning the transaction",
    Step.PRODUCE: "sending the records",
    Step.FLUSH: "waiting until the brokers acknowledge the records",
    Step.OFFSETS: "committing the offsets and the token",
    Step.COMMIT: "waiting until Kafka commits the transaction",
    Step.FINISH: "sinks outside Kafka commit the batch",
    Step.COMMITTED: "ending the commit",
    Step.SKIPPED: "ending the commit",
    Step.LOST: "pausing before the next try",
    Step.TIDY: "deleting the staged rows",
}


def by_group(seconds: Mapping[str, float]) -> dict[StepGroup, float]:
    """Returns the duration of each group that took any time, in the order of the groups.

    Args:
        seconds: duration of each step, by the value of its `Step`. Unknown steps of later versions
            are left out.
    """
    known = {step.value: group for step, group in GROUPS.items()}
    found: dict[StepGroup, float] = {}
    for step, duration in seconds.items():
        if step in known and duration > 0:
            found[known[step]] = found.get(known[step], 0.0) + duration
    return {group: found[group] for group in StepGroup if group in found}
