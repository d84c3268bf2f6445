"""Searches for inputs of a target: with atheris if it is installed, else with a mutator of its own.

The own one keeps each input that reaches lines of the package that no other one reached.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests import ROOT
from tests.fuzzing.targets import Target

PACKAGE = str(ROOT / "kafka_eos_source")
#: More than any input may take: a finding as well.
SLOW_SECONDS = 10.0
_MOST_BYTES = 4096
_WORDS = (
    b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"[" * 400, b'{"a":' * 400, b"1e999", b"9" * 400,
    b"NaN", b"Infinity", b"null", b"true", b'"\\ud800"', b"-1", b"[]", b"{}", b"[[]]", b"\xf0\x9f\x92\xa9",
)  # fmt: skip


class FindingError(Exception):
    """A target raised an error that the table does not allow, or took too long."""


def run(target: Target, data: bytes) -> None:
    """Runs a target; raises what the table does not allow."""
    begun = time.monotonic()
    try:
        target.run(data)
    except target.allowed:
        pass
    except Exception as error:
        raise FindingError(f"{type(error).__name__}: {error}"[:300]) from error
    if time.monotonic() - begun > SLOW_SECONDS:
        raise FindingError(f"it took {time.monotonic() - begun:.0f} s")


def mutated(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Returns the bytes with some changes; ``other`` is an input to take parts of."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randrange(len(changed) + 1)
        end = min(len(changed), at + chance.choice((0, 1, 2, 4, 16)))
        step = chance.randrange(7)
        if step == 0 and changed:
            changed[at - 1] ^= 1 << chance.randrange(8)
        elif step == 1:
            changed[at:end] = chance.randbytes(chance.choice((1, 2, 4, 8)))
        elif step == 2:
            changed[at:end] = chance.choice(_WORDS)
        elif step == 3:
            changed[at:at] = changed[at : at + chance.choice((1, 4, 30))] * chance.choice((1, 2, 20))
        elif step == 4:
            del changed[at : at + chance.choice((1, 3, 20, 200))]
        elif step == 5 and other:
            begin = chance.randrange(len(other))
            changed[at:end] = other[begin : begin + chance.choice((1, 8, 60))]
        else:
            changed[at:end] = str(
                chance.choice((-1, 0, 2**31, 2**63, 10**30, chance.randrange(300)))
            ).encode()
    return bytes(changed[:_MOST_BYTES])


class Lines:
    """Notes which lines of the package run."""

    def __init__(self) -> None:
        self.seen: set[tuple[Any, int]] = set()
        self.is_new = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        place = (frame.f_code, frame.f_lineno)
        if place not in self.seen:
            self.seen.add(place)
            self.is_new = True
        return self


def search(
    target: Target,
    seconds: float,
    corpus: list[bytes],
    seed: int,
    on_finding: Callable[[bytes, FindingError], None],
    most_runs: int = sys.maxsize,
) -> tuple[int, list[bytes]]:
    """Mutates inputs for some time; returns the number of runs, and the inputs that reached new lines."""
    chance, lines, runs = random.Random(seed), Lines(), 0
    queue: list[bytes] = []
    waiting = [*target.seeds, *corpus, b""]
    said: set[str] = set()
    until = time.monotonic() + seconds
    while waiting or (runs < most_runs and time.monotonic() < until):
        given = bool(waiting)
        data = waiting.pop() if given else mutated(chance, chance.choice(queue), chance.choice(queue))
        lines.is_new = False
        traced = given or runs % 4 == 0  # the others are quick
        if traced:
            sys.settrace(lines)
        try:
            run(target, data)
        except FindingError as error:
            text = f"{type(error.__cause__).__name__} {_place(error.__cause__)}"
            if text not in said:
                said.add(text)
                on_finding(data, error)
        finally:
            sys.settrace(None)
        runs += 1
        if lines.is_new or given:
            queue.append(data)
    return runs, queue


def _place(error: BaseException | None) -> str:
    place = ""
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def name_of(data: bytes) -> str:
    """Returns the name of an input's file."""
    return hashlib.sha256(data).hexdigest()[:16]
