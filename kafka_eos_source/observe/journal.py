"""Keeps the figures of the queries on this host in private files, for whoever wants to look at them.

There are three kinds of files, in folders that only this user can open:

* one journal per query, to which the committing process appends one line per micro-batch; its size is bounded
* one file per query whose commit stands still; it is replaced about once per second and deleted at the end
* one file per source, which the planning process of the source replaces about once per second

Losing a file costs figures and nothing else. Every error of these files is logged once and ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TypeVar
from urllib.parse import quote

from kafka_eos_source.observe.background import in_background
from kafka_eos_source.observe.figures import BatchFigures, SourceFigures, WaitingCommit, newer, with_totals
from kafka_eos_source.observe.lines import ProcessId
from kafka_eos_source.runtime.folders import PrivateFolder
from kafka_eos_source.runtime.logs import warn_once

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: A journal has two parts of this size: 1,500 batches of a query with one topic, 50 with the longest lines.
_JOURNAL_BYTES = 1 << 20
#: The newest line is within these last bytes. With the names of 50 output topics, it has about 40 KB.
_NEWEST_BYTES = 128 << 10
#: Size of the largest file of a source: 100,000 partitions.
_SOURCE_BYTES = 8 << 20
#: How much of a journal is read to show it.
_SHOWN_BYTES = 256 << 10
#: Files of queries that have not run for this long are deleted. A source renews its file every hour.
_KEPT_SECONDS = 7 * 24 * 3600.0
_KEPT_SOURCE_SECONDS = 24 * 3600.0
RENEWAL_SECONDS = 3600.0
_LONGEST_NAME = 200
#: Prefix of the name of files whose query has a longer ``application.id``.
_HASHED = "sha256 "
#: Queries whose newest batch a process remembers. It commits for few queries at a time.
_MOST_REMEMBERED = 64


@dataclass(frozen=True)
class _Remembered:
    """The newest batch of a query that this process knows.

    Attributes:
        figures: the batch.
        size: size of the journal after this process wrote its last line; None if it has written none.
    """

    figures: BatchFigures
    size: int | None = None


class Journal:
    """The journal of one query, written by the process that commits: an `Observer`.

    Totals continue those of the newest line, which is usually the last one that this process wrote. If the
    journal cannot be read, they continue what this process remembers, because a total that begins again at 1
    would look like another run of the query.
    """

    def __init__(self, application_id: str) -> None:
        self._name = _name(application_id)

    def newest(self, run_id: str) -> BatchFigures | None:
        """Returns the newest batch of the query. Reads it if this process has committed no batch of the run.

        Args:
            run_id: Spark's id of the present run.

        Returns:
            None if there is no batch, or if the journal cannot be read and this process has written none.
        """
        known = _remembered.get(self._name)
        if known is not None and known.figures.run_id == run_id:
            return known.figures
        found = in_background(lambda: attempt(lambda: _newest(self._name), "read"))
        return newer(found, None if known is None else known.figures)

    def finished(self, figures: BatchFigures) -> None:
        """Appends a line, with the totals of the run."""
        before = _remembered.get(self._name)

        def append() -> _Remembered:
            _tidy()
            made = figures

            def line(size: int) -> str:
                nonlocal made
                last = None if before is None else before.figures
                if before is None or before.size != size:  # another process wrote, or the file is new
                    # raises if nobody can read it: without the newest line, totals could go backwards
                    last = newer(_newest(self._name), last)
                made = with_totals(figures, last)
                return made.to_json()

            size = _journals().append(self._name, line, _JOURNAL_BYTES)
            return _Remembered(made, size)

        written = in_background(lambda: attempt(append, "write"))
        if written is None and before is not None:  # the line is lost, and its figures are not
            written = replace(before, figures=with_totals(figures, before.figures))
        if written is not None:
            _remember(self._name, written)

    def waits(self, commit: WaitingCommit) -> None:
        """Replaces the file that says what the commit waits for."""
        in_background(lambda: attempt(lambda: _waiting().write(self._name, commit.to_json()), "write"))

    def proceeds(self) -> None:
        """Deletes that file."""
        in_background(lambda: attempt(lambda: _waiting().remove(self._name), "delete"))


class SourceFile:
    """The file of one source, written by its planning process.

    Args:
        name: a name that no other source has.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, figures: SourceFigures) -> None:
        """Replaces the file."""
        _tidy()
        attempt(lambda: _sources().write(self._name, figures.to_json()), "write")


