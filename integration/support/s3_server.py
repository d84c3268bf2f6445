"""Runs an S3-compatible server (S3Proxy over a folder), and a proxy in front of it that loses answers.

The server follows S3's rules for multipart uploads, checks signatures and keeps its data when it is killed.
Its jars are downloaded once, like Kafka's.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from integration.support.jvm import Jvm
from kafka_eos_source.embedded import java
from kafka_eos_source.embedded.cluster import free_ports
from kafka_eos_source.errors import KafkaEosError

#: boto3 finds these in the environment. Without them it would spend seconds looking for an instance role.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
    "AWS_EC2_METADATA_DISABLED": "true",
}

_VERSION, _JCLOUDS, _JACKSON = "2.6.0", "2.7.0", "2.18.2"
#: The jars that the file system backend needs. The full dependency list has a hundred more, for other clouds.
S3PROXY = java.JarSet(
    "s3proxy",
    (
        ("org.gaul", "s3proxy", _VERSION),
        ("org.apache.jclouds", "jclouds-core", _JCLOUDS),
        ("org.apache.jclouds", "jclouds-blobstore", _JCLOUDS),
        ("org.apache.jclouds.api", "s3", _JCLOUDS),
        ("org.apache.jclouds.api", "sts", _JCLOUDS),
        ("org.apache.jclouds.api", "oauth", _JCLOUDS),
        ("org.apache.jclouds.api", "openstack-keystone", _JCLOUDS),
        ("org.apache.jclouds.api", "openstack-swift", _JCLOUDS),
        ("org.apache.jclouds.provider", "aws-s3", _JCLOUDS),
        ("org.apache.jclouds.provider", "azureblob", _JCLOUDS),
        ("org.apache.jclouds.driver", "jclouds-slf4j", _JCLOUDS),
        ("com.google.guava", "guava", "33.4.0-jre"),
        ("com.google.guava", "failureaccess", "1.0.2"),
        ("com.google.inject", "guice", "7.0.0"),
        ("com.google.inject.extensions", "guice-assistedinject", "7.0.0"),
        ("com.google.code.gson", "gson", "2.11.0"),
        ("com.google.code.findbugs", "jsr305", "3.0.2"),
        ("aopalliance", "aopalliance", "1.0"),
        ("jakarta.inject", "jakarta.inject-api", "2.0.1"),
        ("jakarta.annotation", "jakarta.annotation-api", "2.0.0"),
        ("jakarta.xml.bind", "jakarta.xml.bind-api", "4.0.2"),
        ("com.fasterxml.jackson.core", "jackson-core", _JACKSON),
        ("com.fasterxml.jackson.core", "jackson-databind", _JACKSON),
        ("com.fasterxml.jackson.core", "jackson-annotations", _JACKSON),
        ("com.fasterxml.jackson.dataformat", "jackson-dataformat-xml", _JACKSON),
        ("com.fasterxml.woodstox", "woodstox-core", "7.0.0"),
        ("org.codehaus.woodstox", "stax2-api", "4.2.2"),
        ("org.eclipse.jetty.toolchain", "jetty-jakarta-servlet-api", "5.0.2"),
        ("args4j", "args4j", "2.37"),
        ("org.slf4j", "slf4j-api", "2.0.16"),
        ("ch.qos.logback", "logback-classic", "1.5.16"),
        ("ch.qos.logback", "logback-core", "1.5.16"),
    ),
    32,
    version=_VERSION,
    transitive=False,
    sums=Path(__file__).with_name("jars.sha256"),
)

_START_SECONDS = 60.0


@dataclass
class S3Server:
    """The server process.

    Attributes:
        folder: holds the objects and the server's configuration.
        port: the server's port, which stays the same when it restarts.
        jars: the folder with the server's jars.
    """

    folder: Path
    port: int
    jars: Path
    _jvm: Jvm = field(init=False, repr=False)

    def __post_init__(self) -> None:
        (self.folder / "objects").mkdir(exist_ok=True)
        settings = self.folder / "s3proxy.conf"
        settings.write_text(
            f"s3proxy.endpoint={self.url}\n"
            "s3proxy.authorization=aws-v2-or-v4\n"
            f"s3proxy.identity={CREDENTIALS['AWS_ACCESS_KEY_ID']}\n"
            f"s3proxy.credential={CREDENTIALS['AWS_SECRET_ACCESS_KEY']}\n"
            "jclouds.provider=filesystem-nio2\njclouds.identity=none\njclouds.credential=none\n"
            f"jclouds.filesystem.basedir={self.folder / 'objects'}\n"
        )
        quiet = self.folder / "logback.xml"
        quiet.write_text(
            '<configuration><appender name="out" class="ch.qos.logback.core.ConsoleAppender"><encoder>'
            '<pattern>%msg%n</pattern></encoder></appender><root level="ERROR"><appender-ref ref="out"/>'
            "</root></configuration>"
        )
        arguments = ["-Xmx512m", f"-Dlogback.configurationFile={quiet}", "-cp", f"{self.jars}/*"]
        arguments += ["org.gaul.s3proxy.Main", "--properties", str(settings)]
        self._jvm = Jvm(self.folder / "log", arguments, self._answers, _START_SECONDS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the server and waits until it accepts connections."""
        self._jvm.start()

    def kill(self) -> None:
        """Kills the server at once, as a power failure would."""
        self._jvm.kill()

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@contextlib.contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    """Runs the server; skips the test if its jars, Java or boto3 are not available."""
    pytest.importorskip("boto3", reason="needs boto3: pip install 'kafka-eos-source[test]'")
    try:
        found = java.jars(S3PROXY)
        java.find()
    except KafkaEosError as error:
        pytest.skip(f"needs S3Proxy: {error}")
    (port,) = free_ports([0])
    server = S3Server(folder, port, found)
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ.update(CREDENTIALS)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@dataclass
class Lossy:
    """A proxy in front of the server that loses requests or answers.

    Attributes:
        url: the proxy's URL.
        lose: given the method and the path with its query, returns what to lose ("request" or "answer"), an
            S3 error code to answer with instead of the server, or "" to pass the request on.
        requests: method and path of every request received.
    """

    url: str = ""
    lose: Callable[[str, str], str] = field(default=lambda method, path: "")
    requests: list[tuple[str, str]] = field(default_factory=list)


