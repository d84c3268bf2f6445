"""Runs a small Spark job and checks the Python processes that run a query's tasks."""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow.fs as pafs
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from kafka_eos_source.operate.doctor import probe
from kafka_eos_source.operate.doctor.finding import Finding, Severity, ok
from kafka_eos_source.operate.doctor.machine import descriptors, temporary_space, version_of
from kafka_eos_source.runtime.file_systems import file_system, make_folder
from kafka_eos_source.runtime.json_input import parse_json

_CLOCK_SECONDS = 5.0
#: Tasks per slot of the cluster, so that each executor gets some.
_TASKS_PER_SLOT = 2
_LONGEST_REASON = 400


def run_job(
    conf: Mapping[str, str], staging: str | None
) -> tuple[list[dict[str, Any]], tuple[float, float], set[str]]:
    """Runs the job and returns what its tasks found, when it ran, and the files that tasks wrote.

    Args:
        conf: settings of the Spark session, such as ``spark.master``.
        staging: the staging folder of the query; None = not checked.

    Raises:
        PySparkException: if a task failed, for example because executors have another version of Python.
        OSError: if the driver cannot write into the staging folder.
    """
    with _session(conf) as spark, _probe_file(staging) as (name, nonce, written):
        tasks = _TASKS_PER_SLOT * max(1, _slots(spark))
        cloudpickle.register_pickle_by_value(probe)  # type: ignore[no-untyped-call]
        try:
            began = time.time()
            frame = spark.range(0, tasks, 1, tasks).mapInArrow(
                probe.task(staging, name, nonce), "found string"
            )
            found = [parse_json(row.found) for row in frame.collect()]
            ended = time.time()
        finally:
            cloudpickle.unregister_pickle_by_value(probe)  # type: ignore[no-untyped-call]
        return found, (began, ended), written()


def check(
    conf: Mapping[str, str],
    staging: str | None,
    *,
    job: Callable[
        [Mapping[str, str], str | None], tuple[list[dict[str, Any]], tuple[float, float], set[str]]
    ] = run_job,
) -> Iterator[Finding]:
    """Checks the executors' Python, package, kernel, clock, space, limits and staging folder.

    Args:
        conf: settings of the Spark session.
        staging: the staging folder of the query; None = not checked.
        job: runs the job; tests replace it.
    """
    try:
        found, times, written = job(conf, staging)
    except (PySparkException, OSError) as error:
        yield Finding(
            "executors",
            Severity.BAD,
            f"the Spark job failed: {_reason(error)}",
            "a query runs the same kind of tasks: Python functions over Arrow batches",
            "install this Python version, pyspark's requirements and kafka-eos-source on every executor, and "
            "set PYSPARK_PYTHON or spark.pyspark.python to it.",
        )
        return
    problems = list(judge(found, times, staging, written))
    yield from problems
    if all(each.severity is Severity.OK for each in problems):
        hosts = sorted({each["host"] for each in found})
        yield ok("executors", f"{len(found)} tasks on {', '.join(hosts)} run Python {found[0]['python']}")


def judge(
    found: Sequence[Mapping[str, Any]],
    times: tuple[float, float],
    staging: str | None,
    written: set[str],
) -> Iterator[Finding]:
    """Yields what is wrong with the processes that ran the tasks; one finding for each host and problem."""
    version = version_of("kafka-eos-source")
    for each in {(one["host"], one["executable"]): one for one in found}.values():
        where = f"executor {each['host']}: "
        if each["package"] is None or each["problem"]:
            yield Finding(
                "executors",
                Severity.BAD,
                f"{where}kafka-eos-source cannot be used in {each['executable']}: "
                f"{each['problem'] or 'it is not installed'}",
                "every task of a query needs it",
                f"install kafka-eos-source {version or ''} into that Python.",
            )
            continue
        if version is not None and each["package"] != version:
            yield Finding(
                "executors",
                Severity.BAD,
                f"{where}kafka-eos-source {each['package']}, but {version} on this machine",
                "tasks and driver exchange messages whose format may differ between versions",
                f"install kafka-eos-source=={version} into {each['executable']}.",
            )
        if _minor(each["python"]) != _minor(platform.python_version()):
            yield Finding(
                "executors",
                Severity.BAD,
                f"{where}Python {each['python']}, but {platform.python_version()} on this machine",
                "pickled functions of one version fail in another",
                "set PYSPARK_PYTHON to the same version everywhere.",
            )
        if not times[0] - _CLOCK_SECONDS <= each["at_seconds"] <= times[1] + _CLOCK_SECONDS:
            off = each["at_seconds"] - (times[0] if each["at_seconds"] < times[0] else times[1])
            yield Finding(
                "executors",
                Severity.WARNING,
                f"{where}its clock is {abs(off):,.0f} s {'ahead of' if off > 0 else 'behind'} this machine's",
                "ages of staged rows and state are computed from several machines' clocks",
                "synchronise the clocks with NTP.",
            )
        space = temporary_space(each["free_bytes"], each["temporary"], where=where, check="executors")
        files = descriptors(*each["files"], where=where, check="executors") if each["files"] else space
        for finding in {space, files}:
            if finding.severity is not Severity.OK:
                yield finding
        if staging is not None and each["staging"]:
            yield _not_shared(staging, f"{where}{each['staging']}")
    tried = [each for each in found if each["staging"] == ""]
    if staging is not None and tried and not written:
        yield _not_shared(staging, "this machine does not see the files that executors wrote")
    elif staging is not None and tried and len(tried) == len(found):
        yield ok(
            "staging", f"this machine and {len({each['host'] for each in found})} host(s) share {staging}"
        )


def _not_shared(staging: str, problem: str) -> Finding:
    return Finding(
        "staging",
        Severity.BAD,
        f"{staging} is not shared: {problem}",
        "tasks stage rows that the driver commits, so both must see the same folder",
        "set staging.location (or the checkpoint) to a file system that all machines share.",
    )


@contextmanager
def _session(conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yields the session of this process, or a new one that is stopped afterwards."""
    running = SparkSession.getActiveSession()
    if running is not None:
        yield running
        return
    spark = SparkSession.builder.appName("kafka-eos doctor").config(map=dict(conf)).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _probe_file(staging: str | None) -> Iterator[tuple[str, str, Callable[[], set[str]]]]:
    """Writes a file that tasks read, and deletes it and theirs at the end."""
    name, nonce = f".doctor-{uuid.uuid4().hex}", uuid.uuid4().hex
    if staging is None:
        yield name, nonce, set
        return
    fs, path = file_system(staging)
    make_folder(fs, path)

    def files() -> set[str]:
        listed = fs.get_file_info(pafs.FileSelector(path))
        return {each.path for each in listed if each.base_name.startswith(name)}

    def of_tasks() -> set[str]:
        return {each for each in files() if not each.endswith(name)}

    with fs.open_output_stream(f"{path}/{name}") as out:
        out.write(nonce.encode())
    try:
        yield name, nonce, of_tasks
    finally:
        for each in files():
            fs.delete_file(each)


def _slots(spark: SparkSession) -> int:
    """Returns how many tasks the cluster runs at the same time, as far as it is known."""
    context = (
        getattr(spark, "sparkContext", None)
        if type(spark).__module__.startswith("pyspark.sql.session")
        else None
    )
    return 4 if context is None else int(context.defaultParallelism)


def _reason(error: Exception) -> str:
    """Returns the last lines of an error, which name its cause; the first ones are Spark's stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "MISMATCH" in line] or lines[-1:]
    return telling[-1][:_LONGEST_REASON]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
