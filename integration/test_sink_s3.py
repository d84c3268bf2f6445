"""The `s3` sink on an S3-compatible server: sink contract, lost answers, left-over uploads, limits of S3."""

from __future__ import annotations

import io
import json
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from integration.support import s3_server
from integration.support.s3_server import Lossy, S3Server
from kafka_eos_source.errors import SinkFailedError, SinkRetryableError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks import constructors, s3_uploads
from kafka_eos_source.sinks.contract import OK, Fatal, Outcome, Retryable, StageContext
from kafka_eos_source.sinks.s3 import S3Sink, committed_files
from kafka_eos_source.sinks.s3_uploads import MIN_PART_BYTES, Service, client
from kafka_eos_source.sinks.specs import parse
from kafka_eos_source.sinks.watched import check_targets
from kafka_eos_source.testing.kills import killed_at
from kafka_eos_source.testing.sinks import (
    ROWS,
    Given,
    Rows,
    SinkConformance,
    System,
    deadline,
    new_txn,
    opened,
    stage,
)
from tests.support.row_rules import NOT_UTF8

REGION = "us-east-1"


@dataclass(frozen=True)
class Store:
    """A bucket of the server for one test."""

    url: str
    bucket: str
    seen: dict[str, Rows] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"s3://{self.bucket}/in/here"

    @property
    def s3(self) -> Any:
        return client(Service(self.url, REGION, True))

    def sink(self, **options: Any) -> S3Sink:
        given = {"endpoint": self.url, "region": REGION, "path_style": True, **options}
        return cast(S3Sink, constructors.s3(self.path, **given).build())

    def all_keys(self) -> list[str]:
        """Returns the keys of objects under the path. S3Proxy keeps parts as hidden objects elsewhere."""
        found = self.s3.list_objects_v2(Bucket=self.bucket, Prefix="in/here/")
        return [each["Key"] for each in found.get("Contents", ())]

    def uploads(self) -> list[str]:
        return [each["Key"] for each in self.s3.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ())]

    def abort_uploads(self) -> None:
        """Aborts uploads, as a lifecycle rule of the bucket does."""
        for each in self.s3.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ()):
            self.s3.abort_multipart_upload(Bucket=self.bucket, Key=each["Key"], UploadId=each["UploadId"])

    def visible(self) -> Rows:
        """Returns the rows of all objects; it reads each object once, because objects never change."""
        uris = committed_files(self.path, endpoint=self.url, region=REGION, path_style=True)
        for uri in uris:
            if uri not in self.seen:
                self.seen[uri] = self._read(uri.removeprefix(f"s3://{self.bucket}/"))
        return [row for uri in uris for row in self.seen[uri]]

    def put(self, key: str, content: object) -> None:
        self.s3.put_object(Bucket=self.bucket, Key=key, Body=json.dumps(content).encode())

    def complete(self, key: str, upload: str, part: str) -> None:
        self.s3.complete_multipart_upload(
            Bucket=self.bucket,
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part}]},
        )

    def _read(self, key: str) -> Rows:
        body = self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        if key.endswith(".parquet"):
            return list(pq.read_table(io.BytesIO(body)).to_pylist())
        return [json.loads(line) for line in body.decode().split("\n") if line]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server.running(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture
def store(server: S3Server) -> Store:
    found = Store(server.url, f"test-{uuid.uuid4().hex[:16]}")
    found.s3.create_bucket(Bucket=found.bucket)
    return found


class TestConformance(SinkConformance):
    most_kills: ClassVar[int] = 10

    @pytest.fixture
    def system(self, store: Store) -> System:
        return System(sink=store.sink, visible=store.visible, poison=NOT_UTF8)

    def test_two_processes_commit_at_once(self, store: Store, proxy: Lossy) -> None:
        """Two drivers may commit at once. The proxy serialises completions, because S3's are atomic."""
        super().test_two_processes_commit_at_once(
            System(lambda: store.sink(endpoint=proxy.url), store.visible)
        )


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Lossy]:
    with s3_server.lossy(server.port) as found:
        yield found


