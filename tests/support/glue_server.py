"""AWS Glue's schema registry in a thread of the test: the four calls that a client makes, and faults.

`tests/registry/test_glue.py` makes the same calls of moto: both have to answer alike.
"""

from __future__ import annotations

import http.server
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

REGION = "eu-central-1"
REGISTRY = "default-registry"


#: Variables of a login, and none of files or machines that have another one.
LOGIN = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENG",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


class RefusedError(Exception):
    """An answer with an error code of Glue."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code)
        self.code, self.message = code, message


@dataclass
class Server:
    """The server's state.

    Attributes:
        url: its URL.
        schemas: data format and ids of the versions of each schema, by registry and name.
        versions: text and status of each version.
        decisions: statuses that the next registrations get instead of AVAILABLE; PENDING becomes the one
            after it when it is asked for.
        fault: answers with this status, error code and message instead, if set; status 0 closes the
            connection. The code None sends the message as it is.
        denied: calls that the principal may not make.
        requests: name and parameters of each call.
    """

    url: str = ""
    schemas: dict[tuple[str, str], tuple[str, list[str]]] = field(default_factory=dict)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    fault: tuple[int, str | None, str] | None = None
    denied: set[str] = field(default_factory=set)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    authorization: str = ""

    @property
    def options(self) -> dict[str, str]:
        """Options of a client of this server."""
        return {
            "url": f"glue://{REGISTRY}",
            "region": REGION,
            "endpoint": self.url,
            "retry.timeout.ms": "300",
        }

    def add(self, name: str, text: str, kind: str = "AVRO", version_id: str | None = None) -> uuid.UUID:
        """Adds a version of a schema of `REGISTRY`, and returns its id."""
        _, versions = self.schemas.setdefault((REGISTRY, name), (kind, []))
        version_id = version_id or str(uuid.uuid4())
        versions.append(version_id)
        status = self.decisions.pop(0) if self.decisions else "AVAILABLE"
        self.versions[version_id] = {"SchemaDefinition": text, "Status": status}
        return uuid.UUID(version_id)

    def answer(self, call: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a call, or raises `RefusedError`."""
        if call in self.denied:
            raise RefusedError(
                "AccessDeniedException", f"User: arn:x is not authorized to perform: glue:{call}"
            )
        if call == "GetSchemaVersion" and "SchemaVersionId" in asked:
            return self._version(asked["SchemaVersionId"])
        if call == "CreateSchema":
            return self._create(asked)
        if call == "PutSchemaVersionMetadata":  # of Glue's own serializer
            return {}
        place = (asked["SchemaId"]["RegistryName"], asked["SchemaId"]["SchemaName"])
        if place not in self.schemas:
            raise RefusedError("EntityNotFoundException", f"Schema is not found. {place}")
        _, versions = self.schemas[place]
        if call == "GetSchemaVersion":
            number = asked["SchemaVersionNumber"].get("VersionNumber", len(versions))
            if not 1 <= number <= len(versions):
                raise RefusedError("EntityNotFoundException", "Schema version is not found.")
            return self._version(versions[number - 1])
        text = asked["SchemaDefinition"]
        same = [each for each in versions if self.versions[each]["SchemaDefinition"] == text]
        if call == "RegisterSchemaVersion":
            return self._version(same[0] if same else str(self.add(place[1], text)))
        if call == "GetSchemaByDefinition" and same:
            return self._version(same[0])
        raise RefusedError("EntityNotFoundException", "Schema version is not found.")

    def _create(self, asked: dict[str, Any]) -> dict[str, Any]:
        place = (asked["RegistryId"]["RegistryName"], asked["SchemaName"])
        if place[0] != REGISTRY:
            raise RefusedError("EntityNotFoundException", f"Registry is not found. {place[0]}")
        if place in self.schemas:
            raise RefusedError("AlreadyExistsException", "Schema already exists.")
        made = str(self.add(place[1], asked["SchemaDefinition"], asked["DataFormat"]))
        return {"SchemaVersionId": made, "SchemaVersionStatus": self.versions[made]["Status"]}

    def _version(self, version_id: str) -> dict[str, Any]:
        if version_id not in self.versions:
            raise RefusedError("EntityNotFoundException", "Schema version is not found.")
        found = self.versions[version_id]
        place = next(place for place, (_, versions) in self.schemas.items() if version_id in versions)
        kind, versions = self.schemas[place]
        answer = {
            "SchemaVersionId": version_id,
            "SchemaArn": f"arn:aws:glue:{REGION}:123456789012:schema/{'/'.join(place)}",
            "DataFormat": kind,
            "VersionNumber": versions.index(version_id) + 1,
            **found,
        }
        if found["Status"] == "PENDING" and self.decisions:
            found["Status"] = self.decisions.pop(0)
        return answer


def log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a login in the environment, and hides files and machines that have another one."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in LOGIN.items():
        monkeypatch.setenv(name, value)


@contextmanager
def running() -> Iterator[Server]:
    """Runs the server on a port of its own."""
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            call = self.headers.get("X-Amz-Target", "").removeprefix("AWSGlue.")
            state.requests.append((call, asked))
            state.authorization = self.headers.get("Authorization", "")
            status, found = 200, {}
            if state.fault is not None:
                status, code, message = state.fault
                if status == 0:
                    self.close_connection = True
                    return
                found = message if code is None else {"__type": code, "Message": message}
            else:
                try:
                    found = state.answer(call, asked)
                except RefusedError as refusal:
                    status, found = 400, {"__type": refusal.code, "Message": refusal.message}
            body = (found if isinstance(found, str) else json.dumps(found)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Suppresses the request log."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
