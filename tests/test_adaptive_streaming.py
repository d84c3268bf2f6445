"""A stateful operator disables adaptive execution of streams, unless the user has decided about it."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_eos_source.spark.session import ADAPTIVE_SETTING, disable_adaptive_streaming


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
