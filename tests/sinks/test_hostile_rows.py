"""Any frame of Spark's types, with any bytes: a row breaks a rule, or another reader finds it unchanged.

No exception of pyarrow, deltalake or pyiceberg may come out of a sink.
"""

from __future__ import annotations

import decimal
import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as spark

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.sinks import constructors
from kafka_eos_source.sinks.contract import OK, TwoPhaseSink
from kafka_eos_source.sinks.filesystem import committed_files
from kafka_eos_source.sinks.formats import rows_as_json
from kafka_eos_source.spark.arrow import arrow_schema
from kafka_eos_source.testing.sinks import System, deadline, new_txn, opened, stage
from tests.support.row_rules import broken_rules

_FLAT = [
    *(pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    *(pa.decimal128(38, 0), pa.decimal128(10, 2), pa.decimal128(38, 38), pa.decimal128(5, 0)),
    *(pa.string(), pa.binary(), pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us")),
]
_ODD_NAMES = [
    "id",
    "Name",
    "a.b",
    "x y",
    "ž",
    "a-b",
    "2x",
    'q"uote',
    "x=y",
    ";",
    "key",
    "element",
    "a/b",
    "%41",
]
_ODD_TEXTS = [b"", b"\0", b"\xff", b"x" * 300, "🐎".encode() * 40, b"a\xffb", b'"\\', b"\n", b"/..", b"\xc3"]


def _names() -> st.SearchStrategy[str]:
    others = st.text(min_size=1, max_size=5).filter(lambda text: text.isprintable() and bool(text.strip()))
    return st.sampled_from(_ODD_NAMES) | others


def _nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    keys = st.sampled_from([each for each in _FLAT if not pa.types.is_floating(each)])
    return (
        inner.map(pa.list_)
        | _fields(inner, 3).map(pa.struct)
        | st.tuples(keys, inner).map(lambda pair: pa.map_(*pair))
    )


def _fields(kinds: st.SearchStrategy[pa.DataType], most: int) -> st.SearchStrategy[list[pa.Field]]:
    fields = st.tuples(_names(), kinds).map(lambda pair: pa.field(*pair))
    return st.lists(fields, min_size=1, max_size=most, unique_by=lambda field: field.name.lower())


_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_KINDS = st.recursive(st.sampled_from(_FLAT), _nested, max_leaves=4)


def _stored(kind: pa.DataType) -> pa.DataType:
    """Returns a type of the same layout whose values Python can hold: bytes for texts, numbers for times."""
    is_ = pa.types
    if is_.is_struct(kind):
        return pa.struct([each.with_type(_stored(each.type)) for each in kind])
    if is_.is_list(kind) or is_.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(_stored(kind.value_type)))
    if is_.is_map(kind):
        return pa.map_(_stored(kind.key_type), _stored(kind.item_type))
    if is_.is_date(kind):
        return pa.int32()
    return pa.int64() if is_.is_timestamp(kind) else pa.binary() if is_.is_string(kind) else kind


def _values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    is_ = pa.types
    found: st.SearchStrategy[Any]
    if is_.is_boolean(kind):
        found = st.booleans()
    elif is_.is_floating(kind):
        found = st.floats(width=32 if kind.bit_width == 32 else 64)
    elif is_.is_decimal(kind):
        most, exact = 10**kind.precision - 1, decimal.Context(prec=80)
        found = st.integers(-most, most).map(lambda n: exact.scaleb(decimal.Decimal(n), -kind.scale))
    elif is_.is_string(kind):
        found = st.text(max_size=6).map(str.encode) | st.binary(max_size=4) | st.sampled_from(_ODD_TEXTS)
    elif is_.is_binary(kind):
        found = st.binary(max_size=20)
    elif is_.is_struct(kind):
        found = st.fixed_dictionaries({each.name: _values(each.type) for each in kind})
    elif is_.is_list(kind):
        found = st.lists(_values(kind.value_type), max_size=3)
    elif is_.is_map(kind):
        pairs = st.tuples(_values(kind.key_type).filter(lambda key: key is not None), _values(kind.item_type))
        found = st.lists(pairs, max_size=3, unique_by=lambda pair: repr(pair[0]))
    else:
        most = 2 ** (_stored(kind).bit_width - 1)
        found = st.integers(-most, most - 1) | st.integers(-5, 5)
    return st.none() | found | found | found


@st.composite
def _frames(draw: st.DrawFn) -> pa.Table:
    schema, rows = pa.schema(draw(_fields(_KINDS, 4))), draw(st.integers(1, 4))
    columns = [
        pa.array([draw(_values(field.type)) for _ in range(rows)], _stored(field.type)).view(field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _plain(rows: pa.Table) -> list[str]:
    """Returns the rows as texts that are equal only if the values are, in any order."""
    columns = [
        pa.concat_arrays(column.cast(_small(column.type)).chunks) if column.num_chunks else []
        for column in rows.columns
    ]
    values = [column.view(_stored(column.type)).to_pylist() for column in columns]
    return sorted(map(repr, zip(*values, strict=True)))


def _small(kind: pa.DataType) -> pa.DataType:
    """Returns the type without large texts and lists, and without the names that a file format gives."""
    is_ = pa.types
    if is_.is_struct(kind):
        return pa.struct([pa.field(each.name, _small(each.type)) for each in kind])
    if is_.is_list(kind) or is_.is_large_list(kind):
        return pa.list_(_small(kind.value_type))
    if is_.is_map(kind):
        return pa.map_(_small(kind.key_type), _small(kind.item_type))
    return pa.string() if is_.is_large_string(kind) else pa.binary() if is_.is_large_binary(kind) else kind


def _written(system: System, rows: pa.Table) -> pa.Table:
    """Writes the rows that break no rule, and returns them; none if the sink refuses the schema by name."""
    with opened(system) as sink:
        try:
            sink.check(rows.schema, deadline())
            sink.make_ready(rows.schema, deadline())
        except (InvalidSchemaError, InvalidOptionError):
            return rows.slice(0, 0)
        refused = broken_rules(sink, rows)
        rows = rows.take(pa.array([each for each in range(rows.num_rows) if each not in refused], pa.int64()))
        if rows.num_rows:
            txn = new_txn()
            assert sink.prepare(txn, stage(sink, rows), deadline()) == OK
            assert sink.commit(txn, deadline()) == OK
    return rows


def _hostile(most: int) -> Callable[[Any], Any]:
    return settings(max_examples=most, deadline=None, suppress_health_check=list(HealthCheck))


@_hostile(40)
@given(_frames(), st.booleans())
def test_delta(rows: pa.Table, partitioned: bool) -> None:
    deltalake = pytest.importorskip("deltalake")
    first = rows.schema.field(0)
    # delta-rs shows readers a wrong partition value for some negative decimals
    by = (first.name,) if partitioned and not pa.types.is_decimal(first.type) else ()
    with tempfile.TemporaryDirectory() as folder:
        system = System(_delta(folder, by), list, store=f"{folder}/checkpoint")
        rows = _written(system, rows)
        if not rows.num_rows:
            return
        found = deltalake.DeltaTable(f"{folder}/t").to_pyarrow_table().select(rows.schema.names)
    if by and pa.types.is_string(first.type):  # the protocol has no empty text in a partition column
        texts = rows.column(0)
        rows = rows.set_column(0, first, pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts))
    assert _plain(found) == _plain(rows)


def _delta(folder: str, by: Sequence[str]) -> Callable[[], TwoPhaseSink]:
    if any("," in each or each != each.strip() for each in by):  # the option is a list with commas
        by = ()
    return lambda: constructors.delta(f"{folder}/t", partition_by=by).build()


@_hostile(20)
@given(_frames(), st.booleans())
def test_iceberg(rows: pa.Table, partitioned: bool) -> None:
    catalogs = pytest.importorskip("pyiceberg.catalog")
    name = rows.schema.names[0]
    by = [name] if partitioned and not set(name) & set(" (),`.") and name == name.strip() else []
    with tempfile.TemporaryDirectory() as folder:
        catalog = {"type": "sql", "uri": f"sqlite:///{folder}/c.db", "warehouse": f"file://{folder}/w"}
        made = lambda: constructors.iceberg("n.t", catalog=catalog, partition_by=by).build()  # noqa: E731
        rows = _written(System(made, list, store=f"{folder}/checkpoint"), rows)
        if not rows.num_rows:
            return
        loaded = catalogs.load_catalog("default", **catalog)
        files = [each.file.file_path for each in loaded.load_table("n.t").scan().plan_files()]
        found = pa.concat_tables([pq.ParquetFile(urlsplit(each).path).read() for each in files])
        loaded.close()
    # the names of fields are escaped if Avro does not have them
    assert _without_names(found) == _without_names(rows)


def _without_names(rows: pa.Table) -> list[str]:
    return sorted(re.sub(r"""('(?:[^'\\]|\\.)*'|"[^"]*"): """, "", each) for each in _plain(rows))


@pytest.mark.parametrize("kind", ["parquet", "json", "csv"])
@_hostile(40)
@given(_frames())
def test_files(kind: str, rows: pa.Table) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = _written(System(lambda: constructors.files(folder, format=kind).build(), list), rows)
        files = [f"/{each.lstrip('/')}" for each in committed_files(folder)]
        if kind == "parquet" and files:
            assert _plain(pa.concat_tables([pq.ParquetFile(each).read() for each in files])) == _plain(rows)
        elif kind == "json" and files:
            lines = [line for each in files for line in Path(each).read_bytes().split(b"\n")[:-1]]
            wanted = [each for batch in rows.to_batches() for each in rows_as_json(batch)[0].to_pylist()]
            assert sorted(map(_comparable, lines)) == sorted(map(_comparable, wanted))
        elif files:
            texts = pacsv.ConvertOptions(column_types=dict.fromkeys(rows.schema.names, pa.string()))
            parsed = pacsv.ParseOptions(newlines_in_values=True)
            found = [pacsv.read_csv(each, parse_options=parsed, convert_options=texts) for each in files]
            assert sum(each.num_rows for each in found) == rows.num_rows
            assert {tuple(each.schema.names) for each in found} == {tuple(rows.schema.names)}


@pytest.mark.parametrize(
    ("unit", "end"), [("ms", "T16:47:04.192"), ("us", "T19:59:05.224192"), ("ns", "T00:12:43.145224192")]
)
def test_the_smallest_time_is_a_time(unit: Any, end: str) -> None:
    """NumPy has no text for it."""
    numbers = pa.array([-(2**63), -(2**63) + 1, None])
    (first, second, null), exact = (
        each.to_pylist()
        for each in rows_as_json(pa.record_batch({"at": numbers.cast(pa.timestamp(unit, "UTC"))}))
    )
    assert first.endswith(f'{end}Z"}}'.encode())
    assert first[:-4] == second[:-4], "one unit earlier"
    assert (null, exact) == (b'{"at":null}', [True] * 3)


def _comparable(line: bytes) -> str:
    """Returns a line of JSON as text in which equal numbers are equal, also those of 32 bits."""

    def number(text: str) -> str:
        value = float(text)
        return f"{value:.6e}" if math.isfinite(value) else text

    def names(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(number(name) if _NUMBER.fullmatch(name) else name, value) for name, value in pairs]

    hooks: dict[str, Any] = {"parse_float": number, "parse_int": number, "object_pairs_hook": names}
    return repr(json.loads(line, parse_constant=_no_json, **hooks))


def _no_json(text: str) -> Any:
    raise AssertionError(f"{text} is no JSON")


# -- every type of Spark ---------------------------------------------------------------------------


def _spark_types() -> list[spark.DataType]:
    flat: list[spark.DataType] = [
        *(spark.NullType(), spark.ByteType(), spark.DayTimeIntervalType(), spark.TimestampNTZType()),
        *(spark.StringType("UTF8_LCASE"), spark.DecimalType(38, 0), spark.BooleanType()),
    ]
    flat += [getattr(spark, name)() for name in ("TimeType", "VariantType") if hasattr(spark, name)]
    flat += [getattr(spark, name)(4326) for name in ("GeometryType", "GeographyType") if hasattr(spark, name)]
    structs = [spark.StructType([spark.StructField("x", each, nullable=False)]) for each in flat]
    maps = [spark.MapType(spark.StringType(), each) for each in flat]
    return [*flat, *map(spark.ArrayType, flat), *structs, *maps, spark.StructType([])]


@pytest.mark.parametrize("kind", ["delta", "parquet", "json", "csv"])
def test_a_column_of_any_type_is_written_or_refused_by_name(tmp_path: Path, kind: str) -> None:
    if kind == "delta":
        pytest.importorskip("deltalake")
    for number, each in enumerate(_spark_types()):
        try:
            schema = arrow_schema(
                spark.StructType([spark.StructField("id", spark.LongType()), spark.StructField("c", each)])
            )
        except InvalidSchemaError:
            continue
        folder = str(tmp_path / str(number))
        made = (
            _delta(folder, ())
            if kind == "delta"
            else lambda folder=folder: constructors.files(folder, format=kind).build()
        )
        rows = pa.table([pa.array([1]), pa.nulls(1, schema.field("c").type)], schema=schema)
        _written(System(made, list, store=f"{folder}/checkpoint"), rows)
