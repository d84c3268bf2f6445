"""The README's quick start works when it is pasted in a clone of the repository, and then again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from integration.support.installed import ROOT, SECONDS, Bare, clone, environment
from kafka_eos_source.embedded.cluster import free_ports

_README = ROOT / "README.md"
_SECONDS = 240


def _blocks(language: str) -> list[str]:
    """Returns the code blocks of the section, without the installation."""
    section = _README.read_text(encoding="utf-8").split("## Quick start")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.mark.timeout(SECONDS + _SECONDS)
def test_the_quick_start_works_when_pasted(tmp_path: Path) -> None:
    """Spark's processes import the sources of the clone, beside which no kernel was compiled."""
    tree, bare = clone(tmp_path / "clone"), Bare(tmp_path / "venv")
    bare.install(str(tree), CFLAGS="-O0")  # compiles in a third of the time
    shutil.copy(ROOT / ".gitignore", tree)

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True, check=True)
        return done.stdout

    git("init", "--quiet")
    git("add", "--all")
    git("-c", "user.name=x", "-c", "user.email=x", "commit", "--quiet", "--message=x")
    (shell,) = _blocks("bash")
    (program,) = _blocks("python")
    assert 'pip install ".[demo]"' in shell
    (port,) = free_ports([0])
    commands = [line for line in shell.splitlines() if not line.startswith("pip install")]
    server = f"127.0.0.1:{port}"
    script = "\n".join(commands).replace("kafka-eos broker", f"kafka-eos broker --port {port}")
    for command in ("kafka-eos flights", "kafka-eos topics create delays"):
        assert command in script
        script = script.replace(command, f"{command} --bootstrap-servers {server}")
    (tree / "program.py").write_text(program.replace("127.0.0.1:9092", server))
    again = "kill %1; wait %1 || true"  # the broker of a shell that was closed
    with subprocess.Popen(
        ["bash", "-e", "-c", f"{script}\npython program.py\n{again}\n{script}\npython program.py\n"],
        cwd=tree,
        env=environment(
            PATH=f"{bare.bin}{os.pathsep}{os.environ['PATH']}",
            PYSPARK_PYTHON=str(bare.bin / "python"),
            PYSPARK_DRIVER_PYTHON=str(bare.bin / "python"),
            JAVA_TOOL_OPTIONS="-XX:TieredStopAtLevel=1",  # too short for the optimising compiler to pay off
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the broker left by the script can be ended with its process group
    ) as process:
        try:
            out, err = process.communicate(timeout=_SECONDS)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode == 0, f"{out}\n{err}"
    assert out.count("10,000 flights sent to topic 'flights'") == 1
    for topic in ("flights", "delays"):
        assert f"Topic '{topic}' exists and was left as it is." in out
    assert re.search(r'"carrier":"\w+","dest":"\w+","dep_delay":\d+', out)
    counts = re.findall(r"(\d+) flights left more than an hour late", out)
    assert len(counts) == 2
    assert counts[0] == counts[1], "the second run finds nothing new"
    assert int(counts[0]) > 100
    assert git("status", "--short") == "?? program.py\n"
