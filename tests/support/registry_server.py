"""A schema registry in a thread of the test, which can be told to fail in every way that a real one does."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import NAMESPACE_OID, UUID, uuid5


@dataclass
class Server:
    """The server's state.

    Attributes:
        url: its URL, without a path.
        schemas: what it answers for each id.
        subjects: ids of the versions of each subject.
        has_guids: whether it knows GUIDs, as Confluent's registry since version 8.
        fault: answers with this status and body instead, if set; status 0 closes the connection.
        requests: method, path and headers of each request.
    """

    url: str = ""
    schemas: dict[int, dict[str, Any]] = field(default_factory=dict)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    has_guids: bool = True
    fault: tuple[int, str] | None = None
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def add(
        self, subject: str, text: str, kind: str = "AVRO", references: list[dict[str, Any]] | None = None
    ) -> int:
        number = len(self.schemas) + 1
        self.schemas[number] = {"schema": text, "schemaType": kind, "references": references or []}
        self.subjects.setdefault(subject, []).append(number)
        return number

    def guid(self, number: int) -> UUID:
        """Returns the GUID of a schema, which is a digest of it, as Confluent's."""
        return uuid5(NAMESPACE_OID, json.dumps(self.schemas[number], sort_keys=True))

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        steps = path.partition("?")[0].strip("/").split("/")
        if steps[:2] == ["schemas", "ids"] or (steps[:2] == ["schemas", "guids"] and self.has_guids):
            known = {
                str(number if steps[1] == "ids" else self.guid(number)): number
                for number in list(self.schemas)
            }
            if steps[2] not in known:
                return 404, {"error_code": 40403, "message": f"Schema {steps[2]} not found"}
            number = known[steps[2]]
            if steps[3:] == ["versions"]:
                named = ((name, ids) for name, ids in self.subjects.items() if number in ids)
                return 200, [{"subject": name, "version": ids.index(number) + 1} for name, ids in named]
            return 200, self._with_guid(number, {})
        if steps[0] != "subjects":
            return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}
        if steps == ["subjects"]:
            return 200, list(self.subjects)
        subject = steps[1]
        if method == "POST":
            same = [
                (number, at)
                for at, number in enumerate(self.subjects.get(subject, []), 1)
                if self.schemas[number]["schema"] == body["schema"]
            ]
            if not same and len(steps) < 3:
                return 404, {"error_code": 40403, "message": "Schema not found"}
            if not same:
                kind, references = body.get("schemaType", "AVRO"), body.get("references")
                number = self.add(subject, body["schema"], kind, references)
                same = [(number, len(self.subjects[subject]))]
            number, version = same[0]
            return 200, self._with_guid(number, {"id": number, "version": version, "subject": subject})
        if subject not in self.subjects:
            return 404, {"error_code": 40401, "message": "Subject not found"}
        versions = self.subjects[subject]
        version = len(versions) if steps[3] == "latest" else int(steps[3])
        if version > len(versions):
            return 404, {"error_code": 40402, "message": "Version not found"}
        number = versions[version - 1]
        return 200, self._with_guid(number, {"id": number, "version": version, "subject": subject})

    def _with_guid(self, number: int, fields: dict[str, Any]) -> dict[str, Any]:
        guid = {"guid": str(self.guid(number))} if self.has_guids else {}
        return {**fields, **guid, **self.schemas[number]}


@contextmanager
def running() -> Iterator[Server]:
    """Runs the server on a port of its own."""
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            state.requests.append((self.command, self.path, dict(self.headers.items())))
            if state.fault is not None:
                status, text = state.fault
                if status == 0:
                    self.close_connection = True
                    return
            else:
                status, found = state.answer(self.command, self.path, json.loads(body or "{}"))
                text = json.dumps(found)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = handle_request  # noqa: N815 - names that http.server calls

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
