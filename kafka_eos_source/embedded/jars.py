"""Kafka's jars: fetched once into a cache by the Ivy that PySpark ships, verified whenever they are used.

::

    <cache>/<set>-<version>/*.jar
    <cache>/<set>-<version>/manifest.json   name → [size, SHA-256]; written last, so a folder without one
                                            is half-made and is made again
    <cache>/ivy/                            Ivy's own cache, so that nothing else is touched
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kafka_eos_source.embedded import java
from kafka_eos_source.errors import UnavailableError

KAFKA_VERSION = "4.3.1"
_MANIFEST = "manifest.json"
_HALF_MADE = "half-made-"


@dataclass(frozen=True)
class JarSet:
    """Artifacts that are fetched together with all they need.

    Attributes:
        name: of the folder.
        artifacts: organisation, module, revision.
        about: how many jars that makes, for the progress shown.
        version: of the set, in the folder's name.
        transitive: whether what the artifacts need is fetched with them; else they alone.
    """

    name: str
    artifacts: tuple[tuple[str, str, str], ...]
    about: int
    version: str = KAFKA_VERSION
    transitive: bool = True


BROKER = JarSet(
    "kafka",
    (("org.apache.kafka", "kafka_2.13", KAFKA_VERSION), ("org.slf4j", "slf4j-simple", "1.7.36")),
    46,
)
#: Kafka's command line tools: console consumer, transactions.
TOOLS = JarSet(
    "kafka-tools",
    (("org.apache.kafka", "kafka-tools", KAFKA_VERSION), ("org.slf4j", "slf4j-simple", "1.7.36")),
    92,
)

#: Fills a folder with the jars of a set, telling how many there are.
Fetch = Callable[[JarSet, Path, Path], None]


def cache_directory() -> Path:
    """``KAFKA_EOS_CACHE``, else ``kafka-eos`` in the user's cache folder."""
    stated = os.environ.get("KAFKA_EOS_CACHE")
    if stated:
        return Path(stated)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kafka-eos"


def jars(jar_set: JarSet = BROKER, cache: Path | None = None, fetch: Fetch | None = None) -> Path:
    """The folder with the set's jars, fetched or repaired first where needed.

    Args:
        jar_set: what is wanted.
        cache: `cache_directory` unless given.
        fetch: fills a folder; Ivy unless given.

    Raises:
        UnavailableError: the jars cannot be fetched, or no Java is there to do it.
    """
    cache = cache or cache_directory()
    folder = cache / f"{jar_set.name}-{jar_set.version}"
    if is_whole(folder):  # also where the cache can only be read
        return folder
    with _locked(cache):
        if not is_whole(folder):
            for left in cache.glob(f"{_HALF_MADE}*"):  # by somebody killed; we hold the lock
                shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=_HALF_MADE) as half_made:
                new = Path(half_made) / "jars"
                _fill(new, jar_set, fetch or _ivy, cache / "ivy")
                (new / _MANIFEST).write_text(json.dumps(_manifest(new)))
                new.rename(folder)
    return folder


def _fill(new: Path, jar_set: JarSet, fetch: Fetch, ivy_cache: Path) -> None:
    """Fetches; if what comes is no whole jar, once more without Ivy's cache, which gave it."""
    for last in (False, True):
        new.mkdir()
        fetch(jar_set, new, ivy_cache)
        broken = [jar.name for jar in sorted(new.glob("*.jar")) if not _is_jar(jar)]
        if not broken:
            return
        if last:
            raise UnavailableError(
                f"what was fetched is damaged: {', '.join(broken)}.",
                fix="check the disk, and what stands between here and the repository; then try again.",
            )
        shutil.rmtree(new)
        shutil.rmtree(ivy_cache, ignore_errors=True)


def _is_jar(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as jar:
            return jar.testzip() is None
    except (zipfile.BadZipFile, zlib.error, EOFError):
        return False


def is_whole(folder: Path) -> bool:
    """Every jar of the manifest is there, with its size and SHA-256."""
    try:
        manifest: Mapping[str, list[object]] = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest) and _manifest(folder) == manifest


def _manifest(folder: Path) -> dict[str, list[object]]:
    return {
        jar.name: [jar.stat().st_size, hashlib.sha256(jar.read_bytes()).hexdigest()]
        for jar in sorted(folder.glob("*.jar"))
    }


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process at a time fetches; the others find what it fetched."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / "lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for another process that fetches Kafka's jars", file=sys.stderr, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise UnavailableError(
            f"the cache folder {str(cache)!r} cannot be used: {error}.",
            fix="make room or give access, or set KAFKA_EOS_CACHE to another folder.",
        ) from error


def _ivy(jar_set: JarSet, into: Path, ivy_cache: Path) -> None:
    import pyspark

    spark_jars = Path(pyspark.__file__).parent / "jars"
    with tempfile.TemporaryDirectory() as scratch:
        module = Path(scratch) / "ivy.xml"
        module.write_text(_ivy_module(jar_set))
        command = [java.find(), f"-Divy.home={ivy_cache}", "-cp", f"{spark_jars}/*"]
        command += ["org.apache.ivy.Main", "-ivy", str(module), "-cache", str(ivy_cache), "-confs", "default"]
        command += ["-types", "jar", "bundle", "-retrieve", f"{into}/[artifact]-[revision].[ext]"]
        code, said = _run(command, jar_set)
    if code or not any(into.glob("*.jar")):
        raise UnavailableError(
            f"the jars of {jar_set.name} {jar_set.version} could not be fetched: {what_went_wrong(said)}",
            fix="check the network or the proxy (JAVA_TOOL_OPTIONS=-Dhttps.proxyHost=…), then try again; "
            "what was fetched is kept.",
        )


def _run(command: list[str], jar_set: JarSet) -> tuple[int, list[str]]:
    """Ivy's exit code and output; its progress is shown meanwhile."""
    print(f"fetching the jars of {jar_set.name} {jar_set.version}, once", file=sys.stderr, flush=True)
    said: list[str] = []
    fetched = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as ivy:
        assert ivy.stdout is not None
        for line in ivy.stdout:
            said.append(line.rstrip())
            if "[SUCCESSFUL ]" in line and ".jar" in line:
                fetched += 1
                _show(fetched, jar_set.about)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return ivy.returncode, said


def _show(fetched: int, about: int) -> None:
    """On a terminal one line that counts; elsewhere a line now and then."""
    text = f"{fetched} of about {about} jars"
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif fetched % 10 == 0:
        print(text, file=sys.stderr, flush=True)


def what_went_wrong(said: list[str]) -> str:
    """What Ivy tells of under ``ERRORS``, else its last lines."""
    told = [line.strip() for line in said if line.strip()]
    errors = told[told.index(":::: ERRORS") + 1 :] if ":::: ERRORS" in told else told[-3:]
    return "; ".join(line for line in errors[:1] if not line.startswith("::"))


def _ivy_module(jar_set: JarSet) -> str:
    dependencies = "".join(
        f'<dependency org="{org}" name="{name}" rev="{rev}" conf="default->default" '
        f'transitive="{str(jar_set.transitive).lower()}"/>'
        for org, name, rev in jar_set.artifacts
    )
    return (
        f'<ivy-module version="2.0"><info organisation="kafka-eos" module="{jar_set.name}"/>'
        f'<configurations><conf name="default"/></configurations>'
        f"<dependencies>{dependencies}</dependencies></ivy-module>"
    )