@dataclass(frozen=True)
class QueryJournal:
    """Everything that this host knows about one query.

    Attributes:
        application_id: the transactional id.
        batches: the newest micro-batches, oldest first.
        waiting: what a commit waits for; None if no commit stands still. Its writer may be dead.
        sources: the sources of the query, as far as they are known. Their writers may be dead.
    """

    application_id: str
    batches: tuple[BatchFigures, ...] = ()
    waiting: WaitingCommit | None = None
    sources: tuple[SourceFigures, ...] = ()


def query_journals(
    changed_since: float = 0.0, is_wanted: Callable[[str], bool] = lambda _: True
) -> list[QueryJournal]:
    """Reads the journals of the queries of this user on this host, the newest first.

    Sources whose query is not known are returned as queries without a name: they belong to a query that has
    not committed a micro-batch yet, or writes to another sink.

    Args:
        changed_since: leaves out journals that have not changed since then, in seconds since 1970.
        is_wanted: whether the caller wants the query with this ``application.id``. Journals of other queries
            are not read.

    Raises:
        OSError: if the folders cannot be read, or belong to another user.
    """

    def names(folder: PrivateFolder) -> list[str]:
        return [name for name in _changed(folder, changed_since) if _is_hashed(name) or is_wanted(name)]

    sources = source_figures()
    queries = {each.application_id: each for each in map(_read_journal, names(_journals())) if each}
    for name in names(_waiting()):
        waiting = _read_waiting(name)
        if waiting is not None and waiting.application_id not in queries:
            queries[waiting.application_id] = QueryJournal(waiting.application_id, waiting=waiting)
    for source in sources:
        if source.application_id and source.application_id not in queries and source.at >= changed_since:
            queries[source.application_id] = QueryJournal(source.application_id)
    candidates = _candidates(sources)
    found = [
        replace(each, sources=sources_of(each, candidates(each)))
        for each in queries.values()
        if is_wanted(each.application_id)
    ]
    matched = {each.writer for query in found for each in query.sources}
    return found + [
        QueryJournal("", sources=(each,))
        for each in sources
        if each.writer not in matched
        and not each.application_id
        and each.at >= changed_since
        and is_wanted("")
    ]


def query_journal(
    application_id: str, sources: Iterable[SourceFigures] | None = None, last_bytes: int = _SHOWN_BYTES
) -> QueryJournal | None:
    """Reads the journal of one query; returns None if this host knows nothing about it.

    Args:
        application_id: the transactional id.
        sources: the figures of all sources, if the caller has read them.
        last_bytes: how much of the journal is read.

    Raises:
        OSError: if the files cannot be read, or belong to another user.
    """
    name = _name(application_id)
    found = _read_journal(name, last_bytes) or QueryJournal(application_id, waiting=_read_waiting(name))
    found = replace(found, sources=sources_of(found, source_figures() if sources is None else sources))
    return None if found == QueryJournal(application_id) else found


def _read_journal(name: str, last_bytes: int = _SHOWN_BYTES) -> QueryJournal | None:
    batches = tuple(reversed(list(_newest_first(_journals().lines(name, last_bytes)))))
    if not batches:
        return None
    return QueryJournal(batches[-1].application_id, batches, _read_waiting(name))


def _read_waiting(name: str) -> WaitingCommit | None:
    return WaitingCommit.from_json(_waiting().read(name) or "")


def _changed(folder: PrivateFolder, since: float) -> list[str]:
    """Returns the files of a folder that have changed since a time, the newest first."""
    changes = folder.changes()
    return sorted((name for name, at in changes.items() if at >= since), key=lambda name: -changes[name])


def source_figures(changed_since: float = 0.0) -> list[SourceFigures]:
    """Reads the figures of the sources of this user on this host.

    Args:
        changed_since: leaves out files that have not changed since then, in seconds since 1970. A source that
            runs renews its file every `RENEWAL_SECONDS`.
    """
    folder = _sources()
    names = [name for name, at in folder.changes().items() if at >= changed_since]
    lines = [folder.read(name, _SOURCE_BYTES) or "" for name in names]
    return [found for found in map(SourceFigures.from_json, lines) if found is not None]


