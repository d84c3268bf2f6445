"""No name, copy or answer comes to mean something else without an error."""

from __future__ import annotations

import pytest

from tests.chain.identity import UNPROTECTED, WANTED, play
from tests.chain.model import Violation


@pytest.mark.parametrize("name", [each.__name__ for each in WANTED])
def test_nothing_is_lost_doubled_or_misplaced_when_a_name_means_something_else(name: str) -> None:
    (hole,) = (each for each in WANTED if each.__name__ == name)
    for query, ending in play(hole).items():
        assert ending in WANTED[hole].get(query, {""}), query


@pytest.mark.parametrize("name", [each.__name__ for each in UNPROTECTED])
def test_what_nothing_protects_is_seen_by_the_model(name: str) -> None:
    (hole,) = (each for each in UNPROTECTED if each.__name__ == name)
    with pytest.raises(Violation):
        play(hole)
