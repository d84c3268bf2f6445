"""Which query is meant, and how its cluster is reached: the options of its sink, given on a command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.stage.paths import location_of_query

_PREFIX = "kafka."
_BOOTSTRAP = "kafka.bootstrap.servers"
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


@dataclass(frozen=True)
class Target:
    """One query, as the options of its sink name it.

    Attributes:
        checkpoint: option ``checkpointLocation``; None = not known, or a batch write.
        application_id: option ``application.id``; None = as the checkpoint says.
        group_id: option ``kafka.group.id``; None = the ``application.id``.
        anchor_topic: option ``anchor.topic``, else ``topic``; None = as Kafka's tokens show.
        staging: option ``staging.location``; None = in the checkpoint.
        source_cluster: option ``source.cluster``.
        kafka: librdkafka properties; None = no broker is to be asked. May hold passwords.
    """

    checkpoint: str | None = None
    application_id: str | None = None
    group_id: str | None = None
    anchor_topic: str | None = None
    staging: str | None = None
    source_cluster: str = "auto"
    kafka: Mapping[str, str] | None = field(default=None, repr=False)

    @property
    def staging_location(self) -> str | None:
        """Where the rows are staged, as far as it is known."""
        return self.staging if self.checkpoint is None else location_of_query(self.checkpoint, self.staging)


def target(sink: Mapping[str, str | None], kafka: Mapping[str, str]) -> Target:
    """Judges options by the code that judges them in a query.

    Args:
        sink: options of the sink, by name; None = not given.
        kafka: ``kafka.*`` options, prefix included; empty = no broker is to be asked.

    Raises:
        InvalidOptionError: as the query would raise it.
    """
    given = {name: value for name, value in sink.items() if value is not None}
    if not kafka:
        application_id = given.get("application.id")
        return Target(
            checkpoint=given.get("checkpointLocation"),
            application_id=application_id and values.application_id("application.id", application_id),
            staging=given.get("staging.location"),
        )
    options = parse_write({**given, **kafka}, streaming=True)
    return Target(
        checkpoint=options.checkpoint_location,
        application_id=options.application_id,
        group_id=options.group_id,
        anchor_topic=options.anchor_topic or options.topic,
        staging=options.staging_location,
        source_cluster=options.source_cluster,
        kafka=options.kafka,
    )


def kafka_options(
    bootstrap_servers: str | None, stated: Sequence[str], properties: str | None
) -> dict[str, str]:
    """The ``kafka.*`` options of a command line. What is stated wins over the file.

    Args:
        bootstrap_servers: of ``--bootstrap-servers``.
        stated: ``KEY=VALUE`` of every ``--kafka``.
        properties: text of the file of ``--kafka-properties``.

    Raises:
        InvalidOptionError: one is no ``KEY=VALUE``, or there are options and no servers.
    """
    found = dict(parse_properties(properties or ""))
    for each in stated:
        name, separator, value = each.partition("=")
        if not separator or not name.strip():
            # what stands there may be a password: it is not shown
            raise InvalidOptionError(
                "an option --kafka has no '='; expected KEY=VALUE, such as --kafka security.protocol=SSL.",
                fix="correct it; secrets belong into the file of --kafka-properties.",
            )
        found[_prefixed(name)] = value.strip()
    if bootstrap_servers is not None:
        found[_BOOTSTRAP] = bootstrap_servers
    return found


def parse_properties(text: str) -> Iterator[tuple[str, str]]:
    """A Java properties file, such as Kafka's tools take, as ``kafka.*`` options.

    Comments, continued lines and escapes are Java's (``Properties.load``). Names may have the prefix already.
    """
    for name, value in properties(text):
        yield _prefixed(name), value


def properties(text: str) -> Iterator[tuple[str, str]]:
    """A Java properties file, its names as they are."""
    for line in _logical_lines(text):
        found = re.match(r"((?:\\.|[^ \t\f:=\\])*)[ \t\f]*[:=]?[ \t\f]*(.*)", line, re.DOTALL)
        assert found is not None, "the pattern matches anything"
        yield _unescaped(found[1]), _unescaped(found[2]).rstrip()


def _logical_lines(text: str) -> Iterator[str]:
    logical = ""
    for line in re.split(r"\r\n|\r|\n", text):
        stripped = line.lstrip(" \t\f")
        if not logical and (not stripped or stripped[0] in "#!"):
            continue
        logical += stripped
        if (len(logical) - len(logical.rstrip("\\"))) % 2:  # an odd number of backslashes: it goes on
            logical = logical[:-1]
            continue
        yield logical
        logical = ""
    if logical:
        yield logical


def _unescaped(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        if found[1] is not None:
            return chr(int(found[1], 16))
        return _LETTERS.get(found[2], found[2])

    units = re.sub(r"\\(?:u([0-9A-Fa-f]{4})|(.))", plain, text, flags=re.DOTALL)
    # Java's \u is a unit of UTF-16: two of them may be one character
    return units.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _prefixed(name: str) -> str:
    name = name.strip()
    return name if name.startswith(_PREFIX) else _PREFIX + name
