"""T53, two minutes of it; ``./dev soak 30`` is the long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from integration.chaos.soak import soak

MINUTES = 2.0


@pytest.mark.timeout(600)
def test_t53_random_faults(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(100_000)
    said: list[str] = [f"seed {seed}"]
    report = soak(MINUTES, seed, tmp_path, said.append)
    assert report.faults.total() >= 10, said
    assert report.good, f"{said}\n{report.outcome}\n{report.findings}\n./dev soak {MINUTES} --seed {seed}"
