"""What the processes of a query import when they start, and the daemon that forks workers."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from kafka_eos_source import recommended_settings
from kafka_eos_source.commit import at_least_once
from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.spark import worker_daemon
from kafka_eos_source.spark.session import DAEMON_SETTING
from tests.support.simulated_kafka import SimulatedKafka

_BROKERS = "b:9092"
_OPTIONS = {
    "kafka.bootstrap.servers": _BROKERS,
    "subscribe": "in",
    "application.id": "app",
}
_SCHEMA = f"""
from kafka_eos_source.datasource import KafkaEosDataSource
KafkaEosDataSource({_OPTIONS!r}).schema()
"""
_PLAN_READ = f"""
import pickle
from kafka_eos_source.datasource import KafkaEosDataSource
source = KafkaEosDataSource({_OPTIONS!r})
pickle.dumps(source.streamReader(source.schema()))
"""
_PLAN_WRITE = """
from kafka_eos_source.commit import at_least_once
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.datasource import writer
"""
_CLIENTS = """
from kafka_eos_source.kafka import fetch, producer
from kafka_eos_source.kafka.cluster import Cluster
Cluster({"bootstrap.servers": "b:9092"})
"""
_READ = """
from kafka_eos_source.datasource import reader
from kafka_eos_source.read import task
"""
_WRITE = """
import pickle
from pathlib import Path
import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType
from kafka_eos_source.datasource import sink, writer
from kafka_eos_source.spark.schema import check_frame
from kafka_eos_source.spark.worker import StreamingTask
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.staging import SealingPlan
sink.running_task = lambda: StreamingTask("q", "0", "r")
frame = StructType([StructField("key", BinaryType()), StructField("value", BinaryType())])
columns = check_frame(frame, topic_option="out", include_timestamp=False)
folder = StagingFolder.at(str(Path.cwd() / "staging"))
options = pickle.loads(Path("options").read_bytes())
data = pa.py_buffer(b"abc")
ends = pa.py_buffer(b"".join(n.to_bytes(4, "little") for n in range(4)))
column = pa.Array.from_buffers(pa.binary(), 3, [None, ends, data])
batch = pa.RecordBatch.from_arrays([column, column], names=["key", "value"])
staged = sink.StagedSink(options, columns, folder, "write")
staged.__dict__["sealing"] = SealingPlan("out", 1, 10**6, 10**6, 10**6)  # the driver pickles it to the task
part = staged.write_frame([batch]).staged.part
assert part.rows == 3, part
"""


def imported(code: str, folder: Path) -> set[str]:
    """Returns the modules that a new process has imported after this code."""
    tell = "\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code + tell],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path])[1:]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("code", "not_needed"),
    [
        (_SCHEMA, {"pyarrow", "numpy", "pandas", "kafka_eos_source.kafka.producer", "http.server"}),
        (_PLAN_READ, {"pandas", "kafka_eos_source.kafka.producer", "http.server", "psutil"}),
        (_PLAN_WRITE, {"pandas", "psutil", "kafka_eos_source.commit.machine"}),
        (_CLIENTS, {"kafka.net", "kafka.admin", "kafka.consumer", "kafka.producer", "urllib.request"}),
        (_READ, {"pandas", "psutil", "kafka_eos_source.kafka.producer", "kafka_eos_source.kafka.admin"}),
        (_WRITE, {"psutil", "kafka_eos_source.commit.machine", "kafka_eos_source.kafka.producer"}),
    ],
    ids=["schema", "plan a read", "plan a write", "native clients", "read", "write"],
)
def test_a_process_does_not_import_what_it_does_not_use(
    code: str, not_needed: set[str], tmp_path: Path
) -> None:
    """A query starts many processes one after the other, so each import of 0.1 s delays its first batch."""
    stated = {"kafka.bootstrap.servers": "b:9092", "topic": "out", "checkpointLocation": str(tmp_path)}
    (tmp_path / "options").write_bytes(pickle.dumps(parse_write(stated, streaming=True)))
    with SimulatedKafka({"in": 1}) as cluster:
        found = imported(code.replace(_BROKERS, cluster.bootstrap), tmp_path)
    assert not found & {"confluent_kafka", *not_needed}


@pytest.mark.parametrize(
    "statement",
    [
        "import kafka; kafka.KafkaProducer",
        "from kafka import KafkaProducer",
        "from kafka import *; KafkaProducer",
        "from kafka import errors; errors.KafkaError",
        "import importlib, kafka; importlib.reload(kafka).KafkaProducer",
        "import kafka; from pyspark import cloudpickle as c; c.loads(c.dumps(lambda: kafka.KafkaProducer))()",
    ],
)
def test_kafka_python_is_complete_for_other_code_of_the_process(statement: str, tmp_path: Path) -> None:
    code = f"""
