"""Passes Python objects to Spark's other processes: pickled in an option, or in a row of a frame.

No other module of the package unpickles anything. Unpickling an option adds no risk: a person who can set the
options of a query can also name a class as a sink, and so run any code. Rows are another matter, because
data of strangers may get into a column by accident. So a row is unpickled only if it was signed with the key
of its batch and sink (`datasource.sink`), which no record contains. The key is no secret of the query's
authors.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import pickle
from typing import Any

from pyspark import cloudpickle

from kafka_eos_source.errors import InvalidOptionError


def to_bytes(value: object, what: str, *, fix: str) -> bytes:
    """Returns an object as bytes. Uses cloudpickle, which also pickles functions of a script.

    Args:
        value: the object.
        what: description of the object, for the error.
        fix: what the user can do if it cannot be pickled.

    Raises:
        InvalidOptionError: if the object cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidOptionError(f"{what} cannot be pickled: {error}.", fix=fix) from error


def from_bytes(pickled: bytes) -> Any:
    """Returns the object that `to_bytes` wrote."""
    return pickle.loads(pickled)


def to_option(value: object, what: str, *, fix: str) -> str:
    """Returns an object as text for an option; takes the arguments and raises the errors of `to_bytes`."""
    return base64.b64encode(to_bytes(value, what, fix=fix)).decode()


def from_option(text: str) -> Any:
    """Returns the object that `to_option` wrote."""
    return from_bytes(base64.b64decode(text))


_MAC_BYTES = 32


def to_row(value: object, key: bytes) -> bytes:
    """Returns an object as a binary value for a row, pickled and signed."""
    pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _mac(pickled, key) + pickled


def from_row(signed: memoryview, key: bytes) -> Any:
    """Returns the object that `to_row` wrote.

    Raises:
        ValueError: if it was not signed with this key.
    """
    mac, pickled = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(pickled, key)):
        raise ValueError("the signature is not that of the key")
    return pickle.loads(pickled)


def _mac(data: bytes | memoryview, key: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()
