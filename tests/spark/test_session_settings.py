"""Stateful operators change or doubt settings of the session that are bad for them."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_eos_source.spark.session import (
    ADAPTIVE_SETTING,
    BATCH_BYTES_SETTING,
    disable_adaptive_streaming,
    recommended_settings,
    warn_of_large_batches,
)


class Conf(dict[str, str]):
    """The part of a session's ``conf`` that is used."""

    def set(self, name: str, value: str) -> None:
        self[name] = value


class Session:
    def __init__(self, **settings: str) -> None:
        self.conf = Conf(settings)


def test_adaptive_execution_is_disabled_once() -> None:
    session: Any = Session()
    assert disable_adaptive_streaming(session)
    assert session.conf == {ADAPTIVE_SETTING: "false"}
    assert not disable_adaptive_streaming(session)


@pytest.mark.parametrize("value", ["true", "false"])
def test_what_the_user_has_set_stays(value: str) -> None:
    session: Any = Session(**{ADAPTIVE_SETTING: value})
    assert not disable_adaptive_streaming(session)
    assert session.conf == {ADAPTIVE_SETTING: value}


@pytest.mark.parametrize(
    ("value", "warned"),
    [
        (None, False),
        ("67108864b", False),
        ("64m", False),
        ("2147483647", True),
        ("1g", True),
        ("2147483647b", True),
    ],
)
def test_a_session_without_a_limit_for_packed_batches_is_warned(
    value: str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session: Any = Session(**({} if value is None else {BATCH_BYTES_SETTING: value}))
    with caplog.at_level("WARNING"):
        assert warn_of_large_batches(session, "a stateful operator") is warned
    assert ("a stateful operator passes packed batches" in caplog.text) is warned


def test_the_recommended_setting_for_small_rows_is_one_of_those() -> None:
    session: Any = Session(**recommended_settings(small_rows=True))
    assert warn_of_large_batches(session, "map_in_read")
