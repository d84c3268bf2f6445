"""What the processes that commit remember for one run of a query.

Spark may run each commit in another process on the driver's host, so a private file there keeps the notes.
The notes of a run replace those of the run before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.runtime.logs import warn_once

_log = logging.getLogger(__name__)

#: Files of queries that have noted nothing for this long are deleted.
_KEPT_SECONDS = 7 * 24 * 3600.0


@dataclass(frozen=True)
class RunNotes:
    """Notes of one kind, such as names of topics, for each query.

    Attributes:
        folder: name of the private folder.
        what: what they say, for a log line: ``which topics have good records``.
        otherwise: what happens if another process does not know it, for the same line.
    """

    folder: str
    what: str
    otherwise: str
    _known: dict[str, tuple[str, frozenset[str]]] = field(default_factory=dict, repr=False)

    def of(self, application_id: str, run_id: str) -> frozenset[str]:
        """Returns the notes of a run of a query.

        Args:
            application_id: the query.
            run_id: Spark's id of the run.
        """
        known = self._known.get(application_id)
        if known is None or known[0] != run_id:
            known = self._read(application_id)
        return known[1] if known[0] == run_id else frozenset()

    def add(self, application_id: str, run_id: str, notes: Iterable[str]) -> None:
        """Adds notes of a run. If they cannot be written, logs a warning, once in this process."""
        before = self.of(application_id, run_id)
        now = before.union(notes)
        self._known[application_id] = run_id, now
        if now == before:
            return
        try:
            folder = PrivateFolder.of_user(self.folder)
            folder.write(f"{application_id}.json", json.dumps({"run": run_id, "notes": sorted(now)}))
            folder.tidy(_KEPT_SECONDS)
        except (OSError, UnicodeDecodeError) as error:
            warn_once(
                _log,
                f"the commit cannot note {self.what} (application.id={application_id!r}): {error}. If Spark "
                f"starts another process for a commit, {self.otherwise}.",
            )

    def _read(self, application_id: str) -> tuple[str, frozenset[str]]:
        try:
            text = PrivateFolder.of_user(self.folder).read(f"{application_id}.json")
            if text is not None:
                found = parse_json(text)
                return str(found["run"]), frozenset(map(str, found["notes"]))
        except (OSError, UnicodeDecodeError, *SHAPE_ERRORS) as error:
            _log.info("cannot read %s (application.id=%r): %s", self.what, application_id, error)
        return "", frozenset()
