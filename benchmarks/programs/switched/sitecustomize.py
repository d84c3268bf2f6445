"""Python imports this module at the start of each process that has this folder on its path."""

from benchmarks.metrics_switch import install

install()
