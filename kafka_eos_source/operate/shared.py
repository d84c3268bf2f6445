"""What all commands share: options and what they name, the exit codes, and the style of the output.

The command line imports this module whenever it starts, so it imports parsers and Kafka's client only when a
command runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime.commands import BROKERS_VARIABLE, DEFAULT_BROKERS, brokers_of_environment
from kafka_eos_source.secrets import is_secret, url_secrets, urls_in

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kafka_eos_source.kafka.admin import ClusterReader
    from kafka_eos_source.runtime.deadline import Deadline

#: Prefix of Kafka's internal topics. One of them carries the tokens of a sink without a topic; the commands
#: do not show its log.
INTERNAL_PREFIX = "__"
#: Prefix of the transactional ids and default groups of ``kafka-eos dead-letters replay``.
REPLAY_PREFIX = "kafka-eos-replay-"

F = TypeVar("F", bound=Callable[..., Any])

#: The options of a query, under the names of the sink's options.
CHECKPOINT = click.option("--checkpoint", metavar="URI", help="The query's option checkpointLocation.")
#: The query that a command works on: its first argument.
OPTIONAL_QUERY = click.argument("application_id", metavar="[QUERY]", required=False)
REQUIRED_QUERY = click.argument("application_id", metavar="QUERY")
ANCHOR_TOPIC = click.option(
    "--topic", metavar="TOPIC", help="The sink's option anchor.topic; if that is not set, its topic."
)
SOURCE_CLUSTER = click.option("--source-cluster", metavar="WHICH", help="The sink's option source.cluster.")
STAGING = click.option("--staging", metavar="URI", help="The sink's option staging.location.")
SOURCE_TOPICS = click.option(
    "--source-topic",
    "source_topics",
    metavar="TOPIC",
    multiple=True,
    help="A topic that the query reads, if its checkpoint does not exist yet; may be repeated.",
)
TOKEN_TOPIC = click.option("--token-topic", metavar="TOPIC", help="The sink's option token.topic.")
DEAD_LETTER_TOPIC = click.option(
    "--dead-letter-topic", metavar="TOPIC", help="The sink's option deadLetter.topic."
)

CONNECTION = (
    click.option(
        "--bootstrap-servers",
        metavar="HOST:PORT,…",
        help=f"Kafka brokers, as in the option kafka.bootstrap.servers. Default: {BROKERS_VARIABLE}, else "
        f"{DEFAULT_BROKERS}.",
    ),
    click.option(
        "--kafka",
        "pairs",
        multiple=True,
        metavar="KEY=VALUE",
        help="The query's option kafka.KEY; may be repeated. Put passwords into --kafka-properties, because "
        "other users of this machine can read command lines.",
    ),
    click.option(
        "--kafka-properties",
        "properties",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with Kafka client properties, in the format of --command-config of Kafka's tools.",
    ),
    click.option(
        "--timeout",
        metavar="DURATION",
        default="30s",
        show_default=True,
        help="How long to wait for answers from the brokers, for example 500ms or 2m.",
    ),
)
REGISTRY = (
    click.option("--registry", metavar="URL,…", help="A schema registry, or glue://NAME."),
    click.option(
        "--registry-option",
        "registry_pairs",
        multiple=True,
        metavar="KEY=VALUE",
        help="Property of its client, such as basic.auth.user.info.env=VARIABLE; may be repeated. With .env "
        "after its name, the value is the name of an environment variable.",
    ),
)
YES = click.option(
    "--yes", is_flag=True, help="Make the change. Without it, the command only shows what it would do."
)


#: How to give a secret to an option in another way.
_SAFER = {
    "--kafka": "write it into a file with mode 0600, and name the file with --kafka-properties",
    "--registry": "leave it out of the URL, and add --registry-option basic.auth.user.info.env=VARIABLE",
    "--registry-option": "add .env to the property's name, and give the name of an environment variable",
}
_SAFER_ELSEWHERE = "put it where the library for this URL looks for it, such as environment variables"


def warn_of_secrets(args: Sequence[str]) -> None:
    """Prints a warning if a command line contains secrets, because other users of the machine can read it.

    Args:
        args: all arguments of the command line.
    """
    found = []
    for option, following in zip(args, (*args[1:], ""), strict=True):
        name, equals, value = option.partition("=")
        if name.startswith("--") and name not in found and _is_secret(value if equals else following):
            found.append(name)
    for name in found:
        click.echo(
            f"Warning: other users of this machine can read the secret in {name}. Instead, "
            f"{_SAFER.get(name, _SAFER_ELSEWHERE)}.",
            err=True,
        )


def _is_secret(value: str) -> bool:
    """Returns whether an argument is NAME=VALUE with a secret, or contains a URL with one."""
    name, equals, rest = value.partition("=")
    if equals and "://" not in name:
        if is_secret(name) and rest:
            return True
        value = rest
    return "://" in value and any(url_secrets(each, only_named=True) for each in urls_in(value))


def parse_pairs(texts: Iterable[str], option: str, expected: str = "KEY=VALUE") -> dict[str, str]:
    """Returns the values of an option that is repeated, by their names.

    Args:
        texts: what the user gave, such as ``("a=1", "b=2")``.
        option: name of the option, for the error.
        expected: form of each text, for the error.

    Raises:
        click.BadParameter: if a text has no "=".
    """
    found = {}
    for each in texts:
        name, separator, value = each.partition("=")
        if not separator:
            # the text is not shown, because it may be a secret
            raise click.BadParameter(f"a value has no '='; expected {expected}", param_hint=option)
        found[name.strip()] = value.strip()
    return found


def with_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Returns a decorator that adds the options to a command, in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def deadline_of(timeout: str) -> Deadline:
    """Returns the deadline that the option ``--timeout`` sets.

    Raises:
        InvalidOptionError: if the text is not a duration.
    """
    from kafka_eos_source.option_values import duration_ms
    from kafka_eos_source.runtime.deadline import Deadline

    return Deadline.after_ms(duration_ms("--timeout", timeout))


def target_of(options: dict[str, Any], *, needs_kafka: bool = True) -> Target:
    """Returns the query and the cluster that the options of a command name.

    Args:
        options: values by parameter name; those of `CONNECTION` are required.
        needs_kafka: whether the command asks Kafka in any case: then `DEFAULT_BROKERS` are used if nothing
            names brokers, and standard error says so. Otherwise the target has no cluster then.

    Raises:
        InvalidOptionError: if the query would refuse one of them.
    """
    kafka = _connection(options)
    if _BOOTSTRAP not in kafka and needs_kafka:
        click.echo(
            f"No brokers are named: asking {DEFAULT_BROKERS}. Others: --bootstrap-servers, or the variable "
            f"{BROKERS_VARIABLE}.",
            err=True,
        )
        kafka[_BOOTSTRAP] = DEFAULT_BROKERS
    return _target(options, kafka)


def kafka_of(options: dict[str, Any]) -> dict[str, str]:
    """Returns the librdkafka properties of the cluster that a command about topics asks.

    Args:
        options: values by parameter name; those of `CONNECTION` are required.

    Raises:
        InvalidOptionError: if a query would refuse one of them.
    """
    return require_brokers(_target(options, {_BOOTSTRAP: DEFAULT_BROKERS, **_connection(options)}))


def _connection(options: dict[str, Any]) -> dict[str, str]:
    """Returns the ``kafka.*`` options of a command, with brokers if they or the variable name any."""
    file = options["properties"]
    properties = file.read_text(encoding="utf-8") if file is not None else None
    found = kafka_options(options["bootstrap_servers"], options["pairs"], properties)
    named = brokers_of_environment()
    return found if _BOOTSTRAP in found or named is None else {**found, _BOOTSTRAP: named}


def _target(options: dict[str, Any], kafka: dict[str, str]) -> Target:
    if kafka:
        # errors are messages; what librdkafka logs would hide them
        kafka.setdefault("kafka.log_level", "0")
    sink = {
        "checkpointLocation": options.get("checkpoint"),
        "application.id": options.get("application_id"),
        "topic": options.get("topic"),
        "staging.location": options.get("staging"),
        "source.cluster": options.get("source_cluster"),
    }
    return target_from_options(sink, kafka)


def registry_of(url: str | None, pairs: Iterable[str]) -> Mapping[str, str] | None:
    """Returns the options of the schema registry that `REGISTRY` names; None if none is named."""
    given = parse_pairs(pairs, "--registry-option")
    if url is not None:
        given = {**given, "url": url}
    return given or None


def require_option(name: str, value: str | None) -> str:
    """Returns the value of an option.

    Raises:
        InvalidOptionError: if the option is not set.
    """
    if value is None:
        raise InvalidOptionError(f"the option {name} is missing.", fix=f"add {name}.")
    return value


def require_brokers(target: Target) -> dict[str, str]:
    """Returns the librdkafka properties of the target's cluster.

    Raises:
        InvalidOptionError: if the command line names no brokers.
    """
    if target.kafka is None:
        raise InvalidOptionError(
            "this command needs Kafka, but no brokers are set.",
            fix="add --bootstrap-servers, or --kafka-properties with a file that sets bootstrap.servers, or "
            f"set {BROKERS_VARIABLE}.",
        )
    return dict(target.kafka)


@contextmanager
def open_reader(target: Target) -> Iterator[ClusterReader | None]:
    """Opens a reader of the target's cluster; yields None if the target names no brokers."""
    if target.kafka is None:
        yield None
        return
    from kafka_eos_source.kafka.admin import ClusterReader
    from kafka_eos_source.kafka.config import admin_config

    with ClusterReader(admin_config(target.kafka)) as reader:
        yield reader


