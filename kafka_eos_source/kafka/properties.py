"""The table of all ``kafka.*`` properties: their kinds of value, and what happens to each.

It has every property of librdkafka and of Java's producers and consumers, so that no option of a user has an
unknown fate. ``docs/kafka-properties.md`` is generated from this table (`documentation`), and a test compares
it with the librdkafka that is installed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.failure import MECHANISMS
from kafka_eos_source.secrets import is_secret, shown

_BILLION = 1_000_000_000
_LARGEST = (1 << 31) - 1
_DAY_MS = 86_400_000
_HOUR_MS = 3_600_000
_MINUTES_5_MS = 300_000


class Fate(Enum):
    """What happens to a property."""

    SUPPORTED = "supported"
    RENAMED = "renamed"
    IGNORED = "no effect"
    REFUSED = "refused"


# -- kinds of value ----------------------------------------------------------------------------------


class Kind:
    """A kind of value. This one accepts any text.

    Attributes:
        expected: what a value must be, for messages and documentation.
    """

    expected = "text"

    def canonical(self, value: str) -> str:
        """Returns the value in the one form that clients read, such as ``true`` for ``T``.

        Raises:
            ValueError: if the value is not of this kind.
        """
        if "\0" in value or any("\ud800" <= each <= "\udfff" for each in value):
            raise ValueError("no C text can contain one of its characters")
        return value


class Whole(Kind):
    """An integer, decimal or hexadecimal (``0x10``), or one of some words that stand for integers."""

    def __init__(self, lowest: int, highest: int, **words: int) -> None:
        self.lowest, self.highest, self._words = lowest, highest, words
        also = "".join(f", or {word}" for word in words)
        self.expected = f"an integer from {lowest} to {highest}{also}"

    def canonical(self, value: str) -> str:
        text = value.strip().lower()
        number = self._words[text] if text in self._words else int(text, 16 if "0x" in text else 10)
        if not self.lowest <= number <= self.highest:
            raise ValueError
        return str(number)


class Number(Kind):
    """A number, which may have a fraction."""

    def __init__(self, lowest: float, highest: float) -> None:
        self.lowest, self.highest = lowest, highest
        self.expected = f"a number from {lowest:g} to {highest:.0f}"

    def canonical(self, value: str) -> str:
        number = float(value)
        if not (math.isfinite(number) and self.lowest <= number <= self.highest):
            raise ValueError
        return f"{number:g}" if number != int(number) else str(int(number))


class Choice(Kind):
    """One of some words, in any case."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.expected = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
        self._by_lower = {word.lower(): word for word in words}

    def canonical(self, value: str) -> str:
        try:
            return self._by_lower[value.strip().lower()]
        except KeyError:
            raise ValueError from None


class Switch(Choice):
    """``true`` or ``false``, or librdkafka's short forms of them."""

    def __init__(self) -> None:
        super().__init__("true", "false")
        self._by_lower.update({"t": "true", "1": "true", "f": "false", "0": "false"})


class Choices(Choice):
    """Several of some words, separated by commas."""

    def __init__(self, *words: str) -> None:
        super().__init__(*words)
        self.expected = f"a comma-separated list of {', '.join(words)}"

    def canonical(self, value: str) -> str:
        return ",".join(super(Choices, self).canonical(each) for each in value.split(",") if each.strip())


class Pem(Kind):
    """Certificates or a key as PEM text. Each block may be in one line, as in Java's properties."""

    expected = "PEM text with -----BEGIN … and -----END … lines"

    def canonical(self, value: str) -> str:
        blocks = _PEM_BLOCK.findall(super().canonical(value).replace("\\n", "\n"))
        if not blocks:
            raise ValueError("it has no such lines")
        return "".join(
            f"-----BEGIN {label}-----\n{body.strip() if ':' in body else _lines(body)}\n-----END {label}-----\n"
            for label, body in blocks
        )


_PEM_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)


def _lines(body: str) -> str:
    """Returns Base64 text in lines of 64 characters, as OpenSSL reads it."""
    text = "".join(body.split())
    return "\n".join(text[at : at + 64] for at in range(0, len(text), 64))


TEXT, SWITCH, PEM = Kind(), Switch(), Pem()