def sources_of(journal: QueryJournal, sources: Iterable[SourceFigures]) -> tuple[SourceFigures, ...]:
    """Returns the sources of a query.

    A source that does not know its ``application.id`` is found by its positions: the query has committed one
    that the source planned, in the same driver. Of the runs of a source, only the newest ones are returned.
    """
    newest = journal.batches[-1] if journal.batches else None
    positions = {read.position for batch in journal.batches for read in batch.sources}
    own = [
        each
        for each in sources
        if each.application_id == journal.application_id
        or (
            not each.application_id
            and newest is not None
            and each.writer.driver == newest.writer.driver
            and not positions.isdisjoint(each.positions)
        )
    ]
    by_name: dict[str, SourceFigures] = {}
    for each in sorted(own, key=lambda each: each.at):
        by_name[each.name] = each
    return tuple(by_name[name] for name in sorted(by_name))


def _candidates(sources: Iterable[SourceFigures]) -> Callable[[QueryJournal], list[SourceFigures]]:
    """Returns a function that finds the sources which `sources_of` has to look at for a query.

    They are the sources that know the query, and the nameless sources of the driver that ran it last. Without
    this index, many queries times many sources would be compared.
    """
    named: dict[str, list[SourceFigures]] = {}
    nameless: dict[ProcessId, list[SourceFigures]] = {}
    for each in sources:
        if each.application_id:
            named.setdefault(each.application_id, []).append(each)
        else:
            nameless.setdefault(each.writer.driver, []).append(each)

    def of_query(journal: QueryJournal) -> list[SourceFigures]:
        of_driver = nameless.get(journal.batches[-1].writer.driver, []) if journal.batches else []
        return named.get(journal.application_id, []) + of_driver

    return of_query


def newest_batch(application_id: str) -> BatchFigures | None:
    """Returns the newest batch of a query; None if this host knows none.

    Raises:
        OSError: if the journal cannot be read.
    """
    return _newest(_name(application_id))


def newest_batches(changed_since: float) -> list[BatchFigures]:
    """Returns the newest batch of each query that has committed one since a time, in seconds since 1970.

    Raises:
        OSError: if a journal cannot be read.
    """
    found = map(_newest, _changed(_journals(), changed_since))
    return [each for each in found if each is not None]


def _newest(name: str) -> BatchFigures | None:
    return next(iter(_newest_first(_journals().lines(name, _NEWEST_BYTES))), None)


def _newest_first(lines: list[str]) -> Iterable[BatchFigures]:
    """Yields the batches that can be read. Damaged lines and those of other versions are left out."""
    for line in reversed(lines):
        batch = BatchFigures.from_json(line)
        if batch is not None:
            yield batch


def _name(application_id: str) -> str:
    """Returns the name of a query's files. Readers take the ``application.id`` from the lines."""
    if len(quote(application_id, safe="", errors="surrogatepass")) <= _LONGEST_NAME:
        return application_id
    return _HASHED + sha256(application_id.encode(errors="surrogatepass")).hexdigest()


def _is_hashed(name: str) -> bool:
    """Whether the ``application.id`` of a query's files cannot be told from their name."""
    return name.startswith(_HASHED)


def _journals() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-live").folder("batches")


def _waiting() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-live").folder("waiting")


def _sources() -> PrivateFolder:
    return PrivateFolder.of_user("kafka-eos-live").folder("sources")


def attempt(call: Callable[[], T], what: str) -> T | None:
    """Makes a call that reads or writes these files; returns None if that fails."""
    try:
        return call()
    except (OSError, UnicodeError) as error:
        warn_once(
            _log,
            f"cannot {what} the live figures of queries on this host: {error}. `kafka-eos top` and the "
            "notebook's panel do not show them; the queries are not affected.",
        )
        return None


def _tidy() -> None:
    """Deletes the files of queries that no longer run."""
    attempt(lambda: _journals().tidy(_KEPT_SECONDS), "delete")
    attempt(lambda: _waiting().tidy(_KEPT_SECONDS), "delete")
    attempt(lambda: _sources().tidy(_KEPT_SOURCE_SECONDS), "delete")


def _remember(name: str, newest: _Remembered) -> None:
    _remembered.pop(name, None)  # so that the query that ended a batch last is the last one
    _remembered[name] = newest
    while len(_remembered) > _MOST_REMEMBERED:
        del _remembered[next(iter(_remembered))]


_remembered: dict[str, _Remembered] = {}
