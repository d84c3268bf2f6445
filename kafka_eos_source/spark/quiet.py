"""Quiet output: one message for each error, and no log lines that need no action.

An error of a query reaches a person in two ways. Spark logs it, also if nobody waits for the query, and
PySpark raises it in the program that does. Log4j's configuration beside this module reduces what Spark logs
about a failed query, up to 350 lines, to the error itself; an uncaught exception is shown with the frames of
the user's own code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.runtime.logs import QUIET_VARIABLE, wants_all_logs

_log = logging.getLogger(__name__)

#: Log4j's configuration. It is the only place that names the loggers whose warnings stay visible.
CONFIGURATION = Path(__file__).with_name("quiet-log4j2.properties")

_JVM_OPTIONS = "SPARK_SUBMIT_OPTS"
_OWN_OPTIONS = (_JVM_OPTIONS, "PYSPARK_SUBMIT_ARGS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")
#: Set by ``spark-submit`` and ``pyspark``, which have started the JVM.
_JVM_EXISTS = "PYSPARK_GATEWAY_PORT"


def quiet_logs() -> None:
    """Shows each error once, and warnings that need action, in a program, notebook or shell.

    Call it before the session starts: ``quiet_logs()``, then ``SparkSession.builder…``. An `App` that
    creates its session does it by itself. It hides Spark's other warnings, the lines that Spark prints when
    it starts, its console progress bars, and Java's stack traces. An uncaught exception is shown with the
    frames of your own code only.

    Errors stay visible, and so do all warnings of this package. Spark's warnings stay visible if a person has
    to act on them: no executor accepts tasks, batches take longer than the trigger interval, a setting is
    ignored, Spark's own Kafka source lost data.

    To see everything, set ``KAFKA_EOS_QUIET_LOGS=false`` in the environment. This function then does nothing.

    If a session runs already, only the warnings of its JVM are hidden. A Log4j configuration of your own
    (``log4j2.properties`` in Spark's configuration folder, or ``-Dlog4j2.configurationFile``) is left as it
    is. The log of executors and of a Spark Connect server on other hosts does not change.
    """
    if wants_all_logs():
        return
    shorten_tracebacks()
    if CONFIGURATION.as_uri() not in os.environ.get(_JVM_OPTIONS, ""):
        if has_own_configuration():
            return
        options = [
            "-Dspark.ui.showConsoleProgress=false",
            f"-Dlog4j2.configurationFile={CONFIGURATION.as_uri()}",
        ]
        os.environ[_JVM_OPTIONS] = " ".join([os.environ.get(_JVM_OPTIONS, ""), *options]).strip()
    _wrap_launch()
    jvm = _running_jvm()
    if jvm is not None:
        _quiet(jvm)


def quiet_by_default() -> None:
    """Calls `quiet_logs` for a session that this package creates, and logs once how to see everything.

    It leaves a JVM alone that ``spark-submit`` has started, because its logs belong to a deployment.
    """
    known = CONFIGURATION.as_uri() in os.environ.get(_JVM_OPTIONS, "")
    if known or wants_all_logs() or _JVM_EXISTS in os.environ or has_own_configuration():
        return
    quiet_logs()
    _log.warning(
        "kafka-eos shows Spark's errors without Java's stack traces, and hides warnings that need no action. "
        "%s=false shows everything.",
        QUIET_VARIABLE,
    )


def kept_loggers() -> Iterator[str]:
    """Yields the names of Spark's loggers whose warnings stay visible."""
    levels = dict(re.findall(r"^logger\.(\w+)\.level = (\w+)$", CONFIGURATION.read_text(), re.MULTILINE))
    for key, name in re.findall(r"^logger\.(\w+)\.name = (\S+)$", CONFIGURATION.read_text(), re.MULTILINE):
        if levels[key] == "warn":
            yield name


def has_own_configuration() -> bool:
    """Returns whether the user has chosen a configuration of Log4j."""
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


# -- what Java prints when it starts ------------------------------------------------------------------

#: Java prints this whenever Spark starts, and no option of Java prevents it.
_JAVA_STARTS = "WARNING: Using incubator modules: jdk.incubator.vector"
#: Passes everything on but that line, which is among the first. `read` takes one byte at a time from a pipe,
#: so `cat` continues where it stopped. Ctrl-C reaches the JVM's group, too, whose last lines have to come.
_FILTER = f"""\
trap '' INT
n=0
while [ $n -lt 10 ] && IFS= read -r line; do
    [ "$line" = "{_JAVA_STARTS}" ] && break
    printf '%s\\n' "$line"
    n=$((n + 1))
done
exec cat
"""
_SHELL = "/bin/sh"
#: The filters of this process. Each ends with its JVM.
_filters: list[subprocess.Popen[bytes]] = []
#: Whether a JVM of this process was started with `CONFIGURATION`, so that its log shows errors of queries.
_log_shows_errors = False


def _wrap_launch() -> None:
    """Makes PySpark start the next JVM with the filter behind its standard error."""
    try:
        from pyspark.core import context
    except ImportError:  # pyspark-client
        return
    original = getattr(context, "launch_gateway", None)
    if original is None or getattr(original, "is_quiet", False) or not os.access(_SHELL, os.X_OK):
        return

    def launch(conf: Any = None, popen_kwargs: Mapping[str, Any] | None = None) -> Any:
        global _log_shows_errors
        if _JVM_EXISTS in os.environ or wants_all_logs() or "stderr" in (popen_kwargs or {}):
            return original(conf, popen_kwargs)
        _log_shows_errors = CONFIGURATION.as_uri() in os.environ.get(_JVM_OPTIONS, "")
        with _filtered() as stderr:
            return original(conf, {**(popen_kwargs or {}), "stderr": stderr})

    launch.is_quiet = True  # type: ignore[attr-defined]
    context.launch_gateway = launch  # type: ignore[attr-defined]


@contextlib.contextmanager
def _filtered() -> Iterator[Any]:
    """Starts a filter before this process's standard error, and yields what a child takes for its own."""
    try:
        process = subprocess.Popen([_SHELL, "-c", _FILTER], stdin=subprocess.PIPE, stdout=2, bufsize=0)
    except OSError as error:
        _log.debug("cannot filter what Java prints when it starts: %r", error)
        yield None  # the child inherits standard error
        return
    _filters.append(process)
    assert process.stdin is not None
    with process.stdin as stdin:
        yield stdin


# -- uncaught exceptions ------------------------------------------------------------------------------

#: Packages whose frames are hidden.
_PACKAGES = ("pyspark", "py4j", "kafka_eos_source")
_OWN = re.compile(
    r"(kafka_eos_source\.errors\.\w+: \[KAFKA_EOS.*?)(?:\s*SQLSTATE: \w+|\n\tat |\Z)", re.DOTALL
)
_CAUSED = "The above exception"
#: The line of a Python traceback that names the error, before what Spark adds.
_PYTHON_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?::.*)?\n+ *SQLSTATE", re.MULTILINE)
_JAVA_FRAME = re.compile(r"^\s+(?:at |\.\.\. \d+ more).*\n?", re.MULTILINE)
_NOT_FOUND = re.compile(r"DATA_SOURCE_NOT_FOUND.* kafka-eos")
_NOT_FOUND_FIX = (
    "Fix: Spark starts the python3 of PATH, in which kafka-eos is not installed: activate the environment of "
    f"this program, or set PYSPARK_PYTHON={sys.executable}."
)
_PLAN = "=== Streaming Query ==="
_QUERY = re.compile(r"^Identifier: (.*?) ?\[id = ([0-9a-f-]+)", re.MULTILINE)


