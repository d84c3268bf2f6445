"""A real Prometheus (Debian package ``prometheus``) that scrapes what a test names, with fast alarms."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from integration.support.processes import await_condition
from kafka_eos_source.embedded.cluster import free_ports

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docker" / "prometheus" / "kafka-eos-alerts.yml"
SECONDS = 120
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"
)


def fast(rules: str) -> str:
    """Returns the rules with durations and thresholds of seconds instead of minutes.

    Every threshold of a minute and more becomes two seconds, also the age of a token that Kafka keeps for
    seven days. A number of restarts becomes one.
    """
    rules = re.sub(r"for: \d+m", "for: 0s", rules)
    rules = re.sub(r"offset \d+m", "offset 3s", rules)
    rules = re.sub(r"\[\d+m\]", "[20s]", rules)
    rules = re.sub(r"> \d{2,}\b", "> 2", rules)
    rules = rules.replace("< 0.3 *", f"< {1 - 2 / 604800:.9f} *").replace("< 172800", "< 604798")
    return rules.replace("[20s]) > 3", "[20s]) > 1")


class Prometheus:
    """A Prometheus that scrapes these ports of this host. A context manager.

    Args:
        folder: folder for its files.
        rules: changes the rules of the alarms.
        scrape_seconds: interval and time limit of a scrape.
        ports: the ports, by the name of the job.
    """

    def __init__(
        self, folder: Path, *, rules: Callable[[str], str] = fast, scrape_seconds: int = 1, **ports: int
    ) -> None:
        folder.mkdir()
        (folder / "alerts.yml").write_text(rules(RULES.read_text(encoding="utf-8")))
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for job, port in ports.items()
        ]
        interval = f"{scrape_seconds}s"
        every = {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "500ms"}
        config = {"global": every, "rule_files": ["alerts.yml"], "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._folder = folder
        (self._port,) = free_ports([0])

    def __enter__(self) -> Prometheus:
        self._log = (self._folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={self._folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        await_condition(self._is_ready, SECONDS, "Prometheus is ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the result of a PromQL expression at this moment: labels and values."""
        found = self._get("query?" + urllib.parse.urlencode({"query": expression}))
        return list(found["data"]["result"])

    def value(self, expression: str) -> float | None:
        """Returns the only value of an expression; None if it has no value yet."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def firing(self, application_id: str) -> set[str]:
        """Returns the names of the alarms that fire for a query."""
        return {
            each["labels"]["alertname"]
            for each in self._get("alerts")["data"]["alerts"]
            if each["state"] == "firing" and each["labels"].get("kafka_eos_application_id") == application_id
        }

    def await_firing(self, alarm: str, application_id: str, *, fires: bool = True) -> None:
        """Waits until an alarm of a query fires, or no longer fires."""
        what = f"{alarm} {'fires' if fires else 'clears'}"
        await_condition(lambda: (alarm in self.firing(application_id)) is fires, SECONDS, what)

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}", timeout=30) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error
