"""One row for each key."""

from __future__ import annotations

from pyspark.sql.streaming import stateful_processor as spark

from kafka_eos_source.state.processor.codec import Value
from kafka_eos_source.state.processor.registry import VariableInfo
from kafka_eos_source.state.processor.variable import Variable
from kafka_eos_source.state.processor.window import PointTable


class ValueState(Variable, spark.ValueState):
    """Spark's `ValueState`."""

    def bind(self, info: VariableInfo, now_ms: int, ttl_ms: int | None) -> None:
        super().bind(info, now_ms, ttl_ms)
        self._values = PointTable(self._keys, info.table)

    def flush(self) -> None:
        self._values.flush()
        if self._expiries is not None:
            self._expiries.flush()

    def sweep(self) -> int:
        return 0 if self._expiries is None else len(self._expiries.sweep())

    def exists(self) -> bool:
        """Whether there is a row, one that has not expired."""
        section = self._section()
        value = self._values.read(section)
        return value is not None and self._is_live(value)

    def get(self) -> Value | None:
        """The row; None = there is none."""
        section = self._section()
        value = self._values.read(section)
        if value is None or not self._is_live(value):
            return None
        return self._unpack(value)

    def update(self, newValue: Value) -> None:
        """Set the row, to live from now."""
        section = self._section()
        value = self._pack(newValue)
        if self._expiries is not None:
            self._expiries.wrote(self._values.read(section), section)
        self._values.write(section, value)

    def clear(self) -> None:
        """Remove the row."""
        section = self._section()
        if self._expiries is not None:
            old = self._values.read(section)
            if old is not None:
                self._expiries.removed(old, section)
        self._values.write(section, None)
