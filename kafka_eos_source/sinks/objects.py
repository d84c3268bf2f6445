"""Sinks that were given as Python objects: how they get from the user's program into Spark's other processes.

As options of the query, pickled. This is the one place of the package that unpickles: whoever sets options of
a query can name a class of his own for a sink as well, and runs code here in any case.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

from pyspark import cloudpickle

from kafka_eos_source.sinks.contract import TwoPhaseSink


def to_option(sink: TwoPhaseSink) -> str:
    """The object as an option's text; cloudpickle, so that classes of a script travel too."""
    return base64.b64encode(cloudpickle.dumps(sink)).decode()  # type: ignore[no-untyped-call]


def from_option(text: str) -> Any:
    """The object that `to_option` wrote."""
    return pickle.loads(base64.b64decode(text))
