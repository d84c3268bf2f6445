"""Runs a Spark driver in a separate process that a test can kill and start again.

The program is ``python -m integration.support.driver SPEC.json``. A spec is::

    {"sources": [{"format": …, "options": {…}}], "select": ["key", "value"],
     "sink": {"format": …, "options": {…}}, "trigger": {"availableNow": true}, "conf": {…},
     "in_read": false,                      # whether rows go through `map_in_read`, or "staged" with `write`
     "app": {"id": …, "brokers": …, "checkpoint": …, "source": …, "schema": …, "sql": …, "through_spark": …,
             "write": {…}, "options": {…}}, # an `App` instead of "sources" and "sink": reads {rows}, runs SQL
     "registry": {…},                       # instead of "select", see `integration.support.registered`
     "state": {"options": {…}, …},          # see `integration.support.stateful.apply`
     "count_by": "word", "checkpoint": …,   # update mode through foreachBatch
     "directory": …,                        # working directory, by default the repository
     "restarts": 0,                         # how often to restart a failed query,
     "restart_when": FILE,                  # ... once this file exists
     "stops": [FILE, …]}                    # stop and restart the query when this file exists

The process ends when its parent does. It writes what `Driver.result` returns.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import psutil
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming import StreamingQuery

from integration.support import processes
from integration.support.processes import await_condition
from kafka_eos_source import map_in_read
from kafka_eos_source.runtime import failpoints as points

START_AND_RUN_SECONDS = 180.0
ROOT = Path(__file__).parent.parent.parent


class Driver:
    """A driver process, whose output goes to the file `log`.

    Args:
        spec: what the driver does, see the module.
        directory: folder for the driver's files.
        failpoints: failpoints to arm in it, see `kafka_eos_source.runtime.failpoints`.
        module: the module to run with the path of the spec as its argument.
        root: the folder with the code to run; another one holds another version of this package.
        python: the Python to run it with; another one has other versions of the dependencies. Options for
            Spark's JVM are not passed on to it: the archive of classes belongs to this Python's Spark.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        directory: Path,
        failpoints: str = "",
        module: str = __name__,
        root: Path = ROOT,
        python: Path = Path(sys.executable),
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        number = len(list(directory.glob("driver-*.log")))
        self.log = directory / f"driver-{number}.log"
        self._spec = directory / f"driver-{number}.json"
        self._spec.write_text(json.dumps(spec))
        self._mark = uuid.uuid4().hex
        environment = {
            **os.environ,
            points.ENVIRONMENT_VARIABLE: failpoints,
            processes.DRIVER: self._mark,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(root),
            "PYSPARK_PYTHON": str(python),
            "PYSPARK_DRIVER_PYTHON": str(python),
        }
        if str(python) != sys.executable:
            environment.pop("PYSPARK_SUBMIT_ARGS", None)
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [str(python), "-m", module, str(self._spec)],
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
            )

    def wait(self, seconds: float = START_AND_RUN_SECONDS) -> int:
        """Waits until the process ends; returns its exit code, -9 if it was killed."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the driver did not end:\n{self.tail()}") from None

    def tell(self, word: str) -> None:
        """Writes a word to the driver's standard input."""
        assert self.process.poll() is None, f"the driver ended by itself:\n{self.tail()}"
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode())
        self.process.stdin.flush()

    def await_stopped(self) -> None:
        """Waits until SIGSTOP has taken effect. A SIGCONT before that is lost, and the process would hang."""
        status = psutil.Process(self.process.pid).status
        await_condition(lambda: status() == psutil.STATUS_STOPPED, START_AND_RUN_SECONDS, "it has stopped")

    def stopped_worker(self) -> psutil.Process:
        """Waits until a failpoint has stopped a Python process, and returns that process."""

        def stopped() -> list[psutil.Process]:
            return processes.descendants(
                self.process.pid, lambda each: each.status() == psutil.STATUS_STOPPED
            )

        await_condition(lambda: len(stopped()) == 1, START_AND_RUN_SECONDS, "one process has stopped itself")
        return stopped()[0]

    def resume(self) -> None:
        """Sends SIGCONT to the process, which a failpoint or the test has stopped."""
        self.process.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        """Waits until the driver ends; fails the test unless it succeeded."""
        code = self.wait()
        assert code == 0, f"the driver ended with {code}:\n{self.tail()}"

    def result(self) -> dict[str, Any]:
        """Returns ``query_id``, ``run_id`` and Spark's ``progress`` reports of a driver that finished."""
        return dict(json.loads(_result_path(self._spec).read_text()))

    def kill(self) -> None:
        """Sends SIGKILL to the script, its JVM and its Python workers, including orphans."""
        if self.process.poll() is None:
            self.process.kill()
        processes.kill_marked(processes.DRIVER, self._mark)
        self.process.wait(30)
        assert self.process.stdin is not None
        self.process.stdin.close()

    def jvm(self) -> psutil.Process:
        """Returns the driver's JVM process."""
        return processes.descendants(self.process.pid, lambda each: each.name() == "java")[0]

    def await_text(self, text: str, seconds: float = START_AND_RUN_SECONDS) -> None:
        """Waits until ``text`` is in the log."""
        await_condition(lambda: text in self.log.read_text(errors="replace"), seconds, f"{text!r} in the log")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def run_until_killed(
    start: Callable[..., Driver], spec: Mapping[str, Any], folder: Path, armed: Mapping[str, str]
) -> Driver:
    """Runs a driver that is killed at failpoints, once at each, and returns it after its end.

    Args:
        start: the fixture ``driver``.
        spec: what the driver does.
        folder: for files that show which failpoints were reached.
        armed: what dies at each failpoint: ``kill-worker`` = the Python process, after which the query needs
            one of the ``restarts`` of the spec; ``kill`` = the driver with everything it started, at the last
            failpoint.
    """
    points = ",".join(f"{step}={dies}@{folder}/once-{step}" for step, dies in armed.items())
    killed = start(spec, points)
    assert killed.wait() != 0, f"the driver was not killed:\n{killed.tail()}"
    reached = {path.name.removeprefix("once-") for path in folder.glob("once-*")}
    assert reached == set(armed), killed.tail()
    return killed


