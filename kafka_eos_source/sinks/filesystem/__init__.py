"""Files: each batch is a folder that appears at once."""

from kafka_eos_source.sinks.filesystem.layout import committed_files
from kafka_eos_source.sinks.filesystem.sink import FilesystemSink

__all__ = ["FilesystemSink", "committed_files"]
