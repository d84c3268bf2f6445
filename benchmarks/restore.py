"""``python -m benchmarks.restore``: time to restore state, from scratch and after a crash that kept it.

It restores one shard with random, distinct, unordered keys, without Spark. It times what a task does before
its first record (`state.changelog.restore`), including opening the store.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click

from benchmarks.arrow_records import random_changes, send
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog import topic as changelog
from kafka_eos_source.state.changelog.recovery import Restored
from kafka_eos_source.state.changelog.restore import restore
from kafka_eos_source.state.changelog.topic import changelog_client
from kafka_eos_source.state.model import Owner, StoreIdentity
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_MINUTES = 600.0


@click.command()
@click.option("--records", "sizes", multiple=True, type=int, default=(10_000, 100_000, 1_000_000, 2_000_000))
@click.option("--value-bytes", default=24, show_default=True)
def main(sizes: tuple[int, ...], value_bytes: int) -> None:
    """Times both cases for changelogs with these numbers of records."""
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory() as folder:
        for records in sizes:
            _measure(kafka.bootstrap_servers, Path(folder), records, value_bytes)


def _measure(bootstrap: str, folder: Path, records: int, value_bytes: int) -> None:
    application_id = f"restore-{records}"
    kafka = check_consumer({"bootstrap.servers": bootstrap})
    name = changelog.changelog_name(application_id, "s")
    made = changelog.ensure(kafka, name, 1, deadline=Deadline.after_seconds(_MINUTES))
    send(bootstrap, name, random_changes(records, value_bytes, seed=1))
    tp = TopicPartition(name, 0)
    path = folder / application_id
    identity = StoreIdentity(application_id, "s", 0, 1, name, made.topic_id)
    wholly, cpu = _timed(kafka, path, identity, tp, records)
    again, _ = _timed(kafka, path, identity, tp, records)
    click.echo(
        f"{records:>10,} records: restored in {wholly:.2f} s, {records / wholly:,.0f} records/s, "
        f"{records / cpu:,.0f} a CPU second; with the state there, ready in {again * 1000:.0f} ms"
    )


def _timed(
    kafka: dict[str, str], path: Path, identity: StoreIdentity, tp: TopicPartition, end: int
) -> tuple[float, float]:
    """Restores the state; returns the seconds until it is ready and the CPU seconds of this process."""
    began, cpu = time.perf_counter(), time.process_time()
    store = TransactionalStateStore.open(path, identity)
    try:
        with changelog_client(kafka) as client:
            found = restore(
                store,
                tp,
                end,
                ChangelogReader(client, tp),
                owner=Owner(identity.application_id, identity.store, identity.shards),
                deadline=Deadline.after_seconds(_MINUTES),
            )
        if not isinstance(found, Restored):
            raise click.ClickException(f"it was not restored: {found}")
        return time.perf_counter() - began, time.process_time() - cpu
    finally:
        store.close()


if __name__ == "__main__":
    main()
