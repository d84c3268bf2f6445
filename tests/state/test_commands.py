"""``kafka-eos state``: lists, gets and compares, on stores created here and a fake cluster."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.cli import main
from kafka_eos_source.errors import InvalidOptionError, StateError
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate import stores
from kafka_eos_source.operate.stores import Kind, Verified, compare, parse_key
from kafka_eos_source.protocol.token import ShardProgress, Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.vector.processor import AggregateProcessor
from tests.state.local_state import APP, STORE, TOPIC, Machine, rows_of

FLIGHTS = pa.schema([("origin", pa.string()), ("delay", pa.int64())])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    processor = AggregateProcessor(FLIGHTS, ["origin"], {"flights": agg.count(), "delay": agg.sum("delay")})
    made = Machine(tmp_path / "state", processor, ["origin"])
    made.batch(0, rows_of(FLIGHTS, [("JFK", 5), ("LGA", 1), ("JFK", -2), ("LAX", 0)]))
    made.commit()
    for shard in range(made.shards):
        made.promote(shard)
    return made


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["state", *map(str, words)])


def test_ls_lists_the_stores_of_a_state_directory(machine: Machine) -> None:
    machine.batch(1, rows_of(FLIGHTS, [("JFK", 1)]), only=[1])
    shown = run("list", "--state-dir", machine.root)
    assert shown.exit_code == 0, shown.output
    assert APP in shown.output
    found = json.loads(run("list", "--state-dir", machine.root, "--json").output)["local"]
    assert [each["shard"] for each in found] == [0, 1, 2]
    assert {each["batch"] for each in found} == {0}
    assert [each["pending"] for each in found] == [[], [1], []]
    assert [each["next_offset"] for each in found] == [machine.ends[k] for k in range(3)]
    assert all(each["bytes"] > 0 and each["shards"] == 3 for each in found)


def test_ls_reports_an_unreadable_store_and_continues(machine: Machine) -> None:
    (machine.path(1) / "VERSION").write_text("99\n")
    found = json.loads(run("list", "--state-dir", machine.root, "--json").output)["local"]
    assert [each["problem"] is None for each in found] == [True, False, True]
    assert "format 99" in run("list", "--state-dir", machine.root).output
    assert "contains no state" in run("list", "--state-dir", machine.root / "x").output
    refused = run("list")
    assert refused.exit_code == 2
    assert "name what to list" in refused.output


@dataclass
class FakeReader:
    """A cluster with these topics, offsets and logs."""

    all_topics: dict[str, int]
    offsets: dict[TopicPartition, GroupOffset] = field(default_factory=dict)

    def topics(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        return "cluster", self.all_topics

    def group(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> tuple[Mapping[TopicPartition, GroupOffset], bool]:
        return {tp: self.offsets[tp] for tp in certainly if tp in self.offsets}, False

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        raise AssertionError("not asked for")

    def logs(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogEnds]:
        return dict.fromkeys(partitions, LogEnds(0, 11, 11))


def test_ls_lists_changelogs() -> None:
    token = Token(APP, "query", "run", 8, 7, "", "", 1, shard=ShardProgress("a", 1, None)).encode()
    tp = TopicPartition(TOPIC, 1)
    reader = FakeReader(
        {TOPIC: 2, "app-other-changelog": 1, "apple-counts-changelog": 1, "app-changelog": 1, "in": 3},
        {tp: GroupOffset(tp, 10, token)},
    )
    found = stores.changelog_shards(reader, APP, APP, None, Deadline.after_ms(1))
    assert [(each.store, each.tp.partition) for each in found] == [("counts", 0), ("counts", 1), ("other", 0)]
    assert [each.lag for each in found] == [11, 1, 11]
    assert [each.token and each.token.batch_id for each in found] == [None, 7, None]
    only = stores.changelog_shards(reader, APP, APP, "other", Deadline.after_ms(1))
    assert [each.store for each in only] == ["other"]
    assert stores.changelog_shards(reader, "nobody", "nobody", None, Deadline.after_ms(1)) == []


def test_get_prints_a_key_a_prefix_or_all_entries(machine: Machine) -> None:
    shown = run("get", APP, "--state-dir", machine.root, "JFK")
    assert shown.exit_code == 0, shown.output
    assert f"{STORE}, batch 0" in shown.output
    (row,) = run("get", APP, "--state-dir", machine.root, "JFK", "--json").output.splitlines()
    assert json.loads(row)["value"] == {"flights": 2, "delay": 3}
    found = run("get", APP, "--state-dir", machine.root, "--prefix", "L", "--json").output.splitlines()
    assert {json.loads(each)["key"]["origin"] for each in found} == {"LGA", "LAX"}
    some = run("get", APP, "--state-dir", machine.root, "--limit", 1, "--json")
    assert "more than 1 rows" in some.output
    assert len(run("get", APP, "--state-dir", machine.root, "--limit", 0, "--json").output.splitlines()) == 3
    assert run("get", APP, "--state-dir", machine.root, "EWR", "--json").output == ""
    assert "remove one of them" in run("get", APP, "--state-dir", machine.root, "EWR", "--prefix", "E").output
    assert run("get", APP, "--state-dir", machine.root, "a", "b").exit_code == 1


def test_words_of_the_command_line_are_parsed_into_typed_keys() -> None:
    fields = pa.schema(
        [
            ("n", pa.int64()),
            ("at", pa.timestamp("us", "UTC")),
            ("bytes", pa.binary()),
            ("flag", pa.bool_()),
            ("price", pa.decimal128(10, 2)),
        ]
    )
    found = parse_key(fields, ("-7", "2026-11-21T12:00:00Z", "00ff", "True", "1.50"))
    assert found[0] == -7
    assert found[1].isoformat() == "2026-11-21T12:00:00+00:00"
    assert found[2:4] == (b"\x00\xff", True)
    assert str(found[4]) == "1.50"
    for word, name in (("seven", "n"), ("today", "at"), ("xyz", "bytes"), ("maybe", "flag")):
        with pytest.raises(InvalidOptionError, match=f"{word!r} is not a value of column {name!r}"):
            parse_key(pa.schema([fields.field(name)]), (word,))
    with pytest.raises(InvalidOptionError, match=r"the key has 1 value\(s\); expected 5: n, at"):
        parse_key(fields, ("1",))


@settings(max_examples=60)
@given(
    st.dictionaries(st.binary(min_size=1, max_size=2), st.binary(max_size=1), max_size=9),
    st.dictionaries(st.binary(min_size=1, max_size=2), st.binary(max_size=1), max_size=9),
)
def test_verify_finds_every_difference(log: dict[bytes, bytes], disk: dict[bytes, bytes]) -> None:
    found = Verified(0, 0, 0)
    compare(found, iter(sorted(log.items())), iter(sorted(disk.items())))
    expected = {
        **dict.fromkeys(log.keys() - disk.keys(), Kind.MISSING),
        **dict.fromkeys(disk.keys() - log.keys(), Kind.SURPLUS),
        **{key: Kind.OTHER for key in log.keys() & disk.keys() if log[key] != disk[key]},
    }
    assert {each.key: each.kind for each in found.differences} == expected
    assert (found.entries, found.differing) == (len(log), len(expected))


def test_verify_counts_differences_beyond_those_it_shows() -> None:
    found = Verified(0, 0, 0)
    compare(found, iter(()), iter([(bytes([n]), b"") for n in range(100)]))
    assert (found.differing, len(found.differences)) == (100, stores.SHOWN)


def test_verify_without_a_database_on_this_host_is_an_error() -> None:
    with pytest.raises(StateError, match="this machine has no database of store"):
        next(stores.verify([], _changelog(), Deadline.after_ms(1)))


def _changelog() -> Any:
    from kafka_eos_source.state.reading.stores import Changelog

    return Changelog(APP, STORE, APP, {})


def test_commands_that_need_a_store_say_so() -> None:
    missing = run("verify", "--bootstrap-servers", "localhost:1", APP)
    assert "--store is missing" in missing.output