@dataclass(frozen=True)
class Property:
    """A property, and what happens to it.

    Attributes:
        name: without ``kafka.``.
        kind: which values it may have.
        fate: what happens to it.
        note: `Fate.SUPPORTED`: what it does. `Fate.RENAMED`: the name that it becomes. `Fate.IGNORED`: why it
            has no effect on records. `Fate.REFUSED`: what to do instead, in the imperative.
        instead: what to do instead of a value that librdkafka accepts and ``kind`` does not; "" = there is
            none.
        connection: whether it describes the connection to the brokers. Requests for administration obey these
            too, and only these.
    """

    name: str
    kind: Kind
    fate: Fate
    note: str
    instead: str = ""
    connection: bool = False


def _supported(name: str, kind: Kind, note: str, instead: str = "") -> Property:
    return Property(name, kind, Fate.SUPPORTED, note, instead)


def _renamed(names: Mapping[str, str]) -> Iterator[Property]:
    return (Property(name, TEXT, Fate.RENAMED, becomes) for name, becomes in names.items())


def _ignored(why: str, kinds: Mapping[str, Kind]) -> Iterator[Property]:
    return (Property(name, kind, Fate.IGNORED, why) for name, kind in kinds.items())


def _refused(instead: str, names: str) -> Iterator[Property]:
    return (Property(name, TEXT, Fate.REFUSED, instead) for name in names.split())


def _of_connection(properties: Iterable[Property]) -> Iterator[Property]:
    return (replace(each, connection=True) for each in properties)


# -- the table ---------------------------------------------------------------------------------------

DEBUG_CONTEXTS = (
    *("generic", "broker", "topic", "metadata", "feature", "queue", "msg", "protocol", "cgrp", "security"),
    *("fetch", "interceptor", "plugin", "consumer", "admin", "eos", "mock", "assignor", "conf", "telemetry"),
    "all",
)

_CONNECTION = (
    _supported("bootstrap.servers", TEXT, "the brokers that are asked first: `host:port`, comma-separated"),
    _supported("client.id", TEXT, "name of the client in the brokers' logs and quotas"),
    _supported(
        "client.rack", TEXT, "reads come from a replica in this rack if the brokers allow it (KIP-392)"
    ),
    _supported(
        "client.dns.lookup",
        Choice("use_all_dns_ips", "resolve_canonical_bootstrap_servers_only"),
        "all addresses of a name are tried one after the other; or each bootstrap server is replaced by the "
        "canonical names of its addresses, as Kerberos needs behind a load balancer",
    ),
    _supported("broker.address.family", Choice("any", "v4", "v6"), "which addresses of a name are used"),
    _supported("socket.timeout.ms", Whole(10, 300_000), "how long a request may wait for its answer (10000)"),
    _supported(
        "socket.connection.setup.timeout.ms",
        Whole(1000, _LARGEST),
        "how long TCP, TLS and the login may take together (10000)",
    ),
    _supported("socket.send.buffer.bytes", Whole(0, 100_000_000), "0 = the system decides"),
    _supported("socket.receive.buffer.bytes", Whole(0, 100_000_000), "0 = the system decides"),
    _supported("socket.keepalive.enable", SWITCH, "TCP keep-alive (false)"),
    _supported("socket.nagle.disable", SWITCH, "sends small packets at once (true)"),
    _supported(
        "connections.max.idle.ms",
        Whole(0, _LARGEST),
        "a connection that was idle for longer is replaced before its next request; 0 = never (540000)",
    ),
    _supported(
        "reconnect.backoff.ms",
        Whole(0, _HOUR_MS),
        "pause after a failed connection, which doubles; without it, as long as the attempt took, at most 1.5 s",
    ),
    _supported("reconnect.backoff.max.ms", Whole(0, _HOUR_MS), "the longest such pause (10000)"),
    _supported("receive.message.max.bytes", Whole(1000, _LARGEST), "raises the limit of an answer's size"),
    _supported(
        "debug",
        Choices(*DEBUG_CONTEXTS),
        "writes the log of these contexts to standard error; see [logging in](logins.md#what-a-connection-does)",
    ),
    _supported(
        "log_level",
        Whole(0, 7),
        "lines of the client's own log, as in syslog: 3 = errors, 4 = warnings too, from 5 on all. The highest number "
        "of all clients of a process counts",
    ),
    *_ignored(
        "it configures librdkafka's inside only",
        {
            "metadata.recovery.strategy": Choice("none", "rebootstrap"),
            "metadata.recovery.rebootstrap.trigger.ms": Whole(0, _LARGEST),
            "api.version.request.timeout.ms": Whole(1, _MINUTES_5_MS),
            "socket.max.fails": Whole(0, 1_000_000),
            "broker.address.ttl": Whole(0, _DAY_MS),
            "log.connection.close": SWITCH,
            "log.thread.name": SWITCH,
            "enable.metrics.push": SWITCH,
        },
    ),
)

