"""Builds the SparkSession of the tests and of the drivers that they start."""

from __future__ import annotations

import os
import sys

from pyspark import SparkContext
from pyspark.sql import SparkSession

_JVM_ENDS_SECONDS = 60


def builder() -> SparkSession.Builder:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.default.parallelism", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        # these JVMs live for seconds, too short for the optimising compiler (C2) to pay off
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    )


def end(session: SparkSession) -> None:
    """Stops the session and its JVM, which would otherwise live as long as this process."""
    gateway = session.sparkContext._gateway
    session.stop()
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM exits when this pipe is closed
    gateway.proc.wait(_JVM_ENDS_SECONDS)
    SparkContext._gateway = SparkContext._jvm = None
