"""Every class of the error tree says what to do next, and survives pickling."""

from __future__ import annotations

import pickle

import pytest

from kafka_eos_source import errors
from kafka_eos_source.errors import KafkaEosError

ALL = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, KafkaEosError)]


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_an_error_text_has_condition_and_fix_and_survives_pickling(cls: type[KafkaEosError]) -> None:
    error = pickle.loads(pickle.dumps(cls("option x is 'y'", fix="use z")))
    assert type(error) is cls
    assert str(error) == f"[{cls.condition}] option x is 'y' Fix: use z"


def test_every_error_class_has_its_own_condition() -> None:
    assert len({c.condition for c in ALL}) == len(ALL)
    assert all(c.__name__ in (errors.__doc__ or "") for c in ALL), "the printed tree names every class"
