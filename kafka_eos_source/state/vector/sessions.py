"""Which rows and sessions of a key are one session: a pure function on numpy arrays."""

from __future__ import annotations

import numpy as np

from kafka_eos_source.state.binary import Ints


def join(keys: Ints, starts: Ints, ends: Ints) -> Ints:
    """Joins the spans ``[start, end)`` of each key that overlap, or that others connect.

    Returns: the number of the session that each span is part of, from 0, in the order of keys and starts.
    """
    if not len(keys):
        return np.zeros(0, np.int64)
    order = np.lexsort((starts, keys))
    keys, starts, ends = keys[order], starts[order], ends[order]
    # The largest end so far, of the same key: ranks of ends, lifted above all ranks before at each new key.
    distinct, rank = np.unique(ends, return_inverse=True)
    begins = np.concatenate([[True], keys[1:] != keys[:-1]])
    floor = np.cumsum(begins) * len(distinct)
    so_far = distinct[np.maximum.accumulate(rank + floor) - floor]
    begins[1:] |= starts[1:] >= so_far[:-1]
    session = np.empty(len(order), np.int64)
    session[order] = np.cumsum(begins) - 1
    return session
