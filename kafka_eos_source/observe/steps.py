"""The steps whose duration is measured, and the groups in which people see them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class TracedStep(Enum):
    """One step of a micro-batch. The steps of the commit have the values of `commit.steps.Step`."""

    TASKS = "tasks"  #: Spark plans the batch and runs its tasks: from its offset log entry to the commit call
    VERIFY = "verify"  #: the commit reads the checkpoint and verifies the staged parts
    OPEN = "open"
    INIT = "init"
    TOKEN = "token"
    GENESIS = "genesis"
    CHECK = "check"
    PREPARE = "prepare"
    BEGIN = "begin"
    PRODUCE = "produce"
    FLUSH = "flush"
    OFFSETS = "offsets"
    COMMIT = "commit"
    FINISH = "finish"
    COMMITTED = "committed"
    SKIPPED = "skipped"
    LOST = "lost"
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


GROUPS: Mapping[TracedStep, StepGroup] = {
    TracedStep.TASKS: StepGroup.TASKS,
    TracedStep.VERIFY: StepGroup.VERIFY,
    TracedStep.OPEN: StepGroup.DECIDE,
    TracedStep.INIT: StepGroup.DECIDE,
    TracedStep.TOKEN: StepGroup.DECIDE,
    TracedStep.GENESIS: StepGroup.DECIDE,
    TracedStep.CHECK: StepGroup.WRITE,
    TracedStep.PREPARE: StepGroup.SINKS,
    TracedStep.BEGIN: StepGroup.WRITE,
    TracedStep.PRODUCE: StepGroup.WRITE,
    TracedStep.FLUSH: StepGroup.WRITE,
    TracedStep.OFFSETS: StepGroup.COMMIT,
    TracedStep.COMMIT: StepGroup.COMMIT,
    TracedStep.FINISH: StepGroup.SINKS,
    TracedStep.COMMITTED: StepGroup.TIDY,
    TracedStep.SKIPPED: StepGroup.TIDY,
    TracedStep.LOST: StepGroup.RETRY,
    TracedStep.TIDY: StepGroup.TIDY,
}

#: What each step does, for a reader who watches a query that stands still in it.
DOING: Mapping[TracedStep, str] = {
    TracedStep.TASKS: "Spark runs the tasks of the batch",
    TracedStep.VERIFY: "verifying the staged rows",
    TracedStep.OPEN: "checking the producer of the previous batch",
    TracedStep.INIT: "initialising the transactional id",
    TracedStep.TOKEN: "reading the token from Kafka",
    TracedStep.GENESIS: "beginning the chain of tokens",
    TracedStep.CHECK: "checking the output topics",
    TracedStep.PREPARE: "sinks outside Kafka prepare the batch",
    TracedStep.BEGIN: "beginning the transaction",
    TracedStep.PRODUCE: "sending the records",
    TracedStep.FLUSH: "waiting until the brokers acknowledge the records",
    TracedStep.OFFSETS: "committing the offsets and the token",
    TracedStep.COMMIT: "waiting until Kafka commits the transaction",
    TracedStep.FINISH: "sinks outside Kafka commit the batch",
    TracedStep.COMMITTED: "ending the commit",
    TracedStep.SKIPPED: "ending the commit",
    TracedStep.LOST: "pausing before the next try",
    TracedStep.TIDY: "deleting the staged rows",
}


def by_group(seconds: Mapping[str, float]) -> dict[StepGroup, float]:
    """Returns the duration of each group that took any time, in the order of the groups.

    Args:
        seconds: duration of each step, by the value of its `TracedStep`. Unknown steps of later versions
            are left out.
    """
    known = {step.value: group for step, group in GROUPS.items()}
    found: dict[StepGroup, float] = {}
    for step, duration in seconds.items():
        if step in known and duration > 0:
            found[known[step]] = found.get(known[step], 0.0) + duration
    return {group: found[group] for group in StepGroup if group in found}
