"""Runs the checks of ``kafka-eos doctor`` in order, and repairs what ``--fix`` may repair."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

import kafka_eos_source
from kafka_eos_source.embedded import java
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.health import Rights, layout
from kafka_eos_source.kafka.schema_registry import RETRY_TIMEOUT
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.operate.doctor import cluster, executors, machine
from kafka_eos_source.operate.doctor.finding import Finding, Repair, failure, ok
from kafka_eos_source.operate.inspection import Inspection, inspect
from kafka_eos_source.operate.rights import names_of
from kafka_eos_source.operate.shared import Target, open_reader
from kafka_eos_source.registry.catalog import registry_client
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark import class_archive
from kafka_eos_source.spark.session import local_checkpoints, recommended_settings


def _imports() -> Iterator[Finding]:
    """Checks that Python processes import bytecode."""
    spark = Path(pyspark.__file__).parent
    yield machine.zipped_pyspark(spark)
    yield from machine.uncompiled([Path(kafka_eos_source.__file__).parent, spark])


def _java_major() -> int | None:
    try:
        return java.found()[1]
    except KafkaEosError:
        return None  # the check of Java reports it


def _one(check: Callable[[], Finding]) -> Callable[[], Iterator[Finding]]:
    return lambda: iter([check()])


#: The checks of this machine, in the order in which they run.
_MACHINE: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "versions": lambda: machine.check_versions(machine.installed(_java_major())),
    "java": _one(machine.check_java),
    "kernel": _one(machine.check_kernel),
    "discovery": _one(machine.discovery),
    "python": _one(lambda: machine.workers_python(os.environ, sys.executable)),
    "workers": _imports,
    "classes": _one(
        lambda: machine.archived_classes(class_archive.archive_path(), class_archive.usable_archive())
    ),
    "checkpoints": _one(lambda: machine.checkpoint_files(local_checkpoints())),
    "daemon": _one(lambda: machine.worker_daemon(recommended_settings(), machine.running_commands())),
    "space": _one(lambda: machine.temporary_space(machine.free_temporary_bytes(), tempfile.gettempdir())),
    "files": _one(lambda: machine.descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))),
    "folders": lambda: machine.private_folders(tempfile.gettempdir(), os.getuid()),
}
_CLUSTER = ("brokers", "transactions", "replicas", "clock", "rights", "dead-letters", "retention")
#: Names of all checks, in the order in which they run.
CHECKS = (*_MACHINE, *_CLUSTER, "staging", "registry", "executors")


@dataclass(frozen=True)
class Patient:
    """What doctor looks at.

    Attributes:
        target: the query and the cluster; its parts may be missing.
        source_topics: topics that the query reads, in addition to those in its checkpoint.
        token_topic: the option ``token.topic``; None = as the checkpoint says.
        dead_letter_topic: the option ``deadLetter.topic``; None = not set.
        principal: whose rights are checked; see `rights.PRINCIPALS`.
        clock_topic: topic into which records are written to compare clocks; None = do not compare.
        spark: settings of the Spark session for the job in the executors; None = run no job.
        only: names of the checks to run; empty = all.
        registry: options of the schema registry; None = the query uses none.
    """

    target: Target
    source_topics: Collection[str] = ()
    token_topic: str | None = None
    dead_letter_topic: str | None = None
    principal: str = "query"
    clock_topic: str | None = None
    spark: Mapping[str, str] | None = None
    only: Collection[str] = field(default=())
    registry: Mapping[str, str] | None = None


def diagnose(patient: Patient, deadline: Deadline) -> Iterator[Finding]:
    """Runs the checks one after another.

    Args:
        patient: what to look at.
        deadline: limits the wait for the brokers.
    """
    for name, check in _MACHINE.items():
        if _wanted(patient, name):
            yield from check()
    if patient.target.kafka is not None:
        yield from _cluster(patient, patient.target.kafka, deadline)
    location = patient.target.staging_location
    if location is not None and _wanted(patient, "staging"):
        yield cluster.staging(location)
    if patient.registry is not None and _wanted(patient, "registry"):
        yield registry(patient.registry, deadline)
    if patient.spark is not None and _wanted(patient, "executors"):
        yield from executors.check(patient.spark, location)


def registry(options: Mapping[str, str], deadline: Deadline) -> Finding:
    """Checks that the schema registry answers and accepts the credentials."""
    try:
        client = registry_client({RETRY_TIMEOUT: deadline.budget_seconds * 1000, **options})
        client.answers()
    except KafkaEosError as error:
        return failure("registry", error, "a query asks it for schemas when it starts, and for each new id")
    return ok("registry", f"{client.name} answers")


def repair(findings: Collection[Finding], before: Callable[[Repair], None]) -> Iterator[tuple[Repair, str]]:
    """Does the repairs of the findings, one after another.

    Args:
        findings: what the checks found.
        before: called with each repair before it is done.

    Yields:
        Each repair, and why it failed; "" = it did not.
    """
    for each in findings:
        if each.repair is None:
            continue
        before(each.repair)
        try:
            each.repair.run()
        except (OSError, KafkaEosError) as error:
            yield each.repair, str(error)
        else:
            yield each.repair, ""


def _wanted(patient: Patient, *names: str) -> bool:
    return not patient.only or bool(set(names) & set(patient.only))


def _cluster(patient: Patient, kafka: Mapping[str, str], deadline: Deadline) -> Iterator[Finding]:
    if not _wanted(patient, *_CLUSTER):
        return
    try:
        with open_reader(patient.target) as reader:
            assert reader is not None, "the target names brokers"
            cluster_id, topics = reader.topics(deadline)
        found = layout(kafka, deadline)
    except KafkaEosError as error:
        yield failure("brokers", error, "a query needs the cluster")
        return

    def soon() -> Deadline:
        # each check has the whole time, so that one without an answer does not fail the next ones
        return Deadline.after_seconds(deadline.budget_seconds)

    if _wanted(patient, "brokers"):
        yield from cluster.brokers(kafka, found, cluster_id, soon())
    if _wanted(patient, "transactions"):
        yield cluster.transaction_version(kafka, found)
    if patient.clock_topic is not None and _wanted(patient, "clock"):
        yield cluster.clock(kafka, patient.clock_topic, soon())
    inspection = None
    try:
        inspection = _inspection(patient.target, soon())
    except KafkaEosError as error:
        yield failure("retention", error, "the state of the query decides which checks can run")
    used = names_of(
        patient.target,
        inspection,
        topics,
        patient.source_topics,
        patient.token_topic,
        patient.dead_letter_topic,
    )
    if _wanted(patient, "replicas"):
        yield cluster.replicas(found, used.topics if used is not None else ())
    if used is not None and _wanted(patient, "rights"):
        try:
            yield from cluster.check_rights(used, patient.principal, Rights(kafka, soon()))
        except KafkaEosError as error:
            yield failure("rights", error, "the query logs in with the same credentials")
    if patient.dead_letter_topic is not None and _wanted(patient, "dead-letters"):
        output = patient.target.anchor_topic
        try:
            with TopicAdmin(kafka) as admin:
                yield from cluster.check_dead_letter_topic(patient.dead_letter_topic, output, admin, soon())
        except KafkaEosError as error:
            yield failure("dead-letters", error, "the sink writes dead letters with the same credentials")
    if inspection is not None and _wanted(patient, "retention"):
        kept = _retention_ms(kafka)
        yield cluster.retention(inspection, kept, time.time(), used.token_topic if used is not None else None)


def _inspection(target: Target, deadline: Deadline) -> Inspection | None:
    """Returns the state of the query; None if no query is named.

    Raises:
        OperatorError: if the checkpoint is damaged.
    """
    if target.application_id is None and target.checkpoint is None:
        return None
    try:
        with open_reader(target) as reader:
            return inspect(target, reader, deadline)
    except InvalidOptionError:
        return None  # a checkpoint that does not exist yet, and no application.id


def _retention_ms(kafka: Mapping[str, str]) -> int | KafkaEosError:
    admin = SourceAdmin(admin_config(kafka), "read_committed", 1, 200)
    try:
        return admin.offsets_retention_ms()
    except KafkaEosError as error:
        return error
    finally:
        admin.close()
