"""A process that serves the protocol of the `http` sink, and loses answers on request.

Its state is in files, ``<folder>/<prepared|committed|aborted>/<id>``, and survives a kill: each change is a
single rename, or a file that appears whole.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import http.server
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

#: Faults: lose the answer after or before handling the request; wait until the caller gives up. A fault can
#: also be a status to answer with.
LOSE_AFTER, LOSE_BEFORE, DELAY = "lose-after", "lose-before", "delay"


def _name(row: dict[str, Any]) -> str | None:
    """Returns what the service looks at: the column ``name``, or a record's value, which is in base64."""
    name: str | None = row["name"] if "name" in row else base64.b64decode(row["value"]).decode()
    return name


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves both protocols of the sink; ``/rows`` accepts a batch under its idempotency key."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    folder: Path
    faults: list[dict[str, Any]]
    log: list[dict[str, Any]]
    lock: threading.Lock
    poison: dict[str, Any]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, what, *rest = url.path.split("/")
        if self._faulty(what, lose=LOSE_BEFORE):
            return
        if what == "log":
            self._answer(200, self.log)
        elif what == "status":
            self._answer(200, {"state": self._state(unquote(rest[0]))})
        elif what == "pending":
            application = parse_qs(url.query)["application"][0]
            ids = [
                each.name
                for each in (self.folder / "prepared").iterdir()
                if each.name.startswith(application)
            ]
            self._answer(200, {"pending": ids})
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        _, what, *rest = urlsplit(self.path).path.split("/")
        body = self.rfile.read(size := int(self.headers["Content-Length"]))
        if len(body) < size:  # the caller died while sending
            self.close_connection = True
            return
        if what == "faults":
            self.faults[:] = json.loads(body)
            self._answer(200, {})
            return
        if what == "poison":
            self.poison.clear()
            self.poison.update(json.loads(body))
            self._answer(200, {})
            return
        if what == "reset":
            self.log.clear()
            self.faults.clear()
            self.poison.clear()
            self._answer(200, {})
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.log.append({"path": self.path, "headers": headers, "bytes": len(body)})
        if self._faulty(what, lose=LOSE_BEFORE):
            return
        refused = self._refused(body) if what == "prepare" else []
        if refused:
            named = refused[: self.poison["names"]]
            rows = [{"row": number, "reason": "is poison", "column": "name"} for number in named]
            self._answer(self.poison["status"], {"rows": rows, "error": "poison"})
            return
        with self.lock:
            status = self._do(what, unquote(rest[0]) if rest else "", body)
        if not self._faulty(what, lose=LOSE_AFTER):
            self._answer(status, {})

    def _refused(self, body: bytes) -> list[int]:
        """Returns the numbers of the rows that the service refuses."""
        if not self.poison:
            return []
        if self.headers["Content-Type"] == "application/x-ndjson":
            names = [_name(json.loads(line)) for line in body.decode().splitlines()]
        else:
            import pyarrow as pa  # the service itself starts without it

            names = pa.ipc.open_stream(body).read_all()["name"].to_pylist()
        ends = tuple(self.poison["rows"])
        found = [number for number, name in enumerate(names) if name is not None and name.endswith(ends)]
        return found if len(found) >= self.poison["least"] else []

    def _do(self, what: str, txn: str, body: bytes) -> int:
        if what == "rows":
            txn = self.headers["Idempotency-Key"]
            if self._state(txn) == "committed":
                return 409
            self._write(txn, body)
            self._move(txn, "prepared", "committed")
            return 201
        state = self._state(txn)
        if what == "prepare":
            if state in ("committed", "prepared"):
                return 409
            self._write(txn, body)
            return 201
        if what == "commit":
            if state == "prepared":
                self._move(txn, "prepared", "committed")
                return 200
            return 409 if state == "committed" else 404
        if what == "abort":
            if state == "prepared":
                self._move(txn, "prepared", "aborted")
                return 200
            return 409 if state == "committed" else 404
        return 404

    def _state(self, txn: str) -> str:
        for state in ("committed", "prepared", "aborted"):
            if (self.folder / state / txn).exists():
                return state
        return "unknown"

    def _write(self, txn: str, body: bytes) -> None:
        new = self.folder / f"{uuid.uuid4().hex}.new"
        new.write_bytes(body)
        new.rename(self.folder / "prepared" / txn)

    def _move(self, txn: str, before: str, after: str) -> None:
        (self.folder / before / txn).rename(self.folder / after / txn)

    def _faulty(self, what: str, lose: str) -> bool:
        """Applies the first matching fault, once; returns whether there was one."""
        for fault in self.faults:
            do = fault["do"]
            if fault["at"] != what or (do in (LOSE_BEFORE, LOSE_AFTER) and do != lose):
                continue
            if lose == LOSE_AFTER != do:
                continue
            self.faults.remove(fault)
            if do == DELAY:
                # wait until the caller gives up and closes the connection
                self.connection.settimeout(30)
                self.connection.recv(1)
            elif do not in (LOSE_BEFORE, LOSE_AFTER):
                self._answer(int(do), {"error": f"told to say {do}"}, fault.get("headers", {}))
                return True
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return True
        return False

    def _answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Suppresses output, because tests read the service's own log."""