_TLS = (
    _supported(
        "security.protocol",
        Choice("plaintext", "ssl", "sasl_plaintext", "sasl_ssl"),
        "whether connections use TLS (`ssl`) and a login (`sasl`)",
    ),
    _supported("ssl.ca.location", TEXT, "PEM file or folder of the authorities; `probe` = the system's"),
    _supported("ssl.ca.pem", PEM, "the authorities' certificates as PEM text"),
    _supported("ssl.certificate.location", TEXT, "PEM file of the client's certificate and its chain"),
    _supported("ssl.certificate.pem", PEM, "the client's certificate and its chain as PEM text"),
    _supported("ssl.key.location", TEXT, "PEM file of the client's private key, which may be encrypted"),
    _supported("ssl.key.pem", PEM, "the client's private key as PEM text, which may be encrypted"),
    _supported("ssl.key.password", TEXT, "password of the private key"),
    _supported(
        "ssl.keystore.location",
        TEXT,
        "PKCS#12 file with the client's key and certificates; needs `pip install 'kafka-eos-source[pkcs12]'`",
    ),
    _supported("ssl.keystore.password", TEXT, "password of the PKCS#12 file"),
    _supported("ssl.cipher.suites", TEXT, "OpenSSL's list of ciphers up to TLS 1.2; see `openssl ciphers`"),
    _supported("ssl.curves.list", TEXT, "one curve, such as `X25519` or `P-256`; several need Python 3.15"),
    _supported("ssl.crl.location", TEXT, "PEM file of revoked certificates; the broker's is looked up in it"),
    _supported(
        "enable.ssl.certificate.verification", SWITCH, "whether the brokers' certificates are verified"
    ),
    _supported(
        "ssl.endpoint.identification.algorithm",
        Choice("none", "https"),
        "whether a certificate must name the broker's host (`https`); empty text means `none`, as in Java",
    ),
    *_ignored("it applies to Windows", {"ssl.ca.certificate.stores": TEXT}),
    *_refused("remove it; Python cannot set it. The system's openssl.cnf can", "ssl.sigalgs.list"),
    *_refused(
        "remove it; set kafka.ssl.key.location to a PEM file, because the client loads no OpenSSL modules",
        "ssl.providers ssl.engine.location ssl.engine.id",
    ),
)

