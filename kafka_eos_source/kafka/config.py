"""Translates ``kafka.*`` options to librdkafka properties, and checks them before a query starts.

librdkafka itself checks names and values (`kafka.properties`), so this module accepts exactly what the client
accepts. It also rejects combinations that librdkafka would reject only when a task or a commit creates a
client, and values that would break exactly-once. Every error names a fix.
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
    "partitioner": "murmur2_random",  # places keys as Java does, so the output stays co-partitioned
    "linger.ms": "5",  # fills batches while rows arrive; a flush does not wait for it
    "batch.size": "1000000",  # large batches compress better and are cheaper for the broker
    "queue.buffering.max.messages": "500000",  # room for the records of a second
    "queue.buffering.max.kbytes": "524288",
    "allow.auto.create.topics": "false",  # a misspelt topic name is an error and creates no topic
    "topic.metadata.propagation.max.ms": "5000",  # a missing topic is reported after 5 s, not 30 s
    # a transaction waits this long if the broker has not completed the previous one; the default of 100 ms
    # would add to the latency of each batch
    "retry.backoff.ms": "10",
    "retry.backoff.max.ms": "200",
}
_TRANSACTION_DEFAULTS: Mapping[str, str] = {
    "transaction.timeout.ms": "60000",
    "socket.timeout.ms": "10000",  # a lost EndTxn is sent again well before the transaction times out
    # since librdkafka 2.11, a client that lost all brokers drops them from its metadata, and then waits for a
    # coordinator among them (librdkafka issue 5511); a new producer starts from bootstrap.servers anyway
    "metadata.recovery.strategy": "none",
}
_CONSUMER_FORCED: Mapping[str, str] = {
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "true",  # reveals the end of a range that ends with control records
    "auto.offset.reset": "error",  # failOnDataLoss decides about data loss, never a reset
    "allow.auto.create.topics": "false",
}

#: Properties of group members. They have no effect, as in Spark's source, because consumers are assigned
#: ranges and join no group. Some of them conflict with others, so they are checked and then left out.
_GROUP_MEMBER_PROPERTIES = frozenset(
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
    """A rule for the value of a property, which applies if the user sets the property."""

    holds: Callable[[str], bool]
    expected: str
    why: str


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


#: Values as librdkafka formats them (``acks=all`` is -1).
_IDEMPOTENT: Mapping[str, _Rule] = {
    "acks": _Rule(_is("-1", "all"), "all", "needs acknowledgements of all in-sync replicas"),
    "retries": _Rule(lambda value: int(value) >= 1, "1 or more", "needs retries of lost requests"),
    "max.in.flight.requests.per.connection": _Rule(
        lambda value: int(value) <= 5,
        "5 or less",
        "needs at most 5, because brokers detect duplicates among the last 5 requests only",
    ),
    "queuing.strategy": _Rule(_is("fifo"), "fifo", "needs records to be sent in order"),
}
_EXACTLY_ONCE: Mapping[str, _Rule] = {
    "enable.idempotence": _Rule(_is("true"), "true", "needs an idempotent producer"),
    **_IDEMPOTENT,
    "allow.auto.create.topics": _Rule(
        _is("false"),
        "false",
        "needs existing topics: if a topic were deleted and created again during a batch, half of the "
        "batch would be lost",
    ),
    "statistics.interval.ms": _Rule(
        lambda _: False,
        "no value",
        "sets the interval itself, because statistics show whether a producer can be reused",
    ),
}
_DELIVERY = _Rule(
    _is("true"),
    "true",
    "needs reports of failed records only, because reporting every record takes most of the time",
)
_READ: Mapping[str, _Rule] = {
    "enable.auto.offset.store": _Rule(_is("false"), "false", "commits no offsets in a task"),
    "enable.partition.eof": _Rule(_is("true"), "true", "needs it to find the end of a range"),
    "allow.auto.create.topics": _Rule(_is("false"), "false", "must not create the topics it reads"),
}


_ACKNOWLEDGED = _Rule(
    _is("-1", "all", "1"),
    "all, or 1 to do without the in-sync replicas",
    "needs the leader's acknowledgement, because it could not report a lost record without",
)


def check_consumer(kafka: Mapping[str, str]) -> dict[str, str]:
    """Translates the ``kafka.*`` options of a read to librdkafka properties, and checks them.

    Args:
        kafka: option → value, without the prefix ``kafka.``.

    Raises:
        InvalidOptionError: if an option is unknown or exists only in Java's client, librdkafka rejects a
            value, values conflict, or users may not set an option.
    """
    with Properties() as conf:
        checked = _Checked(kafka, conf)
        checked.obey(_READ, "a read")
        checked.at_least("fetch.max.bytes", "message.max.bytes")
        checked.at_least("receive.message.max.bytes", "fetch.max.bytes", 512, both=True)
        checked.login()
        return {name: value for name, value in checked.values.items() if name not in _GROUP_MEMBER_PROPERTIES}


def check_producer(kafka: Mapping[str, str], *, exactly_once: bool) -> dict[str, str]:
    """Translates the ``kafka.*`` options of a write to librdkafka properties, and checks them.

    Args:
        kafka: option → value, without the prefix ``kafka.``.
        exactly_once: whether to reject values that would break exactly-once.

    Raises:
        InvalidOptionError: under the same conditions as `check_consumer`, or if a value would break
            exactly-once.
    """
    with Properties() as conf:
        checked = _Checked(kafka, conf)
        checked.login()
        checked.obey({"delivery.report.only.error": _DELIVERY}, "a sink")
        checked.above("message.timeout.ms", "linger.ms", default=_PRODUCER_DEFAULTS["linger.ms"])
        if not exactly_once:
            checked.obey({"acks": _ACKNOWLEDGED}, "a sink")
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
            checked.values["enable.idempotence"] = "false"  # as Java does, unless the user asks for it
        return checked.values


def consumer_config(kafka: Mapping[str, str], group_id: str, isolation_level: str) -> dict[str, Any]:
    """Returns the properties of a consumer that is assigned ranges and never joins a group or commits.

    Args:
        kafka: from `check_consumer`.
        group_id: librdkafka requires a group id of every consumer.
        isolation_level: ``read_committed`` or ``read_uncommitted``.
    """
    return {**kafka, **_CONSUMER_FORCED, "group.id": group_id, "isolation.level": isolation_level}


def producer_config(kafka: Mapping[str, str], transactional_id: str | None = None) -> dict[str, Any]:
    """Returns the properties of a producer. The user's values override the defaults.

    Args:
        kafka: from `check_producer`.
        transactional_id: None = an idempotent producer without transactions.
    """
    if transactional_id is None:
        return {**_PRODUCER_DEFAULTS, "enable.idempotence": "true", **kafka}
    timeout = {k: v for k, v in _TRANSACTION_DEFAULTS.items() if k not in kafka and is_property(k)}
    stated = kafka.get("transaction.timeout.ms")
    if stated is not None and "socket.timeout.ms" in timeout:
        # librdkafka requires at most the transaction's timeout, so that a lost EndTxn is sent again in time
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
    """Returns only the properties for connecting to the cluster, without those of producers and consumers."""
    return {name: value for name, value in kafka.items() if name.startswith(_CONNECTION_PREFIXES)}


def is_known(name: str) -> bool:
    """Returns whether an option ``kafka.<name>`` exists. Helps to report a missing or misspelt prefix."""
    return is_property(name) or name in java.RENAMED or name in java.REFUSED or name == "sasl.jaas.config"


class _Checked:
    """The properties that the user set, by librdkafka's names; raises errors with the user's names."""

    def __init__(self, kafka: Mapping[str, str], conf: Properties) -> None:
        self.values: dict[str, str] = {}
        given_values: dict[str, str] = {}
        self._stated: dict[str, str] = {}
        self._conf = conf
        for name, given in kafka.items():
            for translated, value in java.translated(name, given):
                ours = _SAME.get(translated, translated)
                if given_values.setdefault(ours, value) != value:
                    raise InvalidOptionError(
                        f"options 'kafka.{self._stated[ours]}' and 'kafka.{name}' have different values, but "
                        f"both set librdkafka's property {ours!r}.",
                        fix="remove one of them.",
                    )
                conf.set(ours, value, stated_name=name, stated_value=given)
                # the native client expects what librdkafka prints, such as 65536 for 0x10000
                self.values[ours] = conf.get(ours) if ours in _INTERPRETED else value
                self._stated[ours] = name

    def obey(self, rules: Mapping[str, _Rule], who: str, way_out: str = "") -> None:
        """Raises unless the properties follow the rules; ``way_out`` names another fix than removing one."""
        for name, rule in rules.items():
            if name in self.values and not rule.holds(self._conf.get(name)):
                raise InvalidOptionError(
                    f"{self._option(name)}; expected {rule.expected}: {who} {rule.why}.",
                    fix=f"remove the option{', ' if way_out else ''}{way_out}.",
                )

    def at_least(self, name: str, other: str, more: int = 0, *, both: bool = False) -> None:
        """Raises unless ``name`` is at least ``other + more``; ``both``: only if the user sets both."""
        if name in self.values and (other in self.values or not both):
            least = int(self._conf.get(other)) + more
            if int(self._conf.get(name)) < least:
                raise self._pair(name, other, f"{least} or more")

    def at_most(self, name: str, other: str, default: str, *, slack: int = 0) -> None:
        """Raises unless ``name`` is at most ``other + slack``; ``default`` is our default of ``other``."""
        most = int(self._conf.get(other) if other in self.values else default)
        if name in self.values and int(self._conf.get(name)) > most + slack:
            raise self._pair(name, other, f"{most} or less", default)

    def above(self, name: str, other: str, *, default: str) -> None:
        """Raises unless ``name`` is 0 (no limit) or above ``other``, whose default here is ``default``."""
        bound = float(self._conf.get(other) if other in self.values else default)
        if name in self.values and 0 < int(self._conf.get(name)) <= bound:
            raise self._pair(name, other, f"more than {bound:g}", default)

    def login(self) -> None:
        """Raises if a user or password is missing, which librdkafka notices only when it creates a client."""
        if not self._conf.get("security.protocol").startswith("sasl_"):
            return
        mechanism = self._conf.get("sasl.mechanisms")
        for name in ("sasl.username", "sasl.password"):
            if mechanism.startswith(("PLAIN", "SCRAM-")) and not self.values.get(name):
                raise InvalidOptionError(
                    f"option 'kafka.{name}' is missing; kafka.sasl.mechanism={mechanism} requires it.",
                    fix=f"set .option('kafka.{name}', …).",
                )

    def _option(self, name: str) -> str:
        return f"option 'kafka.{self._stated[name]}' has the value {shown(name, self.values[name])!r}"

    def _pair(self, name: str, other: str, expected: str, default: str = "") -> InvalidOptionError:
        bound = self.values.get(other) or default or self._conf.get(other)
        other_name = self._stated.get(other, other)
        return InvalidOptionError(
            f"{self._option(name)}; expected {expected}: 'kafka.{other_name}' is {bound}.",
            fix=f"change one of the two: 'kafka.{self._stated[name]}' or 'kafka.{other_name}'.",
        )


#: Properties that the native client interprets itself.
_INTERPRETED = frozenset(
    {
        "batch.size",
        "compression.level",
        "compression.type",
        "message.max.bytes",
        "request.timeout.ms",
        "socket.timeout.ms",
        "transaction.timeout.ms",
    }
)

#: librdkafka has two names for some properties. This maps its older name to the one that Java uses too.
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
