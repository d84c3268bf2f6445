"""Begins a shard's store with the newest snapshot that fits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import without_secrets
from kafka_eos_source.state.changelog.recovery import Reason, WipeNeeded, plan_restore
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.snapshots.download import downloaded, install
from kafka_eos_source.state.snapshots.storage import Manifest, SnapshotStorage

_log = logging.getLogger(__name__)

#: A local store that is at least this many offsets behind may be replaced by a snapshot. Reading them takes
#: about a second.
_FAR_BEHIND = 1_000_000
#: Bytes of a snapshot that are downloaded in the time of reading one record of the changelog.
_BYTES_PER_RECORD = 100


@dataclass(frozen=True)
class SnapshotUse:
    """How a process uses the snapshots of a shard.

    Attributes:
        location: option ``state.snapshot.location``.
        timeout_ms: how long a download may take. It is tried once: the changelog has all of the state.
        only_reads: whether nothing is removed from the storage, not even a file that turns out to be damaged.
    """

    location: str = field(repr=False)  # may have a password
    timeout_ms: int
    only_reads: bool = False


class ShardSnapshots:
    """The snapshots from which a shard's store may begin; for one call of `shard_store.open_shard_store`.

    A snapshot fits if reading the rest of the changelog makes it the committed state, by the same rules as a
    local store (`recovery`): its offset lies between the start of the log and the committed offset, and
    it is young enough to have missed no delete.

    Args:
        use: where they are.
        path: folder of the shard's store.
        identity: of the store.
        end: committed offset of the shard's changelog partition, from the token.
        log_start: returns the first offset of that partition.
        delete_retention_ms: of the changelog topic.
    """

    def __init__(
        self,
        use: SnapshotUse,
        path: Path,
        identity: StoreIdentity,
        end: int,
        log_start: Callable[[], int],
        delete_retention_ms: int | None,
    ) -> None:
        self._use = use
        self._path = path
        self._identity = identity
        self._end = end
        self._log_start = log_start
        self._delete_retention_ms = delete_retention_ms
        self._resources = ExitStack()
        self._ready: Path | None = None
        self._was_tried = False

    def install(self) -> bool:
        """Puts the newest snapshot that fits in the place of the store, which does not exist."""
        with self._resources:
            if not self._was_tried:
                self._download(0)
            ready, self._ready = self._ready, None
            return ready is not None and install(ready, self._path)

    def replaces(self, next_offset: int | None) -> WipeNeeded | None:
        """Decides whether a snapshot should take the place of a local store that is far behind.

        The snapshot is downloaded and checked before the store is given up.

        Args:
            next_offset: changelog offset of the local store.
        """
        if next_offset is None or self._was_tried or self._end - next_offset < _FAR_BEHIND:
            return None
        self._download(next_offset)
        if self._ready is None:
            return None
        return WipeNeeded(Reason.SNAPSHOT, f"it is {self._end - next_offset:,} offsets behind its changelog")

    def close(self) -> None:
        """Removes what was downloaded and not used."""
        self._resources.close()

    def _download(self, than: int) -> None:
        """Downloads the newest snapshot that fits, if it is worth more than a store at offset ``than``."""
        self._was_tried = True
        log_start = self._log_start()
        began = time.monotonic()
        deadline = Deadline.after_ms(self._use.timeout_ms)

        def refusal(manifest: Manifest) -> str | None:
            plan = plan_restore(
                manifest.next_offset,
                manifest.batch,
                log_start,
                self._end,
                now_ms=int(time.time() * 1000),
                delete_retention_ms=self._delete_retention_ms,
                saved_ms=manifest.created_ms,
            )
            if isinstance(plan, WipeNeeded):
                return plan.why
            if than and manifest.size_bytes > (manifest.next_offset - than) * _BYTES_PER_RECORD:
                return (
                    f"reading the changelog from offset {than} takes less time than downloading its "
                    f"{manifest.size_bytes / 1e6:.0f} MB"
                )
            return None

        try:
            storage = SnapshotStorage(self._use.location, self._identity, only_reads=self._use.only_reads)
            found = self._resources.enter_context(
                downloaded(storage, self._path, self._identity, refusal, deadline)
            )
        except (InvalidOptionError, OSError) as error:
            # The driver could open the location. Without snapshots, a restore only takes longer.
            _log.warning("no snapshot in %s can be used: %s", without_secrets(self._use.location), error)
            return
        if found is None:
            return
        manifest, self._ready = found
        _log.info(
            "shard %s: downloaded the snapshot at changelog offset %d of %d, %.1f MB in %.1f s",
            TopicPartition(self._identity.changelog_topic, self._identity.shard),
            manifest.next_offset,
            self._end,
            manifest.size_bytes / 1e6,
            time.monotonic() - began,
        )


@contextmanager
def snapshots_of(
    use: SnapshotUse | None,
    path: Path,
    identity: StoreIdentity,
    end: int | None,
    log_start: Callable[[], int],
    delete_retention_ms: int | None,
) -> Iterator[ShardSnapshots | None]:
    """Yields the snapshots of a shard; None if there can be none that fits.

    Args:
        use: where they are; None = they are not used.
        end: committed offset that the token confirms; None = there is no token.
        path, identity, log_start, delete_retention_ms: as in `ShardSnapshots`.
    """
    if use is None or end is None or not identity.topic_id:
        yield None
        return
    snapshots = ShardSnapshots(use, path, identity, end, log_start, delete_retention_ms)
    try:
        yield snapshots
    finally:
        snapshots.close()
