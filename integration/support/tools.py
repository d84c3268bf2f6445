"""Runs Kafka's own command line tools, as a check that shares no code with the product."""

from __future__ import annotations

import subprocess

from kafka_eos_source.embedded import java

TIMEOUT_SECONDS = 120
#: Brokers of a busy machine may stand still for some seconds, which must not look like the end of a topic.
_IDLE_MS = 15_000


def run(main: str, *arguments: str, text: str = "") -> str:
    """Runs one tool with a text as its input, and returns its output; fails the test if the tool fails."""
    folder = java.jars(java.TOOLS)
    finished = subprocess.run(
        [
            java.find(),
            "-XX:TieredStopAtLevel=1",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
            "-cp",
            f"{folder}/*",
            main,
            *arguments,
        ],
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def console_consumer(bootstrap: str, topic: str, at_most: int, *, of: str = "--topic") -> list[str]:
    """Returns the values that a read_committed console consumer reads until it is idle for a while.

    Args:
        bootstrap: bootstrap servers.
        topic: the topic; with ``of="--include"``, a pattern of topics.
        at_most: number of values after which it ends at once.
        of: the consumer's option for ``topic``.
    """
    said = run(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", bootstrap, of, topic, "--from-beginning"),
        *("--isolation-level", "read_committed"),
        *("--timeout-ms", str(_IDLE_MS), "--max-messages", str(at_most)),
    )
    return said.splitlines()


def consumer_groups(bootstrap: str, group_id: str, *arguments: str) -> str:
    """Runs ``kafka-consumer-groups.sh`` for one group; fails the test if the tool reports an error."""
    said = run(
        "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
        *("--bootstrap-server", bootstrap, "--group", group_id),
        *arguments,
    )
    # the tool ends with 0 although it has refused to change a group
    assert "Error" not in said, said
    return said


def transactions(bootstrap: str) -> dict[str, str]:
    """Returns the state of every transactional id that the brokers know."""
    return {row["TransactionalId"]: row["TransactionState"] for row in _transactions(bootstrap, "list")}


def describe_transaction(bootstrap: str, transactional_id: str) -> dict[str, str]:
    """Returns coordinator, producer id, epoch, state, timeout, start and partitions, by Kafka's names."""
    (row,) = _transactions(bootstrap, "describe", "--transactional-id", transactional_id)
    return row


def producers(bootstrap: str, topic: str, partition: int) -> list[dict[str, str]]:
    """Returns one row for each idempotent producer that wrote the partition, by Kafka's column names."""
    where = ["--topic", topic, "--partition", str(partition)]
    return _transactions(bootstrap, "describe-producers", *where)


def hanging_transactions(
    bootstrap: str, topic: str, partition: int, minutes: int = 15
) -> list[dict[str, str]]:
    """Returns transactions open in a partition for over ``minutes`` that no coordinator knows."""
    where = ["--topic", topic, "--partition", str(partition)]
    return _transactions(bootstrap, "find-hanging", *where, "--max-transaction-timeout", str(minutes))


def abort_transaction(bootstrap: str, topic: str, partition: int, start_offset: int) -> None:
    """Aborts the transaction at ``start_offset``, whoever opened it, by writing an abort control record."""
    where = ["--topic", topic, "--partition", str(partition)]
    _transactions(bootstrap, "abort", *where, "--start-offset", str(start_offset))


def _transactions(bootstrap: str, *arguments: str) -> list[dict[str, str]]:
    """Returns the rows of the table that the tool prints, by column."""
    said = run("org.apache.kafka.tools.TransactionsCommand", "--bootstrap-server", bootstrap, *arguments)
    table = [[cell.strip() for cell in line.split("\t")] for line in said.splitlines() if line.strip()]
    if not table:
        return []
    return [dict(zip(table[0], row, strict=False)) for row in table[1:]]
