"""Runs PySpark's `StatefulProcessor` classes, written for `transformWithState`, on this package's store."""
