"""The objects of whole batches, for readers."""

from __future__ import annotations

from kafka_eos_source.sinks.contract import SinkTxn
from kafka_eos_source.sinks.s3 import layout
from kafka_eos_source.sinks.s3.client import Bucket, Service


def committed_files(
    path: str, *, endpoint: str | None = None, region: str | None = None, path_style: bool = False
) -> list[str]:
    """The objects of every committed batch under a sink's path, batch by batch, as ``s3://`` URIs.

    Args:
        path: option ``sink.<name>.path``.
        endpoint, region, path_style: as the options.

    Raises:
        InvalidOptionError: the path is none, or boto3 is not installed.
        SinkFailedError, SinkRetryableError: the store refuses, or does not answer.
    """
    name, prefix = layout.parse("path", path)
    bucket = Bucket(Service(endpoint, region, path_style), name)
    manifests = [
        *(key for key in bucket.keys(f"{prefix}batch=") if layout.is_old_manifest(key)),
        *bucket.keys(f"{prefix}{layout.MANIFESTS}"),
    ]
    found: dict[SinkTxn, list[str]] = {}  # an older version and this one may both have finished a batch
    for key in manifests:
        manifest = bucket.get(key)
        txn = None if manifest is None else SinkTxn.parse(manifest["id"])
        if manifest is not None and txn is not None:
            found[txn] = [f"s3://{name}/{each}" for each in layout.keys_of(key, manifest, prefix)]
    in_order = sorted(found, key=lambda txn: (txn.application_id, txn.sequence, txn.sink, txn.attempt))
    return [file for txn in in_order for file in found[txn]]
