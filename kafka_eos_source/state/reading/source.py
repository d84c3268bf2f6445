"""Where a `StateQuery` finds its store: in the databases on this machine, in the changelog, or in both."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from kafka_eos_source.errors import InvalidOptionError, NotUpToBoundError
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.state.reading.cut import Bound, Changelog, Cut, check_batch
from kafka_eos_source.state.reading.local import StoreFolder, one_store
from kafka_eos_source.state.reading.restored import ChangelogCopy, newest_of_changelog
from kafka_eos_source.state.reading.snapshot import Snapshot, of_folders

_PREFIX = "kafka."
#: Pause between two looks at databases that are behind a batch: the first, and the longest after doubling.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 0.5


class SnapshotSource:
    """Takes snapshots of one store. Not thread-safe.

    Args:
        application_id, store, state_dir, kafka, snapshot_location, timeout_ms: as in `StateQuery`.

    Raises:
        InvalidOptionError: if ``snapshot_location`` cannot be opened, or there is no changelog to read.
    """

    def __init__(
        self,
        application_id: str | None,
        store: str | None,
        state_dir: str | os.PathLike[str] | None,
        kafka: Mapping[str, str] | None,
        snapshot_location: str | None,
        timeout_ms: int,
    ) -> None:
        if snapshot_location is not None:
            if state_dir is not None or kafka is None:
                raise InvalidOptionError(
                    "snapshot_location is set, but this read does not restore the state from the changelog, "
                    "so it uses no snapshots.",
                    fix="remove snapshot_location; or set kafka and no state_dir.",
                )
            file_system(snapshot_location)
        self._application_id = application_id
        self._store = store
        self._state_dir = state_dir
        self._kafka = kafka
        self._snapshot_location = snapshot_location
        self._timeout_ms = timeout_ms
        #: Follows the changelog, if there are no databases to read.
        self._copy: ChangelogCopy | None = None
        self._cut: Cut | None = None

    def newest(self, at_least: Bound | None, present: Snapshot | None = None) -> Snapshot:
        """Returns a snapshot of the newest batch, once it reflects ``at_least``.

        Args:
            at_least: as in `StateQuery`.
            present: the snapshot that this method returned last. It is returned again if Kafka has committed
                nothing to the store since.

        Raises:
            KafkaEosError: as `StateQuery` describes.
        """
        self._check_bound(at_least)
        application_id, store, found = self._application_id, self._store, None
        if self._state_dir is not None:
            application_id, store, found = one_store(self._state_dir, application_id, store)
        changelog = self._changelog(application_id, store)
        if changelog is None:
            if found is None:
                raise InvalidOptionError(
                    "neither state_dir nor kafka is set.",
                    fix="pass the operator's state.dir, its kafka.* options, or both.",
                )
            return self._of_databases(found, at_least)
        deadline = self._deadline()
        cut = changelog.cut(deadline) if at_least is None else changelog.cut_at_least(at_least, deadline)
        if present is not None and self._cut is not None and cut.same_state(self._cut):
            return present
        if found is None:
            return self._of_changelog(changelog, cut, present)
        return self._of_databases_at_cut(found, changelog, at_least)

    def close(self) -> None:
        """Deletes temporary files. May be called repeatedly."""
        if self._copy is not None:
            self._copy.close()

    def _of_databases(self, found: Collection[StoreFolder], at_least: Bound | None) -> Snapshot:
        deadline = self._deadline()

        def look() -> Snapshot:
            snapshot = of_folders(found, None, deadline)
            try:
                for state in snapshot.states.values():
                    if isinstance(at_least, int):
                        check_batch(None if state.batch is None else state.batch.batch_id, at_least)
            except NotUpToBoundError:
                snapshot.close()
                raise
            return snapshot

        return retry(look, NotUpToBoundError, Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS))

    def _of_databases_at_cut(
        self, found: Collection[StoreFolder], changelog: Changelog, at_least: Bound | None
    ) -> Snapshot:
        cuts: list[Cut] = []

        def read_cut(remaining: Deadline) -> Cut:
            cut = changelog.cut(remaining, at_least)
            cut.check(at_least)
            cuts.append(cut)
            return cut

        snapshot = of_folders(found, read_cut, self._deadline())
        self._cut = cuts[-1]
        return snapshot

    def _of_changelog(self, changelog: Changelog, cut: Cut, present: Snapshot | None) -> Snapshot:
        copy = self._copy
        if copy is None or not copy.can_continue(cut):
            copy = ChangelogCopy(changelog, self._deadline())
        try:
            snapshot, reached = newest_of_changelog(copy, cut)
        except BaseException:
            if copy is not self._copy:
                copy.close()
            raise
        if self._copy is not None and copy is not self._copy:
            assert present is not None
            present.also_close(self._copy.close)
        self._copy, self._cut = copy, reached
        return snapshot

    def _check_bound(self, at_least: Bound | None) -> None:
        """Raises unless the bound can be compared with the state."""
        if at_least is None or (isinstance(at_least, int) and not isinstance(at_least, bool)):
            return
        if not isinstance(at_least, Mapping) or not all(
            isinstance(tp, TopicPartition) and isinstance(at, int) for tp, at in at_least.items()
        ):
            raise InvalidOptionError(
                f"at_least is {at_least!r}; expected a batch id, or offsets by TopicPartition.",
                fix="pass a batch id such as 17, or {TopicPartition('topic', 0): 1234}.",
            )
        if self._kafka is None:
            raise InvalidOptionError(
                f"at_least has the offsets {dict(at_least)!r}, but 'kafka' is not set; the databases in "
                "state_dir do not record which input offsets they reflect.",
                fix="pass kafka as well, whose committed offsets are compared; or pass a batch id.",
            )

    def _changelog(self, application_id: str | None, store: str | None) -> Changelog | None:
        if self._kafka is None:
            return None
        if application_id is None or store is None:
            raise InvalidOptionError(
                f"application_id is {application_id!r} and store is {store!r}; a read of the changelog needs "
                "both.",
                fix="pass both, with the values that the query has.",
            )
        properties = {key.lower().removeprefix(_PREFIX): str(value) for key, value in self._kafka.items()}
        group_id = group_of(application_id, properties.pop("group.id", None))
        kafka = check_consumer(properties)
        return Changelog(application_id, store, group_id, kafka, self._snapshot_location)

    def _deadline(self) -> Deadline:
        return Deadline.after_ms(self._timeout_ms)
