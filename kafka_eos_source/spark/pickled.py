"""Sinks and functions that were given as Python objects: how they get from the user's program into Spark's
other processes.

As options of the query, pickled. This is the one place of the package that unpickles: whoever sets options of
a query can name a class of his own for a sink as well, and runs code here in any case.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

from pyspark import cloudpickle

from kafka_eos_source.errors import InvalidOptionError


def to_option(given: object, what: str, *, fix: str) -> str:
    """The object as an option's text; cloudpickle, so that what a script defines travels too.

    Args:
        what: it is, for the error.
        fix: what to do about it.

    Raises:
        InvalidOptionError: it holds what cannot be pickled.
    """
    try:
        return base64.b64encode(cloudpickle.dumps(given)).decode()  # type: ignore[no-untyped-call]
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidOptionError(f"{what} cannot be pickled: {error}.", fix=fix) from error


def from_option(text: str) -> Any:
    """The object that `to_option` wrote."""
    return pickle.loads(base64.b64decode(text))
