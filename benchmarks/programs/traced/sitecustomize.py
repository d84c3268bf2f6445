"""Python imports this module at the start of each process that has this folder on its path."""

from benchmarks.start_events import install

install()
