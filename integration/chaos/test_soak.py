"""T53: one minute of random faults; ``./dev soak 30`` runs longer."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

import pytest

from integration.chaos.soak import BrokenBrokerError, soak
from integration.support.faults import MEASURES

MINUTES = 1.0


@pytest.mark.fault("T53", "any of these at random, every few seconds", "any")
@pytest.mark.timeout(600)
@pytest.mark.long
def test_t53_random_faults_neither_lose_nor_duplicate_records(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(100_000)
    said: list[str] = [f"seed {seed}"]
    try:
        report = soak(MINUTES, seed, tmp_path, said.append)
    except BrokenBrokerError as error:
        pytest.skip(str(error))
    request.node.user_properties.append((MEASURES, asdict(report.measures())))
    assert report.faults.total() >= 5, said
    assert report.good, f"{said}\n{report.outcome}\n{report.findings}\n./dev soak {MINUTES} --seed {seed}"
