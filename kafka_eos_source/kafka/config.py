"""``kafka.*`` options → librdkafka properties: translated, refused with the way out named, checked, masked.

librdkafka judges names and values itself (`kafka.properties`), so that what is accepted here is what the
client accepts. What it would refuse only when a client is made, in a task or in a commit, is refused here
too: values that do not go together, and those that exactly-once cannot live with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import java
from kafka_eos_source.kafka.java import documentation
from kafka_eos_source.kafka.properties import Properties, is_property, property_names
from kafka_eos_source.kafka.secrets import is_secret, masked, redact, shown

__all__ = [
    "admin_config",
    "check_consumer",
    "check_producer",
    "consumer_config",
    "documentation",
    "is_known",
    "is_secret",
    "masked",
    "producer_config",
    "property_names",
    "redact",
]

_PRODUCER_DEFAULTS: Mapping[str, str] = {
    "partitioner": "murmur2_random",  # Java's placement of keys: output stays co-partitioned
    "linger.ms": "5",  # fills batches while rows stream in; a flush does not wait for it
    "batch.size": "1000000",  # large batches compress better and cost the broker less
    "queue.buffering.max.messages": "500000",  # room for a second of the fast path
    "queue.buffering.max.kbytes": "524288",
    "allow.auto.create.topics": "false",  # a misspelt topic is an error, not a topic
    "topic.metadata.propagation.max.ms": "5000",  # a missing topic is reported after this (default 30 s)
    "retry.backoff.ms": "10",  # what a transaction waits behind another: 100 ms by default, each batch
    "retry.backoff.max.ms": "200",
}
_TRANSACTION_DEFAULTS: Mapping[str, str] = {
    "transaction.timeout.ms": "60000",
    "socket.timeout.ms": "10000",  # a lost EndTxn is sent again well before the transaction times out
    # since librdkafka 2.11 a client that lost all brokers forgets them, and waits for a coordinator among
    # those that it forgot (its issue 5511); the next producer starts from bootstrap.servers anyhow
    "metadata.recovery.strategy": "none",
}
_CONSUMER_FORCED: Mapping[str, str] = {
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "true",  # how a range that ends in markers is known to be read
    "auto.offset.reset": "error",  # data loss is decided by failOnDataLoss, never by a reset
    "allow.auto.create.topics": "false",
}

#: Of group membership: without effect, as with Spark's source, since ranges are assigned and no group is
#: joined. Some cannot go together with others, so they are checked and left out.
_OF_MEMBERS = frozenset(
    {
        "group.instance.id",
        "group.protocol",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "max.poll.interval.ms",
        "partition.assignment.strategy",
        "session.timeout.ms",
    }
)


class _Rule(NamedTuple):
    """What a property must be, if it is set at all."""

    holds: Callable[[str], bool]
    expected: str
    why: str


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


#: Values as librdkafka writes them (``acks=all`` is -1).
_IDEMPOTENT: Mapping[str, _Rule] = {
    "acks": _Rule(_is("-1", "all"), "all", "needs the answer of all in-sync replicas"),
    "retries": _Rule(lambda value: int(value) >= 1, "1 or more", "needs lost requests to be sent again"),
    "max.in.flight.requests.per.connection": _Rule(
        lambda value: int(value) <= 5, "5 or less", "needs at most 5, the requests that a broker remembers"
    ),
    "queuing.strategy": _Rule(_is("fifo"), "fifo", "needs records in their order"),
}
_EXACTLY_ONCE: Mapping[str, _Rule] = {
    "enable.idempotence": _Rule(_is("true"), "true", "needs idempotent producing"),
    **_IDEMPOTENT,
    "allow.auto.create.topics": _Rule(
        _is("false"), "false", "needs topics that are there: one made anew amid a batch would lose half of it"
    ),
    "statistics.interval.ms": _Rule(
        lambda _: False, "no value", "needs statistics at an interval of its own, to know a clean producer"
    ),
}
_DELIVERY = _Rule(
    _is("true"), "true", "needs to hear of failed records only: hearing of each costs most of the time"
)
_READ: Mapping[str, _Rule] = {
    "enable.auto.offset.store": _Rule(_is("false"), "false", "commits no offsets from a task"),
    "enable.partition.eof": _Rule(_is("true"), "true", "finds the end of a range by it"),
    "allow.auto.create.topics": _Rule(_is("false"), "false", "makes no topic by reading it"),
}


def check_consumer(kafka: Mapping[str, str]) -> dict[str, str]:
    """The ``kafka.*`` options of a read (prefix removed) as librdkafka properties.

    Raises:
        InvalidOptionError: a name is unknown or Java's alone, librdkafka refuses a value, values do not go
            together, or one is not the user's to say.
    """
    with Properties() as conf:
        checked = _Checked(kafka, conf)
        checked.obey(_READ, "a read")
        checked.at_least("fetch.max.bytes", "message.max.bytes")
        checked.at_least("receive.message.max.bytes", "fetch.max.bytes", 512, both=True)
        checked.login()
        return {name: value for name, value in checked.values.items() if name not in _OF_MEMBERS}


def check_producer(kafka: Mapping[str, str], *, exactly_once: bool) -> dict[str, str]:
    """The ``kafka.*`` options of a write (prefix removed) as librdkafka properties.

    Raises:
        InvalidOptionError: as `check_consumer`, or a value would break exactly-once.
    """
    with Properties() as conf:
        checked = _Checked(kafka, conf)
        checked.login()
        checked.obey({"delivery.report.only.error": _DELIVERY}, "a sink")
        checked.above("message.timeout.ms", "linger.ms", default=_PRODUCER_DEFAULTS["linger.ms"])
        if exactly_once:
            checked.obey(_EXACTLY_ONCE, "exactly-once", "or set processing.guarantee=at_least_once")
            transaction_ms = _TRANSACTION_DEFAULTS["transaction.timeout.ms"]
            checked.at_most("message.timeout.ms", "transaction.timeout.ms", transaction_ms)
            checked.at_most("socket.timeout.ms", "transaction.timeout.ms", transaction_ms, slack=100)
            for implied in ("enable.idempotence", "acks"):
                checked.values.pop(implied, None)
        elif conf.get("enable.idempotence") == "true":
            checked.obey(_IDEMPOTENT, "kafka.enable.idempotence=true", "or set that to false")
        elif any(
            name in checked.values and not rule.holds(conf.get(name)) for name, rule in _IDEMPOTENT.items()
        ):
            checked.values["enable.idempotence"] = "false"  # as Java does, unless it was asked for
        return checked.values


def consumer_config(kafka: Mapping[str, str], group_id: str, isolation_level: str) -> dict[str, Any]:
    """Properties of a consumer that is assigned ranges and never joins or commits.

    Args:
        kafka: from `check_consumer`.
        group_id: librdkafka wants one.
        isolation_level: ``read_committed`` or ``read_uncommitted``.
    """
    return {**kafka, **_CONSUMER_FORCED, "group.id": group_id, "isolation.level": isolation_level}


def producer_config(kafka: Mapping[str, str], transactional_id: str | None = None) -> dict[str, Any]:
    """Properties of a producer; idempotent, and transactional with an id. The user's values win.

    Args:
        kafka: from `check_producer`.
        transactional_id: None = no transactions.
    """
    if transactional_id is None:
        return {**_PRODUCER_DEFAULTS, "enable.idempotence": "true", **kafka}
    timeout = {k: v for k, v in _TRANSACTION_DEFAULTS.items() if k not in kafka and is_property(k)}
    stated = kafka.get("transaction.timeout.ms")
    if stated is not None and "socket.timeout.ms" in timeout:
        # librdkafka: at most the transaction's timeout, so that a lost EndTxn is sent again in time
        timeout["socket.timeout.ms"] = str(max(300, min(10_000, int(stated) - 100)))
    return {**_PRODUCER_DEFAULTS, **timeout, **kafka, "transactional.id": transactional_id}


_CONNECTION_PREFIXES = (
    "bootstrap.servers",
    "client.",
    "security.",
    "ssl.",
    "sasl.",
    "enable.ssl.",
    "enable.sasl.",
    "enable.metrics.push",
    "https.",
    "socket.",
    "broker.address.",
    "connections.",
    "reconnect.backoff.",
    "receive.message.max.bytes",
    "api.version.",
    "metadata.recovery.",
    "plugin.library.paths",
    "debug",
    "log",
)


def admin_config(kafka: Mapping[str, str]) -> dict[str, Any]:
    """Properties that say how to reach the cluster; those of producers and consumers are left out."""
    return {name: value for name, value in kafka.items() if name.startswith(_CONNECTION_PREFIXES)}


def is_known(name: str) -> bool:
    """Whether ``kafka.<name>`` means something, so that a forgotten or misspelt prefix can be told."""
    return is_property(name) or name in java.RENAMED or name in java.REFUSED or name == "sasl.jaas.config"


class _Checked:
    """The properties that were set, by librdkafka's names, and under what name each was set."""

    def __init__(self, kafka: Mapping[str, str], conf: Properties) -> None:
        self.values: dict[str, str] = {}
        self._stated: dict[str, str] = {}
        self._conf = conf
        for name, given in kafka.items():
            for translated, value in java.translated(name, given):
                ours = _SAME.get(translated, translated)
                if self.values.get(ours, value) != value:
                    raise InvalidOptionError(
                        f"options 'kafka.{self._stated[ours]}' and 'kafka.{name}' say two things: both are "
                        f"librdkafka's {ours!r}.",
                        fix="keep one of them.",
                    )
                conf.set(ours, value, stated_name=name, stated_value=given)
                self.values[ours], self._stated[ours] = value, name

    def obey(self, rules: Mapping[str, _Rule], who: str, way_out: str = "") -> None:
        for name, rule in rules.items():
            if name in self.values and not rule.holds(self._conf.get(name)):
                raise InvalidOptionError(
                    f"{self._said(name)}; expected {rule.expected}: {who} {rule.why}.",
                    fix=f"remove it{', ' if way_out else ''}{way_out}.",
                )

    def at_least(self, name: str, other: str, more: int = 0, *, both: bool = False) -> None:
        if name in self.values and (other in self.values or not both):
            least = int(self._conf.get(other)) + more
            if int(self._conf.get(name)) < least:
                raise self._pair(name, other, f"{least} or more")

    def at_most(self, name: str, other: str, default: str, *, slack: int = 0) -> None:
        """``default``: ours, of ``other``."""
        most = int(self._conf.get(other) if other in self.values else default)
        if name in self.values and int(self._conf.get(name)) > most + slack:
            raise self._pair(name, other, f"{most} or less", default)

    def above(self, name: str, other: str, *, default: str) -> None:
        """``default``: ours, of ``other``. 0 = without end."""
        bound = float(self._conf.get(other) if other in self.values else default)
        if name in self.values and 0 < int(self._conf.get(name)) <= bound:
            raise self._pair(name, other, f"more than {bound:g}", default)

    def login(self) -> None:
        """librdkafka finds a missing user or password when the client is made."""
        if not self._conf.get("security.protocol").startswith("sasl_"):
            return
        mechanism = self._conf.get("sasl.mechanisms")
        for name in ("sasl.username", "sasl.password"):
            if mechanism.startswith(("PLAIN", "SCRAM-")) and not self.values.get(name):
                raise InvalidOptionError(
                    f"option 'kafka.{name}' is missing; expected it with kafka.sasl.mechanism={mechanism}.",
                    fix=f"set .option('kafka.{name}', …).",
                )

    def _said(self, name: str) -> str:
        return f"option 'kafka.{self._stated[name]}' has the value {shown(name, self.values[name])!r}"

    def _pair(self, name: str, other: str, expected: str, default: str = "") -> InvalidOptionError:
        bound = self.values.get(other) or default or self._conf.get(other)
        other_name = self._stated.get(other, other)
        return InvalidOptionError(
            f"{self._said(name)}; expected {expected}: 'kafka.{other_name}' is {bound}.",
            fix=f"change one of the two: 'kafka.{self._stated[name]}' or 'kafka.{other_name}'.",
        )


#: Of librdkafka's two names for one property, the one used here: that of Java's clients.
_SAME: Mapping[str, str] = {
    "metadata.broker.list": "bootstrap.servers",
    "compression.codec": "compression.type",
    "fetch.message.max.bytes": "max.partition.fetch.bytes",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.send.max.retries": "retries",
    "delivery.timeout.ms": "message.timeout.ms",
    "queue.buffering.max.ms": "linger.ms",
    "request.required.acks": "acks",
    "sasl.mechanism": "sasl.mechanisms",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
}
