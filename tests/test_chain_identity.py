"""No name, copy or answer comes to mean something else without an error.

`OPEN` names the schedules that do not end as wanted yet. The test of such a schedule fails as soon as it ends
as wanted, so that its entry is removed with the change that closes it.
"""

from __future__ import annotations

import pytest
from chain_identity import OPEN, UNPROTECTED, WANTED, play
from chain_model import Violation


def _as_wanted(name: str) -> bool:
    (hole,) = (each for each in WANTED if each.__name__ == name)
    try:
        endings = play(hole)
    except Violation:
        return False
    return all(ending in WANTED[hole].get(query, {""}) for query, ending in endings.items())


@pytest.mark.parametrize("name", [each.__name__ for each in WANTED if each not in OPEN])
def test_nothing_is_lost_doubled_or_misplaced_when_a_name_means_something_else(name: str) -> None:
    (hole,) = (each for each in WANTED if each.__name__ == name)
    for query, ending in play(hole).items():
        assert ending in WANTED[hole].get(query, {""}), query


@pytest.mark.parametrize("name", [each.__name__ for each in OPEN])
def test_an_open_schedule_is_still_open(name: str) -> None:
    assert not _as_wanted(name), f"remove {name} from OPEN"


@pytest.mark.parametrize("name", [each.__name__ for each in UNPROTECTED])
def test_what_nothing_protects_is_seen_by_the_model(name: str) -> None:
    (hole,) = (each for each in UNPROTECTED if each.__name__ == name)
    with pytest.raises(Violation):
        play(hole)


def test_every_open_schedule_has_a_wanted_end() -> None:
    assert set(OPEN) <= set(WANTED)