from kafka_eos_source.kafka import producer
import sys
assert "kafka.producer" not in sys.modules
{statement}
try:
    sys.modules["kafka"].no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error), error
else:
    raise AssertionError("a module has a name that it does not have")
assert "kafka.producer" in sys.modules
"""
    imported(code, tmp_path)


def test_kafka_python_that_was_imported_before_stays_as_it_is(tmp_path: Path) -> None:
    imported("import kafka, sys; from kafka_eos_source.kafka import fetch; kafka.KafkaProducer", tmp_path)


def test_a_kafka_python_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    """A package that failed once runs again for the next name, and fails again with its own error."""
    broken = tmp_path / "kafka"
    broken.mkdir()
    (broken / "__init__.py").write_text("import no_such_module\n")
    (broken / "part.py").write_text("")
    code = """
import sys
sys.path.insert(0, ".")
from kafka_eos_source.kafka import install
sys.modules.pop("kafka", None)
install()
import kafka.part
for _ in range(2):
    try:
        kafka.KafkaProducer
    except ModuleNotFoundError as error:
        assert error.name == "no_such_module", error
    else:
        raise AssertionError("the package is broken")
"""
    imported(code, tmp_path)


def test_the_process_that_commits_does_not_check_the_target_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {
        "kafka.bootstrap.servers": "127.0.0.1:9",
        "topic": "out",
        "checkpointLocation": str(tmp_path),
        "commitTimeoutMs": "1000",
    }
    options = parse_write(stated, streaming=True)
    with pytest.raises(UnavailableError):
        at_least_once.check_target(options)
    monkeypatch.setitem(sys.modules, "pyspark.sql.worker.python_streaming_sink_runner", sys)
    at_least_once.check_target(options)


def test_a_new_query_does_not_wait_long_for_brokers_that_accept_connections_and_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else may listen at a wrong address. A query that has run waits for its brokers."""
    monkeypatch.setattr(at_least_once, "START_SECONDS", 0.2)
    monkeypatch.setattr(at_least_once, "_SILENT_MS", 3000)
    monkeypatch.setattr("kafka_eos_source.kafka.probe._PASS_SECONDS", 0.2)
    monkeypatch.setattr("kafka_eos_source.kafka.cluster._LEAST_CONNECT_SECONDS", 0.1)
    with SimulatedKafka({"out": 1}) as cluster:
        cluster.hung.add(1)
        stated = {
            "kafka.bootstrap.servers": cluster.bootstrap,
            "topic": "out",
            "checkpointLocation": str(tmp_path),
        }
        with pytest.raises(UnavailableError, match=f"within 3 s.*{cluster.bootstrap}: it did not answer"):
            at_least_once.check_target(parse_write(stated, streaming=True))


def test_a_query_that_runs_waits_for_brokers_also_in_a_new_process(tmp_path: Path) -> None:
    """Spark ends the process that plans batches after a minute without any."""
    stated = {
        "kafka.bootstrap.servers": "127.0.0.1:9",
        "topic": "waits",
        "checkpointLocation": str(tmp_path),
        "commitTimeoutMs": "1000",
    }
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "7").touch()
    with pytest.raises(UnavailableError, match="within 1 s"):  # the limit of the option
        at_least_once.check_target(parse_write(stated, streaming=True))


def test_the_recommended_daemon_imports_what_tasks_use_without_starting_threads() -> None:
    """A thread does not survive a fork. Those that remain are NumPy's and jemalloc's; both handle forks."""
    module = recommended_settings()[DAEMON_SETTING]
    code = f"""
import json, os, sys, threading
from {module} import MODULES, import_modules
import_modules()
names = [open(f"/proc/self/task/{{each}}/comm").read().strip() for each in os.listdir("/proc/self/task")]
native = sorted(name for name in names if name != open("/proc/self/comm").read().strip())
missing = sorted(set(MODULES) - set(sys.modules))
print(json.dumps([threading.active_count(), native, missing, "pandas" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    threads, native, missing, pandas = json.loads(done.stdout)
    assert threads == 1
    assert set(native) <= {"jemalloc_bg_thd"}
    assert not missing, done.stderr
    assert pandas


def test_what_an_import_prints_does_not_reach_the_pipe_on_which_spark_reads_the_port(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_prints.py").write_text("import os; os.write(1, b'hello')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker_daemon, "MODULES", ("module_that_prints", "module_that_is_missing"))
    worker_daemon.import_modules()
    os.write(1, b"port")
    out, err = capfd.readouterr()
    assert out == "port"
    assert "hello" in err
    assert "cannot import module_that_is_missing" in err
