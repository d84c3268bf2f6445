"""S3, and stores that speak its protocol: multipart uploads that the commit completes."""

from kafka_eos_source.sinks.s3.reading import committed_files
from kafka_eos_source.sinks.s3.sink import S3Sink

__all__ = ["S3Sink", "committed_files"]
