"""Samples memory, file descriptors and threads of processes, and estimates whether they grow."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import psutil

#: A process that lived shorter than this is not judged: most of its life was its start.
SHORTEST_LIFE_SECONDS = 600.0
#: Share of a life that counts as warm-up.
_WARM_UP = 1 / 3
#: Successive samples resemble each other. Means of this many blocks are nearly independent.
_BLOCKS = 12
_FEWEST_SAMPLES = 3 * _BLOCKS

#: Growth per hour below which a slope is no growth, however certain it is: absolute, and a share of the mean.
_TOLERATED = {"rss": (16 * 2**20, 0.05), "fds": (4.0, 0.0), "threads": (2.0, 0.0)}


@dataclass(frozen=True)
class Slope:
    """How one metric of one process developed, after its warm-up.

    Attributes:
        role, pid: the process.
        metric: ``rss`` (bytes), ``fds`` or ``threads``.
        seconds: how long the process lived while it was sampled.
        mean: mean of the metric.
        per_hour: slope of the regression line.
        low, high: limits of its 95 % confidence interval.
    """

    role: str
    pid: int
    metric: str
    seconds: float
    mean: float
    per_hour: float
    low: float
    high: float

    @property
    def grows(self) -> bool:
        """Whether the metric certainly grows, and by more than what is tolerated."""
        absolute, share = _TOLERATED[self.metric]
        return self.low > 0 and self.per_hour > max(absolute, share * self.mean)


def take(roles: Mapping[int, str]) -> list[dict[str, Any]]:
    """Samples processes; those that have ended are left out.

    Args:
        roles: role of each process, by process id.
    """
    found = []
    for pid, role in roles.items():
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                found.append(
                    {
                        "role": role,
                        "pid": pid,
                        "born": process.create_time(),
                        "rss": process.memory_info().rss,
                        "fds": process.num_fds(),
                        "threads": process.num_threads(),
                        "cpu": sum(process.cpu_times()[:2]),
                    }
                )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def slopes(samples: Iterable[Mapping[str, Any]]) -> list[Slope]:
    """Returns the slopes of all processes that lived long enough, by role."""
    lives: dict[tuple[str, int, float], list[Mapping[str, Any]]] = defaultdict(list)
    for each in samples:
        lives[each["role"], each["pid"], each["born"]].append(each)
    found = []
    for (role, pid, _), life in sorted(lives.items()):
        seconds = life[-1]["at"] - life[0]["at"]
        warm = [each for each in life if each["at"] >= life[0]["at"] + _WARM_UP * seconds]
        if seconds < SHORTEST_LIFE_SECONDS or len(warm) < _FEWEST_SAMPLES:
            continue
        for metric in _TOLERATED:
            points = [(each["at"], float(each[metric])) for each in warm]
            per_second, error = regression(_blocks(points))
            found.append(
                Slope(
                    role=role,
                    pid=pid,
                    metric=metric,
                    seconds=seconds,
                    mean=fmean(value for _, value in points),
                    per_hour=3600 * per_second,
                    low=3600 * (per_second - error),
                    high=3600 * (per_second + error),
                )
            )
    return found


def _blocks(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the means of `_BLOCKS` successive groups of points."""
    edges = [len(points) * number // _BLOCKS for number in range(_BLOCKS + 1)]
    groups = [points[first:last] for first, last in itertools.pairwise(edges)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]


def regression(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the slope of the least-squares line, and half the width of its 95 % confidence interval."""
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    freedom = len(points) - 2
    return slope, _student(freedom) * math.sqrt(rest / freedom / spread)


def _student(freedom: int) -> float:
    """Returns the 97.5 % quantile of Student's distribution, by its expansion (within 1 % from 4 on)."""
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