def _times(lost: str, method: str, part: str, times: int) -> Any:
    left = [times]

    def lose(called: str, path: str) -> str:
        if called == method and part in path and left[0]:
            left[0] -= 1
            return lost
        return ""

    return lose


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_objects_are_named_after_the_batch_and_listed_in_its_manifest(store: Store, kind: str) -> None:
    txn = new_txn(50)
    system = System(lambda: store.sink(format=kind), store.visible)
    with opened(system) as sink:
        sink.make_ready(ROWS.schema, deadline())
        assert sink.prepare(txn, stage(sink, ROWS, 42), deadline()) == OK
        assert [key for key in store.all_keys() if "batch=" in key] == [], (
            "before the commit there is no object"
        )
        assert sink.commit(txn, deadline()) == OK
    key = f"in/here/_manifests/{txn}.json"
    manifest = json.loads(store.s3.get_object(Bucket=store.bucket, Key=key)["Body"].read())
    assert (manifest["id"], manifest["sink"], manifest["sequence"]) == (str(txn), "conformance", 50)
    assert manifest["rows"] == ROWS.num_rows
    assert all(
        each["name"].startswith(f"batch=conformance-{txn.cluster}-conformance.42/")
        for each in manifest["files"]
    )
    names = [f"in/here/{each['name']}" for each in manifest["files"]]
    assert sorted(store.all_keys()) == sorted([*names, key])
    assert store.uploads() == []


@pytest.mark.parametrize("what", ["name", "upload_id", "etags", "another file", "nested"])
def test_an_edited_note_completes_no_upload_and_the_restored_one_is_committed(
    store: Store, what: str
) -> None:
    """Without the digest, which a person's commit does not have, only names of another sink are refused."""
    system = System(store.sink, store.visible)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS, tasks=2), deadline()) == OK
    (note,) = (key for key in store.all_keys() if "/prepared/" in key)
    original = store.s3.get_object(Bucket=store.bucket, Key=note)["Body"].read()
    content = json.loads(original)
    one = content["files"][0]
    if what == "another file":
        content["files"].pop()
    elif what == "name":
        one["name"] = f"batch=other-{txn.cluster}-conformance.42/part-ab.parquet"
    elif what != "nested":
        one[what] = one[what][::-1] + one[what]
    forged = b"[" * 100_000 if what == "nested" else json.dumps(content).encode()
    store.s3.put_object(Bucket=store.bucket, Key=note, Body=forged)
    before = (store.all_keys(), store.uploads())
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn]
        with pytest.raises(SinkFailedError, match="was changed after the batch was prepared") as refused:
            sink.commit(txn, deadline())
    assert note in refused.value.message
    if what in ("name", "nested"):
        with opened(replace(system, digests={})) as sink, pytest.raises(SinkFailedError, match="damaged"):
            sink.commit(txn, deadline())
    assert (store.all_keys(), store.uploads()) == before, "nothing was completed"
    store.s3.put_object(Bucket=store.bucket, Key=note, Body=original)
    with opened(system) as sink:
        assert sink.commit(txn, deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    assert sorted(row["id"] for row in store.visible()) == ROWS["id"].to_pylist()


def test_a_forged_manifest_destroys_no_prepared_batch(store: Store) -> None:
    """Whoever may write to ``_manifests/`` only can stop the query, and loses nothing of it."""
    system = System(store.sink, store.visible)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS, tasks=2), deadline()) == OK
    (note,) = (key for key in store.all_keys() if "/prepared/" in key)
    forged = f"{note.partition('_kafka_eos')[0]}_manifests/{txn}.json"
    content = json.dumps({"id": str(txn), "files": []}).encode()
    store.s3.put_object(Bucket=store.bucket, Key=forged, Body=content)
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn]
        with pytest.raises(SinkFailedError, match="was changed after the batch was prepared"):
            sink.commit(txn, deadline())
    as_a_person = replace(system, digests={})  # as `kafka-eos sinks commit` calls it
    with (
        opened(as_a_person) as sink,
        pytest.raises(SinkFailedError, match="is not the one that was prepared"),
    ):
        sink.commit(txn, deadline())
    store.s3.delete_object(Bucket=store.bucket, Key=forged)
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn]
        assert sink.commit(txn, deadline()) == OK
    assert sorted(row["id"] for row in store.visible()) == ROWS["id"].to_pylist()


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_after_a_lost_answer_the_sink_looks_for_the_completed_object(
    store: Store, proxy: Lossy, lost: str
) -> None:
    """If the answer to a completion is lost, the sink looks for the object instead of guessing.

    The proxy cuts off every try of boto3 in one call, later a single try.
    """
    system = System(lambda: store.sink(endpoint=proxy.url, timeout=5_000), store.visible)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS, tasks=1), deadline()) == OK
        proxy.lose = _times(lost, "POST", "uploadId=", 4)
        outcome = _outcome(lambda: sink.commit(txn, deadline()))
        # the object exists, so the lost answer does not matter
        assert outcome == OK if lost == "answer" else isinstance(outcome, Retryable)
        assert sink.commit(txn, deadline()) == OK
    assert sorted(row["id"] for row in store.visible()) == ROWS["id"].to_pylist()
    heads = [path for method, path in proxy.requests if method == "HEAD" and "part-" in path]
    assert len(heads) == 1, "the sink looked for the object once"


