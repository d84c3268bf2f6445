"""All commands of ``kafka-eos``: exit codes, --json, completion, secrets, and what the docs say of them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from kafka_eos_source import cli
from kafka_eos_source.cli import main
from kafka_eos_source.operate import json_documents
from kafka_eos_source.operate.json_documents import AnyNames, Object, Optional, OrNull
from kafka_eos_source.operate.shared import ExitCode
from tests import ROOT
from tests.support.json_shapes import mismatches

DOCS = ROOT / "docs"
#: A port on which nobody listens.
NOBODY = ("--bootstrap-servers", "127.0.0.1:1", "--timeout", "300ms")
ID = "app-0123456789ab-files-1-0123456789abcdef0123"
APP = ("app",)
SECRET = "hunter2-is-secret"


def leaves(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """Yields the path of each command that does something, such as ``("state", "list")``."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, *path, name)
        else:
            yield (*path, name)


COMMANDS = sorted(" ".join(each) for each in leaves(main))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    sink = tmp_path / "sink.properties"
    sink.write_text(
        "kafka.bootstrap.servers=127.0.0.1:1\ntopic=out\napplication.id=app\n"
        f"sinks=files\nsink.files.type=filesystem\nsink.files.path={tmp_path}/out\n"
    )
    return {"options": str(sink), "folder": str(tmp_path), "file": str(sink / "below a file")}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def run(*arguments: str) -> tuple[int, str, str]:
    result = invoke(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


#: For each command, arguments with which it fails, because no broker answers or a file is missing.
_FAILING: dict[str, tuple[str, ...]] = {
    "acls": (*APP,),
    "adopt": (),
    "broker": ("--port", "0", "--dir", "{file}"),
    "dead-letters list": ("t", *NOBODY),
    "dead-letters replay": ("t", *NOBODY),
    "demo": ("--bootstrap-servers", "127.0.0.1:1", "--events", "10"),
    "fence": (*APP, *NOBODY, "--yes"),
    "flights": ("--bootstrap-servers", "127.0.0.1:1", "--records", "1"),
    "inspect": (),
    "lag": ("--group", "g", *NOBODY),
    "metrics": ("--port", "0", "--host", "203.0.113.1"),  # a documentation address: nobody has it
    "produce": ("t", "{options}", *NOBODY),
    "sinks abort": (ID, "--options", "{options}", "--yes"),
    "sinks commit": (ID, "--options", "{options}", "--yes"),
    "sinks list": ("--options", "{options}", "--timeout", "300ms"),
    "state get": ("--store", "s", *APP, *NOBODY),
    "state list": (*APP, *NOBODY),
    "state rescale": ("--store", "s", "--shards", "2", *APP, *NOBODY),
    "state lower-time": ("--store", "s", *APP, *NOBODY),
    "state restore": ("--store", "s", "--state-dir", "{folder}", *APP, *NOBODY),
    "state verify": ("--store", "s", "--state-dir", "{folder}", *APP, *NOBODY),
    "sweep": (),
    "tail": ("t", *NOBODY),
    "token-topic create": ("t", *NOBODY),
    "token-topic describe": ("t", *NOBODY),
    "token-topic forget": ("t", *APP, *NOBODY),
    "token-topic restore": ("t", *APP, *NOBODY),
    "token-topic show": ("t", *NOBODY),
    "top": ("a-query-that-nobody-ran-here",),
    "topics create": ("t", *NOBODY),
    "topics describe": ("t", *NOBODY),
    "topics list": NOBODY,
}
#: Commands that fail only by their command line, or report a failure as a finding.
_NEVER_FAIL = {"completion", "doctor"}


def test_each_command_is_covered() -> None:
    assert set(COMMANDS) == set(_FAILING) | _NEVER_FAIL
    assert set(COMMANDS) == set(json_documents.SHAPES)


def _parameters(command: str) -> list[click.Parameter]:
    found: click.Command = main
    for name in command.split():
        assert isinstance(found, click.Group)
        found = found.commands[name]
    return found.make_context(name, ["--help-me-not"], resilient_parsing=True).command.params


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_works_on_is_its_argument(command: str) -> None:
    """One grammar: a query, a topic, a key, an id or a file is an argument, the rest are options."""
    parameters = _parameters(command)
    arguments = [each for each in parameters if isinstance(each, click.Argument)]
    kinds = [(each.metavar or each.human_readable_name).strip("[].").lower() for each in arguments]
    assert set(kinds) <= {"query", "topic", "key", "id", "file", "shell"}, kinds
    options = {opt for each in parameters for opt in each.opts if opt.startswith("--")}
    assert not options & {"--topic", "--id", "--group-id", "--bootstrap"} or "query" in kinds
    if "--application-id" in options:
        assert command == "metrics" or command.startswith("dead-letters"), "it only selects among many"
    if "--checkpoint" in options:
        assert "query" in kinds
    if "--kafka" in options:
        assert {"--bootstrap-servers", "--kafka-properties", "--timeout"} <= options


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_prints_json_and_ends_with_2_for_an_unknown_option(command: str) -> None:
    code, shown, _ = run(*command.split(), "--help")
    assert code == ExitCode.DONE
    assert "--json" in shown
    assert run(*command.split(), "--no-such-option")[0] == ExitCode.USAGE


@pytest.mark.parametrize("command", sorted(_FAILING))
def test_each_command_that_fails_ends_with_1_and_says_why(
    command: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kafka_eos_source.demo import __main__ as demo
    from kafka_eos_source.kafka import playground

    monkeypatch.setattr(playground, "_SECONDS", 0.3)
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    arguments = [*command.split(), *(each.format(**files) for each in _FAILING[command])]
    if command in ("sinks abort", "sinks commit"):
        arguments += ["--timeout", "300ms"]
    code, shown, errors = run(*arguments)
    assert code == ExitCode.FAILED, shown + errors
    assert "[KAFKA_EOS." in errors
    code, shown, _ = run(*arguments, "--json")
    assert code == ExitCode.FAILED
    said = json.loads(shown)
    assert list(mismatches(json_documents.ERROR, said)) == []
    assert f"[{said['error']['condition']}] {said['error']['message'][:40]}" in errors


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("adopt", (*APP, *NOBODY)),
        ("doctor", ("--check", "brokers", *NOBODY)),
        ("fence", (*APP, *NOBODY)),
        ("inspect", (*APP, *NOBODY)),
    ],
)
def test_commands_that_report_brokers_as_a_finding_end_with_3(
    command: str, arguments: tuple[str, ...]
) -> None:
    code, shown, _ = run(command, *arguments, "--json")
    assert code == ExitCode.NEEDS_A_PERSON
    assert list(mismatches(json_documents.SHAPES[command], json.loads(shown))) == []


