"""Each operator refuses a frame with a watermark of Spark, and says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.in_read.lineage import unused_watermark
from kafka_eos_source.state import aggregate, apply, deduplicate, transform

plans = pytest.importorskip("pyspark.sql.connect.plan")


def connect_frame(plan: Any) -> Any:
    return SimpleNamespace(_plan=plan, columns=["k", "ts"], isStreaming=True)


def watermark(plan: Any, delay: str = "10 minutes") -> Any:
    return plans.WithWatermark(plan, "ts", delay)


SOURCE = plans.Read("source")

#: Whether the frame has a watermark that no step of Spark uses.
PLANS: dict[str, tuple[Any, bool]] = {
    "none": (plans.Limit(SOURCE, 3), False),
    "last step": (watermark(SOURCE), True),
    "step before": (plans.Limit(watermark(SOURCE), 3), True),
    "used by a deduplication": (plans.Deduplicate(watermark(SOURCE), column_names=["k"]), False),
    "used, and another": (watermark(plans.Deduplicate(watermark(SOURCE), column_names=["k"])), True),
    "one of a union": (plans.SetOperation(SOURCE, watermark(SOURCE), "union"), True),
    "used by a join": (plans.Join(watermark(SOURCE), watermark(SOURCE), ["k"], "inner"), False),
}


@pytest.mark.parametrize("which", PLANS)
def test_a_watermark_is_found_in_a_plan_of_spark_connect(which: str) -> None:
    plan, found = PLANS[which]
    assert unused_watermark(connect_frame(plan)) == (("ts", "10 minutes") if found else None)


def classic(kind: str, *children: Any) -> Any:
    """Returns a double of a plan in the JVM."""
    return SimpleNamespace(
        getClass=lambda: SimpleNamespace(getSimpleName=lambda: kind),
        eventTime=lambda: SimpleNamespace(name=lambda: "ts"),
        delay=lambda: SimpleNamespace(toString=lambda: "10 minutes"),
        children=lambda: SimpleNamespace(size=lambda: len(children), apply=children.__getitem__),
    )


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        (classic("Project", classic("StreamingRelationV2")), False),
        (classic("Project", classic("EventTimeWatermark", classic("StreamingRelationV2"))), True),
        (classic("Deduplicate", classic("EventTimeWatermark")), False),
        (classic("Union", classic("StreamingRelationV2"), classic("EventTimeWatermark")), True),
        (classic("Project", classic("Join", classic("EventTimeWatermark"))), False),
    ],
)
def test_a_watermark_is_found_in_a_classic_plan(plan: Any, found: bool) -> None:
    execution = SimpleNamespace(analyzed=lambda: plan)
    frame: Any = SimpleNamespace(_jdf=SimpleNamespace(queryExecution=lambda: execution))
    assert unused_watermark(frame) == (("ts", "10 minutes") if found else None)


OPERATORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "aggregate": (
        lambda frame: aggregate(frame, {"n": "count"}, key="k", options={}),
        "pass window=tumbling(…, on='ts', grace='10 minutes')",
    ),
    "deduplicate": (
        lambda frame: deduplicate(frame, key="k", options={}),
        "pass on='ts', grace='10 minutes'",
    ),
    "apply": (
        lambda frame: apply(frame, lambda batch: batch, "a INT", "b INT", key="k", options={}),  # type: ignore[arg-type, return-value]
        "pass on='ts';",
    ),
    "transform": (
        lambda frame: transform(frame, object(), "a INT", key="k", options={}),  # type: ignore[arg-type]
        "pass time_mode='EventTime', on='ts', grace='10 minutes'",
    ),
}


@pytest.mark.parametrize("which", OPERATORS)
def test_each_operator_refuses_a_watermark_and_names_what_replaces_it(which: str) -> None:
    run, instead = OPERATORS[which]
    with pytest.raises(InvalidOptionError) as error:
        run(connect_frame(watermark(SOURCE)))
    assert "withWatermark('ts', '10 minutes')" in error.value.message
    assert instead in error.value.fix


@pytest.mark.parametrize(
    ("delay", "grace"),
    [
        ("1 hours", "1 hour"),
        ("2 days", "2 days"),
        ("interval 30 seconds", "30 seconds"),
        ("10 minutes 5 seconds", "605000ms"),
        ("1 month", "31 days"),
        ("1 months 1 days", "2764800000ms"),
        ("0 seconds", "0 seconds"),
    ],
)
def test_the_delay_is_given_as_a_time_span_that_grace_accepts(delay: str, grace: str) -> None:
    with pytest.raises(InvalidOptionError, match=f"grace='{grace}'"):
        deduplicate(connect_frame(watermark(SOURCE, delay)), key="k", options={})
