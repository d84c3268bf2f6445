"""The `s3` sink without a server: option errors and keys. integration/ has the other tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidOptionError, SinkFailedError, SinkRetryableError
from kafka_eos_source.sinks import manifest, s3_uploads
from kafka_eos_source.sinks.constructors import s3
from kafka_eos_source.sinks.contract import SinkContext
from kafka_eos_source.sinks.s3_uploads import Layout, StagedObject
from kafka_eos_source.sinks.specs import parse
from tests.support import foreign_manifests as foreign

ATTEMPT = "0123456789abcdef0123"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'sink.a.path' is missing"),
        ({"path": "/tmp/x"}, "expected s3://bucket"),
        ({"path": "s3://b"}, "expected s3://bucket"),
        ({"path": "s3://bucket//x"}, "expected s3://bucket"),
        ({"path": "s3://bucket/x", "part.bytes": "5242879"}, "5242880 or more"),
        ({"path": "s3://bucket/x", "part.bytes": str(6 << 30)}, "S3's limits"),
        ({"path": "s3://bucket/x", "endpoint": "localhost:9000"}, "expected http://host:port"),
        ({"path": "s3://bucket/x", "endpoint": "http://me:pa55word@h"}, "without user and password"),
        ({"path": "s3://bucket/x", "upload.threads": "65"}, "1 to 64"),
        ({"path": "s3://bucket/x", "timeout": "0"}, "1ms or more"),
        ({"path": "s3://bucket/x", "format": "orc"}, "parquet or json or csv"),
        ({"path": "s3://bucket/x", "pathstyle": "true"}, "Did you mean 'sink.a.path.style'"),
    ],
)
def test_invalid_options_are_refused_at_the_start(options: dict[str, str], message: str) -> None:
    stated = {"sink.a.type": "s3", **{f"sink.a.{name}": value for name, value in options.items()}}
    with pytest.raises(InvalidOptionError) as error:
        parse(["a"], stated)
    assert message in str(error.value)
    assert "pa55word" not in str(error.value)


def test_without_boto3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    sink = s3("s3://bucket/x")
    assert sink.options("a")["sink.a.path"] == "s3://bucket/x", "whoever starts the query may lack it"
    with pytest.raises(InvalidOptionError, match=r"pip install 'kafka-eos-source\[s3\]'"):
        parse(["a"], sink.options("a"))


def test_keys_of_another_query_with_a_common_prefix_are_ignored() -> None:
    """One application id may be a prefix of another one, such as `orders` and `orders-7`."""
    ours, beside, other, elsewhere = (
        Layout("b", "p/", SinkContext(name, application, cluster))
        for application, name, cluster in (
            ("orders", "a", "c"),
            ("orders", "b", "c"),
            ("orders-7", "a", "c"),
            ("orders", "a", "d"),
        )
    )
    assert ours.batch_of(ours.part(12, "ab", ".csv")) == 12
    assert ours.batch_of(other.part(12, "ab", ".csv")) is None
    assert other.batch_of(ours.part(7, "ab", ".csv")) is None
    mine = ours.context.txn(7, ATTEMPT)
    assert ours.batch_of(ours.manifest(mine)) is None
    assert ours.txn(ours.prepared(mine)) == mine
    for each in (beside, other, elsewhere):
        assert ours.batch_of(each.part(12, "ab", ".csv")) is None
        assert not each.part(12, "ab", ".csv").startswith(ours.rows_of_sink), "tidy does not even list it"
        assert ours.txn(each.prepared(each.context.txn(7, ATTEMPT))) is None


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_what_a_foreign_manifest_names_is_an_upload_of_this_sink_or_is_refused(data: st.DataObject) -> None:
    at = Layout("b", "p/", SinkContext("a", "orders", "cluster"))
    upload = StagedObject(at.part(12, "ab12", ".csv"), "an-upload", ('"e1"', '"e2"'), "ab12", 3, 100)
    assert StagedObject.from_json(upload.to_json(at), at) == upload
    original = manifest.encode({"id": "x", "files": [upload.to_json(at)] * 2})
    found = data.draw(foreign.edited(original))

    def uploads(content: Mapping[str, Any]) -> list[StagedObject]:
        return [StagedObject.from_json(each, at) for each in manifest.objects(content["files"])]

    with pytest.raises(SinkFailedError, match="was changed"):
        manifest.parsed(found, manifest.digest(original), "it", uploads)
    try:
        read = manifest.parsed(found, "", "it", uploads)
    except SinkFailedError as error:
        assert "it is damaged" in error.message  # noqa: PT017
    else:
        assert all(each.key.startswith(at.rows_of_sink) and ".." not in each.key for each in read)
        assert all(0 <= each.size_bytes < 1 << 63 for each in read)


def test_a_long_text_of_the_store_is_cut_off_and_does_not_act_on_a_terminal() -> None:
    answer = {
        "Error": {"Code": "InternalError", "Message": "\x1b[2J" + "x" * 10_000_000},
        "ResponseMetadata": {"HTTPStatusCode": 500},
    }
    error = s3_uploads._of_answer("get a", answer)
    assert isinstance(error, SinkRetryableError)
    assert len(str(error)) < 1000
    assert str(error).isprintable()