@contextlib.contextmanager
def lossy(port: int) -> Iterator[Lossy]:
    """Runs the proxy in a thread of this process, which must not be forked meanwhile.

    The proxy also passes on only one CompleteMultipartUpload at a time. S3 completes an upload atomically;
    S3Proxy copies the parts, and two concurrent completions damage the object, so that lists answer 500.

    Args:
        port: the server's port.
    """
    state = Lossy()
    completing = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            state.requests.append((self.command, self.path))
            what = state.lose(self.command, self.path)
            if what == "request":
                self._cut()
                return
            if what not in ("", "answer"):
                refusal = f"<Error><Code>{what}</Code><Message>told to</Message></Error>".encode()
                self.send_response_only(400)
                self.send_header("Content-Length", str(len(refusal)))
                self.end_headers()
                self.wfile.write(refusal)
                self.wfile.flush()
                return
            # pass the headers on unchanged: the signature covers the Host header
            one_step = self.command == "POST" and "uploadId=" in self.path
            with (
                completing if one_step else contextlib.nullcontext(),
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as onward,
            ):
                onward.request(self.command, self.path, body, dict(self.headers.items()))
                answer = onward.getresponse()
                content = answer.read()
            if what == "answer":
                self._cut()
                return
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            self.wfile.flush()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815 - names that http.server calls

        def _cut(self) -> None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, format: str, *args: object) -> None:
            """Suppresses the request log."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        state.url = f"http://127.0.0.1:{proxy.server_port}"
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield state
        finally:
            proxy.shutdown()
            thread.join()
