"""Kafka's own command line tools: a second opinion that shares no code with ours."""

from __future__ import annotations

import subprocess

from kafka_eos_source.embedded import jars, java

TIMEOUT_SECONDS = 120


def run(main: str, *arguments: str) -> str:
    """One tool, to its end; its output."""
    folder = jars.jars(jars.TOOLS)
    finished = subprocess.run(
        [
            java.find(),
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
            "-cp",
            f"{folder}/*",
            main,
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def console_consumer(bootstrap: str, topic: str, at_most: int, idle_ms: int = 15_000) -> list[str]:
    """The values that Kafka's console consumer reads, read_committed, until none came for ``idle_ms``."""
    said = run(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", bootstrap, "--topic", topic, "--from-beginning"),
        *("--isolation-level", "read_committed"),
        *("--timeout-ms", str(idle_ms), "--max-messages", str(at_most)),
    )
    return said.splitlines()


def transactions(bootstrap: str) -> dict[str, str]:
    """State of every transactional id the brokers know."""
    return {row["TransactionalId"]: row["TransactionState"] for row in _transactions(bootstrap, "list")}


def describe_transaction(bootstrap: str, transactional_id: str) -> dict[str, str]:
    """Coordinator, producer id and epoch, state, time-out, start and partitions; Kafka's names."""
    (row,) = _transactions(bootstrap, "describe", "--transactional-id", transactional_id)
    return row


def producers(bootstrap: str, topic: str, partition: int) -> list[dict[str, str]]:
    """Idempotent producers that wrote the partition, one row for each id; Kafka's names."""
    where = ["--topic", topic, "--partition", str(partition)]
    return _transactions(bootstrap, "describe-producers", *where)


def hanging_transactions(
    bootstrap: str, topic: str, partition: int, minutes: int = 15
) -> list[dict[str, str]]:
    """Open in the partition for longer than ``minutes``, with no coordinator that knows of them."""
    where = ["--topic", topic, "--partition", str(partition)]
    return _transactions(bootstrap, "find-hanging", *where, "--max-transaction-timeout", str(minutes))


def abort_transaction(bootstrap: str, topic: str, partition: int, start_offset: int) -> None:
    """Of whoever opened it: writes the abort marker into the partition."""
    where = ["--topic", topic, "--partition", str(partition)]
    _transactions(bootstrap, "abort", *where, "--start-offset", str(start_offset))


def _transactions(bootstrap: str, *arguments: str) -> list[dict[str, str]]:
    """The rows of the tool's table, by column."""
    said = run("org.apache.kafka.tools.TransactionsCommand", "--bootstrap-server", bootstrap, *arguments)
    table = [[cell.strip() for cell in line.split("\t")] for line in said.splitlines() if line.strip()]
    if not table:
        return []
    return [dict(zip(table[0], row, strict=False)) for row in table[1:]]
