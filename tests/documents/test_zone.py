"""Tables of time zones against zoneinfo, and names as Spark accepts them."""

from __future__ import annotations

import zoneinfo
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.documents.zone import Zone, zone
from kafka_eos_source.errors import InvalidOptionError

#: Names with one offset in Java and more in the database.
_SHORT = {"EST", "MST", "HST"}
_YEARS_400 = 146_097 * 86_400
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_FIRST, _LAST = -62_135_500_000, 253_402_200_000  # as far as zoneinfo goes


def offset(found: Zone, second: int) -> int:
    if second >= found.repeats:
        second = found.repeats + (second - found.repeats) % _YEARS_400
    return int(found.offsets[np.searchsorted(found.starts, second, "right") - 1])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_offsets_are_those_of_zoneinfo(data: st.DataObject) -> None:
    names = sorted(zoneinfo.available_timezones() - _SHORT)
    name = data.draw(st.sampled_from(names))
    found = zone(name)
    changes = [each for each in found.starts.tolist() if _FIRST < each < _LAST]
    seconds = st.integers(_FIRST, _LAST) | st.integers(-(10**9), 5 * 10**9)
    if changes:
        seconds |= st.sampled_from(changes).flatmap(lambda each: st.integers(each - 1, each))
    for second in data.draw(st.lists(seconds, min_size=10, max_size=30)):
        local = (_EPOCH + timedelta(seconds=second)).astimezone(zoneinfo.ZoneInfo(name))
        assert local.utcoffset() == timedelta(seconds=offset(found, second)), (name, second)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("UTC", 0),
        ("Z", 0),
        ("GMT", 0),
        ("+1", 3600),
        ("+0130", 5400),
        ("-07:00:30", -25_230),
        ("UTC+1:30", 5400),
        ("GMT-3", -10_800),
        ("UT+01", 3600),
        ("+18:00", 64_800),
        ("EST", -18_000),
        ("IST", 19_800),
        ("Etc/GMT+5", -18_000),
        ("PST", -25_200),
        ("Europe/Berlin", 7200),
    ],
)
def test_names_that_spark_accepts(name: str, expected: int) -> None:
    assert offset(zone(name), 1_718_000_000) == expected


@pytest.mark.parametrize(
    "name", ["", "Nowhere/City", "+19:00", "UTC+1:99", "../../etc/passwd", "/etc/localtime"]
)
def test_names_that_are_unknown(name: str) -> None:
    with pytest.raises(InvalidOptionError, match="is not in the time zone database"):
        zone(name)


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = next(Path(each, "Europe/Rome") for each in [*zoneinfo.TZPATH, _package()] if Path(each).is_dir())
    content = whole.read_bytes()
    monkeypatch.setattr(zoneinfo, "TZPATH", (str(tmp_path),))
    zoneinfo.ZoneInfo("Europe/Rome")
    Path(tmp_path, "Europe").mkdir()
    for size in (0, 20, 44, len(content) // 2):
        zone.cache_clear()
        Path(tmp_path, "Europe/Rome").write_bytes(content[:size])
        with pytest.raises(InvalidOptionError, match="'Europe/Rome' is not in the time zone database"):
            zone("Europe/Rome")
    zone.cache_clear()


def _package() -> str:
    tzdata = pytest.importorskip("tzdata")
    return str(Path(tzdata.__file__).parent / "zoneinfo")


def test_the_package_tzdata_is_used_if_the_machine_has_no_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _package()
    monkeypatch.setattr(zoneinfo, "TZPATH", ())
    zone.cache_clear()
    assert offset(zone("Asia/Kathmandu"), 1_718_000_000) == 20_700
    zone.cache_clear()