def test_a_commit_continues_where_another_was_killed(store: Store) -> None:
    """Some uploads are already objects, so their upload ids are gone."""
    system = System(store.sink, store.visible)
    txn = new_txn()
    with opened(system) as sink:
        staged = stage(sink, ROWS, tasks=3)
        assert sink.prepare(txn, staged, deadline()) == OK
        for each in staged.receipts[:2]:
            store.s3.complete_multipart_upload(
                Bucket=store.bucket,
                Key=each.key,
                UploadId=each.upload_id,
                MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": each.etags[0]}]},
            )
        assert store.visible() == [], "half a batch has no manifest"
    with opened(system) as sink:
        assert list(sink.recover(deadline())) == [txn]
        assert sink.commit(txn, deadline()) == OK
    assert len(store.visible()) == ROWS.num_rows


def test_after_a_refusal_the_sink_looks_for_the_object_before_it_fails(store: Store, proxy: Lossy) -> None:
    """The sink checks whether the object exists before it believes that parts are missing.

    An S3-compatible store may report missing parts while another driver completes the upload.
    """
    system = System(lambda: store.sink(endpoint=proxy.url), store.visible)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS, tasks=1), deadline()) == OK
        proxy.lose = _times("InvalidPart", "POST", "uploadId=", 1)
        with pytest.raises(SinkFailedError, match="InvalidPart"):
            sink.commit(txn, deadline())
        assert store.visible() == []
        proxy.lose = _times(
            "answer", "PUT", "_manifest", 4
        )  # the object exists; whether its manifest does is unknown
        assert isinstance(_outcome(lambda: sink.commit(txn, deadline())), Retryable)
        store.s3.delete_object(
            Bucket=store.bucket, Key=next(key for key in store.all_keys() if "_manifest" in key)
        )
        proxy.lose = _times("InvalidPart", "POST", "uploadId=", 1)
        assert sink.commit(txn, deadline()) == OK
    assert len(store.visible()) == ROWS.num_rows


def test_a_restart_of_the_server_loses_no_batch(server: S3Server, store: Store) -> None:
    system = System(lambda: store.sink(timeout=5_000), store.visible)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        server.kill()
        assert isinstance(_outcome(lambda: sink.commit(txn, deadline())), Retryable)
        server.start()
        assert list(sink.recover(deadline())) == [txn]
        assert sink.commit(txn, deadline()) == OK
    assert len(store.visible()) == ROWS.num_rows


