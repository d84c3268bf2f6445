"""Which rows and sessions of a key are one session: pure functions on numpy arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kafka_eos_source.state.binary import Ints


class Joined(NamedTuple):
    """Spans in the order of key and start, and the number of the session that each is part of.

    Attributes:
        order: where each span stood.
        session: of each span in that order, from 0, in order of key and start.
    """

    order: NDArray[Any]
    session: Ints


def join(keys: Ints, starts: Ints, ends: Ints) -> Joined:
    """Joins the spans ``[start, end)`` of each key that overlap, or are joined by others.

    Spans that are equal in key and start keep their order.
    """
    order = np.lexsort((starts, keys))
    keys, starts, ends = keys[order], starts[order], ends[order]
    if not len(order):
        return Joined(order, np.zeros(0, np.int64))
    # The largest end so far of the same key: ranks of ends, raised by more than there are ranks at each new
    # key.
    distinct, rank = np.unique(ends, return_inverse=True)
    new_key = np.concatenate([[True], keys[1:] != keys[:-1]])
    floor = np.cumsum(new_key) * len(distinct)
    so_far = distinct[np.maximum.accumulate(rank + floor) - floor]
    begins = new_key.copy()
    begins[1:] |= starts[1:] >= so_far[:-1]
    return Joined(order, np.cumsum(begins) - 1)
