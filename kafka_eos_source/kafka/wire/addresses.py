"""Finds the addresses of brokers, and opens sockets to them."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka_eos_source.kafka.wire.debug import broker
from kafka_eos_source.runtime.deadline import Deadline

_DEFAULT_PORT = 9092
_FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}
#: How long the canonical names of bootstrap servers are kept.
_VALID_SECONDS = 60.0

Address = tuple[str, int]


@dataclass
class Addresses:
    """How to find the addresses of brokers, and the options of sockets. Create it with `Addresses.of`.

    Attributes:
        bootstrap_servers: as the user wrote them.
        canonical: whether bootstrap servers are replaced by the canonical names of their addresses.
        family: the family of addresses that is used; ``AF_UNSPEC`` = any.
        options: options of each socket: level, name, value.
    """

    bootstrap_servers: str
    canonical: bool = False
    family: socket.AddressFamily = socket.AF_UNSPEC
    options: tuple[tuple[int, int, int], ...] = ()
    _names: list[Address] = field(default_factory=list)
    _names_until: float = 0.0

    @classmethod
    def of(cls, kafka: Mapping[str, str]) -> Addresses:
        """Returns what librdkafka properties describe."""
        options = [
            (
                socket.IPPROTO_TCP,
                socket.TCP_NODELAY,
                int(kafka.get("socket.nagle.disable", "true").lower() == "true"),
            )
        ]
        if kafka.get("socket.keepalive.enable", "false").lower() == "true":
            options.append((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
        for name, option in (
            ("socket.send.buffer.bytes", socket.SO_SNDBUF),
            ("socket.receive.buffer.bytes", socket.SO_RCVBUF),
        ):
            if size := int(kafka.get(name, "0")):
                options.append((socket.SOL_SOCKET, option, size))
        return cls(
            kafka.get("bootstrap.servers", ""),
            kafka.get("client.dns.lookup") == "resolve_canonical_bootstrap_servers_only",
            _FAMILIES.get(kafka.get("broker.address.family", "any"), socket.AF_UNSPEC),
            tuple(options),
        )

    def bootstrap(self) -> list[Address]:
        """Returns host and port of the bootstrap servers, in random order."""
        if not self.canonical:
            found = listed(self.bootstrap_servers)
        else:
            if time.monotonic() >= self._names_until:
                self._names = self._canonical_names()
                self._names_until = time.monotonic() + _VALID_SECONDS
            found = list(self._names)
        random.shuffle(found)
        return found

    def connect(self, host: str, port: int, deadline: Deadline) -> socket.socket:
        """Connects to a host. Tries its addresses one after the other, until one accepts.

        Raises:
            OSError: if the name does not resolve, or no address accepts; names each address that was tried.
        """
        found = socket.getaddrinfo(host, port, self.family, socket.SOCK_STREAM)
        failures: list[tuple[str, OSError]] = []
        for index, (family, kind, protocol, _, address) in enumerate(found):
            # an address that does not answer must leave time for the others
            seconds = deadline.remaining_seconds() / (len(found) - index)
            plain = socket.socket(family, kind, protocol)
            try:
                for option in self.options:
                    plain.setsockopt(*option)
                plain.settimeout(max(seconds, 0.001))  # 0 would mean: do not block
                plain.connect(address)
            except OSError as error:
                plain.close()
                failures.append((str(address[0]), error))
                broker.debug("%s:%d does not accept a connection at %s: %s", host, port, address[0], error)
            except BaseException:
                plain.close()
                raise
            else:
                broker.debug("connected to %s:%d at %s", host, port, address[0])
                return plain
        raise _failure(failures)

    def _canonical_names(self) -> list[Address]:
        names: dict[Address, None] = {}
        for host, port in listed(self.bootstrap_servers):
            try:
                found = socket.getaddrinfo(host, port, self.family, socket.SOCK_STREAM)
            except OSError:
                names[host, port] = None  # whoever connects to it reports why
                continue
            for *_, address in found:
                name, _ = socket.getnameinfo(address, socket.NI_NUMERICSERV)  # the address if it has no name
                names[name, port] = None
        broker.debug("canonical names of %s: %s", self.bootstrap_servers, list(names))
        return list(names)


def listed(servers: str) -> list[Address]:
    """Returns host and port of each server in a comma-separated list, such as ``bootstrap.servers``."""
    found = []
    for each in filter(None, (address.strip() for address in servers.split(","))):
        plain = each.rpartition("://")[2]
        host, separator, port = plain.rpartition(":")
        if separator and port.isdigit():
            found.append((host.strip("[]"), int(port)))
        else:
            found.append((plain.strip("[]"), _DEFAULT_PORT))
    return found


def _failure(failures: list[tuple[str, OSError]]) -> OSError:
    """Returns one error for all addresses of a host, of the class of the last one."""
    last = failures[-1][1]
    if len(failures) == 1:
        return last
    text = "; ".join(f"{address}: {error.strerror or error}" for address, error in failures)
    return OSError(last.errno, text) if last.errno is not None else type(last)(text)
