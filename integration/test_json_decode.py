"""docs/json.md is right: documents become what `from_json` makes of them, except where it says otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession, types
from pyspark.sql import functions as f

from kafka_eos_source.documents.decode import JsonDecoding
from tests import ROOT
from tests.documents import json_model as model
from tests.documents.json_examples import DOCUMENTS, SCALARS, VALUES

ZONE = "America/New_York"
BAD = "is_bad"


class Case(NamedTuple):
    """A document, and what the page says that it becomes; None = the same here and there."""

    document: bytes
    field: str | None = None
    here: str | None = None
    there: str | None = None


def tables() -> Iterator[list[list[str]]]:
    """Yields the rows of the tables that the page marks, without code marks; a cell that is no code is ''."""
    page = (ROOT / "docs" / "json.md").read_text()
    for part in page.split("<!-- read by integration/test_json_decode.py -->")[1:]:
        lines = part.strip().split("\n\n")[0].splitlines()[2:]
        yield [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def code(cell: str) -> str:
    found = re.search(r"`(.*)`", cell)
    return ("error, " if cell.startswith("error, ") else "") + found.group(1) if found else cell


def as_bytes(text: str) -> bytes:
    text = re.sub(r"\[\*(\d+)", lambda each: "[" * int(each.group(1)) + "]" * int(each.group(1)), text)
    text = re.sub(r"9\*(\d+)", lambda each: "9" * int(each.group(1)), text)
    return text.encode().replace(b"\\xff", b"\xff")


#: What differs, as the page says, in values that are not in its table: a type, and the texts of values.
KNOWN = (
    ("tinyint", r"12[89]|1[3-9]\d|2[0-4]\d|25[0-5]"),
    ("float", r"-?1e(39|308|309|400|1000000|9{20})|1\.797\S+|3\.4028236e38"),
    ("double", r"-?1e(309|400|1000000|9{20})|1\.7976931348623159e308"),
    ("string|float|double", r"NaN|Infinity"),
    ("string", r"-0|-?\d+(\.\d+)?[eE].*|-?\d+\.\d+|\".*\\u(d800|de00\\u|d83dx).*"),
    ("binary", r'"YQ==YQ=="'),
    ("date", r'"\+?(1|123|20200102)"'),
    ("decimal.*", r"0e9{20}"),
    ("timestamp", r'"T?03:04:05"|9223372036855|-?\d{16,19}'),
)


def is_known(kind: str, text: str) -> bool:
    return any(re.fullmatch(name, kind) and re.fullmatch(texts, text) for name, texts in KNOWN)


def shown(value: Any, found: pa.DataType) -> str:
    """Returns a value as the page writes it."""
    if isinstance(value, bytes):
        value = value.decode()
    if pa.types.is_date(found) and value is not None:
        value = str(date(1970, 1, 1) + timedelta(days=value))
    if pa.types.is_timestamp(found) and value is not None:
        value = str(datetime.fromisoformat("1970-01-01T00:00:00+00:00") + timedelta(microseconds=value))[:25]
    return json.dumps(value, ensure_ascii=False, default=str)


def test_documents_become_what_from_json_makes_of_them(spark: SparkSession) -> None:
    """One query with a field for each type, and a row for each value, document, and line of the page."""
    values, documents = tables()
    kinds = {each.simpleString(): each for each in SCALARS}
    ddl = [code(kind) for _, kind, *_ in values]
    for each in [
        *ddl,
        "STRUCT<x INT, y STRING>",
        "ARRAY<INT>",
        "ARRAY<STRUCT<x INT, y INT>>",
        "MAP<STRING, INT>",
    ]:
        found = types.StructType.fromDDL(f"c {each}")["c"].dataType
        kinds[found.simpleString()] = found
    names = {kind: f"c{number}" for number, kind in enumerate(kinds)}
    schema = types.StructType.fromDDL(
        "a INT, s STRING, l ARRAY<INT>, m MAP<STRING, INT>, n STRUCT<x INT, y STRING>"
    )
    for kind, name in names.items():
        schema = schema.add(name, kinds[kind])

    cases = [
        Case(f'{{"{names[kind]}":{text}}}'.encode())
        for kind in kinds
        for text in VALUES
        if not is_known(kind, text)
    ]
    for (_, _, value, here, there), each in zip(values, ddl, strict=True):
        name = names[types.StructType.fromDDL(f"c {each}")["c"].dataType.simpleString()]
        text = b'{"%s":%s}' % (name.encode(), as_bytes(code(value)))
        cases.append(Case(text, name, code(here), code(there)))
    for _, document, here, there in documents:
        cases.append(Case(as_bytes(code(document)), "", code(here), code(there)))
    listed = {case.document for case in cases}
    differ = re.compile(
        rb'\xff|\xed|\\ud800|"m":.*"k".*(k|006b)"|} *[{x\0]|NaN|"s":[^"n]|"l".*"x"|\'|\[{254}|9{999}', re.S
    )
    cases += [
        Case(each) for each in DOCUMENTS if each.strip() and each not in listed and not differ.search(each)
    ]

    column = pa.array([case.document for case in cases], pa.binary())
    ours = JsonDecoding(schema, ZONE, partial=True).decode(column)
    frame = spark.createDataFrame(list(enumerate(case.document for case in cases)), "i INT, v BINARY")
    options = {"timeZone": ZONE, "columnNameOfCorruptRecord": BAD}
    parsed = f.from_json(f.col("v").cast("string"), schema.add(BAD, types.StringType()), options)
    table = frame.select("i", parsed.alias("p")).orderBy("i").coalesce(1).toArrow()
    theirs = table["p"].combine_chunks()

    mine, spark_rows = model.plain(ours.values), model.plain(theirs)
    wrong = []
    for row, (case, left, right) in enumerate(zip(cases, mine, spark_rows, strict=True)):
        is_bad = right is not None and right.pop(BAD) is not None
        if case.here is None:
            if (row in ours.errors, model.comparable(left)) != (is_bad, model.comparable(right)):
                rows = [each and {k: v for k, v in each.items() if v is not None} for each in (left, right)]
                wrong.append((case.document[:100], *rows, ours.errors.get(row), is_bad))
            continue
        results = []
        for bad, found in ((row in ours.errors, left), (is_bad, right)):
            if case.field:
                field = schema.names.index(case.field)
                text = "error" if bad else shown(found[case.field], ours.values.type.field(field).type)
            else:
                text = json.dumps(found and {"a": found["a"], "s": found["s"]}, ensure_ascii=False)
                text = "error, " * bad + text
            results.append(text)
        expected = [case.here, case.there]
        if case.there == "that time today":
            expected[1] = results[1] if results[1] not in ("error", "null") else "a time"
        if results != expected:
            wrong.append((case.document[:100], results, expected))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(cases) > 2000


@pytest.mark.parametrize("kind", ["CHAR(3)", "VARCHAR(3)"])
def test_from_json_refuses_types_that_are_strings_here(spark: SparkSession, kind: str) -> None:
    with pytest.raises(Exception, match="CHAR"):
        spark.sql(f"SELECT from_json('{{}}', 'c {kind}') AS p").collect()
    schema = types.StructType.fromDDL(f"c {kind}")
    found = JsonDecoding(schema).decode(pa.array([b'{"c":"longer"}']))
    assert found.values.to_pylist() == [{"c": "longer"}]
