"""Value state: one row per key."""

from __future__ import annotations

from pyspark.sql.streaming import stateful_processor as spark

from kafka_eos_source.state.processor.codec import Value
from kafka_eos_source.state.processor.registry import VariableInfo
from kafka_eos_source.state.processor.variable import Variable
from kafka_eos_source.state.processor.window import PointTable


class ValueState(Variable, spark.ValueState):
    """Implements Spark's `ValueState`."""

    def bind(self, info: VariableInfo, now_ms: int, ttl_ms: int | None) -> None:
        super().bind(info, now_ms, ttl_ms)
        self._values = PointTable(self._keys, info.table)
        self._read, self._write = self._values.read, self._values.write

    def flush(self) -> None:
        self._values.flush()
        super().flush()

    def exists(self) -> bool:
        """Whether the key has a row that has not expired."""
        section = self._section()
        value = self._read(section)
        return value is not None and self._is_live(value)

    def get(self) -> Value | None:
        """Returns the row; None if the key has no row."""
        section = self._keys.section or self._section()
        value = self._read(section)
        if value is None:
            return None
        if self._expiries is None:  # the hot path needs as few calls as possible
            return self._decode(value)
        return self._unpack(value) if self._expiries.is_live(value) else None

    def update(self, newValue: Value) -> None:
        """Writes the row; its time to live starts now."""
        section = self._keys.section or self._section()
        value = self._pack(newValue)
        if self._expiries is not None:
            self._expiries.wrote(self._read(section), section)
        self._write(section, value)

    def clear(self) -> None:
        """Removes the row."""
        section = self._section()
        if self._expiries is not None:
            old = self._read(section)
            if old is not None:
                self._expiries.removed(old, section)
        self._write(section, None)
