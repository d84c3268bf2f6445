"""One kept connection to the service: a request, and its answer or none.

The standard library's client: it tells a request that was never sent from one that was not answered by
nothing, which is right, because neither can be told from outside; and it repeats nothing by itself.
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
from kafka_eos_source.kafka import secrets
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.http.answers import Answer, retry_after_seconds

#: Of an answer, that are read: it is a state, a list of ids or a complaint.
_MOST_BYTES = 4 << 20
_LEAST_SECONDS = 0.05


@dataclass(frozen=True)
class Credentials:
    """The header that says who asks. Never shown.

    Attributes:
        header: its name.
        value: None = none, or in the environment.
        variable: of the environment; read where requests are made, which is on the driver.
    """

    header: str
    value: str | None = field(default=None, repr=False)
    variable: str | None = None

    def headers(self) -> dict[str, str]:
        """From now on this process hides the value.

        Raises:
            InvalidOptionError: the variable is not set, or no header can have the value.
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
                f"the value of the header {self.header!r} has characters that no header may have.",
                fix="give it as it is to be sent, in ASCII, such as 'Bearer …'.",
            )
        _hide(found)
        return {self.header: found}

    def hide(self) -> None:
        """From now on this process hides the value, if it was given as an option."""
        if self.value is not None:
            _hide(self.value)


def _hide(value: str) -> None:
    secrets.register_secret_values(
        [value, value.rpartition(" ")[2]]
    )  # a service may complain about the token alone


@dataclass
class Transport:
    """To one service; used by one thread. Connects when it is first used.

    Attributes:
        url: of the service.
        credentials: sent with each request.
        timeout_seconds: of connecting, and of each wait for bytes.
        ca_file: certificates to trust; None = the system's.
    """

    url: str
    credentials: Credentials
    timeout_seconds: float
    ca_file: str | None = None
    _connection: http.client.HTTPConnection | None = field(default=None, init=False, repr=False)

    def ask(
        self,
        method: str,
        target: str,
        deadline: Deadline,
        *,
        body: memoryview | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request.

        Args:
            target: path and query.

        Raises:
            InvalidOptionError: the credentials are not there, or the certificates are none.
        """
        own = {"User-Agent": "kafka-eos-source", **self.credentials.headers(), **(headers or {})}
        if body is None and method == "POST":
            own["Content-Length"] = "0"
        seconds = max(_LEAST_SECONDS, deadline.remaining_seconds(self.timeout_seconds))
        connection = self._connected(seconds)
        try:
            connection.request(method, target, body, own)
            response = connection.getresponse()
            content = response.read(_MOST_BYTES)
            if not response.isclosed() or response.will_close:
                self.close()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return Answer(None, f"{type(error).__name__}: {error}".encode())
        after = retry_after_seconds(response.getheader("Retry-After"), datetime.now(timezone.utc))
        return Answer(response.status, content, after)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, seconds: float) -> http.client.HTTPConnection:
        kept = self._connection
        if kept is not None and kept.sock is not None:
            # a service closes what is idle: noticed before a request is lost in it
            if not select.select([kept.sock], [], [], 0)[0]:
                kept.sock.settimeout(seconds)
                return kept
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
                f"option 'ca.file' names {self.ca_file!r}, which cannot be used: {error}.",
                fix="give a file of PEM certificates that the driver can read.",
            ) from error
        return http.client.HTTPSConnection(url.hostname, url.port, timeout=seconds, context=trusted)
