"""Filesystem sink: writes each batch as a folder of files that becomes visible by one rename."""

from kafka_eos_source.sinks.filesystem.layout import committed_files
from kafka_eos_source.sinks.filesystem.sink import FilesystemSink

__all__ = ["FilesystemSink", "committed_files"]