@dataclass
class HttpService:
    """Starts and controls the service's process.

    Attributes:
        folder: the folder with its state.
        port: its port, which stays the same when it restarts.
    """

    folder: Path
    port: int
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, __file__, str(self.folder), str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == b"ready"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def reset(self) -> None:
        """Deletes the state, as if the service were new."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        self._ask("POST", "/reset", {})
        for each in self.folder.glob("*/*"):
            each.unlink()

    def fault(self, *faults: tuple[str, str], headers: dict[str, str] | None = None) -> None:
        """Sets the faults of the next requests of a kind (``commit``, …): statuses or the constants above."""
        self._ask("POST", "/faults", [{"at": at, "do": do, "headers": headers or {}} for at, do in faults])

    def refuse(self, *rows: str, status: int = 422, names: int | None = None, least: int = 1) -> None:
        """Lets the service refuse bodies that contain rows whose names end with one of these texts.

        Args:
            rows: ends of the column ``name``, or of the value of a record.
            status: the status of the answer.
            names: how many of the refused rows the answer names; None = all.
            least: how many such rows a body must contain.
        """
        poison = {"rows": rows, "status": status, "names": names, "least": least}
        self._ask("POST", "/poison", poison)

    def log(self) -> list[dict[str, Any]]:
        """Returns the POST requests since the start."""
        found: list[dict[str, Any]] = self._ask("GET", "/log", None)
        return found

    def committed(self) -> list[bytes]:
        """Returns the bodies that readers see."""
        return [each.read_bytes() for each in sorted((self.folder / "committed").iterdir())]

    def _ask(self, method: str, path: str, content: object) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(content))
            return json.loads(connection.getresponse().read())


@contextlib.contextmanager
def running(folder: Path) -> Iterator[HttpService]:
    from kafka_eos_source.embedded.cluster import free_ports  # the service itself starts without it

    for each in ("prepared", "committed", "aborted"):
        (folder / each).mkdir(parents=True)
    (port,) = free_ports([0])
    service = HttpService(folder, port)
    service.start()
    try:
        yield service
    finally:
        service.kill()


def serve(folder: str, port: str) -> None:
    class Own(Handler):
        pass

    Own.folder, Own.faults, Own.log, Own.lock = Path(folder), [], [], threading.Lock()
    Own.poison = {}
    http.server.ThreadingHTTPServer.daemon_threads = True
    parent = os.getppid()
    with http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Own) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print("ready", flush=True)
        while os.getppid() == parent:  # ends with the test runner, even if that is killed
            time.sleep(1)


if __name__ == "__main__":
    serve(*sys.argv[1:])