_SIGNS = "for `grant.type=jwt-bearer`: "
_LOGIN = (
    _supported(
        "sasl.mechanisms",
        Choice(*MECHANISMS, "AWS_MSK_IAM"),
        "the login; see [logging in](logins.md)",
    ),
    _supported("sasl.username", TEXT, "user of PLAIN and SCRAM"),
    _supported("sasl.password", TEXT, "password of PLAIN and SCRAM"),
    _supported("sasl.kerberos.service.name", TEXT, "first part of the brokers' principal (kafka)"),
    _supported("sasl.kerberos.principal", TEXT, "the client's principal; default: that of the ticket cache"),
    _supported("sasl.kerberos.keytab", TEXT, "file from which tickets are got and renewed"),
    *_ignored(
        "the Kerberos library renews tickets from the keytab",
        {"sasl.kerberos.min.time.before.relogin": Whole(0, _DAY_MS)},
    ),
    *_refused(
        "set kafka.sasl.kerberos.keytab and kafka.sasl.kerberos.principal, from which tickets are renewed; or let "
        "another program keep the ticket cache fresh (KRB5CCNAME), and set neither",
        "sasl.kerberos.kinit.cmd",
    ),
    _supported(
        "sasl.oauthbearer.method",
        Choice("default", "oidc"),
        "`oidc` gets tokens from a service (KIP-768); the default if there is a URL",
    ),
    _supported(
        "sasl.oauthbearer.grant.type",
        Choice("client_credentials", "urn:ietf:params:oauth:grant-type:jwt-bearer"),
        "how a client proves to the service who it is",
    ),
    _supported(
        "sasl.oauthbearer.token.endpoint.url", TEXT, "address of the service, or `file:///path` of a token"
    ),
    _supported("sasl.oauthbearer.client.id", TEXT, "the client's id there"),
    _supported("sasl.oauthbearer.client.secret", TEXT, "the client's secret there"),
    _supported("sasl.oauthbearer.scope", TEXT, "scope of the tokens"),
    _supported("sasl.oauthbearer.extensions", TEXT, "`name=value` pairs for the broker (KIP-342)"),
    _supported(
        "sasl.oauthbearer.assertion.algorithm",
        Choice("RS256", "ES256"),
        _SIGNS + "algorithm of the signature",
    ),
    _supported("sasl.oauthbearer.assertion.private.key.file", TEXT, _SIGNS + "PEM file of the key"),
    _supported("sasl.oauthbearer.assertion.private.key.pem", PEM, _SIGNS + "the key as PEM text"),
    _supported("sasl.oauthbearer.assertion.private.key.passphrase", TEXT, _SIGNS + "password of the key"),
    _supported(
        "sasl.oauthbearer.assertion.file", TEXT, _SIGNS + "file with a signed assertion, in place of a key"
    ),
    _supported("sasl.oauthbearer.assertion.claim.aud", TEXT, _SIGNS + "audience"),
    _supported("sasl.oauthbearer.assertion.claim.exp.seconds", Whole(1, _LARGEST), _SIGNS + "lifetime (300)"),
    _supported("sasl.oauthbearer.assertion.claim.iss", TEXT, _SIGNS + "issuer"),
    _supported("sasl.oauthbearer.assertion.claim.jti.include", SWITCH, _SIGNS + "whether it has an id"),
    _supported(
        "sasl.oauthbearer.assertion.claim.nbf.seconds",
        Whole(0, _LARGEST),
        _SIGNS + "how long it is valid before (60)",
    ),
    _supported("sasl.oauthbearer.assertion.claim.sub", TEXT, _SIGNS + "subject"),
    _supported("sasl.oauthbearer.assertion.jwt.template.file", TEXT, _SIGNS + "JSON file with other claims"),
    _supported("https.ca.location", TEXT, "PEM file of the authorities of the service"),
    _supported("https.ca.pem", PEM, "their certificates as PEM text"),
    _supported(
        "enable.sasl.oauthbearer.unsecure.jwt", SWITCH, "tokens without a signature, for tests (false)"
    ),
    _supported(
        "sasl.oauthbearer.config",
        TEXT,
        "claims of such tokens (`principal=alice lifeSeconds=600`), or a text for the token provider",
    ),
    _supported(
        "sasl.oauthbearer.metadata.authentication.type",
        Choice("none", "azure_imds"),
        "whether Azure gives tokens to its virtual machine",
        instead="set kafka.sasl.mechanism=AWS_MSK_IAM",
    ),
    *_ignored("the broker takes the principal from the token", {"sasl.oauthbearer.sub.claim.name": TEXT}),
)

#: Properties of logins that librdkafka does not have.
_OTHER_LOGIN = (
    _supported(
        "sasl.oauthbearer.token.provider",
        TEXT,
        "a Python function that gives tokens: `module:function`; see [logging in](logins.md)",
    ),
    _supported(
        "sasl.oauthbearer.allow.http",
        SWITCH,
        "whether the login may be sent to the service over plain http; to this host it always may (false)",
    ),
    _supported(
        "sasl.jaas.config", TEXT, "becomes the properties of PLAIN, SCRAM, OAUTHBEARER, GSSAPI or AWS's login"
    ),
    _supported(
        "sasl.login.callback.handler.class",
        TEXT,
        "those of Kafka's OAuth client and of AWS are translated, others refused",
    ),
    _supported("sasl.client.callback.handler.class", TEXT, "that of AWS is translated, others are refused"),
)

_READ = (
    _supported("fetch.min.bytes", Whole(0, _LARGEST), "the broker waits for so much (1)"),
    _supported("fetch.wait.max.ms", Whole(0, _MINUTES_5_MS), "how long the broker waits for that (10)"),
    _supported("fetch.max.bytes", Whole(0, 2_147_483_135), "most bytes of one answer"),
    _supported("max.partition.fetch.bytes", Whole(1, _BILLION), "most bytes of a partition in one answer"),
    _supported(
        "metadata.max.age.ms",
        Whole(1, _DAY_MS),
        "how long a partition is read from a replica in the client's rack, until its leader is asked again (300000)",
    ),
    _supported("check.crcs", SWITCH, "whether the checksums of record batches are verified (true)"),
    _supported(
        "topic.metadata.propagation.max.ms",
        Whole(0, _HOUR_MS),
        "how long brokers may not know a topic that exists",
    ),
    *_ignored(
        "the client reads ahead only what the task reads next",
        {
            "queued.min.messages": Whole(1, 10_000_000),
            "queued.max.messages.kbytes": Whole(1, 2_097_151),
            "fetch.queue.backoff.ms": Whole(0, _MINUTES_5_MS),
            "fetch.error.backoff.ms": Whole(0, _MINUTES_5_MS),
            "consume.callback.max.messages": Whole(0, 1_000_000),
        },
    ),
    *_ignored(
        "tasks read assigned ranges and join no group, as in Spark",
        {
            "group.instance.id": TEXT,
            "group.protocol": Choice("classic", "consumer"),
            "group.protocol.type": TEXT,
            "group.remote.assignor": TEXT,
            "partition.assignment.strategy": TEXT,
            "session.timeout.ms": Whole(1, _HOUR_MS),
            "heartbeat.interval.ms": Whole(1, _HOUR_MS),
            "coordinator.query.interval.ms": Whole(1, _HOUR_MS),
            "max.poll.interval.ms": Whole(1, _DAY_MS),
            "share.acknowledgement.mode": TEXT,
        },
    ),
    *_ignored(
        "offsets are committed with the batch",
        {
            "enable.auto.offset.store": SWITCH,
            "enable.partition.eof": SWITCH,
            "offset.store.method": Choice("none", "file", "broker"),
            "offset.store.path": TEXT,
            "offset.store.sync.interval.ms": Whole(-1, _DAY_MS),
        },
    ),
)

