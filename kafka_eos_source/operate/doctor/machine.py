"""Checks of this machine: versions, Java, C kernel, data sources, Python, space, limits, private folders."""

from __future__ import annotations

import compileall
import contextlib
import os
import platform
import re
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from importlib.util import cache_from_source
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import psutil

from kafka_eos_source import native
from kafka_eos_source.embedded import java
from kafka_eos_source.errors import KafkaEosError, KernelUnavailableError, OperatorError
from kafka_eos_source.operate.doctor.finding import Finding, Repair, Severity, failure, ok
from kafka_eos_source.spark import class_archive
from kafka_eos_source.spark.session import DAEMON_SETTING

FORMATS = ("kafka-eos", "kafka-eos-state")
#: Folders in the system's temporary folder that this package uses, without the user's id.
PRIVATE_FOLDERS = (
    "kafka-eos-staging",
    "kafka-eos-state",
    "kafka-eos-due",
    "kafka-eos-senders",
    "kafka-eos-live",
)

_LEAST_SPACE_BYTES, _LITTLE_SPACE_BYTES = 200 << 20, 2 << 30
_LEAST_DESCRIPTORS, _FEW_DESCRIPTORS = 256, 4096
_NOT_FOUND_FIX = (
    "install kafka-eos-source into the Python of Spark's driver. An editable install needs "
    "--config-settings editable_mode=compat, because Spark searches sys.path and ignores import hooks."
)


def check_java() -> Finding:
    """Checks that there is a Java that Kafka and Spark can use."""
    try:
        path, major = java.found()
    except KafkaEosError as error:
        return failure("java", error, "Spark and the embedded broker run in Java")
    return ok("java", f"{path}, version {major}")


def check_kernel() -> Finding:
    """Checks that the libraries of the C kernel can be loaded."""
    try:
        native.check()
    except KernelUnavailableError as error:
        return failure("kernel", error, "every process of a query needs it")
    return ok("kernel", f"{len(native.VERSIONS)} libraries can be loaded")


def discovery() -> Finding:
    """Checks that Spark finds the data sources, searching as ``pyspark.sql.worker.lookup_data_sources`` does.

    One ``pyspark_…`` module that cannot be imported makes Spark find no data source at all.
    """
    why = "spark.readStream.format('kafka-eos') fails"
    found: dict[str, str] = {}
    for info in iter_modules():
        if not info.name.startswith("pyspark_"):
            continue
        try:
            source: Any = getattr(import_module(info.name), "DefaultSource", None)
            if source is not None:
                found[source.name()] = info.name
        except Exception as error:  # noqa: BLE001  whatever a module raises while it is imported
            return Finding(
                "discovery",
                Severity.BAD,
                f"Spark cannot find any data source, because importing {info.name} fails with "
                f"{type(error).__name__}: {error}",
                why,
                f"repair or uninstall {info.name}.",
            )
    missing = [name for name in FORMATS if name not in found]
    if missing:
        what = f"Spark does not find format({missing[0]!r})"
        return Finding("discovery", Severity.BAD, what, why, _NOT_FOUND_FIX)
    return ok("discovery", f"Spark finds {', '.join(map(repr, FORMATS))}")


def workers_python(environment: Mapping[str, str], ours: str) -> Finding:
    """Checks that Spark's Python workers on this machine use this Python.

    They use ``PYSPARK_PYTHON``, else the first ``python3`` on the PATH.
    """
    value = environment.get("PYSPARK_PYTHON")
    found = shutil.which(value or "python3", path=environment.get("PATH"))
    text = (
        f"PYSPARK_PYTHON={value}" if value else "PYSPARK_PYTHON is not set, so Spark uses python3 on the PATH"
    )
    why = "tasks run in that Python, and need this package in the same version"
    if found is None:
        return Finding(
            "python", Severity.BAD, f"{text}, which does not exist", why, f"set PYSPARK_PYTHON={ours}."
        )
    text = text if value == found else f"{text}, which is {found}"
    if _folder(found) == _folder(ours):
        return ok("python", text)
    fix = f"set PYSPARK_PYTHON={ours}, or install kafka-eos-source into that Python."
    return Finding("python", Severity.BAD, f"{text}: another Python than the driver's", why, fix)


