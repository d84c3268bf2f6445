"""`committed_files`: lists the objects of committed batches, for readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kafka_eos_source.sinks import manifest as manifests
from kafka_eos_source.sinks.contract import SinkTxn
from kafka_eos_source.sinks.s3 import layout
from kafka_eos_source.sinks.s3.client import Bucket, Service


def committed_files(
    path: str, *, endpoint: str | None = None, region: str | None = None, path_style: bool = False
) -> list[str]:
    """Lists the objects of all committed batches under a sink's path, batch by batch, as ``s3://`` URIs.

    Args:
        path: value of the option ``sink.<name>.path``.
        endpoint, region, path_style: values of these options of the sink.

    Raises:
        InvalidOptionError: if the path is malformed, or boto3 is not installed.
        SinkFailedError, SinkRetryableError: if the store refuses a request or does not answer.
    """
    name, prefix = layout.parse("path", path)
    bucket = Bucket(Service(endpoint, region, path_style), name)
    found: dict[SinkTxn, list[str]] = {}
    for key in bucket.keys(f"{prefix}{layout.MANIFESTS}"):
        txn, data = SinkTxn.parse(key.rpartition("/")[2].removesuffix(".json")), bucket.get(key)
        if txn is not None and data is not None:
            names = manifests.parsed(data, "", f"the object {key}", _names)
            found[txn] = [f"s3://{name}/{prefix}{each}" for each in names]
    in_order = sorted(
        found, key=lambda txn: (txn.application_id, txn.cluster, txn.sequence, txn.sink, txn.attempt)
    )
    return [file for txn in in_order for file in found[txn]]


def _names(content: Mapping[str, Any]) -> list[str]:
    return [manifests.relative_name(each["name"]) for each in manifests.objects(content["files"])]
