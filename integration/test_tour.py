"""The tour shows what it tells: it checks every part itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from integration.support.driver import ROOT
from integration.support.prometheus import needs_prometheus

SECONDS = 900


@needs_prometheus
@pytest.mark.long
@pytest.mark.timeout(SECONDS + 60)
def test_everything_happens_as_the_tour_tells_it() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "integration.tour"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "Everything happened as told" in finished.stdout
