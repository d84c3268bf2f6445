"""Every sink that needs no server, put to the contract."""

from __future__ import annotations

import uuid

import pytest

from kafka_eos_source.sinks.memory import SYSTEMS, MemorySink
from kafka_eos_source.testing.sinks import Rows, SinkConformance, System


class TestMemory(SinkConformance):
    @pytest.fixture
    def system(self) -> System:
        name = uuid.uuid4().hex

        def visible() -> Rows:
            memory = SYSTEMS.get(name)
            table = memory.visible() if memory is not None else None
            return [] if table is None else table.to_pylist()

        return System(sink=lambda: MemorySink(name), visible=visible, in_process=True)
