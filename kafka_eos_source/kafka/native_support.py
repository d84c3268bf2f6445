"""Chooses between librdkafka and this package's own clients, and tells what the latter lack."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.kernel import choice

AUTO, LIBRDKAFKA, NATIVE = "auto", "librdkafka", "native"

#: Properties that only librdkafka supports.
_ONLY_LIBRDKAFKA = (
    "broker.address.",
    "client.dns.",
    "client.rack",
    "ssl.certificate.pem",
    "ssl.cipher.suites",
    "ssl.crl.",
    "ssl.curves.list",
    "ssl.engine.",
    "ssl.key.pem",
    "ssl.keystore.",
    "ssl.providers",
    "ssl.sigalgs.list",
)

_log = logging.getLogger(__name__)


class Chosen(NamedTuple):
    """The client that does a task.

    Attributes:
        client: `LIBRDKAFKA` or `NATIVE`.
        reason: why, as the end of a sentence.
    """

    client: str
    reason: str

    def __str__(self) -> str:
        return f"{self.client}: {self.reason}"


def missing(config: Mapping[str, Any]) -> str:
    """Returns what the native clients lack for these properties, as a clause; "" if nothing."""
    if choice().kernel is None:
        return f"the C kernel is not available ({choice().why_not})"
    only = next((name for name in sorted(config) if name.startswith(_ONLY_LIBRDKAFKA)), None)
    return "" if only is None else f"the native client does not support kafka.{only}"


@dataclass(frozen=True)
class ClientOption:
    """An option that chooses the client for a task.

    Attributes:
        name: of the option.
        variable: the environment variable that counts where the option is not set. The tests use it.
        done: what the client does, as the beginning of a sentence in the passive voice.
        side: "source" or "sink".
        lacking: tells what the native client lacks for given properties; "" if nothing.
    """

    name: str
    variable: str
    done: str
    side: str
    lacking: Callable[[Mapping[str, Any]], str] = missing
    _logged: set[Chosen] = field(default_factory=set, compare=False)

    def choose(self, config: Mapping[str, Any], client: str = "") -> Chosen:
        """Chooses the client for these properties.

        Args:
            config: librdkafka properties, as checked by `kafka.config`.
            client: value of the option; "" = the environment variable decides, or else `AUTO`.

        Raises:
            InvalidOptionError: if the native client is asked for and cannot be used; names the reason.
        """
        origin = self.name if client else self.variable
        wanted = client or os.environ.get(self.variable) or AUTO
        if wanted == LIBRDKAFKA:
            return Chosen(LIBRDKAFKA, f"{origin}={wanted}")
        lacking = self.lacking(config)
        if wanted == NATIVE:
            if lacking:
                raise InvalidOptionError(
                    f"option {origin!r} has the value 'native', which does not work here: {lacking}.",
                    fix="remove the option; librdkafka is then used.",
                )
            return Chosen(NATIVE, f"{origin}={wanted}")
        if lacking:
            return Chosen(LIBRDKAFKA, lacking)
        return Chosen(NATIVE, f"it supports all options of this {self.side}")

    def choose_and_log(self, config: Mapping[str, Any], client: str = "") -> str:
        """Chooses like `choose`, and logs each choice of this process once.

        Returns:
            `LIBRDKAFKA` or `NATIVE`.
        """
        chosen = self.choose(config, client)
        if chosen not in self._logged:
            self._logged.add(chosen)
            _log.info("%s by %s", self.done, chosen)
        return chosen.client
