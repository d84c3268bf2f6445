"""Kafka, Delta, Iceberg, S3 and an HTTP service hold the same rows, each once, despite kills and crashes."""

from __future__ import annotations

import base64
import io
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from integration.chaos.everywhere import pairs
from integration.chaos.scenario import Scenario
from integration.support import s3_server
from integration.support.s3_server import CREDENTIALS, S3Server
from tests.support.http_service import HttpService
from tests.support.http_service import running as running_service

deltalake = pytest.importorskip("deltalake")
pyiceberg_catalog = pytest.importorskip("pyiceberg.catalog")
pytest.importorskip("boto3")

REGION = "us-east-1"

#: Failpoints of a commit with these sinks, in the order in which a batch reaches them.
STEPS = [
    "sink.s3.after_create",
    "sink.s3.after_parts",
    "sink.http.before_prepare",
    "commit.after_prepare",
    "commit.after_flush",
    "commit.after_commit",
    "sink.delta.before_version",
    "sink.iceberg.before_snapshot",
    "sink.s3.before_manifest",
    "sink.s3.after_complete",
    "commit.within_finish",
    "commit.after_finish",
]

Rows = list[tuple[str, str]]


class EachKind:
    """A scenario whose rows also go to four external systems."""

    def __init__(self, scenario: Scenario, bucket: S3Server, service: HttpService) -> None:
        from kafka_eos_source.sinks.s3_uploads import Service, client

        self.scenario = scenario
        self.bucket = bucket
        self.service = service
        self._s3 = client(Service(bucket.url, REGION, True))
        self._name = f"test-{uuid.uuid4().hex[:12]}"
        self._s3.create_bucket(Bucket=self._name)
        self._delta = scenario.folder / "delta"
        self._catalog = {
            "type": "sql",
            "uri": f"sqlite:///{scenario.folder}/catalog.db",
            "warehouse": f"file://{scenario.folder}/iceberg",
        }

    @property
    def sink(self) -> Mapping[str, str]:
        found = {
            "sinks": "objects,table,lake,service",
            "sink.objects.type": "s3",
            "sink.objects.path": f"s3://{self._name}/orders",
            "sink.objects.endpoint": self.bucket.url,
            "sink.objects.region": REGION,
            "sink.objects.path.style": "true",
            "sink.table.type": "delta",
            "sink.table.path": str(self._delta),
            "sink.lake.type": "iceberg",
            "sink.lake.table": "shop.orders",
            "sink.service.type": "http",
            "sink.service.url": self.service.url,
        }
        return {**found, **{f"sink.lake.catalog.{name}": value for name, value in self._catalog.items()}}

    def verdict(self) -> None:
        """Checks that each system holds each row once, and that no prepared rows are left."""
        found = self.scenario.outcome()
        assert found.exactly_once, found
        sent = sorted(self.scenario.sent)
        for rows in (self.in_objects(), self.in_table(), self.in_lake(), self.in_service()):
            assert sorted(rows) == sent
        assert not list(self.scenario.checkpoint.glob("kafka-eos/sinks/*/*")), "prepared rows are left"

    def in_objects(self) -> Rows:
        from kafka_eos_source.sinks.s3 import committed_files

        uris = committed_files(
            f"s3://{self._name}/orders", endpoint=self.bucket.url, region=REGION, path_style=True
        )
        bodies = [
            self._s3.get_object(Bucket=self._name, Key=uri.removeprefix(f"s3://{self._name}/"))["Body"].read()
            for uri in uris
        ]
        return [row for body in bodies for row in pairs(pq.read_table(io.BytesIO(body)))]

    def in_table(self) -> Rows:
        return pairs(deltalake.DeltaTable(str(self._delta)).to_pyarrow_table())

    def in_lake(self) -> Rows:
        catalog = pyiceberg_catalog.load_catalog("default", **self._catalog)
        return pairs(catalog.load_table("shop.orders").scan().to_arrow())

    def in_service(self) -> Rows:
        lines = [json.loads(line) for body in self.service.committed() for line in body.splitlines()]
        return [tuple(_text(line[name]) for name in ("key", "value")) for line in lines]  # type: ignore[misc]


def _text(encoded: Any) -> str:
    return base64.b64decode(encoded).decode()


@pytest.fixture
def each_kind(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EachKind]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bucket").mkdir()
    with (
        s3_server.running(tmp_path / "bucket") as bucket,
        running_service(tmp_path / "service") as service,
    ):
        yield EachKind(scenario, bucket, service)


@pytest.mark.long  # each sink's conformance suite kills it at every line
@pytest.mark.fault("T49b", "killed processes and servers", "commit with a sink of each kind")
def test_t49_a_batch_is_in_a_sink_of_each_kind_once_although_the_driver_is_killed_at_every_step(
    each_kind: EachKind,
) -> None:
    """A driver killed at any step of the commit leaves a batch that the next start finishes everywhere."""
    each_kind.scenario.killed_at_each(STEPS, each_kind.sink)
    each_kind.verdict()


@pytest.mark.fault("T49b", "killed processes and servers", "commit with a sink of each kind")
@pytest.mark.parametrize("server", ["bucket", pytest.param("service", marks=pytest.mark.long)])
def test_t49_a_batch_is_finished_after_a_server_died_behind_kafkas_commit(
    each_kind: EachKind, server: str
) -> None:
    """A server that dies after Kafka's commit makes the query fail; the next start finishes the batch."""
    died = getattr(each_kind, server)
    each_kind.scenario.unfinished(died.kill, each_kind.sink)
    assert len(each_kind.in_table()) == 50, "the other sinks have the batch, and the next batch has not begun"
    died.start()
    each_kind.scenario.run(sink=each_kind.sink)
    each_kind.verdict()
