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


def console_consumer(bootstrap: str, topic: str, records: int) -> list[str]:
    """The values of ``records`` records, as Kafka's console consumer reads them, read_committed."""
    said = run(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        "--bootstrap-server",
        bootstrap,
        "--topic",
        topic,
        "--from-beginning",
        "--isolation-level",
        "read_committed",
        "--timeout-ms",
        "15000",
        "--max-messages",
        str(records),
    )
    return said.splitlines()


def transactions(bootstrap: str) -> dict[str, str]:
    """State of every transactional id the brokers know."""
    said = run("org.apache.kafka.tools.TransactionsCommand", "--bootstrap-server", bootstrap, "list")
    rows = [line.split() for line in said.splitlines() if line.strip()]
    return {row[0]: row[-1] for row in rows[1:]}
