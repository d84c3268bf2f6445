"""The table of properties has all that the installed librdkafka has, with the same values."""

from __future__ import annotations

import ctypes
import re
from typing import NamedTuple

import pytest
from confluent_kafka import cimpl, libversion

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.config import check_consumer, check_producer
from kafka_eos_source.kafka.properties import (
    PROPERTIES,
    Choice,
    Choices,
    Fate,
    Number,
    Property,
    Switch,
    Whole,
    documentation,
)
from tests import ROOT

#: The librdkafka from which the table has its ranges. An older one may have others.
WRITTEN_FOR = 0x02100000


class Theirs(NamedTuple):
    """A property, as librdkafka describes it."""

    values: str
    kind: str


@pytest.fixture(scope="module")
def librdkafka(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Theirs]]:
    """What the installed librdkafka prints about its properties; some exist globally and for topics."""
    path = tmp_path_factory.mktemp("librdkafka") / "CONFIGURATION.md"
    libc, library = ctypes.CDLL(None), ctypes.CDLL(cimpl.__file__)
    libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p] * 2
    libc.fclose.argtypes = library.rd_kafka_conf_properties_show.argtypes = [ctypes.c_void_p]
    file = libc.fopen(str(path).encode(), b"w")
    library.rd_kafka_conf_properties_show(file)
    libc.fclose(file)
    found: dict[str, list[Theirs]] = {}
    for line in path.read_text().splitlines():
        cells = [each.strip() for each in line.split(" | ")]
        kind = re.search(r"[*]Type: ([^*]*)[*]", line)
        if kind:
            found.setdefault(cells[0], []).append(Theirs(cells[2], kind[1]))
    assert len(found) > 150
    return found


def test_the_table_has_every_property_of_librdkafka(librdkafka: dict[str, list[Theirs]]) -> None:
    assert librdkafka.keys() <= PROPERTIES.keys()


def test_the_table_accepts_the_values_that_librdkafka_accepts(librdkafka: dict[str, list[Theirs]]) -> None:
    """Where the table accepts fewer words, it says what to do instead."""
    if libversion()[1] < WRITTEN_FOR:
        pytest.skip("an older librdkafka has other ranges")
    differences = {
        name: (each, ours.kind.expected)
        for name, each in librdkafka.items()
        if (ours := PROPERTIES[name]).fate in (Fate.SUPPORTED, Fate.IGNORED)
        and not any(_fits(ours, theirs) for theirs in each)
    }
    assert differences == {}


def _fits(ours: Property, theirs: Theirs) -> bool:
    kind = ours.kind
    words = set(theirs.values.split(", "))
    if theirs.kind == "boolean":
        return isinstance(kind, Switch)
    if theirs.kind in ("integer", "float"):
        low, high = map(int, theirs.values.split(" .. "))
        return isinstance(kind, (Whole, Number)) and (
            (kind.lowest, kind.highest) == (low, high)
            or (bool(ours.instead) and low <= kind.lowest and kind.highest <= high)
        )
    if theirs.kind == "enum value":
        return isinstance(kind, Choice) and (
            set(kind.words) == words or (bool(ours.instead) and set(kind.words) < words)
        )
    if theirs.kind == "CSV flags":
        return isinstance(kind, Choices) and set(kind.words) == words
    return theirs.kind in ("string", "pattern list") and not isinstance(kind, (Whole, Number, Switch))


def test_a_renamed_property_becomes_one_that_has_an_effect_or_none() -> None:
    targets = {each.note for each in PROPERTIES.values() if each.fate is Fate.RENAMED}
    assert all(PROPERTIES[each].fate in (Fate.SUPPORTED, Fate.IGNORED) for each in targets)


def test_a_refused_property_names_itself_and_the_alternative() -> None:
    for name, each in PROPERTIES.items():
        if each.fate is Fate.REFUSED:
            with pytest.raises(InvalidOptionError) as caught:
                check_producer({name: "hunter2"}, exactly_once=False)
            assert f"option 'kafka.{name}' (" in str(caught.value)
            assert caught.value.fix == each.note + "."


def test_a_property_without_effect_reaches_only_requests_for_administration() -> None:
    for name, each in PROPERTIES.items():
        if each.fate is Fate.IGNORED:
            kind = each.kind
            value = kind.words[0] if isinstance(kind, Choice) else str(getattr(kind, "lowest", 1))
            assert check_consumer({name: value}) == ({name: value} if each.connection else {})


def test_the_documentation_is_current() -> None:
    page = ROOT / "docs" / "kafka-properties.md"
    assert page.read_text(encoding="utf-8") == documentation(), "run ./dev docs"
    for name in PROPERTIES:
        assert f"`{name}`" in page.read_text(encoding="utf-8")
