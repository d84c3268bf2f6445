"""``python -m benchmarks.session_start``: what the archive of Spark's classes saves when a session starts.

Sessions with four settings of the driver's JVM take turns. Each runs a first small query. The table has the
seconds from the start of the Python process to the result, and the CPU seconds of the JVM until then. The
archive must exist: ``kafka-eos doctor --fix`` writes it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import click
import psutil

from kafka_eos_source.spark import class_archive
from kafka_eos_source.spark.session import DRIVER_OPTIONS_SETTING

_FIRST_COMPILER = "-XX:TieredStopAtLevel=1"


def _settings() -> dict[str, str]:
    """Returns options of the JVM by the title of the setting."""
    archive = class_archive.usable_archive()
    if archive is None:
        raise click.ClickException("there is no class archive. Fix: run kafka-eos doctor --fix.")
    options = class_archive.java_options(archive)
    return {
        "Spark's default": "",
        f"`{_FIRST_COMPILER}`": _FIRST_COMPILER,
        "archive": options,
        f"archive and `{_FIRST_COMPILER}`": f"{_FIRST_COMPILER} {options}",
    }


def _child(options: str) -> None:
    """Starts a session, runs a query, and prints the seconds that took, and the CPU seconds of the JVM."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    if options:
        builder = builder.config(DRIVER_OPTIONS_SETTING, options)
    spark = builder.getOrCreate()
    spark.range(1000).selectExpr("sum(id)").collect()
    own = psutil.Process()
    jvms = [each for each in own.children(recursive=True) if each.name() == "java"]
    used = [each.cpu_times() for each in jvms]
    found = {"seconds": time.time() - own.create_time(), "cpu": sum(each.user + each.system for each in used)}
    print(json.dumps(found), flush=True)
    spark.stop()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--child", hidden=True)
def main(rounds: int, child: str | None) -> None:
    """Measures the start of Spark sessions with and without the archive of Spark's classes."""
    if child is not None:
        _child(child)
        return
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    settings = _settings()
    for _ in range(rounds):
        for title, options in settings.items():
            command = [sys.executable, "-m", "benchmarks.session_start", "--child", options]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            found[title].append(json.loads(done.stdout.splitlines()[-1]))
    click.echo("| the driver's JVM | seconds | CPU s of the JVM |\n|---|--:|--:|")
    for title, runs in found.items():
        seconds, cpu = (statistics.median(each[name] for each in runs) for name in ("seconds", "cpu"))
        click.echo(f"| {title} | {seconds:.1f} | {cpu:.1f} |")


if __name__ == "__main__":
    main()
