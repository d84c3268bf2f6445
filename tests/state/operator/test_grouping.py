"""`grouping` names the way to write what ``groupBy`` cannot say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.operator.frame import grouping


def grouped(*keys: str) -> Any:
    """Returns the double of ``frame.groupBy(…)`` of a frame with the columns ``k`` and ``ts``."""
    frame = SimpleNamespace(columns=["k", "ts"], isStreaming=True)
    return SimpleNamespace(_df=frame, count=lambda: SimpleNamespace(columns=[*keys, "count"]))


@pytest.mark.parametrize("function", ["window", "session_window"])
def test_a_window_of_spark_is_an_argument_here(function: str) -> None:
    with pytest.raises(InvalidSchemaError) as error:
        grouping(grouped(function, "k"), None)
    assert "pass window=tumbling('1 minute', on='timestamp')" in error.value.fix


def test_an_expression_is_computed_before() -> None:
    with pytest.raises(InvalidSchemaError, match="withColumn"):
        grouping(grouped("upper(k)"), None)
