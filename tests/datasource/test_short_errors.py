"""Spark shows short errors, without causes and inner frames; the debug log has both."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from types import FunctionType

import pytest

from kafka_eos_source.datasource import KafkaEosDataSource
from kafka_eos_source.datasource.short_errors import short_errors, with_short_errors
from kafka_eos_source.errors import (
    InvalidOptionError,
    KafkaEosError,
    SinkFailedError,
    UnavailableError,
)


def missing_topic_of_user(error: type[KafkaEosError] = UnavailableError) -> None:
    try:
        raise OSError("what librdkafka said")  # noqa: TRY301
    except OSError as cause:
        raise error("topic 'no-such-topic' does not exist.", fix="create the topic.") from cause


#: The same function, as if a module of the package contained it.
missing_topic = FunctionType(
    missing_topic_of_user.__code__,
    {**globals(), "__name__": "kafka_eos_source.example"},
    "missing_topic",
    missing_topic_of_user.__defaults__,
)


@short_errors
def call(error: type[KafkaEosError] = UnavailableError) -> None:
    missing_topic(error)


def read() -> Iterator[int]:
    yield 1
    missing_topic()


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_an_error_is_shown_without_its_cause_and_inner_frames(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kafka_eos_source")
    with pytest.raises(UnavailableError) as caught:
        call()
    text = shown(caught.value)
    assert text.count("Traceback") == 1
    assert "librdkafka" not in text
    assert "in missing_topic_of_user" not in text
    assert text.splitlines()[-1].endswith(
        "[KAFKA_EOS.UNAVAILABLE] topic 'no-such-topic' does not exist. Fix: create the topic."
    )
    assert "what librdkafka said" in caplog.text
    assert "in missing_topic_of_user" in caplog.text


def test_an_error_while_rows_are_read_is_shown_without_its_cause_and_inner_frames() -> None:
    rows = with_short_errors(read())
    assert next(rows) == 1
    with pytest.raises(UnavailableError) as caught:
        next(rows)
    assert "librdkafka" not in shown(caught.value)
    assert "in missing_topic_of_user" not in shown(caught.value)


def test_an_error_of_a_sink_keeps_its_cause_for_the_author_of_the_sink() -> None:
    with pytest.raises(SinkFailedError) as caught:
        call(SinkFailedError)
    assert "what librdkafka said" in shown(caught.value)


def test_an_error_raised_by_user_code_keeps_its_cause_and_frames() -> None:
    """A sink of the user may raise any error of the package, for example while a task stages its rows."""

    def rows() -> Iterator[int]:
        yield 1
        missing_topic_of_user()

    with pytest.raises(UnavailableError) as caught:
        short_errors(missing_topic_of_user)()
    assert "what librdkafka said" in shown(caught.value)
    with pytest.raises(UnavailableError) as caught:
        list(with_short_errors(rows()))
    assert "in missing_topic_of_user" in shown(caught.value)


def test_an_error_of_another_package_keeps_its_cause_and_frames() -> None:
    @short_errors
    def broken() -> None:
        try:
            missing_topic()
        except UnavailableError as cause:
            raise RuntimeError("a bug") from cause

    with pytest.raises(RuntimeError, match="a bug") as caught:
        broken()
    assert "what librdkafka said" in shown(caught.value)


def test_the_data_source_raises_short_errors() -> None:
    source = KafkaEosDataSource({"subscibe": "t"})
    with pytest.raises(InvalidOptionError) as caught:
        source.schema()
    assert "parse_table" not in shown(caught.value)
