"""S3 sink: tasks upload objects in parts, and the commit completes the multipart uploads."""

from kafka_eos_source.sinks.s3.reading import committed_files
from kafka_eos_source.sinks.s3.sink import S3Sink

__all__ = ["S3Sink", "committed_files"]