def test_the_error_names_uploads_that_were_aborted(store: Store) -> None:
    """Uploads that a lifecycle rule aborted fail the batch with an error that names them.

    Before prepare nothing is lost; after it an operator has to act.
    """
    system = System(store.sink, store.visible)
    before, after = new_txn(1), new_txn(2)
    with opened(system) as sink:
        staged = stage(sink, ROWS, 1)
        sink.tidy(1, deadline())
        with pytest.raises(SinkFailedError, match=r"upload of .* is gone"):
            sink.prepare(before, staged, deadline())
        assert list(sink.recover(deadline())) == []
        assert sink.prepare(after, stage(sink, ROWS, 2), deadline()) == OK
        sink.tidy(2, deadline())
        store.abort_uploads()
        with pytest.raises(SinkFailedError, match="and there is no object"):
            sink.commit(after, deadline())
        assert list(sink.recover(deadline())) == [after]
    assert store.visible() == []


def test_a_commit_that_runs_out_of_time_is_continued_later(store: Store) -> None:
    system = System(store.sink, store.visible)
    txn = new_txn()
    with opened(system) as sink:
        assert sink.prepare(txn, stage(sink, ROWS), deadline()) == OK
        assert isinstance(_outcome(lambda: sink.commit(txn, Deadline.after_seconds(0))), Retryable)
        assert store.visible() == []
        assert sink.commit(txn, deadline()) == OK
    assert len(store.visible()) == ROWS.num_rows


def test_an_object_of_another_writer_is_not_taken_for_the_batch(store: Store) -> None:
    system = System(store.sink, store.visible)
    txn = new_txn()
    with opened(system) as sink:
        staged = stage(sink, ROWS, tasks=1)
        assert sink.prepare(txn, staged, deadline()) == OK
        store.abort_uploads()
        store.s3.put_object(
            Bucket=store.bucket, Key=staged.receipts[0].key, Body=b"x" * staged.receipts[0].size_bytes
        )
        with pytest.raises(SinkFailedError, match="no two tasks have one key"):
            sink.commit(txn, deadline())