# -- exit codes


class ExitCode(IntEnum):
    """What a command tells the program that called it.

    Attributes:
        meaning: one sentence for the documentation.
    """

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    DONE = 0, "The command did what it was asked, or showed what it would do."
    FAILED = 1, "The command failed. The message names the fix."
    USAGE = 2, "The command line is wrong: an unknown option, or a value that cannot be parsed."
    NEEDS_A_PERSON = 3, "A person has to act first: the command found an error that no restart heals."
    WARNING = 4, "Nothing prevents a query from running, but `doctor` found something to look at."


# -- the query that a command line names

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
        from kafka_eos_source.stage.files import location_of_query

        return self.staging if self.checkpoint is None else location_of_query(self.checkpoint, self.staging)


def target_from_options(sink: Mapping[str, str | None], kafka: Mapping[str, str]) -> Target:
    """Validates options with the query's own parser and returns the target they name.

    Args:
        sink: options of the sink by name; None = not set.
        kafka: ``kafka.*`` options, including the prefix; empty = do not contact Kafka.

    Raises:
        InvalidOptionError: if the query itself would refuse an option.
    """
    from kafka_eos_source.option_values import application_id as valid_application_id
    from kafka_eos_source.options.parse import parse_write

    given = {name: value for name, value in sink.items() if value is not None}
    if not kafka:
        application_id = given.get("application.id")
        return Target(
            checkpoint=given.get("checkpointLocation"),
            application_id=application_id and valid_application_id("application.id", application_id),
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


# -- output for people

#: Characters per line when the output is a file or a pipe, which has no width of its own.
_WIDTH = 160


def console() -> Console:
    """Returns a console that writes to standard output."""
    from rich.console import Console

    return Console(
        markup=False, highlight=False, soft_wrap=False, width=None if writes_to_terminal() else _WIDTH
    )


def writes_to_terminal() -> bool:
    """Returns whether standard output is a terminal. It is None if the caller has closed it."""
    return sys.stdout is not None and sys.stdout.isatty()


def table_of(title: str, *columns: str, fold: bool = False) -> Table:
    """Returns an empty table in the style of all commands.

    Args:
        title: what the table shows; "" = no title.
        columns: headings; ``>`` at the beginning of one aligns the column to the right.
        fold: whether long texts continue on the next line; False = they are cut if there is no space.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
    for each in columns:
        table.add_column(
            each.removeprefix(">"),
            justify="right" if each.startswith(">") else "left",
            overflow="fold" if fold else "ellipsis",
        )
    return table


def facts_of(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Returns a table of names and their values."""
    table = table_of(title, "", "")
    table.show_header = False
    table.columns[0].style = "dim"
    for name, value in facts:
        table.add_row(name, value)
    return table
