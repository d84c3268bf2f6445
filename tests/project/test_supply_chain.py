"""What others provide is named so exactly that nobody can replace it, and only this machine reaches ports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def workflow(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_action_is_pinned_to_a_commit(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    for each in used:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v[\d.]+", each), each


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_job_has_the_least_rights(path: Path) -> None:
    found = workflow(path)
    assert found["permissions"] == {}
    for name, job in found["jobs"].items():
        publishes = any("pypi-publish" in step.get("uses", "") for step in job["steps"])
        assert job["permissions"] == ({"id-token": "write"} if publishes else {"contents": "read"}), name
        for step in job["steps"]:
            if publishes:
                assert "run" not in step, "the job that may publish runs no code of the repository"
            if "actions/checkout@" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_what_builds_the_published_files_has_exact_versions_and_hashes() -> None:
    lines = [
        line
        for line in (ROOT / ".ci/build-requirements.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert {Requirement(line.split(" --")[0]).name for line in lines} >= {"build", "setuptools"}
    for line in lines:
        assert re.fullmatch(
            r"[\w-]+==[\w.]+( ; python_version < \"[\d.]+\")? --hash=sha256:[0-9a-f]{64}", line
        ), line
    project = (ROOT / "pyproject.toml").read_text()
    (required,) = re.findall(r"\[build-system\]\nrequires = \[(.*?)\]", project)
    needed = Requirement(required.strip('"'))
    (pinned,) = re.findall(r"^setuptools==(\S+)", "\n".join(lines), re.MULTILINE)
    assert "<" in str(needed.specifier)
    assert needed.specifier.contains(pinned)


def test_the_ports_of_compose_are_open_to_this_machine_alone() -> None:
    services = workflow(ROOT / "docker-compose.yml")["services"]
    ports = [port for each in services.values() for port in each.get("ports", ())]
    assert len(ports) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)


def test_the_hashes_of_jars_are_part_of_the_wheel() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (files,) = re.findall(r"^kafka_eos_source = \[(.*)\]", project, re.MULTILINE)
    assert '"embedded/jars.sha256"' in files
    for path in ("kafka_eos_source/embedded", "integration/support"):
        for line in (ROOT / path / "jars.sha256").read_text().splitlines():
            assert re.fullmatch(r"[0-9a-f]{64}  [\w.+-]+\.jar", line)