def _result_path(spec: Path) -> Path:
    return spec.with_suffix(".result.json")


def end_with_parent() -> None:
    """Ends this process when its parent ends, and the JVM with it.

    Only the parent holds the other end of this process's standard input; only this process holds the JVM's.
    """

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _stop_at(query: StreamingQuery, moment: Path) -> bool:
    """Stops the query once a file exists; returns False if the query ended by itself first."""
    await_condition(
        lambda: moment.exists() or not query.isActive, START_AND_RUN_SECONDS, f"the query reached {moment}"
    )
    if not moment.exists():
        return False
    stopping = threading.Thread(target=query.stop)  # stop() blocks until the batch ends
    stopping.start()
    await_condition(lambda: not query.isActive, START_AND_RUN_SECONDS, "the query is told to stop")
    print("QUERY STOPPING at", moment.name, flush=True)
    stopping.join()
    return True


def main(path: str) -> None:
    from integration.support.session import builder

    end_with_parent()
    spec = json.loads(Path(path).read_text())
    os.chdir(spec.get("directory", os.curdir))
    session = builder()
    for name, value in spec.get("conf", {}).items():
        session = session.config(name, value)
    spark = session.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    if "app" in spec:
        _run(_of_app(spec["app"]), spec, Path(path))
        spark.stop()
        return
    frames = [
        spark.readStream.format(source["format"]).options(**source.get("options", {})).load()
        for source in spec["sources"]
    ]
    if "registry" in spec:
        from integration.support import registered

        selected = [registered.delays(frame, spec["registry"]) for frame in frames]
    else:
        selected = [frame.selectExpr(*spec.get("select", ["key", "value"])) for frame in frames]
    frame = reduce(lambda left, right: left.unionByName(right), selected)
    if spec.get("in_read"):
        staged = {"write": spec["sink"]["options"]} if spec["in_read"] == "staged" else {}
        frame = map_in_read(frame, lambda rows: (batch.slice(0) for batch in rows), frame.schema, **staged)
    if "state" in spec:
        from integration.support import stateful

        frame = stateful.apply(frame, spec["state"])
    sink = spec["sink"]
    if "count_by" in spec:
        counts = frame.groupBy(spec["count_by"]).count()

        def write(batch: Any, batch_id: int) -> None:
            rows = batch.selectExpr(
                f"CAST({spec['count_by']} AS STRING) AS key", "CAST(count AS STRING) AS value"
            )
            options = {**sink["options"], "txnVersion": str(batch_id)}
            rows.write.format(sink["format"]).mode("append").options(**options).save()
            points.reach("test.after_foreach_batch")

        writer = counts.writeStream.outputMode("update").foreachBatch(write)
        writer = writer.option("checkpointLocation", spec["checkpoint"])
    else:
        writer = frame.writeStream.format(sink["format"]).options(**sink["options"])
    _run(writer, spec, Path(path))
    spark.stop()


def _of_app(spec: Mapping[str, Any]) -> Any:
    """Returns the writer of an App that reads JSON, runs SQL, and writes."""
    from kafka_eos_source import App

    app = App(spec["id"], spec["brokers"], checkpoint=spec["checkpoint"])
    rows = app.read(spec["source"], schema=spec["schema"], keep="key", options=spec.get("options"))
    result = app.sql(spec["sql"], rows=rows.where("true") if spec.get("sql_after_spark") else rows)
    return app.write(result.where("true") if spec.get("through_spark") else result, **spec["write"])


def _run(writer: Any, spec: Mapping[str, Any], path: Path) -> None:
    """Runs the query of a spec, and starts it again as often as the spec says."""
    restarts_left = spec.get("restarts", 0)
    stops = [Path(each) for each in spec.get("stops", ())]
    while True:
        query = writer.trigger(**spec.get("trigger", {"availableNow": True})).start()
        print("QUERY STARTED", query.id, query.runId, flush=True)
        try:
            if stops and _stop_at(query, stops[0]):
                print("QUERY STOPPED at", stops.pop(0).name, flush=True)
                continue
            query.awaitTermination()
            break
        except StreamingQueryException as error:
            print("QUERY FAILED", str(error).splitlines()[0], flush=True)
            if not restarts_left:
                raise
            restarts_left -= 1
            if "restart_when" in spec:
                await_condition(Path(spec["restart_when"]).exists, START_AND_RUN_SECONDS, "word to go on")
    print("QUERY DONE", flush=True)
    progress = [json.loads(each.json) for each in query.recentProgress]
    result = {"query_id": str(query.id), "run_id": str(query.runId), "progress": progress}
    _result_path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
