"""The check of a plan for steps that lose state changes, on plans that the test makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.spark.changelog_check import Step, _kept_by, check_steps, warning_of_functions

SOURCE = Step("source", has_changes=False)
OPERATOR = Step("operator", True, (replace(SOURCE, shuffles=True),), is_operator=True)
TABLE = Step("table", has_changes=False)


def after(step: Step = OPERATOR, name: str = "step()", **fields: object) -> Step:
    return replace(Step(name, True, (step,)), **fields)  # type: ignore[arg-type]


def test_a_query_without_an_operator_may_do_anything() -> None:
    check_steps(after(after(SOURCE, drops="drops rows", has_changes=False), has_changes=False))


def test_steps_that_keep_rows_and_column_pass() -> None:
    check_steps(after(after(after(), shuffles=True), merges=True))


@pytest.mark.parametrize(
    ("lossy", "message"),
    [
        (after(has_changes=False), r"step\(\) after a stateful operator drops the column"),
        (after(drops="drops some rows"), r"step\(\) after a stateful operator drops some rows"),
        (after(merges=True), r"step\(\) after a stateful operator moves the shards"),
    ],
)
def test_a_lossy_step_is_found_wherever_it_is(lossy: Step, message: str) -> None:
    above = after(after(lossy, name="above()", has_changes=lossy.has_changes))
    for plan in (lossy, above, Step("union()", True, (after(), after(lossy, name="x", shuffles=True)))):
        with pytest.raises(InvalidSchemaError, match=message):
            check_steps(plan)


READ = Step("source", True, only_bad_records=True)


@pytest.mark.parametrize(
    ("lossy", "message"),
    [
        (after(READ, has_changes=False), r"step\(\) after a read with on_bad='dead-letter' drops the column"),
        (after(READ, drops="drops rows with state changes"), r"'dead-letter' drops rows with bad records\."),
        (after(READ, needs=frozenset({1})), r"'dead-letter' drops or repeats rows with bad records"),
    ],
)
def test_a_step_that_loses_bad_records_is_found(lossy: Step, message: str) -> None:
    with pytest.raises(InvalidSchemaError, match=message):
        check_steps(lossy)
    check_steps(after(READ, merges=True))
    with pytest.raises(InvalidSchemaError, match="after a stateful operator"):
        check_steps(Step("union()", False, (READ, OPERATOR)))


def test_the_second_operator_of_a_union_needs_a_shuffle() -> None:
    check_steps(Step("union()", True, (after(), after(shuffles=True)), is_union=True))
    check_steps(Step("union()", True, (after(), TABLE), is_union=True))
    for second in (OPERATOR, after(), after(after())):
        with pytest.raises(InvalidSchemaError, match=r"union\(\) .* moves the shards"):
            check_steps(Step("union()", True, (TABLE, second), is_union=True))


@pytest.mark.parametrize(
    ("kind", "streams", "kept"),
    [
        ("LEFT OUTER", (True, False), {0}),
        ("JOIN_TYPE_LEFT_OUTER", (True, False), {0}),
        ("LEFT ANTI", (True, False), {0}),
        ("LEFT OUTER", (True, True), set()),
        ("RIGHT OUTER", (False, True), {1}),
        ("RIGHT OUTER", (True, True), set()),
        ("INNER", (True, False), set()),
        ("LEFT SEMI", (True, False), set()),
        ("FULL OUTER", (True, False), set()),
        ("CROSS", (True, False), set()),
    ],
)
def test_a_join_keeps_the_rows_of_its_outer_side(
    kind: str, streams: tuple[bool, bool], kept: set[int]
) -> None:
    needs = _kept_by(kind, streams)
    assert needs == kept
    plan = Step("join()", True, (OPERATOR, TABLE), needs=needs)
    if 0 in kept:
        check_steps(plan)
    else:
        with pytest.raises(InvalidSchemaError, match=r"join\(\) .* drops or repeats rows"):
            check_steps(plan)


def test_functions_of_python_that_get_the_rows_of_packets_are_named_once() -> None:
    assert warning_of_functions(after(READ)) == ""
    plan = after(after(READ, functions=("parse", "clean")), functions=("parse",), only_bad_records=True)
    text = warning_of_functions(plan)
    assert "the Python function(s) clean, parse for the rows that carry bad records" in text
    assert "each argument is None" in text
    assert "state changes" in warning_of_functions(after(functions=("f",)))
