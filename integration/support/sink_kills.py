"""Kills a process at a step of a sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from integration.support.driver import Driver


def killed_at(
    driver: Callable[..., Driver],
    query: Any,
    tmp_path: Path,
    steps: list[str],
    changes: Sequence[Mapping[str, Any]] = ({},),
) -> None:
    """Kills the driver once at each step, then runs it to its end.

    Args:
        changes: changes to the spec, one for each start in turn; the last one also applies to the last start.
    """
    for number, (step, change) in enumerate(zip(steps, cycle(changes), strict=False)):
        killed = driver({**query, **change}, f"{step}=kill@{tmp_path}/once-{number}")
        assert killed.wait() != 0, f"{step}: the driver was not killed:\n{killed.tail()}"
        assert (tmp_path / f"once-{number}").exists(), f"{step} was not reached:\n{killed.tail()}"
    driver({**query, **changes[-1]}).finish()
