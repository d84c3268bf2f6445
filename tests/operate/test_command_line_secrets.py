"""A secret on a command line is warned of, with another way to give it; no command shows one."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kafka_eos_source.cli import main

SECRET = "hunter2-is-secret"


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


@pytest.mark.parametrize(
    ("args", "instead"),
    [
        (["--kafka", f"sasl.password={SECRET}"], "--kafka-properties"),
        ([f"--kafka=kafka.ssl.key.password={SECRET}"], "--kafka-properties"),
        (["--kafka", f"sasl.oauthbearer.token.endpoint.url=https://c:{SECRET}@h/"], "--kafka-properties"),
        (["--registry-option", f"basic.auth.user.info=bob:{SECRET}"], "add .env"),
        (["--registry-option", f"bearer.auth.token={SECRET}"], "add .env"),
        (["--registry-option", f"url=https://bob:{SECRET}@h"], "add .env"),
        (["--registry", f"https://a:1,https://bob:{SECRET}@h:1"], "basic.auth.user.info.env=VARIABLE"),
        (["--registry", f"https://h:1?api_key={SECRET}"], "basic.auth.user.info.env=VARIABLE"),
        (["--checkpoint", f"s3://KEY:{SECRET}@bucket/c"], "environment variables"),
        (["--staging", f"s3://bucket/c?secret_key={SECRET}"], "environment variables"),
    ],
)
def test_a_secret_on_the_command_line_is_warned_of_once(args: list[str], instead: str) -> None:
    result = run("doctor", *args, "--check", "no-such-check")
    assert result.stderr.count("Warning: other users of this machine can read the secret in ") == 1
    option = args[0].partition("=")[0]
    assert f"the secret in {option}." in result.stderr
    assert instead in result.stderr
    assert SECRET not in result.output + result.stderr + repr(result.exception)


@pytest.mark.parametrize(
    "args",
    [
        ["--registry-option", "basic.auth.user.info.env=REGISTRY_LOGIN"],
        ["--registry", "https://registry:8081"],
        ["--kafka", "sasl.username=alice"],
        ["--kafka", "ssl.key.location=/etc/key.pem"],
        ["--kafka-properties", "/dev/null"],
        ["--checkpoint", "s3://bucket/c?endpoint_override=localhost:9000&scheme=http"],
        ["--checkpoint", "abfss://container@account.dfs.core.windows.net/c"],
        ["--token-topic", "tokens"],
    ],
)
def test_what_is_no_secret_is_not_warned_of(args: list[str]) -> None:
    assert "Warning" not in run("doctor", *args, "--check", "no-such-check").stderr


def test_every_command_that_has_a_registry_takes_its_login_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REGISTRY_URL", f"https://bob:{SECRET}@127.0.0.1:1")
    for command in (["doctor", "--check", "registry", "--json"], ["tail", "t"]):
        result = run(*command, "--timeout", "1s", "--registry-option", "url.env=REGISTRY_URL")
        assert "Warning" not in result.stderr
        assert SECRET not in result.output + result.stderr


@pytest.mark.parametrize("option", ["--registry-option", "--config"])
def test_a_value_without_its_name_is_not_shown(option: str) -> None:
    command = ["doctor"] if option == "--registry-option" else ["topics", "create", "t"]
    result = run(*command, option, SECRET)
    assert result.exit_code != 0
    assert "has no '='" in result.stderr + result.output
    assert SECRET not in result.stderr + result.output
