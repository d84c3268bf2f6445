"""`committed_files`: lists the objects of committed batches, for readers."""

from __future__ import annotations

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
        manifest = bucket.get(key)
        txn = None if manifest is None else SinkTxn.parse(manifest["id"])
        if manifest is not None and txn is not None:
            found[txn] = [f"s3://{name}/{prefix}{each['name']}" for each in manifest["files"]]
    in_order = sorted(
        found, key=lambda txn: (txn.application_id, txn.cluster, txn.sequence, txn.sink, txn.attempt)
    )
    return [file for txn in in_order for file in found[txn]]