def shorten_tracebacks() -> None:
    """Shows uncaught exceptions of this package and of Spark in short; others as before."""
    if getattr(sys.excepthook, "is_short", False):
        return
    original = sys.excepthook
    logging.getLogger().addFilter(_is_no_repetition)  # py4j logs to the root logger

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            lines = short_traceback(error, trace, is_logged=_is_logged(error))
        except Exception as failure:  # noqa: BLE001 - such as an error of Spark whose JVM has ended
            _log.debug("cannot shorten an exception: %r", failure)
            lines = None
        if lines is None:
            original(kind, error, trace)
        else:
            print("\n".join(lines), file=sys.stderr)

    hook.is_short = True  # type: ignore[attr-defined]
    sys.excepthook = hook
    _render_in_notebooks()


def _is_no_repetition(record: logging.LogRecord) -> bool:
    """Returns False for what py4j logs about a call that fails, because it also raises the error."""
    return record.module != "java_gateway" or "while sending command" not in record.getMessage()


def _render_in_notebooks() -> None:
    """Makes IPython show PySpark's exceptions in short. It calls this method of an exception that has it."""
    if "IPython" not in sys.modules:
        return
    from pyspark.errors import PySparkException

    def render(error: BaseException) -> list[str]:
        lines = short_traceback(error, error.__traceback__)
        return lines or traceback.format_exception(error)

    for kind in (PySparkException, KafkaEosError):
        kind._render_traceback_ = render  # type: ignore[union-attr]


