"""Finds Java, and downloads Kafka's jars once into a cache with the Ivy that PySpark includes.

``jars.sha256`` beside this module lists the SHA-256 of each jar of the versions that are tested, in the
format of ``sha256sum``. Neither the repository nor a proxy can replace such a jar. Jars of another version
are not used unless `ACCEPTS_UNLISTED` is set. They are verified at each use.

::

    <cache>/<set>-<version>/*.jar
    <cache>/<set>-<version>/manifest.json   name → [size, SHA-256]; written last, so a folder without it is
                                            incomplete and is downloaded again
    <cache>/ivy/                            Ivy's own cache; Ivy writes to no other folder
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.runtime.folders import cache_directory, make_missing, refuse_replaceable
from kafka_eos_source.runtime.json_input import parse_json

LOWEST = 17
_FIX = (
    f"install Java {LOWEST} or newer (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) "
    "and put it on the PATH or into JAVA_HOME."
)


def find() -> str:
    """Returns the path of a ``java`` that is new enough: that of ``JAVA_HOME``, else of the PATH.

    Raises:
        UnavailableError: if there is no Java, or it is too old.
    """
    return found()[0]


def found() -> tuple[str, int]:
    """Returns the path of a ``java`` that is new enough, and its major version.

    Raises:
        UnavailableError: if there is no Java, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin")) if home else None
    java = java or shutil.which("java")
    if java is None:
        raise UnavailableError("there is no Java in JAVA_HOME or on the PATH.", fix=_FIX)
    output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    major = version(output)
    if major is None or major < LOWEST:
        raise UnavailableError(
            f"{java} is Java {major or 'of unknown version'}; Kafka 4 needs {LOWEST} or newer.", fix=_FIX
        )
    return java, major


def version(output: str) -> int | None:
    """Returns the major version in the output of ``java -version``.

    ``"1.8.0_392"`` is 8, ``"17.0.9"`` is 17.
    """
    found = re.search(r'version "(?:1\.)?(\d+)', output)
    return int(found[1]) if found else None


# -- jars ------------------------------------------------------------------------------------------

KAFKA_VERSION = "4.3.1"
#: The variable of the environment that accepts jars of which the list does not have the name.
ACCEPTS_UNLISTED = "KAFKA_EOS_UNLISTED_JARS"
_SUMS = Path(__file__).with_name("jars.sha256")
_MANIFEST = "manifest.json"
_INCOMPLETE = "half-made-"


@dataclass(frozen=True)
class JarSet:
    """Maven artifacts that are downloaded together with their dependencies.

    Attributes:
        name: first part of the folder's name.
        artifacts: organisation, module and revision of each.
        about: approximate number of jars, for the progress display.
        version: second part of the folder's name.
        transitive: whether to download the dependencies too.
        sums: the file with the SHA-256 of the jars.
    """

    name: str
    artifacts: tuple[tuple[str, str, str], ...]
    about: int
    version: str = KAFKA_VERSION
    transitive: bool = True
    sums: Path = _SUMS

    @cached_property
    def listed(self) -> Mapping[str, str]:
        """The SHA-256 of each jar that is known, by name."""
        lines = self.sums.read_text(encoding="utf-8").splitlines()
        return {name: digest for digest, name in map(str.split, lines)}

    def refused(self, digests: Mapping[str, str]) -> dict[str, str]:
        """Returns the jars that must not be used, by name: those whose SHA-256 is another one than listed.

        Those that are not listed are refused as well, with an empty text, unless the user accepts them.
        """
        accepts = os.environ.get(ACCEPTS_UNLISTED) == "accept"
        return {
            name: self.listed.get(name, "")
            for name, digest in digests.items()
            if self.listed.get(name, digest if accepts else "") != digest
        }


BROKER = JarSet(
    "kafka",
    (("org.apache.kafka", "kafka_2.13", KAFKA_VERSION), ("org.slf4j", "slf4j-simple", "1.7.36")),
    46,
)


def broker_jars(version: str) -> JarSet:
    """Returns the set of jars that runs a broker of this Kafka version."""
    core, *others = BROKER.artifacts
    return replace(BROKER, version=version, artifacts=((*core[:2], version), *others))


#: Kafka's command-line tools.
TOOLS = JarSet(
    "kafka-tools",
    (("org.apache.kafka", "kafka-tools", KAFKA_VERSION), ("org.slf4j", "slf4j-simple", "1.7.36")),
    92,
)

#: Downloads the jars of a set into a folder; the second folder is Ivy's cache.
Fetch = Callable[[JarSet, Path, Path], None]


def jars(jar_set: JarSet = BROKER, cache: Path | None = None, fetch: Fetch | None = None) -> Path:
    """Returns the folder with the set's jars; downloads or repairs them first if necessary.

    Args:
        jar_set: the set.
        cache: cache folder; None = `cache_directory`.
        fetch: downloads the jars; None = Ivy.

    Raises:
        UnavailableError: if the jars cannot be downloaded, are others than those that are listed, or there is
            no Java to run Ivy.
        InvalidOptionError: if other users could put other jars in the cache.
    """
    cache = cache or cache_directory()
    refuse_replaceable(cache, "KAFKA_EOS_CACHE")  # a JVM runs the code in the jars
    folder = cache / f"{jar_set.name}-{jar_set.version}"
    if is_complete(folder, jar_set):  # before taking the lock, because the cache may be read-only
        return folder
    with _locked(cache):
        if not is_complete(folder, jar_set):
            for leftover in cache.glob(f"{_INCOMPLETE}*"):  # of a killed process, because we hold the lock
                shutil.rmtree(leftover, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=_INCOMPLETE) as incomplete:
                new = Path(incomplete) / "jars"
                _fill(new, jar_set, fetch or _ivy, cache / "ivy")
                (new / _MANIFEST).write_text(json.dumps(_manifest(new)))
                new.rename(folder)
    return folder


