"""An archive of Spark's classes, which lets the JVM of a driver start with less CPU time.

A JVM reads, verifies and links each class of Spark's jars whenever a driver starts. Java can do that once
and keep the result in an archive that later JVMs map into memory (application class-data sharing, JEP 350).
`write` runs a short Spark program and archives the classes that it loaded; ``kafka-eos doctor --fix`` calls
it. `java_options` are the options of a JVM that uses the archive, which `recommended_settings` includes.

A JVM checks its own version, and the path, size and time of each jar, against the archive. If anything
differs, it ignores the archive and starts as if there were none. It does not check that the file is complete:
it crashes if the end is missing. So a second file, with the suffix ``.size``, holds the size of the archive.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from kafka_eos_source.errors import KafkaEosError, UnavailableError
from kafka_eos_source.runtime.folders import cache_directory, is_replaceable, make_missing

#: Size of an archive, as measured with Spark 4.3 and Java 17.
SIZE_MIB = 170

#: Otherwise a JVM prints a warning to its standard output if it cannot use the archive.
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"
_PROGRAM = Path(__file__).with_name("class_archive_program.py")
#: Runs the program as ``python PROGRAM`` does, but without its folder in the path of modules.
_RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
_WAIT_SECONDS = 1800.0
_FORMAT = "1"
#: Most characters of the program's output that an error shows.
_MOST_OUTPUT = 2_000


def archive_path() -> Path | None:
    """Returns the path of the archive for the Spark and the Java that a session of this process would use.

    It does not start Java, and the archive need not exist.

    Returns:
        None if there is no Java, or PySpark is installed without Spark (pyspark-client).
    """
    import pyspark

    java, spark = _java(), _spark_home()
    if java is None or not (spark / "jars").is_dir():
        return None
    place = "\0".join([_FORMAT, pyspark.__version__, str(spark.resolve()), os.path.realpath(java)])
    digest = hashlib.sha256(place.encode()).hexdigest()[:16]
    return cache_directory() / f"spark-{pyspark.__version__}-{digest}.jsa"


def usable_archive() -> Path | None:
    """Returns the path of the archive if it is complete and nobody else can have written it; otherwise None.

    A JVM runs the code in its archive. So an archive counts only if it belongs to this user or to root, only
    its owner may write it, and not everybody may replace it.
    """
    path = archive_path()
    return path if path is not None and _flaw(path) is None else None


def _flaw(path: Path) -> str | None:
    """Returns why the archive cannot be used, as a predicate of its path; None if it can."""
    if not str(path).isprintable() or set(str(path)) & set(" \"'"):
        return "has a blank or a quote in its path, at which Spark divides the options of a JVM"
    try:
        status = path.lstat()
        size = int(_size_file(path).read_text())
    except (OSError, ValueError):
        return "does not exist"
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        return "is not complete"
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "could have been written by another user"
    if is_replaceable(path.parent):
        return "is in a folder in which other users may replace it"
    return None


def java_options(archive: Path) -> str:
    """Returns the options with which a JVM uses an archive if it can, and starts without it if not."""
    return f"-XX:SharedArchiveFile={archive} -Xshare:auto {_QUIET}"


def write(path: Path | None = None) -> Path:
    """Runs a short Spark program, and writes the archive of the classes that it loads. Takes half a minute.

    Args:
        path: where; None = `archive_path`. A reader never finds an incomplete archive there.

    Returns:
        The path of the archive.

    Raises:
        UnavailableError: if there is no Java or no Spark, the program failed or wrote no archive, or no
            session would use an archive at ``path``.
        InvalidOptionError: if other users could replace the folder.
        OSError: if the file or its folder cannot be written.
    """
    from kafka_eos_source.runtime.file_systems import fsync  # imports PyArrow, which the settings do not need

    path = archive_path() if path is None else path
    if path is None:
        raise UnavailableError(
            "there is no Java on the PATH or in JAVA_HOME, or PySpark is installed without Spark.",
            fix="install Java 17 or newer, and PySpark (not pyspark-client).",
        )
    make_missing(path.parent, "KAFKA_EOS_CACHE")
    with tempfile.TemporaryDirectory(prefix=".class-archive-", dir=path.parent) as folder:
        unfinished = Path(folder, "spark.jsa")
        # the variable may name another archive, or make the program run on a cluster
        environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_SUBMIT_ARGS"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", _RUN, str(_PROGRAM), str(unfinished)],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_WAIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(
                f"the Spark program that loads the classes did not end within {_WAIT_SECONDS:.0f} s."
            ) from error
        if done.returncode or not unfinished.exists():
            raise UnavailableError(
                "the Spark program that loads the classes wrote no archive, and ended with exit code "
                f"{done.returncode}: {done.stdout[-_MOST_OUTPUT:].strip()}"
            )
        unfinished.chmod(0o644)
        fsync(str(unfinished))
        size = unfinished.stat().st_size
        os.replace(unfinished, path)
        unfinished.write_text(str(size))
        os.replace(unfinished, _size_file(path))
    flaw = _flaw(path)
    if flaw is not None:
        raise UnavailableError(
            f"no session uses the class archive {path}: it {flaw}.",
            fix="set KAFKA_EOS_CACHE to a folder of your own, with an ordinary name.",
        )
    return path


def _size_file(archive: Path) -> Path:
    return archive.with_suffix(".size")


def _java() -> str | None:
    """Returns the path of the ``java`` that Spark starts: that of ``JAVA_HOME``, else of the PATH."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which(os.path.join(home, "bin", "java")) if home else shutil.which("java")


def _spark_home() -> Path:
    import pyspark

    configured = os.environ.get("SPARK_HOME")
    return Path(configured) if configured else Path(pyspark.__file__).parent


def _main() -> None:
    """Writes the archive to the path that is given as the argument, for ``./dev``."""
    try:
        write(Path(sys.argv[1]))
    except (KafkaEosError, OSError) as error:
        sys.exit(f"no archive of Spark's classes was written: {error}")


if __name__ == "__main__":
    _main()
