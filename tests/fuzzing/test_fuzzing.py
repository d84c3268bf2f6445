"""Foreign bytes raise only the errors that `fuzzing.targets` allows: stored inputs, and new ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.fuzzing import engine
from tests.fuzzing.targets import TARGETS, Target

CORPUS = ROOT / "tests" / "corpus"


def _stored() -> Iterator[tuple[str, Path]]:
    for name in TARGETS:
        for path in sorted((CORPUS / name).glob("*")):
            yield name, path


@pytest.mark.parametrize(("name", "path"), [*_stored()], ids=lambda each: getattr(each, "name", each))
def test_what_was_found_stays_fixed(name: str, path: Path) -> None:
    engine.run(TARGETS[name], path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_random_bytes_raise_only_what_is_allowed(name: str) -> None:
    target = TARGETS[name]
    for seed in target.seeds:
        engine.run(target, seed)

    @settings(max_examples=60, deadline=None)
    @given(st.binary(max_size=200))
    def check(data: bytes) -> None:
        engine.run(target, data)

    check()


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_seeds_raise_only_what_is_allowed(name: str) -> None:
    target = TARGETS[name]
    if target.seeds:
        findings: list[str] = []

        def found(data: bytes, error: engine.FindingError) -> None:
            findings.append(f"{error}: {data[:200]!r}")

        engine.search(target, 60, [], 1, found, most_runs=300)
        assert findings == []


def test_the_search_finds_what_is_not_allowed() -> None:
    def run(data: bytes) -> None:
        if b"\xff" in data:
            raise RuntimeError(data)
        raise ValueError

    findings: list[bytes] = []
    target = Target(run, (ValueError,), (b"ab",))
    engine.search(target, 60, [], 2, lambda data, _: findings.append(data), most_runs=3000)
    (found,) = findings  # each place once
    with pytest.raises(engine.FindingError, match="RuntimeError"):
        engine.run(target, found)


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 200_000
