"""Everything that talks to Kafka. No other package imports a Kafka client.

The package speaks Kafka's protocol itself, with the messages of ``kafka-python``.

``import kafka.protocol.producer`` first runs ``kafka/__init__.py``, which imports a consumer, a producer and
an admin client: 110 modules and 0.1 CPU s, in each process that speaks Kafka's protocol. This package uses
the messages only. `install` therefore puts the package into ``sys.modules`` without running it. It runs as
soon as somebody asks for one of its names, so ``from kafka import KafkaProducer`` works in the same process.
``import kafka.cluster`` does not, unless the package ran before: that module expects it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

_PACKAGE = "kafka"


class _NotYetRun(ModuleType):
    """A package whose ``__init__.py`` runs when a name is missing that it may define."""

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickles the package by its name, as cloudpickle does with plain modules."""
        return import_module, (_PACKAGE,)

    def __getattr__(self, name: str) -> Any:
        """Runs the package, and returns the name. Python calls this only for names that are missing."""
        with _lock:
            if "_is_running" in vars(self):  # the package itself asks whether it has the name
                raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
            if type(self) is _NotYetRun:
                self._is_running = True
                try:
                    self.__loader__.exec_module(self)  # type: ignore[union-attr]
                finally:
                    del self._is_running
                self.__class__ = ModuleType  # type: ignore[assignment]
        return getattr(self, name)


#: Held while the package runs.
_lock = threading.RLock()


def install() -> None:
    """Makes later imports of a part of ``kafka-python`` skip the rest; does nothing if it was imported."""
    if _PACKAGE in sys.modules:
        return
    spec = find_spec(_PACKAGE)
    if spec is None or spec.loader is None:
        return  # the import that follows reports it
    package = module_from_spec(spec)
    package.__class__ = _NotYetRun
    sys.modules[_PACKAGE] = package


install()
