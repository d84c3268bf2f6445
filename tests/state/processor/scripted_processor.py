"""A processor whose input rows are operations on its state, and whose output rows are their results."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from kafka_eos_source.state.processor.run import StatefulProcessorRunner
from tests.state.processor.processor_shard import runner

KEY = "key STRING"
INPUT = "key STRING, op STRING, a LONG, b LONG, at TIMESTAMP"
OUTPUT = "key STRING, op STRING, result STRING"


class Scripted(StatefulProcessor):
    """``v``, ``l`` and ``m`` are a value, a list and a map state; ``t`` the timers.

    Args:
        ttl_ms: of all three.
        clock: method of `TimerValues` that timers are set by.
    """

    def __init__(self, ttl_ms: int | None = None, clock: str = "getCurrentProcessingTimeInMs") -> None:
        self.ttl_ms = ttl_ms
        self.clock = clock

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.v = handle.getValueState("v", "n LONG", self.ttl_ms)
        self.l = handle.getListState("l", "n LONG", self.ttl_ms)
        self.m = handle.getMapState("m", "k LONG", "n LONG", self.ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        now_ms = getattr(timerValues, self.clock)()
        for row in rows:
            result = getattr(self, row.op.replace(".", "_"))(row.a, row.b, now_ms)
            yield Row(key=key[0], op=row.op, result=str(result))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        time_ms = expiredTimerInfo.getExpiryTimeInMs()
        self.l.appendValue((time_ms,))
        seen = (self.v.get(), sorted(self.handle.listTimers()))
        yield Row(key=key[0], op="fired", result=f"{time_ms} {seen}")

    def v_get(self, a: int, b: int, now_ms: int) -> Any:
        return self.v.get()

    def v_exists(self, a: int, b: int, now_ms: int) -> Any:
        return self.v.exists()

    def v_update(self, a: int, b: int, now_ms: int) -> Any:
        return self.v.update((a,))

    def v_clear(self, a: int, b: int, now_ms: int) -> Any:
        return self.v.clear()

    def l_get(self, a: int, b: int, now_ms: int) -> Any:
        return list(self.l.get())

    def l_exists(self, a: int, b: int, now_ms: int) -> Any:
        return self.l.exists()

    def l_put(self, a: int, b: int, now_ms: int) -> Any:
        return self.l.put([(a + i,) for i in range(b + 1)])

    def l_append(self, a: int, b: int, now_ms: int) -> Any:
        return self.l.appendValue((a,))

    def l_extend(self, a: int, b: int, now_ms: int) -> Any:
        return self.l.appendList([(a + i,) for i in range(b + 1)])

    def l_clear(self, a: int, b: int, now_ms: int) -> Any:
        return self.l.clear()

    def m_get(self, a: int, b: int, now_ms: int) -> Any:
        found = self.m.getValue((a,))
        return found if found is None else tuple(found)

    def m_has(self, a: int, b: int, now_ms: int) -> Any:
        return self.m.containsKey((a,))

    def m_put(self, a: int, b: int, now_ms: int) -> Any:
        return self.m.updateValue((a,), (b,))

    def m_remove(self, a: int, b: int, now_ms: int) -> Any:
        return self.m.removeKey((a,))

    def m_items(self, a: int, b: int, now_ms: int) -> Any:
        return sorted(self.m.iterator())

    def m_keys(self, a: int, b: int, now_ms: int) -> Any:
        return sorted(self.m.keys())

    def m_values(self, a: int, b: int, now_ms: int) -> Any:
        return sorted(self.m.values())

    def m_exists(self, a: int, b: int, now_ms: int) -> Any:
        return self.m.exists()

    def m_clear(self, a: int, b: int, now_ms: int) -> Any:
        return self.m.clear()

    def t_set(self, a: int, b: int, now_ms: int) -> Any:
        return self.handle.registerTimer(now_ms + a)

    def t_delete(self, a: int, b: int, now_ms: int) -> Any:
        return self.handle.deleteTimer(now_ms + a)

    def t_list(self, a: int, b: int, now_ms: int) -> Any:
        return list(self.handle.listTimers())


#: Everything but the map's ``exists``, which Spark's tester answers wrongly once the last key was removed.
OPS = sorted(
    name.replace("_", ".", 1) for name in vars(Scripted) if re.match("[vlmt]_(?!exists)|[vl]_", name)
)


def scripted(
    time_mode: str = "ProcessingTime", ttl_ms: int | None = None, **options: Any
) -> StatefulProcessorRunner:
    """Returns a runner of `Scripted`."""
    clock = "getCurrentWatermarkInMs" if time_mode == "EventTime" else "getCurrentProcessingTimeInMs"
    processor = Scripted(ttl_ms, clock)
    return runner(processor, key=KEY, columns=INPUT, output=OUTPUT, time_mode=time_mode, **options)


def ops(key: str, *ops: str, at: dt.datetime | None = None) -> list[tuple[Any, ...]]:
    """Returns rows for `Scripted`: ``"m.put 1 2"`` is an operation with its numbers."""
    made = []
    for op in ops:
        name, *numbers = op.split()
        a, b = ([int(number) for number in numbers] + [0, 0])[:2]
        made.append((key, name, a, b, at))
    return made


def results(out: list[tuple[Any, ...]]) -> list[str]:
    """Returns the result of each operation."""
    return [row[2] for row in out]
