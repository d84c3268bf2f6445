"""The query and the cluster that a command line names, from the options of the query's sink."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.stage.files import location_of_query

_PREFIX = "kafka."
_BOOTSTRAP = "kafka.bootstrap.servers"
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


@dataclass(frozen=True)
class Target:
    """One query, described by the options of its sink.

    Attributes:
        checkpoint: option ``checkpointLocation``; None = not set, or a batch write.
        application_id: option ``application.id``; None = take it from the checkpoint.
        group_id: option ``kafka.group.id``; None = the default (`identity.group_of`).
        anchor_topic: option ``anchor.topic``, else ``topic``; None = derive it from the tokens in Kafka.
        staging: option ``staging.location``; None = the default folder in the checkpoint.
        source_cluster: option ``source.cluster``.
        kafka: librdkafka properties; None = do not contact Kafka. May contain passwords.
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
        """Folder with the query's staged rows; None if neither folder nor checkpoint is known."""
        return self.staging if self.checkpoint is None else location_of_query(self.checkpoint, self.staging)


def target_from_options(sink: Mapping[str, str | None], kafka: Mapping[str, str]) -> Target:
    """Validates options with the query's own parser and returns the target they name.

    Args:
        sink: options of the sink by name; None = not set.
        kafka: ``kafka.*`` options, including the prefix; empty = do not contact Kafka.

    Raises:
        InvalidOptionError: if the query itself would refuse an option.
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
    bootstrap_servers: str | None, pairs: Sequence[str], properties: str | None
) -> dict[str, str]:
    """Returns the ``kafka.*`` options of a command line. Command-line values override the file.

    Args:
        bootstrap_servers: value of ``--bootstrap-servers``.
        pairs: the ``KEY=VALUE`` of each ``--kafka``.
        properties: text of the file that ``--kafka-properties`` names.

    Raises:
        InvalidOptionError: if a pair has no ``=``.
    """
    found = dict(parse_properties(properties or ""))
    for each in pairs:
        name, separator, value = each.partition("=")
        if not separator or not name.strip():
            # The message does not show the value, because it may be a password.
            raise InvalidOptionError(
                "a value of --kafka has no '='; expected KEY=VALUE, for example security.protocol=SSL.",
                fix="correct it; put secrets into a file for --kafka-properties.",
            )
        found[_prefixed(name)] = value.strip()
    if bootstrap_servers is not None:
        found[_BOOTSTRAP] = bootstrap_servers
    return found


def parse_properties(text: str) -> Iterator[tuple[str, str]]:
    """Reads a Java properties file, as Kafka's tools use it, as ``kafka.*`` options.

    Comments, continuation lines and escapes follow Java's ``Properties.load``. Names that already have the
    prefix keep it.
    """
    for name, value in java_properties(text):
        yield _prefixed(name), value


def java_properties(text: str) -> Iterator[tuple[str, str]]:
    """Reads a Java properties file and yields names and values unchanged."""
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
        if (len(logical) - len(logical.rstrip("\\"))) % 2:  # an odd number of backslashes continues the line
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
    # A \u escape in Java is one UTF-16 unit; two of them may form one character.
    return units.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _prefixed(name: str) -> str:
    name = name.strip()
    return name if name.startswith(_PREFIX) else _PREFIX + name