def test_a_shape_finds_what_is_missing_undocumented_or_of_another_kind() -> None:
    shape: Object[object] = Object(
        a="text", b=OrNull([Object(c="number")], "never"), d=Optional("text"), e=AnyNames(Object(f="x"))
    )
    good = {"a": 1, "b": [{"c": 2}], "e": {"anything": {"f": 1}}}
    assert list(mismatches(shape, good)) == []
    assert list(mismatches(shape, {**good, "b": None, "d": "x"})) == []
    for bad, said in (
        ({**good, "z": 1}, "$.z is not documented"),
        ({"a": 1, "b": None}, "$.e is missing"),
        ({**good, "b": [{"c": []}]}, "$.b[0].c: [] is not a simple value"),
        ({**good, "b": {"c": 1}}, "$.b: {'c': 1} is not an array"),
        ({**good, "e": {"anything": {}}}, "$.e.anything.f is missing"),
        ([], "$: [] is not an object"),
    ):
        assert list(mismatches(shape, bad)) == [said]


def test_the_documentation_has_the_exit_codes_and_the_json_of_this_version() -> None:
    rows = [f"| {code.value} | {code.meaning} |" for code in ExitCode]
    table = "\n".join(["| exit code | meaning |", "|--:|---|", *rows])
    assert table in (DOCS / "command-line.md").read_text(encoding="utf-8")
    written = (DOCS / "cli-json.md").read_text(encoding="utf-8")
    assert written == json_documents.documentation(), "run python -m kafka_eos_source.operate.json_documents"


# -- completion


def test_the_command_line_starts_without_kafka_arrow_and_spark() -> None:
    """A shell starts it for each completion."""
    heavy = "{'confluent_kafka', 'kafka', 'numpy', 'pyarrow', 'pyspark', 'rich', 'rocksdict'}"
    program = f"import sys, kafka_eos_source.cli; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("shell", sorted(cli.INSTALL))
def test_each_shell_has_a_script(shell: str) -> None:
    code, script, _ = run("completion", shell)
    assert code == ExitCode.DONE
    assert f"_KAFKA_EOS_COMPLETE={shell}_complete" in script
    printed = json.loads(run("completion", shell, "--json")[1])
    assert list(mismatches(json_documents.SHAPES["completion"], printed)) == []
    assert printed["script"] + "\n" == script


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("sta", ["state"]),
        ("state res", ["rescale", "restore"]),
        ("token-topic create --min", ["--min-insync-replicas"]),
        ("completion ", ["bash", "fish", "zsh"]),
        ("flights --rec", ["--records"]),
        ("produce --format ", ["json", "lines"]),
    ],
)
def test_bash_completes_commands_options_and_values(typed: str, found: list[str], tmp_path: Path) -> None:
    """bash itself runs the script and asks the program, as it does when a person presses Tab."""
    bash = shutil.which("bash")
    assert bash is not None, "bash is not installed"
    program = tmp_path / "kafka-eos"
    # as pip writes it
    program.write_text(f"#!{sys.executable}\nfrom kafka_eos_source.cli import main\nmain()\n")
    program.chmod(0o755)
    words = ["kafka-eos", *typed.split(" ")]
    lines = [
        'eval "$(kafka-eos completion bash)"',
        "complete -p kafka-eos >/dev/null || exit 9",
        f"COMP_WORDS=({' '.join(map(shlex.quote, words))})",
        f"COMP_CWORD={len(words) - 1}",
        f"COMP_LINE={shlex.quote('kafka-eos ' + typed)} COMP_POINT=${{#COMP_LINE}}",
        "_kafka_eos_completion kafka-eos",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [bash, "--norc", "--noprofile", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == found


# -- secrets


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
    result = invoke("doctor", *args, "--check", "no-such-check")
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
    assert "Warning" not in invoke("doctor", *args, "--check", "no-such-check").stderr


def test_every_command_that_has_a_registry_takes_its_login_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REGISTRY_URL", f"https://bob:{SECRET}@127.0.0.1:1")
    for command in (["doctor", "--check", "registry", "--json"], ["tail", "t"]):
        result = invoke(*command, "--timeout", "1s", "--registry-option", "url.env=REGISTRY_URL")
        assert "Warning" not in result.stderr
        assert SECRET not in result.output + result.stderr


@pytest.mark.parametrize("option", ["--registry-option", "--config"])
def test_a_value_without_its_name_is_not_shown(option: str) -> None:
    command = ["doctor"] if option == "--registry-option" else ["topics", "create", "t"]
    result = invoke(*command, option, SECRET)
    assert result.exit_code != 0
    assert "has no '='" in result.stderr + result.output
    assert SECRET not in result.stderr + result.output
