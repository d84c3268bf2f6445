"""How Spark is to write a checkpoint's files where they are in a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZipFile

SETTING = "spark.sql.streaming.checkpointFileManagerClass"

_MANAGER = "FileSystemBasedCheckpointFileManager"
_PACKAGE = "org/apache/spark/sql/execution/streaming/"


def local_checkpoints() -> dict[str, Any]:
    """Settings of a session whose queries have their checkpoints in a local folder.

    To be given before they start: ``SparkSession.builder.config(map=local_checkpoints())``, or
    ``spark.conf.set`` for each. Spark writes two files a micro-batch. By its default, Hadoop's
    ``FileContext``, each takes 40 ms, for without Hadoop's native library that starts ten processes
    (``chmod``, ``readlink``) for a file and its checksum. The manager named here starts two and takes 11 ms:
    it writes beside and renames, which a local file system does at once or not at all. Files and names are
    the same, so a query may begin and cease to use it at any start.

    Not for HDFS, where the default is as quick and safer. For object stores Spark takes this manager by
    itself.

    Returns:
        One setting; none where PySpark brings no Spark along (pyspark-client).
    """
    import pyspark

    found = file_system_manager(Path(pyspark.__file__).parent / "jars")
    return {SETTING: found} if found else {}


def file_system_manager(jars: Path) -> str:
    """The class by the name that it has in these jars, other since Spark 4.1; empty if it is in none."""
    for jar in sorted(jars.glob("spark-sql_*.jar")):
        with ZipFile(jar) as archive:
            for name in archive.namelist():
                if name.startswith(_PACKAGE) and name.endswith(f"/{_MANAGER}.class"):
                    return name.removesuffix(".class").replace("/", ".")
    return ""
