"""Finds the rows and sessions of a key that form one session: a pure function on numpy arrays."""

from __future__ import annotations

import numpy as np

from kafka_eos_source.state.encoding.binary import Ints


def join_spans(keys: Ints, starts: Ints, ends: Ints) -> Ints:
    """Joins spans ``[start, end)`` of the same key that overlap, directly or through others.

    Args:
        keys: number of the key of each span, from 0.
        starts: start of each span.
        ends: end of each span, later than its start.

    Returns:
        For each span the number of its session, from 0, in the order of keys and starts.
    """
    if not len(keys):
        return np.zeros(0, np.int64)
    lowest = int(starts.min())
    span = int(ends.max()) - lowest + 1
    if (int(keys.max()) + 1) * span >= 1 << 62:
        # The spans are too far apart for the axis below, so replace the times by their ranks.
        distinct, ranks = np.unique(np.concatenate([starts, ends]), return_inverse=True)
        starts, ends = ranks[: len(keys)], ranks[len(keys) :]
        lowest, span = 0, len(distinct)
    # Place the keys one after another on one axis, so that no span reaches into the part of the next key.
    starts = keys * span + (starts - lowest)
    ends = keys * span + (ends - lowest)
    order = np.argsort(starts)
    reached = np.maximum.accumulate(ends[order])
    begins = np.concatenate([[True], starts[order][1:] >= reached[:-1]])
    session = np.empty(len(order), np.int64)
    session[order] = np.cumsum(begins) - 1
    return session
