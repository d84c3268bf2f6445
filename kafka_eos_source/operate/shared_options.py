"""Command-line options that several commands share, and what the commands build from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kafka_eos_source.secrets import is_secret, url_secrets, urls_in

if TYPE_CHECKING:
    from kafka_eos_source.operate.cluster import MetadataReader
    from kafka_eos_source.operate.target import Target
    from kafka_eos_source.runtime.deadline import Deadline

#: Where ``kafka-eos broker`` listens.
_DEFAULT_BOOTSTRAP = "127.0.0.1:9092"

F = TypeVar("F", bound=Callable[..., Any])

#: What `acls` and `doctor` are told about a query.
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
        help="Kafka brokers, as in the option kafka.bootstrap.servers.",
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
    click.option("--registry", metavar="URL,…", help="A schema registry with Confluent's interface."),
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


def target_of(options: dict[str, Any]) -> Target:
    """Returns the query and the cluster that the options of a command name.

    Args:
        options: values by parameter name; those of `CONNECTION` are required.

    Raises:
        InvalidOptionError: if the query would refuse one of them.
    """
    from kafka_eos_source.operate.target import kafka_options, target_from_options

    pairs = options["pairs"]
    file = options["properties"]
    kafka = kafka_options(
        options["bootstrap_servers"], pairs, file.read_text(encoding="utf-8") if file is not None else None
    )
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
    from kafka_eos_source.errors import InvalidOptionError

    if value is None:
        raise InvalidOptionError(f"the option {name} is missing.", fix=f"add {name}.")
    return value


def require_brokers(target: Target) -> dict[str, str]:
    """Returns the librdkafka properties of the target's cluster.

    Raises:
        InvalidOptionError: if the command line names no brokers.
    """
    from kafka_eos_source.errors import InvalidOptionError

    if target.kafka is None:
        raise InvalidOptionError(
            "this command needs Kafka, but no brokers are set.",
            fix="add --bootstrap-servers, or --kafka-properties with a file that sets bootstrap.servers.",
        )
    return dict(target.kafka)


def kafka_of(options: dict[str, Any]) -> dict[str, str]:
    """Returns the librdkafka properties of a connection; without brokers, those of ``kafka-eos broker``.

    Args:
        options: values by parameter name; those of `CONNECTION` are required.

    Raises:
        InvalidOptionError: if a query would refuse one of them.
    """
    if options["bootstrap_servers"] is None and options["properties"] is None:
        names = {each.partition("=")[0].strip() for each in options["pairs"]}
        if not {"bootstrap.servers", "kafka.bootstrap.servers"} & names:
            options = {**options, "bootstrap_servers": _DEFAULT_BOOTSTRAP}
    return require_brokers(target_of(options))


@contextmanager
def open_reader(target: Target) -> Iterator[MetadataReader | None]:
    """Opens a reader of the target's cluster; yields None if the target names no brokers."""
    if target.kafka is None:
        yield None
        return
    from kafka_eos_source.kafka.admin import ClusterReader
    from kafka_eos_source.kafka.config import admin_config

    with ClusterReader(admin_config(target.kafka)) as reader:
        yield reader
