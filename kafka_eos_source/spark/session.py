"""Settings of a Spark session: faster starts of its JVM and workers, local checkpoints, stateful queries."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from kafka_eos_source.spark import class_archive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

#: Spark's setting for the module that runs as the daemon of Python workers.
DAEMON_SETTING = "spark.python.daemon.module"
#: Spark's setting for options of the driver's JVM; ``spark.driver.extraJavaOptions`` come after them.
DRIVER_OPTIONS_SETTING = "spark.driver.defaultJavaOptions"
#: HotSpot compiles a method after some thousand calls, and again with its second compiler after some more. In
#: a Spark driver those are mostly methods of Spark's planner, which run a few times in each micro-batch: the
#: compilers take more CPU time than they save for minutes. This waits for five times as many calls. Loops
#: over rows reach them as well. Other JVMs ignore the option.
COMPILER_OPTION = "-XX:CompileThresholdScaling=5"
SETTING = "spark.sql.streaming.checkpointFileManagerClass"
#: Spark's setting (4.1 and later) for adaptive execution in streaming queries without Spark's own state.
ADAPTIVE_SETTING = "spark.sql.adaptive.streaming.stateless.enabled"

_MANAGER = "FileSystemBasedCheckpointFileManager"
_PACKAGE = "org/apache/spark/sql/execution/streaming/"


#: Spark's setting (4.1 and later) for the bytes of a batch that it passes to Python. The largest value
#: switches the check off.
BATCH_BYTES_SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
#: Four times Spark's default.
_MOST_BATCH_BYTES = 256 << 20
#: Spark's limit for the rows of such a batch. A packed batch has up to about a megabyte.
_BATCH_ROWS_SETTING = "spark.sql.execution.arrow.maxRecordsPerBatch"
_MOST_BATCH_ROWS = 256


@dataclass(frozen=True)
class SessionRules:
    """Settings of a session on which the text of values depends.

    Attributes:
        time_zone: the time zone in which timestamps are shown and parsed.
        is_ansi: whether SQL follows the ANSI standard (``spark.sql.ansi.enabled``).
        has_nulls: whether JSON has fields that are null (no ``spark.sql.jsonGenerator.ignoreNullFields``).
        has_legacy_times: whether times are written as before Spark 3 (``spark.sql.legacy.timeParserPolicy``).
    """

    time_zone: str
    is_ansi: bool
    has_nulls: bool = False
    has_legacy_times: bool = False

    @classmethod
    def of(cls, session: SparkSession) -> SessionRules:
        """Returns the settings of a session."""

        def value(setting: str) -> str:
            return str(session.conf.get(setting)).lower()

        return cls(
            time_zone(session),
            is_ansi=value("spark.sql.ansi.enabled") == "true",
            has_nulls=value("spark.sql.jsonGenerator.ignoreNullFields") == "false",
            has_legacy_times=value("spark.sql.legacy.timeParserPolicy") == "legacy",
        )


def time_zone(session: SparkSession) -> str:
    """Returns the time zone in which a session shows and parses timestamps."""
    return str(session.conf.get("spark.sql.session.timeZone"))


def recommended_settings(*, small_rows: bool = False) -> dict[str, str]:
    """Returns settings with which Spark starts its JVM and its Python workers faster, and compiles less.

    Set them when the session is built: ``SparkSession.builder.config(map=recommended_settings())``, or with
    ``--conf`` or in ``spark-defaults.conf``; they have no effect on a session that runs already.

    **Python workers.** Spark starts a worker for each task that runs at the same time, and ends workers that
    were idle for a minute. With these settings, workers are forked from a daemon that has already imported
    PyArrow, pandas if it is installed, and this package (`kafka_eos_source.spark.worker_daemon`). That saves
    0.25 to 0.45 CPU s for each. Other Python functions of the session work as before, and their workers find
    PyArrow imported too. This package must be installed on all executors, as kafka-eos itself requires;
    otherwise no Python worker of the session starts there. On Windows, Spark has no daemon and ignores the
    setting.

    **The JVM of the driver.** It compiles a method only after five times as many calls as by default, which
    saves most of the compilers' time in the first minutes. If this host has an archive of Spark's classes,
    which ``kafka-eos doctor --fix`` writes once, the JVM maps it into memory instead of loading each class
    from its jar (`kafka_eos_source.spark.class_archive`). A JVM that cannot use the archive ignores it. The
    setting is ``spark.driver.defaultJavaOptions``, so your ``spark.driver.extraJavaOptions`` still apply. A
    program that ``spark-submit`` starts has its JVM already: pass the setting with ``--conf``.

    Args:
        small_rows: no row of the session has more than about 10 KiB. Spark then divides the rows that it
            passes to Python by their number (10,000), and no longer adds up the bytes of each batch for each
            row, which costs more than copying the row. With large rows, such a batch could exceed the memory.
            Leave it out if the session runs stateful operators, or `map_in_read` without ``write=``: they
            pass packed batches through Spark, which are rows of up to a megabyte.

    Returns:
        Two or three settings.
    """
    archive = class_archive.usable_archive()
    of_archive = [] if archive is None else [class_archive.java_options(archive)]
    found = {
        DAEMON_SETTING: "kafka_eos_source.spark.worker_daemon",
        DRIVER_OPTIONS_SETTING: " ".join([COMPILER_OPTION, *of_archive]),
    }
    return {**found, BATCH_BYTES_SETTING: str(2**31 - 1)} if small_rows else found


#: Environment variables that name an interpreter, or say that ``spark-submit`` has started the JVM.
_NAMES_PYTHON = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYSPARK_GATEWAY_PORT")
_CLUSTER_OR_PYTHON = re.compile(r"(?:--master|spark\.master)[\s=:]+(?![\s=:]|local)|spark\.pyspark\.")


def use_this_python() -> None:
    """Makes Spark start the interpreter of this process in a local session that is created next.

    Spark otherwise starts the ``python3`` of PATH. That is another one if the virtual environment of the
    program is not activated, and Spark then does not find the data source. A setting of the user is left as
    it is, and so is a session on a cluster, whose hosts may not have this path.
    """
    if any(os.environ.get(name) for name in _NAMES_PYTHON):
        return
    texts = [os.environ.get("PYSPARK_SUBMIT_ARGS", "")]
    for folder in (os.environ.get("SPARK_CONF_DIR"), os.path.join(os.environ.get("SPARK_HOME", "."), "conf")):
        with contextlib.suppress(OSError):
            texts.append(Path(folder or ".", "spark-defaults.conf").read_text(encoding="utf-8"))
    if not any(_CLUSTER_OR_PYTHON.search(text) for text in texts):
        os.environ["PYSPARK_PYTHON"] = sys.executable


def disable_adaptive_streaming(session: SparkSession) -> bool:
    """Disables adaptive execution in streaming queries that start later, unless the session sets it.

    Adaptive execution runs a shuffle as a job of its own and plans the rest of the query again when the job
    has ended, in each micro-batch. Spark disables it for queries with Spark's own stateful operators, because
    it may change the number of partitions. It does not recognise the operators of this package, and takes a
    query with one for stateless.

    Args:
        session: the session of the query's frame; it also decides for its other streaming queries.

    Returns:
        Whether this call has disabled it.
    """
    if session.conf.get(ADAPTIVE_SETTING, None) is not None:
        return False
    session.conf.set(ADAPTIVE_SETTING, "false")
    _log.info("%s is now false in this session: a query has a stateful operator", ADAPTIVE_SETTING)
    return True


def warn_of_large_batches(session: SparkSession, what: str) -> bool:
    """Logs a warning if a session lets Spark collect packed batches without a reasonable limit.

    A packed batch is a large row for Spark. Without the limit, a Python worker gets up to 10,000 of them at a
    time, so its memory grows with the micro-batch.

    Args:
        session: the session of the query's frame.
        what: what passes packed batches through Spark.

    Returns:
        Whether the session has such a setting.
    """
    try:
        value = session.conf.get(BATCH_BYTES_SETTING, None) or ""
        rows = session.conf.get(_BATCH_ROWS_SETTING, None) or ""
    except Exception as error:  # noqa: BLE001 - a server of Spark Connect may refuse to show settings
        _log.debug("cannot tell how Spark limits packed batches: %r", error)
        return False
    if rows.strip().isdecimal() and 0 < int(rows) <= _MOST_BATCH_ROWS:
        return False
    found = re.fullmatch(r"\s*(\d+)\s*([bkmg]?)b?\s*", value.lower())
    if found is None or int(found[1]) * _UNITS[found[2]] <= _MOST_BATCH_BYTES:
        return False
    _log.warning(
        "%s=%s is meant for sessions that pass only small rows to Python, but %s passes packed batches. The "
        "memory of Python workers grows with the size of micro-batches. Leave the setting out, or "
        "small_rows=True of recommended_settings().",
        BATCH_BYTES_SETTING,
        value,
        what,
    )
    return True


def local_checkpoints() -> dict[str, Any]:
    """Returns settings that make micro-batches faster if the checkpoints are in a local folder.

    Set them before the queries start: ``SparkSession.builder.config(map=local_checkpoints())``, or with
    ``spark.conf.set``. Spark writes two files per micro-batch. Its default, Hadoop's ``FileContext``, takes
    40 ms for each file: without Hadoop's native library, it starts ten processes (``chmod``, ``readlink``)
    for a file and its checksum. The file manager in this setting starts two and takes 11 ms. It writes a
    temporary file and renames it, which is atomic on a local file system. The files are the same, so a query
    can switch at any restart.

    Do not use it on HDFS; Spark's default is as fast and safer there. On object stores, Spark uses this
    manager anyway.

    Returns:
        One setting; empty if PySpark is installed without Spark (pyspark-client).
    """
    import pyspark

    class_name = file_system_manager(Path(pyspark.__file__).parent / "jars")
    return {SETTING: class_name} if class_name else {}


def file_system_manager(jars: Path) -> str:
    """Returns the class name of the file manager in these jars (Spark 4.1 changed it); "" if not found."""
    for jar in sorted(jars.glob("spark-sql_*.jar")):
        with ZipFile(jar) as archive:
            for name in archive.namelist():
                if name.startswith(_PACKAGE) and name.endswith(f"/{_MANAGER}.class"):
                    return name.removesuffix(".class").replace("/", ".")
    return ""