_WRITE = (
    _supported("transaction.timeout.ms", Whole(1000, _LARGEST), "when brokers abort a transaction (60000)"),
    _supported(
        "compression.type", Choice("none", "gzip", "snappy", "lz4", "zstd"), "codec of record batches"
    ),
    _supported("compression.level", Whole(-1, 12), "level of the codec; -1 = its default"),
    _supported("batch.size", Whole(1, _LARGEST), "most bytes of a record batch (1000000)"),
    _supported("message.max.bytes", Whole(1000, _BILLION), "a larger record is refused (1000000)"),
    _supported(
        "partitioner",
        Choice(
            "murmur2_random", "murmur2", "consistent_random", "consistent", "fnv1a_random", "fnv1a", "random"
        ),
        "where records go whose partition no column names; the default, `murmur2_random`, places keys as Java's clients "
        "do, and rows with a null key anywhere",
    ),
    _supported(
        "acks",
        Whole(-1, 1, all=-1),
        "whose acknowledgements a write with `at_least_once` waits for: those of all in-sync replicas (`all`), or of the "
        "leader (`1`). `0` is refused: a lost record could not be reported. With `exactly_once`, it is `all`",
        instead="set all or 1, because brokers refuse other numbers",
    ),
    _supported(
        "enable.idempotence",
        SWITCH,
        "whether brokers recognise a batch of `at_least_once` that is sent again; true unless `acks` is not `all`. With "
        "`exactly_once`, it is true",
    ),
    *_ignored(
        "records are sent in order, with up to 5 requests in flight",
        {
            "enable.gapless.guarantee": SWITCH,
            "max.in.flight.requests.per.connection": Whole(1, 1_000_000),
            "queuing.strategy": Choice("fifo", "lifo"),
        },
    ),
    *_ignored(
        "a request is repeated until the batch's deadline (`commitTimeoutMs`)",
        {
            "retries": Whole(0, _LARGEST),
            "message.timeout.ms": Whole(0, _LARGEST),
            "retry.backoff.ms": Whole(1, _MINUTES_5_MS),
            "retry.backoff.max.ms": Whole(1, _MINUTES_5_MS),
        },
    ),
    *_ignored(
        "a batch of rows is encoded and sent as a whole, without queues",
        {
            "linger.ms": Number(0, 900_000),
            "queue.buffering.max.messages": Whole(0, _LARGEST),
            "queue.buffering.max.kbytes": Whole(1, _LARGEST),
            "queue.buffering.backpressure.threshold": Whole(1, 1_000_000),
            "batch.num.messages": Whole(1, 1_000_000),
            "sticky.partitioning.linger.ms": Number(0, 900_000),
            "message.copy.max.bytes": Whole(0, _BILLION),
            "delivery.report.only.error": SWITCH,
            "produce.offset.report": SWITCH,
        },
    ),
)

