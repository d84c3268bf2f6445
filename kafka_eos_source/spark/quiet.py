"""Hides the lines that Spark and librdkafka print although nobody has to act on them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kafka_eos_source.runtime import logs

#: Log4j's configuration. It is the only place that names the loggers whose warnings stay visible.
CONFIGURATION = Path(__file__).with_name("quiet-log4j2.properties")

_JVM_OPTIONS = "SPARK_SUBMIT_OPTS"
_OWN_OPTIONS = (_JVM_OPTIONS, "PYSPARK_SUBMIT_ARGS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")


def quiet_logs() -> None:
    """Shows only errors, and warnings that need action, in a notebook or shell.

    Call it before the session starts: ``quiet_logs()``, then ``SparkSession.builder…``. It hides

    - Spark's other warnings, the lines that Spark prints when it starts, and its console progress bars;
    - the warnings (``%4|…``) and notices of librdkafka.

    Errors of Spark and librdkafka stay visible, and so do all warnings of this package. Spark's warnings stay
    visible if a person has to act on them: no executor accepts tasks, batches take longer than the trigger
    interval, a setting is ignored, Spark's own Kafka source lost data.

    If a session runs already, only the warnings of its JVM are hidden. A Log4j configuration of your own
    (``log4j2.properties`` in Spark's configuration folder, or ``-Dlog4j2.configurationFile``) is left as it
    is. The log of executors and of a Spark Connect server on other hosts does not change.
    """
    os.environ.setdefault(logs.LEVEL_VARIABLE, logs.ERRORS)
    if _has_own_configuration():
        return
    options = ["-Dspark.ui.showConsoleProgress=false", f"-Dlog4j2.configurationFile={CONFIGURATION.as_uri()}"]
    os.environ[_JVM_OPTIONS] = " ".join([os.environ.get(_JVM_OPTIONS, ""), *options]).strip()
    jvm = _running_jvm()
    if jvm is not None:
        _quiet(jvm)


def kept_loggers() -> Iterator[str]:
    """Yields the names of Spark's loggers whose warnings stay visible."""
    levels = dict(re.findall(r"^logger\.(\w+)\.level = (\w+)$", CONFIGURATION.read_text(), re.MULTILINE))
    for key, name in re.findall(r"^logger\.(\w+)\.name = (\S+)$", CONFIGURATION.read_text(), re.MULTILINE):
        if levels[key] == "warn":
            yield name


def _has_own_configuration() -> bool:
    """Returns whether the user, or an earlier call, has chosen a configuration of Log4j."""
    if any("log4j" in os.environ.get(name, "") for name in _OWN_OPTIONS):
        return True
    folders = [os.environ.get("SPARK_CONF_DIR", "")]
    if os.environ.get("SPARK_HOME"):
        folders.append(os.path.join(os.environ["SPARK_HOME"], "conf"))
    return any(
        Path(folder, f"log4j2.{suffix}").exists()
        for folder in folders
        if folder
        for suffix in ("properties", "xml", "yaml", "yml", "json", "jsn")
    )


def _running_jvm() -> Any:
    """Returns the JVM of this process's Spark session, also of a local Spark Connect server; else None."""
    if "pyspark" not in sys.modules:
        return None
    try:
        from pyspark import SparkContext
    except ImportError:  # pyspark-client has no JVM
        return None
    return SparkContext._jvm


def _quiet(jvm: Any) -> None:
    log4j = jvm.org.apache.logging.log4j
    log4j.core.config.Configurator.setRootLevel(log4j.Level.ERROR)
    for name in kept_loggers():
        log4j.core.config.Configurator.setLevel(name, log4j.Level.WARN)
