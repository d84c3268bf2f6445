"""Event times of a batch: which of them advance the watermark, and up to when windows are closed."""

from __future__ import annotations

import numpy as np

from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.model import BatchContext


def record_event_times(
    context: BatchContext, first_ms: Ints, last_ms: Ints | None = None, rows: Ints | None = None
) -> None:
    """Records the largest event time of this shard's rows in the context of the batch.

    A single record with a wrong time in the far future must not close all windows. So event times after
    ``context.event_time_limit_ms`` do not count, and their rows are counted as ``future_rows``.

    Args:
        context: the micro-batch.
        first_ms: event time of each row; or, for a partial row, the first time that it covers.
        last_ms: the last event time of each partial row.
        rows: number of rows in each partial row.
    """
    if not len(first_ms):
        return
    last_ms = first_ms if last_ms is None else last_ms
    limit_ms = context.event_time_limit_ms
    if limit_ms is not None:
        ahead = first_ms > limit_ms
        if bool(ahead.any()):
            context.count("future_rows", int(ahead.sum() if rows is None else rows[ahead].sum()))
            last_ms = last_ms[~ahead]
            if not len(last_ms):
                return
        last_ms = np.minimum(last_ms, limit_ms)
    largest, known = int(last_ms.max()), context.seen_event_time_ms
    context.seen_event_time_ms = largest if known is None else max(known, largest)


def closed_until(context: BatchContext, grace_ms: int) -> int | None:
    """Returns the time up to which windows are closed at the end of the batch; None = no window closes.

    The event times that this shard saw in the running batch count. The watermark of the next batch is at
    least as late, so no later row can fall into these windows, and their results can be emitted now.

    Args:
        context: the micro-batch.
        grace_ms: how long a window accepts rows after its end.

    Returns:
        Milliseconds since the epoch. A window that ends at this time or earlier is closed.
    """
    times = [time for time in (context.event_time_ms, context.seen_event_time_ms) if time is not None]
    return max(times) - grace_ms if times else None
