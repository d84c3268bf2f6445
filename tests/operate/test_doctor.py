"""``kafka-eos doctor``: each check passes and fails when it should."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.errors import PySparkException

from kafka_eos_source import native
from kafka_eos_source.cli import main
from kafka_eos_source.embedded import java
from kafka_eos_source.errors import (
    AuthorizationError,
    KernelUnavailableError,
    OperatorError,
    UnavailableError,
)
from kafka_eos_source.kafka.health import Broker, ClockDifference, Layout
from kafka_eos_source.operate import json_documents
from kafka_eos_source.operate.doctor import cluster, executors, machine, probe, run
from kafka_eos_source.operate.doctor.finding import Finding, Repair, Severity, exit_code, ok, worst
from kafka_eos_source.operate.rights import QUERY, Names, Need, needs
from kafka_eos_source.operate.shared import ExitCode
from kafka_eos_source.runtime.deadline import Deadline
from tests.support import glue_server, registry_server
from tests.support.json_shapes import mismatches
from tests.support.mock_cluster import MockCluster

OK, NOTE, WARNING, BAD = Severity
GIB = 1 << 30
DAY = 86_400.0


def soon() -> Deadline:
    return Deadline.after_seconds(5)


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(main, ["doctor", "--json", *arguments])
    found = json.loads(result.stdout)
    assert list(mismatches(json_documents.SHAPES["doctor"], found)) == []
    return result.exit_code, found


def complete(*found: Finding) -> None:
    """Whoever reads a finding learns what is wrong, why it matters and what to do."""
    for each in found:
        assert each.severity is OK or (each.what and each.why and each.fix), each


def is_complete(found: Finding, severity: Severity, said: str = "") -> None:
    complete(found)
    assert found.severity is severity, found
    assert said in found.what


# -- the command


def test_a_ready_machine_passes_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "found", lambda: ("/opt/java", 21))
    monkeypatch.setattr(machine, "free_temporary_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(machine, "private_folders", lambda root, uid: iter(()))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65_536, 65_536))
    # the mock cluster does not know this request
    monkeypatch.setattr(cluster, "transaction_version", lambda kafka, found: ok("transactions", "fine"))
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with MockCluster() as mock:
        code, found = doctor("--bootstrap-servers", mock.bootstrap_servers)
    by_name = {each["check"]: each for each in found["findings"]}
    assert code == ExitCode.DONE, found
    assert by_name["java"]["what"] == "/opt/java, version 21"
    assert by_name["kernel"]["what"] == f"{len(native.VERSIONS)} libraries can be loaded"
    assert by_name["discovery"]["what"] == "Spark finds 'kafka-eos', 'kafka-eos-state'"
    assert by_name["python"]["what"] == f"PYSPARK_PYTHON={sys.executable}"
    assert by_name["brokers"]["what"].startswith("1 of 1 brokers of cluster mockCluster")
    assert not {"rights", "retention", "staging", "executors", "clock"} & set(by_name), (
        "nobody asked for these"
    )


def test_missing_components_fail_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_java() -> tuple[str, int]:
        raise UnavailableError("no Java found.", fix="install it.")

    monkeypatch.setattr(java, "found", no_java)
    monkeypatch.setattr(machine, "iter_modules", list)
    monkeypatch.setenv("PYSPARK_PYTHON", "/nowhere/python")
    arguments = ["doctor", "--bootstrap-servers", "127.0.0.1:1", "--timeout", "300ms"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == ExitCode.NEEDS_A_PERSON
    assert "BAD  java         no Java found.\n" in result.output
    assert "fix: install it.\n" in result.output
    assert "BAD  discovery    Spark does not find format('kafka-eos')\n" in result.output
    assert "BAD  python       PYSPARK_PYTHON=/nowhere/python, which does not exist" in result.output
    assert "BAD  brokers      reading the cluster's metadata: no answer from Kafka" in result.output


def test_only_the_named_checks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_temporary_bytes", lambda: GIB)
    code, found = doctor("--check", "space", "--check", "java")
    assert {each["check"] for each in found["findings"]} == {"space", "java"}
    assert code == ExitCode.WARNING
    assert found["severity"] == "warning"
    wrong = CliRunner().invoke(main, ["doctor", "--check", "sapce"])
    assert wrong.exit_code == ExitCode.USAGE
    assert "expected one of versions, java" in wrong.output


def test_the_exit_code_is_that_of_the_worst_finding() -> None:
    found = [Finding("a", each, "x", "y", "z") for each in (OK, NOTE, BAD, WARNING)]
    assert worst(found) is BAD
    assert worst([]) is OK
    assert [exit_code(each) for each in (OK, NOTE, WARNING, BAD)] == [0, 0, 4, 3]


def test_a_repair_is_named_before_it_is_done_and_its_failure_is_reported(tmp_path: Path) -> None:
    events: list[str] = []

    def fail() -> None:
        raise PermissionError("read-only")

    found = [
        Finding("a", WARNING, "x", "y", "z", Repair("mend a", lambda: events.append("done"))),
        ok("b", "fine"),
        Finding("c", WARNING, "x", "y", "z", Repair("mend c", fail)),
    ]
    results = [
        (each.what, problem) for each, problem in run.repair(found, lambda each: events.append(each.what))
    ]
    assert events == ["mend a", "done", "mend c"]
    assert results == [("mend a", ""), ("mend c", "read-only")]


def test_fix_repairs_and_counts_only_what_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    open_to_all = tmp_path / f"kafka-eos-state-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    monkeypatch.setattr(run.tempfile, "gettempdir", lambda: str(tmp_path))
    code, found = doctor("--check", "folders")
    assert (code, found["repairs"]) == (ExitCode.WARNING, [])
    assert open_to_all.stat().st_mode & 0o777 == 0o755, "without --fix nothing changes"
    code, found = doctor("--check", "folders", "--fix")
    assert code == ExitCode.DONE
    (repaired,) = found["repairs"]
    assert repaired == {"repair": f"change the mode of {open_to_all} to 0700", "done": True, "problem": None}
    assert open_to_all.stat().st_mode & 0o777 == 0o700
    assert doctor("--check", "folders")[1]["findings"][0]["severity"] == "ok"


# -- versions

FINE = {
    "kafka-eos-source": "0.1.0",
    "pyspark": "4.3.0",
    "confluent-kafka": "2.16.1",
    "pyarrow": "26.0.1",
    "pandas": "2.3.3",
    "rocksdict": "0.3.29",
}


@pytest.mark.parametrize(
    ("changed", "python", "java_major", "severity", "said"),
    [
        ({}, "3.11.7", 17, OK, "pyspark 4.3.0"),
        ({"pyspark": None}, "3.11.7", 17, BAD, "pyspark not installed"),
        ({"pyspark": "3.5.4"}, "3.11.7", 17, BAD, "PySpark older than 4.0"),
        ({"pyspark": "4.1.4"}, "3.11.7", 17, NOTE, "PySpark older than 4.2"),
        ({"pyspark": "4.0.0"}, "3.11.7", 24, BAD, "Java 24 or newer with PySpark older than 4.2"),
        ({"pyspark": "4.0.0"}, "3.11.7", 23, WARNING, "Java 23"),
        ({}, "3.11.7", 25, OK, "pyspark 4.3.0"),
        ({"pandas": "3.0.0rc1"}, "3.11.7", 17, BAD, "pandas 3"),
        ({"pandas": "2.1.4"}, "3.11.7", 17, BAD, "pandas older than 2.2"),
        ({"confluent-kafka": "2.5.3"}, "3.11.7", 17, BAD, "confluent-kafka older"),
        ({"pyarrow": "17.0.0"}, "3.11.7", 17, BAD, "PyArrow older"),
        ({}, "3.14.0", 17, NOTE, "Python 3.14"),
    ],
)
def test_version_combinations_that_do_not_work_are_reported(
    changed: dict[str, str | None], python: str, java_major: int, severity: Severity, said: str
) -> None:
    found = list(machine.check_versions(machine.Versions({**FINE, **changed}, python, java_major)))
    complete(*found)
    assert worst(found) is severity
    assert any(said in each.what for each in found)


# -- this machine


def test_a_module_that_cannot_be_imported_hides_all_data_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyspark_0_broken.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    found = machine.discovery()
    assert found.severity is BAD
    assert found.what.endswith("importing pyspark_0_broken fails with RuntimeError: not today")
    assert found.fix == "repair or uninstall pyspark_0_broken."


def test_another_python_for_workers_is_reported(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        for each in ("python", "python3"):
            (tmp_path / name / each).write_text("")
            (tmp_path / name / each).chmod(0o755)
    ours, theirs = str(tmp_path / "ours" / "python"), str(tmp_path / "theirs" / "python")
    assert machine.workers_python({"PYSPARK_PYTHON": ours}, ours).severity is OK
    assert machine.workers_python({"PATH": str(tmp_path / "ours")}, ours).severity is OK
    assert machine.workers_python({"PATH": str(tmp_path / "theirs")}, ours).severity is BAD
    assert "set PYSPARK_PYTHON=" in machine.workers_python({"PYSPARK_PYTHON": theirs}, ours).fix
    assert "does not exist" in machine.workers_python({"PATH": ""}, ours).what


def test_a_missing_kernel_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise KernelUnavailableError("there is no kernel.so", fix="install the package")

    monkeypatch.setattr(native, "check", check)
    code, found = doctor("--check", "kernel")
    (finding,) = found["findings"]
    assert code == ExitCode.NEEDS_A_PERSON
    assert (finding["severity"], finding["what"]) == ("bad", "there is no kernel.so")
    assert finding["fix"] == "install the package"


def test_pyspark_in_a_zip_is_reported_with_its_cost_and_can_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.zipped_pyspark(tmp_path).severity is OK
    (tmp_path / "python" / "lib").mkdir(parents=True)
    (archive := tmp_path / "python" / "lib" / "pyspark.zip").write_bytes(b"")
    found = machine.zipped_pyspark(tmp_path)
    is_complete(found, NOTE)
    assert found.repair is None, "these modules are nowhere else"
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "session.py").write_text("")
    found = machine.zipped_pyspark(tmp_path)
    assert found.repair is not None
    spark = SimpleNamespace(
        pid=7, info={"pid": 7, "name": "java", "cmdline": ["java", "-cp", f"{tmp_path}/jars/*"]}
    )
    with monkeypatch.context() as running:
        running.setattr(machine.psutil, "process_iter", lambda _fields: [spark])
        with pytest.raises(OperatorError, match="process 7 runs Spark"):
            found.repair.run()
    assert archive.exists(), "a running Python could not import further modules"
    found.repair.run()
    assert not archive.exists()


def test_a_package_without_bytecode_is_reported_and_can_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", None)
    package = tmp_path / "package"
    (package / "part").mkdir(parents=True)
    for module in ("__init__.py", "module.py", "part/__init__.py"):
        (package / module).write_text("")
    (found,) = machine.uncompiled([package])
    is_complete(found, NOTE)
    assert found.repair is not None
    found.repair.run()
    assert len(list(package.rglob("*.pyc"))) == 3
    assert not list(machine.uncompiled([package]))
    # a module that was edited since is compiled by each process again
    os.utime(package / "part" / "__init__.py", (2**31, 2**31))
    assert list(machine.uncompiled([package]))
    (package / "part" / "__init__.py").write_text("no Python")
    os.utime(package / "part" / "__init__.py", (2**31, 2**31))  # compileall compares whole seconds
    with pytest.raises(OperatorError, match="cannot write bytecode"):
        found.repair.run()


def test_the_setting_for_fast_checkpoints_is_reported_and_never_fails() -> None:
    found = machine.checkpoint_files({"some.setting": "a.Class"})
    is_complete(found, OK, "some.setting=a.Class")
    assert "does not include Spark" in machine.checkpoint_files({}).what


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ((), "spark.python.daemon.module=ours saves"),
        (("pyspark.daemon", "ours"), "a running session on this host does not use it"),
        (("ours", "ours"), "workers are forked from a daemon that has imported"),
    ],
)
def test_the_daemon_of_running_sessions_is_found_by_its_command_line(
    modules: tuple[str, ...], expected: str
) -> None:
    commands = [["/usr/bin/python3", "-m", module, "pyspark.worker"] for module in modules]
    planner = ["python", "-m", "pyspark.daemon", "pyspark.sql.worker.plan_data_source_read"]
    others: list[list[str]] = [[], ["python", "-m"], planner]
    assert (
        expected in machine.worker_daemon({"spark.python.daemon.module": "ours"}, [*others, *commands]).what
    )


@pytest.mark.parametrize(
    ("free", "severity"), [(100 * GIB, OK), (GIB, WARNING), (50 << 20, BAD)], ids=["much", "little", "none"]
)
def test_little_temporary_space_is_reported(free: int, severity: Severity) -> None:
    found = machine.temporary_space(free, "/tmp")
    is_complete(found, severity)


@pytest.mark.parametrize(
    ("soft", "hard", "severity", "fix"),
    [
        (65_536, 65_536, OK, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, OK, ""),
        (1024, 524_288, WARNING, "ulimit -n"),
        (1024, resource.RLIM_INFINITY, WARNING, "ulimit -n"),
        (1024, 1024, WARNING, "hard limit"),
        (64, 1024, BAD, "hard limit"),
    ],
)
def test_a_low_limit_of_open_files_is_reported(soft: int, hard: int, severity: Severity, fix: str) -> None:
    found = machine.descriptors(soft, hard)
    is_complete(found, severity)
    assert fix in found.fix


def test_private_folders_of_other_users_are_reported_and_not_repaired(tmp_path: Path) -> None:
    uid = os.getuid()
    assert list(machine.private_folders(str(tmp_path), uid)) == []
    (tmp_path / f"kafka-eos-state-{uid}").mkdir(mode=0o700)
    (tmp_path / f"kafka-eos-staging-{uid}").symlink_to(tmp_path)
    linked, fine = machine.private_folders(str(tmp_path), uid)
    complete(linked)
    assert (linked.severity, fine.severity) == (BAD, OK)
    assert linked.repair is None, "nobody follows or deletes a link that another user may have made"
    (tmp_path / f"kafka-eos-state-{uid + 1}").mkdir(mode=0o700)
    (foreign,) = machine.private_folders(str(tmp_path), uid + 1)
    is_complete(foreign, BAD, "belongs to another user")


# -- the cluster

TWO = Layout((Broker(1, "a", 9092), Broker(2, "b", 9092)), {"in": 3, "out": 1, "__consumer_offsets": 3})


def test_every_broker_is_asked_at_the_address_that_it_gives() -> None:
    asked = []

    def ask(kafka: Mapping[str, str], broker: Broker, deadline: Deadline) -> None:
        asked.append(broker.host)
        assert deadline.budget_seconds == 3, "a broker that is down leaves time for the next one"
        if broker.node_id == 2:
            raise UnavailableError("no answer")

    (found,) = cluster.brokers({}, TWO, "c", Deadline.after_seconds(3), ask=ask)
    complete(found)
    assert asked == ["a", "b"]
    is_complete(found, BAD, "broker 2 does not answer at b:9092")
    (found,) = cluster.brokers({}, TWO, "c", soon(), ask=lambda *each: None)
    is_complete(found, OK, "2 of 2 brokers of cluster c answer")


@pytest.mark.parametrize(
    ("features", "severity", "said"),
    [
        ({"transaction.version": 2, "metadata.version": 25}, OK, "transaction.version=2"),
        ({"transaction.version": 1}, NOTE, "transaction.version=1"),
        ({}, NOTE, "transaction.version=0"),
        (None, BAD, "older than"),
        (OSError("refused"), NOTE, "refused"),
    ],
)
def test_the_finalized_level_of_transactions_is_reported(
    features: Any, severity: Severity, said: str
) -> None:
    def ask(host: str, port: int, kafka: Mapping[str, str], seconds: float) -> Any:
        if isinstance(features, OSError):
            raise features
        return features

    found = cluster.transaction_version({"bootstrap.servers": "b:1"}, TWO, ask=ask)
    is_complete(found, severity, said)


def test_few_replicas_are_a_warning_if_the_cluster_has_several_brokers() -> None:
    found = cluster.replicas(TWO, ["in", "out", "unknown"])
    complete(found)
    assert (found.severity, "out: 1" in found.what, "in: 3" in found.what) == (WARNING, True, False)
    alone = Layout(TWO.brokers[:1], TWO.replicas)
    assert cluster.replicas(alone, ["out"]).severity is NOTE
    assert cluster.replicas(TWO, ["in"]).severity is OK


@pytest.mark.parametrize(
    ("ms", "uncertainty", "severity"),
    [
        (300, 5, OK),
        (-300, 5, OK),
        (5_000, 5, WARNING),
        (-5_000, 5, WARNING),
        (5_000, 4_000, OK),
        (-90_000, 9, BAD),
    ],
)
def test_clocks_that_surely_differ_are_reported(ms: float, uncertainty: float, severity: Severity) -> None:
    found = cluster.clock({}, "t", soon(), ask=lambda *each: ClockDifference(ms, uncertainty))
    is_complete(found, severity)
    assert ("ahead of" if ms > 0 else "behind") in found.what


def test_a_damaged_checkpoint_is_a_finding_and_ends_no_other_check(tmp_path: Path) -> None:
    (tmp_path / "metadata").write_text("not JSON")
    with MockCluster() as mock:
        where = ("--bootstrap-servers", mock.bootstrap_servers, "--checkpoint", str(tmp_path))
        code, found = doctor(*where, "--check", "retention", "--check", "staging")
    by_name = {each["check"]: each for each in found["findings"]}
    assert code == ExitCode.NEEDS_A_PERSON
    assert by_name["retention"]["severity"] == "bad"
    assert by_name["staging"]["severity"] == "ok"


# -- rights


class Asks:
    """A cluster that grants these operations; a name that is absent does not exist."""

    def __init__(self, granted: Mapping[str, set[str]], *, writes: bool | None = True) -> None:
        self._granted, self._writes = granted, writes

    def of_topics(self, topics: Collection[str]) -> dict[str, frozenset[str] | None]:
        return {each: frozenset(self._granted[each]) if each in self._granted else None for each in topics}

    def of_group(self, group_id: str) -> frozenset[str] | None:
        return frozenset(self._granted[group_id]) if group_id in self._granted else None

    def may_write_transactional_id(self, transactional_id: str) -> bool | None:
        return self._writes


STATEFUL = Names("app", "group", {"in"}, {"out"}, "out", "tokens", {"app-s-changelog"}, "dead")
ALL = {
    "in": {"READ", "DESCRIBE"},
    "out": {"READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"},
    "dead": {"WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"},
    "tokens": {"READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"},
    "app-s-changelog": {"READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS"},
    "group": {"READ", "DESCRIBE"},
}


def needed(names: Names, principal: str) -> list[Need]:
    """Returns the rights that doctor asks for: not those on the cluster, and not the one to create topics."""
    found = needs(names, QUERY if principal == "query" else (principal,))
    return [each for each in found if each.kind != "cluster" and each.operation != "CREATE"]


@pytest.mark.parametrize("principal", cluster.PRINCIPALS)
def test_each_missing_right_is_named(principal: str) -> None:
    (fine,) = cluster.check_rights(STATEFUL, principal, Asks(ALL))
    assert fine.severity is OK
    for need in needed(STATEFUL, principal):
        if need.kind == "transactional id":
            asks = Asks(ALL, writes=False)
        else:
            asks = Asks({**ALL, need.name: ALL[need.name] - {need.operation}})
        found, *fine = cluster.check_rights(STATEFUL, principal, asks)
        complete(found)
        assert found.severity is (NOTE if need.without else BAD)
        assert [each.severity for each in fine] == ([OK] if need.without else [])
        assert f"on {need.kind} '{need.name}' is missing" in found.what
        assert "kafka-acls.sh" in found.fix


def test_each_principal_needs_its_own_rights() -> None:
    def wanted(principal: str, names: Names = STATEFUL) -> set[tuple[str, str]]:
        return {(each.name, each.operation) for each in needed(names, principal)}

    assert wanted("source") == {("in", "READ"), ("group", "DESCRIBE")}
    assert ("out", "WRITE") not in wanted("operator")
    assert ("tokens", "DESCRIBE_CONFIGS") in wanted("sink")
    # Read contains Describe
    parts = wanted("source") | wanted("sink") | wanted("operator")
    assert wanted("query") == parts - {("group", "DESCRIBE")}
    assert wanted("operator", Names("app", "group", {"in"}, {"out"}, "out")) == set()


def test_missing_topics_and_unanswerable_rights_are_reported_as_such() -> None:
    missing = {name: each for name, each in ALL.items() if name not in ("out", "group")}
    found = list(cluster.check_rights(STATEFUL, "sink", Asks(missing, writes=None)))
    complete(*found)
    assert {each.what.partition(",")[0] for each in found if each.severity is WARNING} == {
        "topic 'out' does not exist"
    }
    unknown = {each.what for each in found if each.severity is NOTE}
    assert {"group" in each or "transactional id" in each for each in unknown} == {True}
    assert len(unknown) == 2


class DeadLetterTopics:
    """Topics ``dead`` and ``out``; a topic whose configuration is None may not be described."""

    def __init__(self, **dead: str) -> None:
        usual = {"max.message.bytes": "1000000", "cleanup.policy": "delete", "retention.ms": "-1"}
        changed = {name.replace("_", "."): value for name, value in dead.items()}
        self.configs = {"dead": {**usual, **changed}, "out": usual}

    def shape(self, name: str, deadline: Deadline) -> object | None:
        return self.configs.get(name)

    def config(self, name: str, deadline: Deadline) -> Mapping[str, str]:
        return self.configs[name]


@pytest.mark.parametrize(
    ("config", "severity", "text"),
    [
        ({}, OK, "takes and keeps dead letters"),
        ({"max_message_bytes": "2000000"}, OK, "takes and keeps dead letters"),
        ({"cleanup_policy": "compact,delete"}, BAD, "cleanup.policy=compact,delete"),
        ({"retention_ms": "3600000"}, NOTE, "keeps letters for 1 hours"),
        ({"max_message_bytes": "999999"}, WARNING, "less than topic 'out' (1000000)"),
        ({"max_message_bytes": "10000"}, BAD, "has max.message.bytes=10000"),
    ],
)
def test_a_dead_letter_topic_that_loses_or_refuses_letters_is_reported(
    config: dict[str, str], severity: Severity, text: str
) -> None:
    (found,) = cluster.check_dead_letter_topic("dead", "out", DeadLetterTopics(**config), soon())
    is_complete(found, severity, text)


def test_a_missing_dead_letter_topic_is_reported() -> None:
    (found,) = cluster.check_dead_letter_topic("other", "out", DeadLetterTopics(), soon())
    complete(found)
    assert (found.severity, found.what) == (BAD, "the dead-letter topic 'other' does not exist")


# -- the query


def inspection(*, planned: float | None, token: bool = True, committed: bool = True) -> Any:
    return SimpleNamespace(
        checkpoint=SimpleNamespace(planned_at_seconds=planned, identity="file" if committed else None),
        kafka=SimpleNamespace(token="token" if token else None),
    )


WEEK_MS = int(7 * DAY * 1000)


@pytest.mark.parametrize(
    ("idle", "token", "kept_ms", "topic", "severity", "said"),
    [
        (60, True, WEEK_MS, None, OK, "7 days"),
        (6 * DAY, True, WEEK_MS, None, WARNING, "deletes its token in 24 hours"),
        (8 * DAY, True, WEEK_MS, None, WARNING, "at any moment"),
        (6 * DAY, True, WEEK_MS, "tokens", OK, "token topic 'tokens'"),
        (8 * DAY, False, WEEK_MS, None, BAD, "the token is gone"),
        (8 * DAY, False, WEEK_MS, "tokens", WARNING, "the token is gone"),
        (60, True, 3_600_000, None, WARNING, "60 minutes"),
        (60, True, 10 * 3_600_000, None, NOTE, "10 hours"),
        (60, True, AuthorizationError("no right"), None, NOTE, "not known"),
    ],
)
def test_a_token_that_kafka_deletes_soon_is_reported(
    idle: float, token: bool, kept_ms: Any, topic: str | None, severity: Severity, said: str
) -> None:
    found = cluster.retention(inspection(planned=1e9 - idle, token=token), kept_ms, 1e9, topic)
    is_complete(found, severity, said)


def test_a_query_that_never_committed_has_no_token_to_lose() -> None:
    new = inspection(planned=None, token=False, committed=False)
    assert cluster.retention(new, WEEK_MS, 1e9, None).severity is OK


def test_a_staging_folder_that_can_be_used_is_left_as_it_was(tmp_path: Path) -> None:
    assert cluster.staging(str(tmp_path)).severity is OK
    assert list(tmp_path.iterdir()) == []
    assert cluster.staging(str(tmp_path / "not" / "yet")).severity is OK
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("")
    for wrong in (str(tmp_path / "file" / "below"), "nosuchscheme://bucket/x"):
        found = cluster.staging(wrong)
        is_complete(found, BAD)


# -- the executors

VERSION = metadata.version("kafka-eos-source")


def executor(**changed: Any) -> dict[str, Any]:
    return {
        **probe.describe(None, "", ""),
        "free_bytes": 100 * GIB,
        "files": [65536, 65536],
        **changed,
    }


def judged(
    *found: dict[str, Any], written: Collection[str] = (), staging: str | None = None
) -> list[Finding]:
    times = (min(each["at_seconds"] for each in found), max(each["at_seconds"] for each in found))
    job = lambda conf, folder: (list(found), times, set(written))  # noqa: E731
    return list(executors.check({}, staging, job=job))


def test_executors_like_the_driver_pass() -> None:
    (found,) = judged(executor(), executor(host="other"))
    is_complete(found, OK, "2 tasks on")


@pytest.mark.parametrize(
    ("changed", "severity", "said"),
    [
        ({"package": None, "problem": "PackageNotFoundError: x"}, BAD, "cannot be used in"),
        ({"problem": "ImportError: librdkafka"}, BAD, "ImportError: librdkafka"),
        ({"package": "0.0.1"}, BAD, f"kafka-eos-source 0.0.1, but {VERSION}"),
        ({"python": "3.9.1"}, BAD, "Python 3.9.1"),
        ({"free_bytes": 1}, BAD, "GiB free"),
        ({"files": [1024, 4096]}, WARNING, "open files: 1024"),
    ],
)
def test_a_problem_on_an_executor_is_reported_with_its_host(
    changed: dict[str, Any], severity: Severity, said: str
) -> None:
    found = judged(executor(), executor(host="bad", executable="/opt/python", **changed))
    complete(*found)
    assert [each.severity for each in found] == [severity]
    assert found[0].what.startswith("executor bad: ")
    assert said in found[0].what


def test_a_wrong_clock_on_an_executor_is_reported() -> None:
    good = executor()
    late = executor(host="late", at_seconds=good["at_seconds"] + 100)
    times = (good["at_seconds"], good["at_seconds"])
    found = list(executors.judge([good, late], times, None, set()))
    complete(*found)
    assert [each.severity for each in found] == [WARNING]
    assert "95 s ahead" not in found[0].what
    assert "100 s ahead of this machine's" in found[0].what


def test_a_staging_folder_that_executors_do_not_share_is_reported() -> None:
    fine = judged(executor(staging=""), staging="/s", written={"/s/a"})
    assert {each.check: each.severity for each in fine} == {"staging": OK, "executors": OK}
    for found in (
        judged(executor(staging="FileNotFoundError: x"), staging="/s"),
        judged(executor(staging=""), staging="/s", written=()),
    ):
        complete(*found)
        assert [(each.check, each.severity) for each in found] == [("staging", BAD)]
        assert "/s is not shared" in found[0].what


def test_a_job_that_fails_names_its_cause() -> None:
    def fail(conf: Mapping[str, str], staging: str | None) -> Any:
        raise PySparkException("Job aborted\n  at x.y\nPySparkRuntimeError: [PYTHON_VERSION_MISMATCH] 3.9\n")

    (found,) = executors.check({}, None, job=fail)
    is_complete(found, BAD, "PYTHON_VERSION_MISMATCH")


def test_the_probe_imports_only_the_standard_library() -> None:
    """Spark ships it to executors that may lack the package."""
    lines = Path(probe.__file__).read_text().splitlines()
    top = {line.split()[1].partition(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert top <= sys.stdlib_module_names


def test_a_task_uses_the_staging_folder_of_the_driver(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("nonce")
    assert probe.describe(str(tmp_path), "p", "nonce")["staging"] == ""
    assert len(list(tmp_path.glob("p-*"))) == 1
    assert "other contents" in probe.describe(str(tmp_path), "p", "else")["staging"]
    assert "FileNotFoundError" in probe.describe(str(tmp_path), "q", "nonce")["staging"]


# -- the schema registry ---------------------------------------------------------------------------


def test_the_schema_registry_is_checked_if_it_is_named() -> None:
    with registry_server.running() as server:
        arguments = ["doctor", "--check", "registry", "--registry", server.url, "--timeout", "1s"]
        answer = CliRunner().invoke(main, arguments)
        assert answer.exit_code == ExitCode.DONE, answer.output
        assert f"the schema registry {server.url} answers" in answer.output
        server.fault = (401, "{}")
        login = ["--registry-option", "basic.auth.user.info=bob:secret1"]
        refused = CliRunner().invoke(main, [*arguments, *login])
        assert refused.exit_code == ExitCode.NEEDS_A_PERSON
        assert "refuses access to the list of subjects" in " ".join(refused.output.split())
        assert "secret1" not in refused.output


def test_aws_glue_is_checked_with_the_right_that_a_query_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    glue_server.log_in(monkeypatch)
    with glue_server.running() as server:
        arguments = ["doctor", "--check", "registry", "--registry", server.options["url"], "--timeout", "1s"]
        for name in ("region", "endpoint"):
            arguments += ["--registry-option", f"{name}={server.options[name]}"]
        answer = CliRunner().invoke(main, arguments)
        assert answer.exit_code == ExitCode.DONE, answer.output
        assert "AWS Glue (registry 'default-registry' in eu-central-1) answers" in answer.output
        server.denied = {"GetSchemaVersion"}
        refused = CliRunner().invoke(main, arguments)
        assert refused.exit_code == ExitCode.NEEDS_A_PERSON
        assert "glue:GetSchemaVersion" in refused.output