def _fill(new: Path, jar_set: JarSet, fetch: Fetch, ivy_cache: Path) -> None:
    """Downloads the jars. If one is not as it should be, deletes all, and downloads them once more."""
    for last in (False, True):
        new.mkdir()
        fetch(jar_set, new, ivy_cache)
        found = _digests(_manifest(new))
        broken = [name for name in found if not _is_jar(new / name)]
        refused = {} if broken else jar_set.refused(found)
        if not broken and not refused:
            return
        shutil.rmtree(new)
        shutil.rmtree(ivy_cache, ignore_errors=True)
        if refused and not all(refused.values()):
            raise _unlisted(jar_set, [name for name, digest in refused.items() if not digest])
        if last and broken:
            raise UnavailableError(
                f"downloaded jars are damaged: {', '.join(broken)}.",
                fix="check the disk, the network and the proxy, then try again.",
            )
        if last:
            name, digest = next(iter(refused.items()))
            raise UnavailableError(
                f"the download of {name} has the SHA-256 {found[name]}; expected {digest}. It was deleted, "
                "and so were all others.",
                fix="do not use what this repository or proxy sends: somebody may have replaced it. Find out "
                "where Ivy downloads from, and try again over another network.",
            )


def _unlisted(jar_set: JarSet, names: Sequence[str]) -> UnavailableError:
    return UnavailableError(
        f"kafka-eos does not know the SHA-256 of {len(names)} jar(s) of {jar_set.name} {jar_set.version}: "
        f"{', '.join(names[:3])}{', …' * (len(names) > 3)}. They were deleted.",
        fix=f"use a version that is listed, such as {KAFKA_VERSION}; or set {ACCEPTS_UNLISTED}=accept in the "
        "environment if you trust the repository and the network that they come from.",
    )


def _is_jar(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as jar:
            return jar.testzip() is None
    except (zipfile.BadZipFile, zlib.error, EOFError):
        return False


def is_complete(folder: Path, jar_set: JarSet) -> bool:
    """Returns whether every jar of the manifest exists, as it was downloaded and as it is listed."""
    try:
        manifest: Mapping[str, list[object]] = parse_json((folder / _MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    found = _manifest(folder)
    return bool(manifest) and found == manifest and not jar_set.refused(_digests(found))


def _manifest(folder: Path) -> dict[str, list[object]]:
    return {
        jar.name: [jar.stat().st_size, hashlib.sha256(jar.read_bytes()).hexdigest()]
        for jar in sorted(folder.glob("*.jar"))
    }


def _digests(manifest: Mapping[str, list[object]]) -> dict[str, str]:
    return {name: str(digest) for name, (_, digest) in manifest.items()}


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Lets one process at a time download; the others wait and then find the jars."""
    try:
        make_missing(cache, "KAFKA_EOS_CACHE")
        with open(cache / "lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("waiting for another process to download Kafka's jars", file=sys.stderr, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise UnavailableError(
            f"cannot use the cache folder {str(cache)!r}: {error}.",
            fix="free space or grant access, or set KAFKA_EOS_CACHE to another folder.",
        ) from error


def _ivy(jar_set: JarSet, into: Path, ivy_cache: Path) -> None:
    import pyspark

    spark_jars = Path(pyspark.__file__).parent / "jars"
    with tempfile.TemporaryDirectory() as scratch:
        module = Path(scratch) / "ivy.xml"
        module.write_text(_ivy_module(jar_set))
        command = [find(), f"-Divy.home={ivy_cache}", "-cp", f"{spark_jars}/*"]
        command += ["org.apache.ivy.Main", "-ivy", str(module), "-cache", str(ivy_cache), "-confs", "default"]
        command += ["-types", "jar", "bundle", "-retrieve", f"{into}/[artifact]-[revision].[ext]"]
        code, output = _run(command, jar_set)
    if code or not any(into.glob("*.jar")):
        raise UnavailableError(
            f"cannot download the jars of {jar_set.name} {jar_set.version}: {ivy_error(output)}",
            fix="check the network or the proxy (JAVA_TOOL_OPTIONS=-Dhttps.proxyHost=…), then try again; "
            "the download continues where it stopped.",
        )


def _run(command: list[str], jar_set: JarSet) -> tuple[int, list[str]]:
    """Runs Ivy and shows its progress; returns its exit code and output."""
    print(f"downloading the jars of {jar_set.name} {jar_set.version} once", file=sys.stderr, flush=True)
    output: list[str] = []
    fetched = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as ivy:
        assert ivy.stdout is not None
        for line in ivy.stdout:
            output.append(line.rstrip())
            if "[SUCCESSFUL ]" in line and ".jar" in line:
                fetched += 1
                _show_progress(fetched, jar_set.about)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return ivy.returncode, output


def _show_progress(fetched: int, about: int) -> None:
    """Updates one line on a terminal; elsewhere prints every tenth jar."""
    text = f"{fetched} of about {about} jars"
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif fetched % 10 == 0:
        print(text, file=sys.stderr, flush=True)


def ivy_error(output: list[str]) -> str:
    """Returns the first line under ``ERRORS`` in Ivy's output, else one of its last lines."""
    lines = [line.strip() for line in output if line.strip()]
    errors = lines[lines.index(":::: ERRORS") + 1 :] if ":::: ERRORS" in lines else lines[-3:]
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