_GENERAL = (
    *_ignored(
        "metadata is asked for in each micro-batch, and when a broker refuses a request",
        {
            "topic.metadata.refresh.interval.ms": Whole(-1, _HOUR_MS),
            "topic.metadata.refresh.fast.interval.ms": Whole(1, 60_000),
            "topic.metadata.refresh.fast.cnt": Whole(0, 1000),
            "topic.metadata.refresh.sparse": SWITCH,
            "metadata.request.timeout.ms": Whole(10, 900_000),
        },
    ),
    *_ignored(
        "it configures librdkafka's inside only",
        {
            "api.version.request": SWITCH,
            "api.version.fallback.ms": Whole(0, 604_800_000),
            "broker.version.fallback": TEXT,
            "enable.random.seed": SWITCH,
            "enable.sparse.connections": SWITCH,
            "enable_sasl_queue": SWITCH,
            "enabled_events": Whole(0, _LARGEST),
            "internal.termination.signal": Whole(0, 128),
            "log.queue": SWITCH,
            "reconnect.backoff.jitter.ms": Whole(0, _HOUR_MS),
            "socket.blocking.max.ms": Whole(1, 60_000),
            "statistics.interval.ms": Whole(0, _DAY_MS),
            "topic.blacklist": TEXT,
        },
    ),
    _supported(
        "allow.auto.create.topics",
        SWITCH,
        "whether a write with `at_least_once` lets brokers create its topic (false)",
    ),
    *_refused("remove it; the client loads no plugins", "plugin.library.paths interceptors"),
    *_refused(
        "remove it; an option cannot be a function",
        "error_cb throttle_cb stats_cb log_cb socket_cb "
        "background_event_cb connect_cb closesocket_cb open_cb resolve_cb opaque default_topic_conf "
        "rebalance_cb consume_cb offset_commit_cb dr_cb dr_msg_cb partitioner_cb msg_order_cmp "
        "oauthbearer_token_refresh_cb ssl.certificate.verify_cb ssl_engine_callback_data "
        "ut_handle_ProduceResponse",
    ),
    *_refused("set kafka.ssl.key.pem", "ssl_key"),
    *_refused("set kafka.ssl.certificate.pem", "ssl_certificate"),
    *_refused("set kafka.ssl.ca.pem", "ssl_ca"),
    *_refused(
        "remove it; kafka-eos sets it itself", "client.software.name client.software.version builtin.features"
    ),
    *_refused("start a broker with kafka_eos_source.embedded", "test.mock.num.brokers test.mock.broker.rtt"),
    *_refused("set the options startingOffsets and failOnDataLoss", "auto.offset.reset"),
    *_refused(
        "remove it; offsets are committed with the batch",
        "enable.auto.commit auto.commit.enable auto.commit.interval.ms",
    ),
    *_refused("set the options maxOffsetsPerTrigger and maxRecordsPerPartition", "max.poll.records"),
    *_refused("set the option application.id", "transactional.id"),
    *_ignored(
        "it is an option of a source or a sink; see [options](options.md)",
        {"group.id": TEXT, "isolation.level": Choice("read_uncommitted", "read_committed")},
    ),
)

_ALIASES = _renamed(
    {
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
        # a broker's answer to a producer has the same limit as all others, as in Java
        "request.timeout.ms": "socket.timeout.ms",
    }
)

_JAVA_ALIASES = _renamed(
    {
        "fetch.max.wait.ms": "fetch.wait.max.ms",
        "receive.buffer.bytes": "socket.receive.buffer.bytes",
        "send.buffer.bytes": "socket.send.buffer.bytes",
        "max.request.size": "message.max.bytes",
        "ssl.truststore.certificates": "ssl.ca.pem",
        "ssl.keystore.certificate.chain": "ssl.certificate.pem",
        "ssl.keystore.key": "ssl.key.pem",
        "sasl.oauthbearer.assertion.template.file": "sasl.oauthbearer.assertion.jwt.template.file",
    }
)

_JAVA_CONNECTION = (
    _supported(
        "ssl.enabled.protocols",
        Choices("TLSv1.2", "TLSv1.3"),
        "versions of TLS, for records",
        instead="name TLSv1.2 or TLSv1.3; older versions are not safe",
    ),
    _supported(
        "ssl.protocol",
        Choice("TLS", "TLSv1.2", "TLSv1.3"),
        "the newest version of TLS, for records",
        instead="set TLSv1.2 or TLSv1.3; older versions are not safe",
    ),
    _supported(
        "ssl.truststore.location",
        TEXT,
        "becomes `ssl.ca.location` with `ssl.truststore.type=PEM`, else refused",
    ),
    _supported(
        "ssl.truststore.type", TEXT, "`PEM`; for a store of another type, an error shows how to convert it"
    ),
    _supported(
        "ssl.keystore.type", TEXT, "`PKCS12`, or `PEM` for a file with key and certificates; `JKS` is refused"
    ),
    *_ignored(
        "`socket.connection.setup.timeout.ms` is the limit", {"socket.connection.setup.timeout.max.ms": TEXT}
    ),
)