def zipped_pyspark(package: Path) -> Finding:
    """Reports whether Python processes import PySpark from a zip file, which is slow and no error.

    pip's PySpark contains every module twice. The zip has no bytecode and comes first in the path of workers.
    """
    archive = package / "python" / "lib" / "pyspark.zip"
    if not archive.exists():
        return ok("workers", "Python processes import PySpark as bytecode")
    by_pip = (package / "sql" / "session.py").exists()
    return Finding(
        "workers",
        Severity.NOTE,
        f"each Python process compiles PySpark again, because it imports {archive}",
        "this takes 0.6 s each, for five processes at the start of a query",
        "stop the queries that use it, then delete the file; pip installed the same modules next to it."
        if by_pip
        else "install Spark with pip, or leave it as it is.",
        Repair(f"delete {archive}", lambda: delete_archive(archive, package)) if by_pip else None,
    )


def uncompiled(packages: Iterable[Path]) -> Iterator[Finding]:
    """Reports packages that each Python process compiles again, because they have no bytecode.

    pip compiles what it installs. uv does not, and nobody compiles sources on ``PYTHONPATH``. A process
    stores what it has compiled, unless the folder is not writable or ``PYTHONDONTWRITEBYTECODE`` is set, as
    in many images.
    """
    found = [package for package in packages if not all(map(_is_compiled, _some_modules(package)))]
    if not found:
        return
    listed = " and ".join(map(str, found))
    yield Finding(
        "workers",
        Severity.NOTE,
        f"there is no bytecode for {listed}, so each Python process may compile these modules again",
        "for kafka-eos this takes up to 0.15 CPU s each, for five processes at the start of a query",
        f"run {sys.executable} -m compileall -q {' '.join(map(str, found))}, when the image is built if "
        "there is one.",
        Repair(f"compile the Python modules in {listed}", lambda: _compile_modules(found)),
    )


def _some_modules(package: Path) -> Iterator[Path]:
    yield package / "__init__.py"
    yield from package.glob("*/__init__.py")


def _is_compiled(module: Path) -> bool:
    try:
        return os.path.getmtime(cache_from_source(str(module))) >= module.stat().st_mtime
    except FileNotFoundError:
        return False


def _compile_modules(packages: Iterable[Path]) -> None:
    failed = [str(package) for package in packages if not compileall.compile_dir(package, quiet=2)]
    if failed:
        raise OperatorError(f"cannot write bytecode into {', '.join(failed)}")


def delete_archive(archive: Path, package: Path) -> None:
    """Deletes PySpark's zip file, unless a Spark runs from this installation.

    Python keeps the list of an archive's modules, so running processes could import no further module.

    Raises:
        OperatorError: if Spark runs.
        OSError: if the file cannot be deleted.
    """
    own = {each.pid for each in psutil.Process().children(recursive=True)}  # a job of doctor's has ended
    for each in psutil.process_iter(["pid", "name", "cmdline"]):
        command = " ".join(each.info["cmdline"] or ())
        if (each.info["name"] or "").startswith("java") and str(package) in command and each.pid not in own:
            raise OperatorError(f"process {each.pid} runs Spark from {package}; stop it first")
    archive.unlink()


def checkpoint_files(local: Mapping[str, str]) -> Finding:
    """Reports settings that speed up checkpoints in local folders; without them, nothing is wrong."""
    if not local:
        return ok(
            "checkpoints", "this PySpark does not include Spark; the remote driver writes the checkpoints"
        )
    listed = ", ".join(f"{name}={value}" for name, value in local.items())
    return ok("checkpoints", f"with a checkpoint in a local folder, {listed} shortens a micro-batch by 60 ms")


def archived_classes(where: Path | None, usable: Path | None) -> Finding:
    """Reports whether the JVM of a driver can start from an archive of Spark's classes.

    Args:
        where: where the archive is, or would be; None = there is no Java, or no Spark with PySpark.
        usable: the archive, if it exists.
    """
    if where is None:
        return ok("classes", "no JVM starts in this Python: there is no Java, or PySpark without Spark")
    if usable is not None:
        return ok("classes", f"sessions with recommended_settings() start from the class archive {usable}")
    return Finding(
        "classes",
        Severity.NOTE,
        "there is no archive of Spark's classes, so the JVM of each driver loads them from their jars",
        "with the archive, a session and its first query need 6.8 CPU s of the JVM instead of 11.2",
        "run kafka-eos doctor --fix, and build sessions with recommended_settings().",
        Repair(
            f"run a short Spark program, and write the classes that it loads to {where} "
            f"({class_archive.SIZE_MIB} MiB, about a minute)",
            partial(class_archive.write, where),
        ),
    )


