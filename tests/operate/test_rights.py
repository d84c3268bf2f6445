"""The table of least rights: what ``kafka-eos acls`` prints for a query, and what the documentation says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from kafka_eos_source.cli import main
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate import json_documents, rights
from kafka_eos_source.operate.rights import BATCH, COMMANDS, QUERY, TABLE, Names, names_of
from kafka_eos_source.operate.shared import ExitCode
from tests import ROOT
from tests.support.json_shapes import mismatches

DOCS = ROOT / "docs"
QUERY_ID = "7d1c5b1e-53a5-4f2a-9a55-0c4d0d8f6d11"
OUT = ("--topic", "out")
FLAGS = ("--topic", "--group", "--transactional-id")


def acls(*arguments: str, code: int = ExitCode.DONE) -> str:
    result = CliRunner().invoke(main, ["acls", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def granted(*arguments: str) -> set[tuple[str, str, str]]:
    """Returns who gets which operation on what, as the lines that are no comments grant it."""
    found = set()
    for line in acls(*arguments).splitlines():
        if line.startswith("#"):
            continue
        words = shlex.split(line)
        assert words[:2] == ["kafka-acls.sh", "--bootstrap-server"]
        assert words[2] in ("$BROKERS", "$SOURCE_BROKERS")
        assert words[5] == "--add"
        who = words[words.index("--allow-principal") + 1]
        prefixed = "--resource-pattern-type" in words
        (name,) = (words[words.index(each) + 1] for each in FLAGS if each in words)
        operations = (words[at + 1] for at, each in enumerate(words) if each == "--operation")
        found |= {(who, each, name + ("*" if prefixed else "")) for each in operations}
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A checkpoint that has read topic ``in``, and a token topic."""
    position = {"in": {"0": 5}, "in-too": {"0": 7}}
    for name, text in {
        "metadata": json.dumps({"id": QUERY_ID}),
        "offsets/0": "v1\n" + json.dumps({"batchTimestampMs": 1}) + "\n" + json.dumps(position),
        "kafka-eos/identity.json": json.dumps(
            {
                "application_id": "app",
                "query_id": QUERY_ID,
                "first_batch": 0,
                "location": tmp_path.as_uri(),
                "token_topic": "tokens",
            }
        ),
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return str(tmp_path)


def test_the_names_come_from_the_checkpoint(checkpoint: str) -> None:
    found = granted("--checkpoint", checkpoint, *OUT)
    assert {each[1:] for each in found if each[0] == "User:source"} == {("Read", "in"), ("Read", "in-too")}
    assert {each[1:] for each in found if each[0] == "User:sink"} == {
        ("Write", "app"),
        ("Read", "kafka-eos.app"),
        ("Write", "out"),
        ("Read", "out"),
        ("Read", "in"),
        ("Read", "in-too"),
        ("Write", "tokens"),
        ("Read", "tokens"),
    }


def test_a_new_query_is_described_by_options(tmp_path: Path) -> None:
    options = ("app", "--group", "own", "--source-topic", "in", "--other-cluster")
    stateful = ("--store", "s", "--dead-letter-topic", "dead", "--anchor-topic", "anchor", *OUT)
    found = granted(*options, *stateful, "--operator-principal", "User:operator")
    assert ("User:source", "Read", "in") in found
    assert ("User:sink", "Read", "in") not in found
    assert {("User:sink", "Read", "own"), ("User:sink", "Read", "anchor")} < found
    assert ("User:sink", "Write", "dead") in found
    assert {each[1:] for each in found if each[0] == "User:operator"} == {
        ("Create", "app-s-changelog"),
        ("DescribeConfigs", "app-s-changelog"),
        ("Read", "app-s-changelog"),
        ("Describe", "own"),
        ("Write", "app"),
    }


def test_rights_of_a_source_elsewhere_are_granted_on_its_own_cluster() -> None:
    """A mirrored topic has the same name on both, and one principal may log in to both."""
    options = ("app", "--source-topic", "same", "--topic", "same", "--other-cluster")
    both = ("--source-principal", "User:me", "--sink-principal", "User:me")
    lines = [each for each in acls(*options, *both, "--store", "s").splitlines() if "kafka-acls.sh" in each]
    source = [each for each in lines if '--bootstrap-server "$SOURCE_BROKERS" ' in each]
    assert all('--bootstrap-server "$BROKERS" ' in each for each in lines if each not in source)
    assert [each.partition("--operation ")[2] for each in source] == [
        "Read --topic same",
        "Describe --group kafka-eos.app",
        "DescribeConfigs --cluster",
    ]
    assert any(each.endswith("--operation Write --operation Read --topic same") for each in lines)
    rights = json.loads(acls(*options, *both, "--json"))["rights"]
    assert all(each["other_cluster"] == (each["part"] == "source") for each in rights)
    assert "(other" in acls(*options, *both, "--table")


def test_who_shares_a_principal_gets_each_right_once_and_no_contained_one() -> None:
    options = ("app", "--source-topic", "in", "--store", "s", *OUT)
    both = ("--source-principal", "User:me", "--sink-principal", "User:me")
    found = granted(*options, *both)
    assert {each[0] for each in found} == {"User:me"}
    assert ("User:me", "Describe", "kafka-eos.app") not in found
    text = acls(*options, *both)
    assert text.count("--topic in\n") == 1
    assert "--operation Describe --group" not in text, "Read contains Describe, also if it is optional"


def test_batch_writes_need_prefixes_unless_they_have_an_id() -> None:
    found = {each[1:] for each in granted("--batch", *OUT)}
    assert found == {
        ("Write", "kafka-eos-batch-*"),
        ("Read", "kafka-eos.kafka-eos-batch-*"),
        ("Write", "out"),
        ("Read", "out"),
    }
    named = {each[1:] for each in granted("--batch", "app", *OUT)}
    assert named == {("Write", "app"), ("Read", "kafka-eos.app"), ("Write", "out"), ("Read", "out")}


@pytest.mark.parametrize(
    ("in_group", "expected"),
    [
        ({"out": 1}, set()),
        ({"out": 1, "app-s-changelog": 5}, {"app-s-changelog"}),
        ({}, {"app-s-changelog", "app-x-s-changelog"}),
    ],
)
def test_a_query_gets_no_right_to_the_changelogs_of_another_one(
    in_group: dict[str, int], expected: set[str]
) -> None:
    """The store ``x-s`` of query ``app`` has the same changelog as the store ``s`` of query ``app-x``."""
    offsets = {TopicPartition(topic, 0): offset for topic, offset in in_group.items()}
    group: Any = SimpleNamespace(offsets=offsets, own=SimpleNamespace(ends={}))
    inspection: Any = SimpleNamespace(application_id="app", checkpoint=None, kafka=group)
    target: Any = SimpleNamespace(application_id="app", group_id=None, anchor_topic=None)
    topics = dict.fromkeys(["out", "app-s-changelog", "app-x-s-changelog"], 1)
    found = names_of(target, inspection, topics)
    assert found is not None
    assert set(found.changelogs) == expected


def test_with_several_output_topics_the_anchor_is_kafkas_own_topic_unless_it_is_named() -> None:
    options = ("app", *OUT, "--topic", "more")
    assert ("User:sink", "Read", "__consumer_offsets") in granted(*options)
    named = granted(*options, "--anchor-topic", "out")
    assert ("User:sink", "Read", "out") in named
    assert not any("__consumer_offsets" in each for each in named)


def test_optional_rights_are_comments_that_say_what_happens_without_them() -> None:
    lines = acls("app", "--token-topic", "tokens", *OUT).splitlines()
    optional = [each for each in lines if each.startswith("# optional")]
    assert any("without it: the sink only warns" in each for each in optional)
    assert sum(each.startswith("# kafka-acls.sh") for each in lines) == len(optional)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_rights_of_its_own(command: str) -> None:
    options = ("app", "--source-topic", "in", "--store", "s", *OUT)
    more = ("--token-topic", "tokens", "--dead-letter-topic", "dead", "--command", command)
    without = granted(*options, *more[:4])
    found = granted(*options, *more, "--command-principal", "User:me")
    assert found > without
    assert {each[0] for each in found - without} == {"User:me"}


def test_a_replay_has_a_group_and_an_id_of_its_own() -> None:
    options = ("app", "--source-topic", "in", "--dead-letter-topic", "dead", *OUT)
    found = granted(*options, "--command", "dead-letters replay", "--command-principal", "User:me")
    assert {each[1:] for each in found if each[0] == "User:me"} == {
        ("Read", "dead"),
        ("Write", "in"),
        ("DescribeConfigs", "in"),
        ("Write", "kafka-eos-replay-dead*"),
        ("Read", "kafka-eos-replay-dead*"),
    }


def test_the_table_and_json_have_every_right() -> None:
    options = ("app", "--source-topic", "in", "--token-topic", "tokens", *OUT)
    shown = json.loads(acls(*options, "--json"))
    assert list(mismatches(json_documents.SHAPES["acls"], shown)) == []
    assert not shown["looked_up"]
    required = {
        (each["principal"], each["operation"], each["name"])
        for each in shown["rights"]
        if not each["without"]
    }
    assert required == granted(*options)
    table = acls(*options, "--table")
    for each in shown["rights"]:
        assert any(
            all(each[key] in line for key in ("principal", "operation", "name"))
            for line in table.splitlines()
        )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("app",), "add --topic"),
        (OUT, "the application.id is not known"),
        (("*", *OUT), "application.id"),
        (("app", "--group", "*", *OUT), "'*' stands for every resource"),
        (("app", "--source-topic", "*", *OUT), "'*' stands for every resource"),
        (("app", "--topic", "a\x1b[2J"), "control characters"),
        (("app", *OUT, "--sink-principal", "sink"), "no principal"),
        (("app", *OUT, "--sink-principal", "User:*"), "no principal"),
    ],
)
def test_what_would_grant_too_much_or_is_not_known_is_refused(arguments: tuple[str, ...], said: str) -> None:
    shown = acls(*arguments, code=ExitCode.FAILED)
    assert said in shown
    assert "kafka-acls.sh" not in shown


def test_names_do_not_escape_from_the_shell() -> None:
    evil = "x; rm -rf $(echo /) '\""
    found = granted("app", "--group", evil, *OUT, "--sink-principal", f"User:{evil}")
    assert (f"User:{evil}", "Read", evil) in found


def test_every_row_of_the_table_is_used() -> None:
    full = Names("app", "group", ("in",), ("out",), "out", "tokens", ("app-s-changelog",), "dead")
    for row in TABLE:
        assert row.part in (*QUERY, BATCH, *COMMANDS)
        assert row.operation in {each.operation for each in rights.needs(full, [row.part])}, row


def test_the_documentation_has_the_table_of_this_version() -> None:
    page = (DOCS / "security.md").read_text(encoding="utf-8")
    assert rights.documented() in page, "run python -m kafka_eos_source.operate.rights"