_METRICS = "remove it; the metrics of this package are described in docs/metrics.md"
_RENEWED = "remove it; the client renews logins itself"
_OPENSSL = "remove it, or set kafka.ssl.cipher.suites; the client uses OpenSSL"
_BROKERS_SIDE = "remove it; the brokers validate tokens"
_KERBEROS = "remove it; the Kerberos library renews tickets"

_JAVA = (
    *_ignored("metadata is asked for in each micro-batch", {"metadata.max.idle.ms": TEXT}),
    *_ignored(
        "kafka-eos does not use it", {"share.acquire.mode": TEXT, "transaction.two.phase.commit.enable": TEXT}
    ),
    *_refused(
        "remove it, and cast the column 'key' to string or binary; keys are written as bytes",
        "key.serializer",
    ),
    *_refused(
        "remove it, and cast the column 'value' to string or binary; values are written as bytes",
        "value.serializer",
    ),
    *_refused(
        "remove it, and cast the column 'key' after load(); keys are read as bytes", "key.deserializer"
    ),
    *_refused(
        "remove it, and cast the column 'value' after load(); values are read as bytes", "value.deserializer"
    ),
    *_refused(
        "remove it, and transform the DataFrame; the client has no interceptors", "interceptor.classes"
    ),
    *_refused(
        "set kafka.partitioner (the default, murmur2_random, places keys as Java does)", "partitioner.class"
    ),
    *_refused("remove it, and leave the column 'key' null", "partitioner.ignore.keys"),
    *_refused(
        "remove it; rows with a null key go to any partition",
        "partitioner.adaptive.partitioning.enable partitioner.availability.timeout.ms partitioner.rack.aware",
    ),
    *_refused(
        "set kafka.compression.level", "compression.gzip.level compression.lz4.level compression.zstd.level"
    ),
    *_refused(
        _METRICS,
        "metric.reporters metrics.num.samples metrics.recording.level metrics.sample.window.ms "
        "auto.include.jmx.reporter",
    ),
    *_refused(
        "set kafka.sasl.oauthbearer.method=oidc and its properties",
        "sasl.oauthbearer.jwt.retriever.class",
    ),
    *_refused("set kafka.sasl.mechanism and its properties", "sasl.login.class"),
    *_refused(
        _RENEWED,
        "sasl.login.connect.timeout.ms sasl.login.read.timeout.ms sasl.login.refresh.buffer.seconds "
        "sasl.login.refresh.min.period.seconds sasl.login.refresh.window.factor "
        "sasl.login.refresh.window.jitter sasl.login.retry.backoff.max.ms sasl.login.retry.backoff.ms",
    ),
    *_refused(_KERBEROS, "sasl.kerberos.ticket.renew.jitter sasl.kerberos.ticket.renew.window.factor"),
    *_refused(
        _BROKERS_SIDE,
        "sasl.oauthbearer.clock.skew.seconds sasl.oauthbearer.expected.audience "
        "sasl.oauthbearer.expected.issuer sasl.oauthbearer.jwks.endpoint.refresh.ms "
        "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms sasl.oauthbearer.jwks.endpoint.retry.backoff.ms "
        "sasl.oauthbearer.jwks.endpoint.url sasl.oauthbearer.jwt.validator.class "
        "sasl.oauthbearer.scope.claim.name",
    ),
    *_refused(
        "remove it; the client sends id and secret as they are",
        "sasl.oauthbearer.header.urlencode",
    ),
    *_refused(
        "set kafka.ssl.ca.location to a PEM file, which has no password: keytool -exportcert -rfc -keystore "
        "STORE -alias ALIAS -file ca.pem",
        "ssl.truststore.password",
    ),
    *_refused(
        _OPENSSL,
        "ssl.provider ssl.secure.random.implementation ssl.engine.factory.class ssl.keymanager.algorithm "
        "ssl.trustmanager.algorithm",
    ),
    *_refused("remove it; a batch is written from files, and needs no memory for all of it", "buffer.memory"),
    *_refused("set the option commitTimeoutMs", "max.block.ms"),
    *_refused("set kafka.socket.timeout.ms, or fetchOffset.numRetries", "default.api.timeout.ms"),
    *_refused("remove it; a pattern never matches internal topics", "exclude.internal.topics"),
    *_refused("remove it", "security.providers internal.throw.on.fetch.stable.offset.unsupported"),
    *_refused("pass secrets as docs/secrets.md describes", "config.providers"),
    *_refused("set kafka.bootstrap.servers", "bootstrap.controllers"),
)

