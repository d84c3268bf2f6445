"""Runs a real schema registry (Apicurio, with the interface of Confluent's) in a process of its own.

Its archive is downloaded once, like Kafka's jars. The schemas are in a database file, so that the registry
can be killed and started again with the same ids.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark
import pytest

from integration.support.jvm import Jvm
from integration.support.s3_server import S3PROXY
from kafka_eos_source.embedded import java
from kafka_eos_source.embedded.cluster import free_ports
from kafka_eos_source.errors import KafkaEosError, UnavailableError

_ORGANISATION, _MODULE, _VERSION = "io.apicurio", "apicurio-registry-app", "2.6.13.Final"
APICURIO = java.JarSet("apicurio", ((_ORGANISATION, _MODULE, _VERSION),), 300, _VERSION, False, S3PROXY.sums)

_START_SECONDS = 180.0
PATH = "/apis/ccompat/v7"
_CONTENT = {"Content-Type": "application/vnd.schemaregistry.v1+json"}


def fetch(jar_set: java.JarSet, into: Path, ivy_cache: Path) -> None:
    """Downloads the registry's archive with Ivy, and unpacks its jars into one folder."""
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        module = Path(scratch) / "ivy.xml"
        module.write_text(
            '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
            '<info organisation="kafka-eos" module="apicurio"/>'
            '<configurations><conf name="default"/></configurations><dependencies>'
            f'<dependency org="{_ORGANISATION}" name="{_MODULE}" rev="{_VERSION}" conf="default->master" '
            f'transitive="false"><artifact name="{_MODULE}" type="tar.gz" ext="tar.gz" m:classifier="all"/>'
            "</dependency></dependencies></ivy-module>"
        )
        ivy = [java.find(), f"-Divy.home={ivy_cache}", "-cp", f"{Path(pyspark.__file__).parent}/jars/*"]
        ivy += ["org.apache.ivy.Main", "-ivy", str(module), "-cache", str(ivy_cache), "-confs", "default"]
        ivy += ["-types", "tar.gz", "-retrieve", f"{scratch}/[artifact].[ext]"]
        print(f"downloading the schema registry {_MODULE} {_VERSION} once", file=sys.stderr, flush=True)
        done = subprocess.run(ivy, capture_output=True, text=True, errors="replace", check=False)
        archive = Path(scratch) / f"{_MODULE}.tar.gz"
        if done.returncode or not archive.exists():
            reason = java.ivy_error(done.stdout.splitlines())
            raise UnavailableError(f"cannot download {_MODULE} {_VERSION}: {reason}", "check the network.")
        with tarfile.open(archive) as packed:
            for member in packed:
                if member.isfile() and member.name.endswith(".jar"):
                    member.name = Path(member.name).name
                    packed.extract(member, into, filter="data")


@dataclass
class Registry:
    """The registry's process.

    Attributes:
        folder: holds its database and its log.
        port: its port, which stays the same when it restarts.
        jars: the folder with its jars.
    """

    folder: Path
    port: int
    jars: Path
    _jvm: Jvm = field(init=False, repr=False)

    def __post_init__(self) -> None:
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": str(self.port),
            "quarkus.log.level": "WARN",
            "quarkus.datasource.jdbc.url": f"jdbc:h2:file:{self.folder / 'schemas'};WRITE_DELAY=0",
        }
        arguments = ["-Xmx256m", "-Xshare:auto", *(f"-D{name}={value}" for name, value in settings.items())]
        arguments += ["-cp", f"{self.jars}/*", "io.quarkus.runner.GeneratedMain"]
        self._jvm = Jvm(self.folder / "log", arguments, self._answers, _START_SECONDS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{PATH}"

    def start(self) -> None:
        """Starts the registry and waits until it answers."""
        self._jvm.start()

    def kill(self) -> None:
        """Kills the registry at once, as a power failure would."""
        self._jvm.kill()

    def _answers(self) -> bool:
        try:
            self.call("GET", "/subjects")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def register(
        self, subject: str, text: str, kind: str = "AVRO", references: list[dict[str, Any]] | None = None
    ) -> int:
        """Registers a schema with a plain HTTP request; returns its id."""
        body = {"schema": text, "schemaType": kind, "references": references or []}
        return int(self.call("POST", f"/subjects/{subject}/versions", body)["id"])

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, _CONTENT, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Registry]:
    """Runs the registry; skips the test if its jars, Java or the client's libraries are not available."""
    pytest.importorskip("fastavro", reason="needs pip install 'kafka-eos-source[test]'")
    try:
        found = java.jars(APICURIO, fetch=fetch)
        java.find()
    except KafkaEosError as error:
        pytest.skip(f"needs Apicurio: {error}")
    (port,) = free_ports([0])
    registry = Registry(folder, port, found)
    try:
        registry.start()
        yield registry
    finally:
        registry.kill()