def test_only_leftover_uploads_of_finished_batches_are_aborted(store: Store) -> None:
    """Uploads of killed or superseded tasks are aborted; those of the next batch or other queries stay."""
    system = System(store.sink, store.visible)
    staging = [os.path.dirname(sys.modules[S3Sink.__module__].__file__ or "") + os.sep]

    def stage_and_die() -> None:
        with opened(system) as sink:
            stage(sink, ROWS, 5, tasks=1)
            os.kill(os.getpid(), 9)

    assert killed_at(stage_and_die, staging, 10**9)
    with opened(system, "conformance-7") as other:
        stage(other, ROWS, 3, tasks=1)
    with opened(system) as sink:
        stage(sink, ROWS, 7, tasks=1)
        txn = new_txn(6)
        assert sink.prepare(txn, stage(sink, ROWS, 6), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
        assert any("conformance.5/" in key for key in store.uploads())
        sink.tidy(6, deadline())
    assert sorted(key.split("/")[2] for key in store.uploads()) == sorted(
        f"batch={each.application_id}-{each.cluster}-conformance.{batch}"
        for each, batch in ((new_txn(application_id="conformance-7"), 3), (new_txn(), 7))
    )


def test_a_failed_task_leaves_no_upload(store: Store) -> None:
    for kind in ("parquet", "json", "csv"):
        with opened(System(lambda kind=kind: store.sink(format=kind), store.visible)) as sink:
            to = sink.stage(StageContext(7, uuid.uuid4().hex, ROWS.schema, _no_parts))
            to.write(ROWS.to_batches()[0])
            assert len(store.uploads()) == 1
            to.discard()
    assert store.uploads() == []
    assert store.all_keys() == []


def test_large_rows_are_uploaded_in_parts_of_s3s_minimum_size(store: Store) -> None:
    """Parts have at least S3's minimum size; S3 refuses a smaller part unless it is the last."""
    values = np.random.default_rng(7).random(2_000_000)
    rows = pa.table({"id": np.arange(len(values)), "value": values})
    system = System(lambda: store.sink(part_bytes=MIN_PART_BYTES, upload_threads=2), store.visible)
    txn = new_txn()
    with opened(system) as sink:
        to = sink.stage(StageContext(7, uuid.uuid4().hex, rows.schema, _no_parts))
        for batch in rows.to_batches(500_000):
            to.write(batch)
        token = to.finish()
        assert len(token.etags) == -(-token.size_bytes // MIN_PART_BYTES) > 3
        assert sink.prepare(txn, Given(rows.schema, rows.num_rows, [token]), deadline()) == OK
        assert sink.commit(txn, deadline()) == OK
    (uri,) = committed_files(store.path, endpoint=store.url, region=REGION, path_style=True)
    key = uri.removeprefix(f"s3://{store.bucket}/")
    body = store.s3.get_object(Bucket=store.bucket, Key=key)["Body"].read()
    assert pq.read_table(io.BytesIO(body)).equals(rows)


def test_an_unreachable_store_is_retried_and_a_missing_bucket_is_an_error(store: Store) -> None:
    gone = System(lambda: store.sink(endpoint="http://127.0.0.1:9", timeout=500), list)
    with opened(gone) as sink, pytest.raises(SinkRetryableError, match=r"127\.0\.0\.1:9"):
        sink.recover(deadline())
    no_bucket = System(
        lambda: constructors.s3(
            "s3://no-such-bucket/x", endpoint=store.url, region=REGION, path_style=True
        ).build(),
        list,
    )
    with opened(no_bucket) as sink:
        with pytest.raises(SinkFailedError, match="NoSuchBucket") as error:
            sink.make_ready(ROWS.schema, deadline())
        assert "create the bucket" in error.value.fix
    with opened(System(store.sink, store.visible)) as sink:
        assert isinstance(sink.commit(new_txn(), deadline()), Fatal)


@pytest.mark.fault("T446", "a wrong bucket, key or address of an object store", "a query is started")
def test_a_check_names_what_is_wrong_and_leaves_no_trace(
    server: S3Server, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(path: str = store.path, **options: Any) -> str:
        given = {"endpoint": store.url, "region": REGION, "path_style": True, **options}
        (spec,) = parse(["lake"], constructors.s3(path, **given).options("lake"))
        found = check_targets([(spec, ROWS.schema)]).get("lake")
        return "" if found is None else str(found)

    assert check() == ""
    assert "NoSuchBucket" in (found := check("s3://no-such-bucket/x"))
    assert "create the bucket" in found
    assert "SINK_UNAVAILABLE" in (found := check(endpoint="http://127.0.0.1:9"))
    assert "sink 'lake'" in found
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
        wrong.setattr(s3_uploads, "_clients", {})
        wrong.setattr(s3_uploads, "_sessions", [])
        assert "SignatureDoesNotMatch" in (found := check())
        assert "hunter2" not in found
    folder = (
        f"s3://{store.bucket}/files?endpoint_override=127.0.0.1:{server.port}&scheme=http&region={REGION}"
    )
    (spec,) = parse(["lake"], constructors.files(folder).options("lake"))
    assert check_targets([(spec, ROWS.schema)]) == {}
    (spec,) = parse(["lake"], constructors.files(folder.replace(store.bucket, "no-such")).options("lake"))
    assert "no bucket or container 'no-such'" in str(check_targets([(spec, ROWS.schema)])["lake"])
    assert "Contents" not in store.s3.list_objects_v2(Bucket=store.bucket)
    assert store.uploads() == []


def test_credentials_never_appear_in_logs_or_errors(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(System(lambda: store.sink(endpoint="http://127.0.0.1:9", timeout=500), list)) as sink:
        with pytest.raises(SinkRetryableError) as error:
            sink.recover(deadline())
        told = f"{error.value!r} {error.value.__cause__!r} {vars(sink)}"
    assert not [value for name, value in s3_server.CREDENTIALS.items() if "KEY" in name and value in told]


def _no_parts() -> Any:
    raise AssertionError("the rows go to S3, not to the checkpoint")


def _outcome(call: Any) -> Outcome:
    try:
        found: Outcome = call()
    except SinkRetryableError as error:
        return Retryable(str(error))
    return found