def worker_daemon(recommended: Mapping[str, str], commands: Iterable[Sequence[str]]) -> Finding:
    """Reports what `recommended_settings` saves, and whether the Spark sessions of this host use them.

    Args:
        recommended: the settings.
        commands: command lines of the processes of this host.
    """
    # a worker has the command line of the daemon that forked it
    daemons = {_module_of(command) for command in commands if "pyspark.worker" in command}
    off = "pyspark.daemon" in daemons
    module = recommended[DAEMON_SETTING]
    if module in daemons and not off:
        return ok("daemon", "workers are forked from a daemon that has imported PyArrow and kafka-eos")
    listed = f"{DAEMON_SETTING}={module}"
    where = "; a running session on this host does not use it" if off else ""
    return ok("daemon", f"{listed} saves 0.25 to 0.45 CPU s for each Python worker{where}")


def running_commands() -> Iterator[Sequence[str]]:
    """Yields the command lines of the processes of this host, as far as this user may see them."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            yield process.cmdline()


def _module_of(command: Sequence[str]) -> str:
    """Returns the module that ``python -m`` runs; "" if the command is another one."""
    at = command.index("-m") if "-m" in command else len(command)
    return command[at + 1] if at + 1 < len(command) else ""


def temporary_space(free_bytes: int, folder: str, *, where: str = "", check: str = "space") -> Finding:
    """Judges the free space of the system's temporary folder, where state and staged rows go by default."""
    text = f"{where}{free_bytes / (1 << 30):,.1f} GiB free in {folder}"
    if free_bytes >= _LITTLE_SPACE_BYTES:
        return ok(check, text)
    return Finding(
        check,
        Severity.BAD if free_bytes < _LEAST_SPACE_BYTES else Severity.WARNING,
        text,
        "Spark's shuffle files, and by default state databases and rows of batch writes, are there",
        "free some space, or set spark.local.dir, state.dir and staging.location to larger disks.",
    )


def free_temporary_bytes() -> int:
    """Returns the free space of the system's temporary folder, bytes."""
    return shutil.disk_usage(tempfile.gettempdir()).free


def descriptors(soft: int, hard: int, *, where: str = "", check: str = "files") -> Finding:
    """Judges the limit on open files; each state database keeps its files open."""
    unlimited = resource.RLIM_INFINITY
    text = f"{where}limit on open files: {'unlimited' if soft == unlimited else soft}"
    if soft == unlimited or soft >= _FEW_DESCRIPTORS:
        return ok(check, text)
    able = hard == unlimited or hard >= _FEW_DESCRIPTORS
    return Finding(
        check,
        Severity.BAD if soft < _LEAST_DESCRIPTORS else Severity.WARNING,
        text,
        "Kafka clients and the state database of each shard keep files and connections open",
        "run ulimit -n 65536 before the driver and the executors start."
        if able
        else "raise the hard limit (limits.conf, LimitNOFILE=65536), then the soft limit.",
    )


def private_folders(root: str, uid: int) -> Iterator[Finding]:
    """Checks that the package's folders in the temporary folder belong to this user alone."""
    fine = []
    for name in PRIVATE_FOLDERS:
        path = Path(root, f"{name}-{uid}")
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode) or found.st_uid != uid:
            yield Finding(
                "folders",
                Severity.BAD,
                f"{path} is a symbolic link or belongs to another user",
                "queries refuse to use it, because that user could read or change its contents",
                "ask its owner to remove it, or set staging.location and state.dir (docs/security.md).",
            )
        elif stat.S_IMODE(found.st_mode) & 0o077:
            yield Finding(
                "folders",
                Severity.WARNING,
                f"{path} has mode {stat.S_IMODE(found.st_mode):04o}",
                "other users of this machine can read staged rows and state",
                f"chmod 700 {path}",
                Repair(f"change the mode of {path} to 0700", lambda path=path: path.chmod(0o700)),  # type: ignore[misc]
            )
        else:
            fine.append(str(path))
    if fine:
        yield ok("folders", f"only this user may open {', '.join(fine)}")


def _folder(python: str) -> str:
    """Returns the folder of a Python, which identifies its environment.

    In a virtual environment, the program is a link to another environment's, but its folder is not.
    """
    return os.path.realpath(os.path.dirname(os.path.abspath(python)))


# -- versions, and combinations of them that are known not to work

_PACKAGES = ("kafka-eos-source", "pyspark", "confluent-kafka", "pyarrow", "pandas", "rocksdict")

Version = tuple[int, ...]


