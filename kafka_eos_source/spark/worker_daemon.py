"""Daemon that forks Spark's Python workers with everything imported (``spark.python.daemon.module``).

PySpark's daemon imports almost nothing before it forks, so each new worker imports PyArrow, NumPy and this
package again: 0.25 CPU s. A worker that writes imports pandas too, 0.2 CPU s, because PySpark passes the
commit message of a task through ``pa.array``, which imports pandas if it is installed. This module imports
them once, then runs PySpark's daemon. `recommended_settings` names it.

PySpark imports after the fork, because a thread of the daemon does not exist in its workers, and a lock that
it holds stays locked there. So this module imports only what starts no Python thread. Two libraries have a
native thread, and both install handlers for a fork (``pthread_atfork``): PyArrow's jemalloc, and NumPy's
OpenBLAS unless ``OMP_NUM_THREADS`` is 1, which is Spark's default. No Kafka client is created here.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec

#: What the workers of a query import, those of PySpark first. The rest is imported by those that use it.
MODULES = (
    "pyspark.worker",
    "pyarrow",
    "pyarrow.compute",
    "kafka_eos_source.datasource.reader",
    "kafka_eos_source.read.task",
    "kafka_eos_source.datasource.writer",
)
#: What they import only if it is installed.
OPTIONAL_MODULES = ("pandas",)


def import_modules() -> None:
    """Imports what workers need; a module that cannot be imported here fails in the worker that needs it."""
    # Spark reads the daemon's port from its standard output, so nothing that is imported may print there
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        for name in (*MODULES, *filter(find_spec, OPTIONAL_MODULES)):
            try:
                import_module(name)
            except Exception as error:  # noqa: BLE001 - the worker that needs the module reports it
                print(f"kafka-eos: cannot import {name} in Spark's Python daemon: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def main() -> None:
    """Imports what workers need, then runs PySpark's daemon, which never returns."""
    import_modules()
    from pyspark import daemon

    daemon.manager()


if __name__ == "__main__":
    main()
