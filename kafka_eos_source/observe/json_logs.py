"""One log record per micro-batch, for programs that collect structured logs (`runtime.log_format`)."""

from __future__ import annotations

import logging
from dataclasses import replace

from kafka_eos_source.observe.figures import BatchFigures, WaitingCommit, bounded
from kafka_eos_source.runtime.json_input import parse_json

_log = logging.getLogger("kafka_eos_source.batches")


class BatchLog:
    """Logs each micro-batch whose commit has ended: an `Observer`."""

    def finished(self, figures: BatchFigures) -> None:
        """Logs the figures at level INFO, or WARNING if the commit failed."""
        level = logging.WARNING if figures.error else logging.INFO
        text = f"batch {figures.batch_id} of {figures.application_id}: {figures.outcome.value}"
        figures = replace(figures, topics=bounded(figures.topics))
        _log.log(level, text, extra={"batch": parse_json(figures.to_json())})

    def waits(self, commit: WaitingCommit) -> None:
        """Ignores that a commit stands still; `Journal` writes it down."""

    def proceeds(self) -> None:
        """Ignores the end of that."""
