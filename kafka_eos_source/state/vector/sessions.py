"""Which rows and sessions of a key are one session: a pure function on numpy arrays."""

from __future__ import annotations

import numpy as np

from kafka_eos_source.state.encoding.binary import Ints


def join(keys: Ints, starts: Ints, ends: Ints) -> Ints:
    """Joins the spans ``[start, end)`` of each key that overlap, or that others connect.

    Args:
        keys: numbers from 0.
        starts, ends: of the spans, none empty.

    Returns: the number of the session that each span is part of, from 0, in the order of keys and starts.
    """
    if not len(keys):
        return np.zeros(0, np.int64)
    lowest = int(starts.min())
    span = int(ends.max()) - lowest + 1
    if (int(keys.max()) + 1) * span >= 1 << 62:
        # Far apart: their order is all that counts.
        distinct, ranks = np.unique(np.concatenate([starts, ends]), return_inverse=True)
        starts, ends = ranks[: len(keys)], ranks[len(keys) :]
        lowest, span = 0, len(distinct)
    # All keys on one axis, one behind the other: no span reaches into the next key's part of it.
    starts = keys * span + (starts - lowest)
    ends = keys * span + (ends - lowest)
    order = np.argsort(starts)
    reached = np.maximum.accumulate(ends[order])
    begins = np.concatenate([[True], starts[order][1:] >= reached[:-1]])
    session = np.empty(len(order), np.int64)
    session[order] = np.cumsum(begins) - 1
    return session