@dataclass(frozen=True)
class Versions:
    """What is installed.

    Attributes:
        packages: version of each package as text; None = it is not installed.
        python: version of this Python.
        java: major version of Java; None = there is no usable Java.
    """

    packages: Mapping[str, str | None]
    python: str
    java: int | None

    def of(self, package: str) -> Version:
        """Returns the version of a package as numbers; empty = it is not installed."""
        return numbers(self.packages.get(package) or "")


@dataclass(frozen=True)
class _Combination:
    """A combination that does not work, or not as documented.

    Attributes:
        holds: whether these versions are such a combination.
        severity: how bad it is.
        what: the combination.
        why: what happens with it.
        fix: what to install instead.
    """

    holds: Callable[[Versions], bool]
    severity: Severity
    what: str
    why: str
    fix: str


def _below(package: str, *least: int) -> Callable[[Versions], bool]:
    return lambda versions: () < versions.of(package) < least


_COMBINATIONS = (
    _Combination(
        _below("pyspark", 4, 0),
        Severity.BAD,
        "PySpark older than 4.0",
        "it has no Python data sources for streams, so format('kafka-eos') does not exist",
        "install pyspark 4.0 or newer.",
    ),
    _Combination(
        lambda versions: (4, 0) <= versions.of("pyspark") < (4, 2),
        Severity.NOTE,
        "PySpark older than 4.2",
        "limits per trigger and onRolledBackCheckpoint=jump do not exist, and Trigger.AvailableNow reads "
        "everything in one batch",
        "install pyspark 4.2 or newer (docs/supported-versions.md).",
    ),
    _Combination(
        lambda versions: (versions.java or 0) >= 24 and () < versions.of("pyspark") < (4, 2),
        Severity.BAD,
        "Java 24 or newer with PySpark older than 4.2",
        "Spark's Hadoop client calls Subject.getSubject, which Java 24 removed (HADOOP-19212), so Spark does "
        "not start",
        "use Java 17 or 21.",
    ),
    _Combination(
        lambda versions: versions.java == 23 and () < versions.of("pyspark") < (4, 2),
        Severity.WARNING,
        "Java 23 with PySpark older than 4.2",
        "Spark starts only with -Djava.security.manager=allow (HADOOP-19212)",
        "use Java 17 or 21.",
    ),
    _Combination(
        lambda versions: versions.of("pandas") >= (3,),
        Severity.BAD,
        "pandas 3 or newer",
        "PySpark's Arrow workers import pandas and do not support version 3 yet",
        "install 'pandas>=2.2,<3'.",
    ),
    _Combination(
        _below("pandas", 2, 2),
        Severity.BAD,
        "pandas older than 2.2",
        "PySpark's Arrow workers refuse it",
        "install 'pandas>=2.2,<3'.",
    ),
    _Combination(
        _below("confluent-kafka", 2, 6),
        Severity.BAD,
        "confluent-kafka older than 2.6",
        "the transactional producer and the admin requests that this package uses are incomplete in it",
        "install confluent-kafka 2.6 or newer.",
    ),
    _Combination(
        _below("pyarrow", 18),
        Severity.BAD,
        "PyArrow older than 18",
        "PySpark 4 refuses it, or this package's Arrow code fails",
        "install pyarrow 18 or newer.",
    ),
    _Combination(
        lambda versions: numbers(versions.python)[:2] >= (3, 14),
        Severity.NOTE,
        "Python 3.14 or newer",
        "this package is tested with Python 3.10 to 3.13",
        "use Python 3.13 if something fails.",
    ),
)


def installed(java: int | None) -> Versions:
    """Returns the versions of this machine.

    Args:
        java: major version of the Java that Spark uses; None = none was found.
    """
    return Versions(
        {name: version_of(name) for name in _PACKAGES},
        platform.python_version(),
        java,
    )


def check_versions(versions: Versions) -> Iterator[Finding]:
    """Yields the versions, and each known problem of their combination."""
    listed = ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.packages.items())
    text = f"Python {versions.python}, {listed}"
    missing = [name for name, version in versions.packages.items() if version is None]
    if missing:
        yield Finding(
            "versions",
            Severity.BAD,
            text,
            "a query needs these packages in the driver and in every executor",
            f"install {', '.join(missing)}.",
        )
    else:
        yield ok("versions", text)
    for each in _COMBINATIONS:
        if each.holds(versions):
            yield Finding("versions", each.severity, each.what, each.why, each.fix)


def numbers(version: str) -> Version:
    """Returns the numbers at the beginning of a version: ``(4, 1, 0)`` for ``"4.1.0.dev3"``."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def version_of(package: str) -> str | None:
    """Returns the version of an installed package; None = it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