def short_traceback(
    error: BaseException, trace: TracebackType | None, *, is_logged: bool = False
) -> list[str] | None:
    """Returns the lines that show an uncaught exception; None if Python should show it.

    Args:
        error: the exception.
        trace: its traceback, of which the frames of the user's code are shown.
        is_logged: Spark has logged the error of the query just before, so only its class is repeated.
    """
    if isinstance(error, KeyboardInterrupt):
        return ["KeyboardInterrupt"]
    text = short_text(error, is_logged=is_logged)
    handled_another = error.__context__ is not None and not error.__suppress_context__
    if text is None or handled_another:
        return None
    hidden = _hidden_folders()
    frames = [
        each
        for each in traceback.extract_tb(trace)
        if each.filename != contextlib.__file__ and not hidden.intersection(Path(each.filename).parents)
    ]
    shown = "".join(traceback.format_list(frames)).rstrip("\n")
    return ["Traceback (most recent call last):", *([shown] if shown else []), text]


def short_text(error: BaseException, *, is_logged: bool = False) -> str | None:
    """Returns what an exception of this package or of Spark says, without what Spark quotes around it."""
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(error, KafkaEosError):
        return f"{name}: {error}"
    if kind.__module__.partition(".")[0] not in ("pyspark", "py4j"):
        return None
    text = str(error)
    own = None if _CAUSED in text else _OWN.search(text)
    query = _QUERY.search(text)
    if is_logged and query is not None:
        cause = own or _PYTHON_ERROR.search(text)
        what = cause[1].partition(":")[0].rpartition(".")[2] if cause else "an error"
        return f"{kind.__name__}: query {query[1] or query[2]} ended with {what}, which the log above shows."
    if own is not None:
        return own[1]
    shown = f"{name}: {_JAVA_FRAME.sub('', text.partition(_PLAN)[0]).rstrip()}"
    return f"{shown}\n{_NOT_FOUND_FIX}" if _NOT_FOUND.search(text) else shown


def _hidden_folders() -> set[Path]:
    found = (getattr(sys.modules.get(name), "__file__", None) for name in _PACKAGES)
    return {Path(file).parent for file in found if file}


def _is_logged(error: BaseException) -> bool:
    """Returns whether Spark's log has shown the error: that of a query, in a JVM whose log is quiet."""
    if not _log_shows_errors or type(error).__name__ != "StreamingQueryException":
        return False
    try:
        return bool(_running_jvm().org.apache.logging.log4j.LogManager.getRootLogger().isErrorEnabled())
    except Exception as failure:  # noqa: BLE001 - the JVM has ended
        _log.debug("cannot ask the JVM for the level of its log: %r", failure)
        return False
