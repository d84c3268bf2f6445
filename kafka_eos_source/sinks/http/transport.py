"""A persistent connection that sends one request at a time and returns its answer.

It uses the standard library's client, because that client never repeats a request by itself.
"""

from __future__ import annotations

import http.client
import os
import select
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from urllib.parse import SplitResult, urlsplit

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import NO_SECRETS, Secrets
from kafka_eos_source.sinks.http.answers import Answer, retry_after_seconds

#: Most bytes of an answer that are read. Answers contain a state, a list of ids or an error text.
_MAX_ANSWER_BYTES = 4 << 20
_MIN_TIMEOUT_SECONDS = 0.05


@dataclass(frozen=True)
class Credentials:
    """Header that authenticates the client. Its value is never shown.

    Attributes:
        header: name of the header.
        value: value of the header; None if there is none, or if `variable` names it.
        variable: environment variable that contains the value. Only the driver reads it, because only the
            driver sends requests.
    """

    header: str
    value: str | None = field(default=None, repr=False)
    variable: str | None = None

    def headers(self) -> dict[str, str]:
        """Returns the header with its value.

        Raises:
            InvalidOptionError: if the variable is not set, or the value contains characters that a header
                must not contain.
        """
        found = self.value
        if self.variable is not None:
            found = os.environ.get(self.variable, "").strip()
            if not found:
                raise InvalidOptionError(
                    f"the environment variable {self.variable!r} (option 'auth.env') is not set.",
                    fix="set it where the driver runs.",
                )
        if found is None:
            return {}
        if not found.isascii() or not found.isprintable():
            raise InvalidOptionError(
                f"the value (not shown) of the header {self.header!r} contains characters other than "
                "printable ASCII.",
                fix="set the option 'auth' to the exact header value, such as 'Bearer …'.",
            )
        return {self.header: found}

    @property
    def secrets(self) -> Secrets:
        """The value, and its last word: a service's error text may contain the token without "Bearer"."""
        value = self.value or os.environ.get(self.variable or "", "")
        return Secrets(frozenset({value, value.rpartition(" ")[2]}))


@dataclass
class Transport:
    """Connection to one service, used by one thread. Connects when the first request is sent.

    Attributes:
        url: URL of the service.
        credentials: sent with each request.
        timeout_seconds: time limit for connecting, and for each wait for bytes.
        ca_file: PEM file of certificates to trust; None for the system's.
        secrets: what the text of a refusal or of an error must not show, besides the credentials.
    """

    url: str = field(repr=False)
    credentials: Credentials
    timeout_seconds: float
    ca_file: str | None = None
    secrets: Secrets = NO_SECRETS
    _connection: http.client.HTTPConnection | None = field(default=None, init=False, repr=False)

    def request(
        self,
        method: str,
        target: str,
        deadline: Deadline,
        *,
        body: memoryview | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends one request and returns the answer. Does not repeat it.

        Args:
            method: HTTP method.
            target: path and query.
            deadline: limits the timeout.
            body: content of the request.
            headers: headers in addition to the credentials.

        Returns:
            The answer. Its status is None if the connection failed.

        Raises:
            InvalidOptionError: if the credentials or certificates cannot be used.
        """
        all_headers = {"User-Agent": "kafka-eos-source", **self.credentials.headers(), **(headers or {})}
        if body is None and method == "POST":
            all_headers["Content-Length"] = "0"
        seconds = max(_MIN_TIMEOUT_SECONDS, deadline.remaining_seconds(self.timeout_seconds))
        connection = self._connected(seconds)
        try:
            connection.request(method, target, body, all_headers)
            response = connection.getresponse()
            content = response.read(_MAX_ANSWER_BYTES)
            if not response.isclosed() or response.will_close:
                self.close()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return Answer(None, self._hidden(f"{type(error).__name__}: {error}").encode())
        after = retry_after_seconds(response.getheader("Retry-After"), datetime.now(timezone.utc))
        if response.status >= 400:  # a text for people
            content = self._hidden(content.decode(errors="replace")).encode()
        return Answer(response.status, content, after)

    def _hidden(self, text: str) -> str:
        return (self.credentials.secrets | self.secrets).hide(text)

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, seconds: float) -> http.client.HTTPConnection:
        open_one = self._connection
        if open_one is not None and open_one.sock is not None:
            # services close idle connections; detect that before a request is lost
            if not select.select([open_one.sock], [], [], 0)[0]:
                open_one.sock.settimeout(seconds)
                return open_one
            self.close()
        self._connection = self._new(urlsplit(self.url), seconds)
        return self._connection

    def _new(self, url: SplitResult, seconds: float) -> http.client.HTTPConnection:
        assert url.hostname is not None
        if url.scheme == "http":
            return http.client.HTTPConnection(url.hostname, url.port, timeout=seconds)
        try:
            trusted = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidOptionError(
                f"option 'ca.file' has the value {self.ca_file!r}, which cannot be loaded: {error}.",
                fix="set it to a file of PEM certificates that the driver can read.",
            ) from error
        return http.client.HTTPSConnection(url.hostname, url.port, timeout=seconds, context=trusted)
