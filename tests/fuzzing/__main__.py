"""The command line of the fuzzer: ``./dev fuzz MINUTES [TARGET…]``.

Each target runs in turn in a process of its own. Where atheris is installed (pip install atheris), it guides
Python code by coverage; else a mutator of this package does. Where clang has libFuzzer (or CLANG names one),
the record decoder in C runs under the address and the undefined-behaviour sanitizers as well. Findings are in
a folder that is printed; copy their files to tests/corpus/TARGET, and `./dev test` replays them from then on.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from tests import ROOT

CORPUS = ROOT / "tests" / "corpus"
#: The target of `kernel.c`, which is no Python function.
KERNEL = "kernel.c"


@click.command()
@click.argument("minutes", type=float, default=10.0)
@click.argument("names", nargs=-1)
@click.option("--keep", type=click.Path(path_type=Path), help="Folder of corpus and findings, used again.")
@click.option("--own", is_flag=True, help="Use the mutator of this package even if atheris is installed.")
@click.option("--child", hidden=True)
def main(minutes: float, names: tuple[str, ...], keep: Path | None, own: bool, child: str | None) -> None:
    """Searches for MINUTES for inputs of NAMES, by default all targets, that raise what they may not.

    The exit code is 1 if there is a finding.
    """
    folder = keep or Path(tempfile.mkdtemp(prefix="kafka-eos-fuzz-"))
    if child:
        _child(child, minutes * 60, folder, own=own)
        return
    clang = os.environ.get("CLANG") or shutil.which("clang")
    if not names:
        from tests.fuzzing.targets import TARGETS

        names = (*TARGETS, *([KERNEL] if clang else ()))
        if not clang:
            click.echo(
                "no clang: the C code runs without libFuzzer; tests/support/sanitized.py still watches it"
            )
    each = minutes / len(names)
    broken = [name for name in names if not _run(name, each, folder, clang, own=own)]
    found = sorted(path for path in (folder / "findings").rglob("*") if path.is_file())
    for path in found:
        click.echo(f"finding: {path}")
    click.echo(f"{len(names)} target(s), {len(found)} finding(s), corpus in {folder}")
    sys.exit(1 if found or broken else 0)


def _run(name: str, minutes: float, folder: Path, clang: str | None, *, own: bool) -> bool:
    click.echo(f"== {name}, {minutes * 60:.0f} s")
    (folder / "findings" / name).mkdir(parents=True, exist_ok=True)
    (folder / "corpus" / name).mkdir(parents=True, exist_ok=True)
    if name == KERNEL:
        program = folder / "kernel"
        flags = ["-g", "-O1", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"]
        source = str(Path(__file__).with_name(KERNEL))
        subprocess.run([clang or "clang", *flags, "-I", str(ROOT), source, "-o", str(program)], check=True)
        command = [str(program), *_libfuzzer(name, minutes * 60, folder)]
    else:
        command = [
            sys.executable,
            "-m",
            "tests.fuzzing",
            str(minutes),
            "--child",
            name,
            "--keep",
            str(folder),
        ]
        command += ["--own"] * own
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines = [
        line for line in done.stdout.splitlines() if line.startswith(("Done ", "stat::", "finding", "ran "))
    ]
    click.echo("\n".join(lines))
    if done.returncode:
        (folder / f"{name}.log").write_text(done.stdout)
        click.echo(f"{name} ended with code {done.returncode}: {folder / name}.log")
    return done.returncode == 0


def _libfuzzer(name: str, seconds: float, folder: Path) -> list[str]:
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    return [
        f"-max_total_time={seconds:.0f}",
        "-max_len=4096",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        f"-artifact_prefix={folder / 'findings' / name}/",
        str(folder / "corpus" / name),
        str(CORPUS / name),
    ]


def _child(name: str, seconds: float, folder: Path, *, own: bool) -> None:
    if not own and importlib.util.find_spec("atheris") is not None:
        import atheris

        with atheris.instrument_imports(include=["kafka_eos_source", "kafka"]):
            from tests.fuzzing import engine
            from tests.fuzzing.targets import TARGETS

        target = TARGETS[name]
        for seed in target.seeds:
            (folder / "corpus" / name / engine.name_of(seed)).write_bytes(seed)
        atheris.Setup([name, *_libfuzzer(name, seconds, folder)], lambda data: engine.run(target, data))
        atheris.Fuzz()
        return
    from tests.fuzzing import engine
    from tests.fuzzing.targets import TARGETS

    def found(data: bytes, error: engine.FindingError) -> None:
        (folder / "findings" / name / engine.name_of(data)).write_bytes(data)
        print(f"finding: {error}", flush=True)

    stored = [*sorted((CORPUS / name).glob("*")), *sorted((folder / "corpus" / name).glob("*"))]
    seed = time.time_ns() % 1_000_000
    corpus = [path.read_bytes() for path in stored]
    runs, kept = engine.search(TARGETS[name], seconds, corpus, seed, found)
    for data in kept:
        (folder / "corpus" / name / engine.name_of(data)).write_bytes(data)
    print(f"ran {runs} inputs with seed {seed}; {len(kept)} reach lines of their own", flush=True)


if __name__ == "__main__":
    main()
