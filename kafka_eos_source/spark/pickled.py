"""Passes Python objects of the user (sinks and functions) to Spark's other processes, pickled in an option.

No other module of the package unpickles anything. Unpickling adds no risk here: a person who can set the
options of a query can also name a class as a sink, and so run any code.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

from pyspark import cloudpickle

from kafka_eos_source.errors import InvalidOptionError


def to_option(value: object, what: str, *, fix: str) -> str:
    """Returns an object as text for an option. Uses cloudpickle, which also pickles functions of a script.

    Args:
        value: the object.
        what: description of the object, for the error.
        fix: what the user can do if it cannot be pickled.

    Raises:
        InvalidOptionError: if the object cannot be pickled.
    """
    try:
        return base64.b64encode(cloudpickle.dumps(value)).decode()  # type: ignore[no-untyped-call]
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidOptionError(f"{what} cannot be pickled: {error}.", fix=fix) from error


def from_option(text: str) -> Any:
    """Returns the object that `to_option` wrote."""
    return pickle.loads(base64.b64decode(text))