_SECTIONS: Mapping[str, tuple[Property, ...]] = {
    "Connection": (*_of_connection(_CONNECTION),),
    "TLS": (*_of_connection(_TLS), *_of_connection(_JAVA_CONNECTION)),
    "Login": (*_of_connection(_LOGIN), *_of_connection(_OTHER_LOGIN)),
    "Reading": _READ,
    "Writing": _WRITE,
    "Other properties": _GENERAL,
    "Other names": (*_ALIASES, *_JAVA_ALIASES),
    "Properties of Java's clients": _JAVA,
}

_BY_NAME = {each.name: each for part in _SECTIONS.values() for each in part}
#: All properties by name. Another name describes the connection if the property does that it becomes.
PROPERTIES: Mapping[str, Property] = {
    name: replace(each, connection=_BY_NAME[each.note].connection) if each.fate is Fate.RENAMED else each
    for name, each in _BY_NAME.items()
}


# -- use ---------------------------------------------------------------------------------------------


def unknown(name: str) -> InvalidOptionError:
    """Returns the error for a property that nobody has. It does not show the value, which may be a password."""
    near = difflib.get_close_matches(name, PROPERTIES, n=2, cutoff=0.75)
    hint = f" Did you mean {' or '.join(repr('kafka.' + each) for each in near)}?" if near else ""
    return InvalidOptionError(
        f"unknown option 'kafka.{name}': neither librdkafka nor Java's clients have such a property.{hint}",
        fix="correct or remove the option; docs/kafka-properties.md lists all properties.",
    )


def refused(name: str, value: str, why: str, instead: str) -> InvalidOptionError:
    """Returns the error for an option that cannot be used."""
    stated = "a secret value" if is_secret(name) else f"value {shown(name, value)!r}"
    return InvalidOptionError(f"option 'kafka.{name}' ({stated}) cannot be used: {why}.", fix=f"{instead}.")


def canonical(name: str, value: str, stated_name: str) -> str:
    """Returns the value of a property in the form that clients read.

    Args:
        name: of the property, as in the table.
        value: the user's value.
        stated_name: the name that the user wrote.

    Raises:
        InvalidOptionError: if the property does not have such values.
    """
    known = PROPERTIES[name]
    try:
        return known.kind.canonical(value)
    except ValueError as error:
        why = f" ({error})" if type(known.kind) in (Kind, Pem) else ""
        instead = known.instead and f", or {known.instead}"
        # not a cause: the text of an error for a number shows the value
        raise InvalidOptionError(
            f"option 'kafka.{stated_name}' has the value {shown(stated_name, value)!r}; expected "
            f"{known.kind.expected}{why}.",
            fix=f"correct or remove the option{instead}.",
        ) from None


def documentation() -> str:
    """Returns the text of ``docs/kafka-properties.md``."""
    lines = [
        "# Kafka properties",
        "",
        "For people who have options `kafka.*` from Spark, Java or librdkafka and want to know what each does.",
        "",
        "`./dev docs` generates this page from `kafka_eos_source/kafka/properties.py`. Do not edit it. It lists "
        "every property of librdkafka and of Java's producers and consumers. Set one as the option "
        "`kafka.<name>`. A query checks all names and values when it starts.",
        "",
        "kafka-eos has a client of its own. Requests for administration, such as for the topics of a pattern, "
        "obey the properties of connection, TLS and login in the first three sections.",
        "",
        "- *no effect*: the option is accepted, and one line in the log says that it has no effect.",
        "- *refused*: the query does not start; the table says what to do instead.",
    ]
    for title, rows in _SECTIONS.items():
        lines += ["", f"## {title}", "", "| property | value | |", "|---|---|---|", *_rows(rows)]
    return "\n".join([*lines, ""])


def _rows(properties: Iterable[Property]) -> Iterator[str]:
    """Yields one row for each property, but only one for those with the same reason of having no effect."""
    merged: dict[tuple[str, str], list[str]] = {}
    for each in properties:
        kind = each.kind.expected if each.fate is Fate.SUPPORTED else ""
        merged.setdefault((kind, _told(each)), []).append(f"`{each.name}`")
    for (kind, told), names in merged.items():
        yield f"| {', '.join(names)} | {kind} | {told} |"


def _told(each: Property) -> str:
    if each.fate is Fate.SUPPORTED:
        return each.note + (f". For other values: {each.instead}" if each.instead else "")
    if each.fate is Fate.RENAMED:
        return f"becomes `{each.note}`"
    return f"*{each.fate.value}*: {each.note}"
