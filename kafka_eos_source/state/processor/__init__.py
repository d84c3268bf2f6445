"""PySpark's `StatefulProcessor` classes, as `transformWithState` takes them, on a store of this package."""
