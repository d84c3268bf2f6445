"""Finds out whether all columns of a frame come directly from this source.

Only then can a step run inside the read tasks. This module reads Spark's analysed plan through the JVM. The
plan must consist of the source and of projections that select columns, rename them, or apply ``cast(… as
string)`` to bytes. With any other or unknown plan, the step runs after the read, as with any other source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kafka_eos_source.in_read.columns import ReadColumn, ReadColumns
from kafka_eos_source.model import FORMAT_NAME
from kafka_eos_source.options.table import STEPS_IN_READ
from kafka_eos_source.spark.schema import read_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Number of fields of a ``StreamingRelationV2`` in Spark versions that have named sources.
_NAMED = 9


@dataclass(frozen=True)
class Lineage:
    """The source that the columns of a frame come from.

    Attributes:
        options: options of the source.
        name: name of the source from ``readStream.name(…)``; None if it has none.
        columns: the columns of the frame.
    """

    options: dict[str, str]
    name: str | None
    columns: ReadColumns

    def read(
        self, option: str, step: str, session: SparkSession, more: Mapping[str, str] | None = None
    ) -> DataFrame:
        """Returns a frame that reads the source with a step that its tasks apply before Spark sees a row.

        Args:
            option: option of the source that carries the step.
            step: the value of that option.
            session: session of the frame.
            more: further options of the source.
        """
        reader: Any = session.readStream.format(FORMAT_NAME).options(**self.options)
        if self.name is not None:
            reader = reader.name(self.name)
        frame: DataFrame = reader.option(option, step).options(**(more or {})).load()
        return frame


def lineage(frame: DataFrame, names: Sequence[str]) -> Lineage | None:
    """Returns the lineage of columns of a frame; None if they do not all come directly from this source.

    With Spark Connect it is always None, because the client cannot read the plan.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is None:
        return None
    return _of_plan(jdf.queryExecution().analyzed(), names)


def source_options(frame: DataFrame) -> list[dict[str, str]]:
    """Returns the options of each source of this package that a frame reads, with names in lower case.

    With Spark Connect it returns nothing, because the client cannot read the plan.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is None:
        return []
    leaves = _each(jdf.queryExecution().analyzed().collectLeaves())
    return [
        {str(name).lower(): str(value) for name, value in leaf.extraOptions().asCaseSensitiveMap().items()}
        for leaf in leaves
        if _kind(leaf) == "StreamingRelationV2" and str(leaf.sourceName()) == FORMAT_NAME
    ]


def _of_plan(plan: Any, names: Sequence[str]) -> Lineage | None:
    kind = _kind(plan)
    if kind == "SubqueryAlias":
        return _of_plan(plan.child(), names)
    if kind == "StreamingRelationV2":
        return _of_source(plan, names)
    if kind != "Project":
        return None
    projection = list(_each(plan.projectList()))
    projected = {each.name(): each for each in projection}
    if len(projected) < len(projection):
        return None  # two columns have the same name
    found = [_column(projected.get(name)) for name in names]
    wanted = [each.source for each in found if each is not None]
    beneath = _of_plan(plan.child(), list(dict.fromkeys(wanted))) if len(wanted) == len(names) else None
    if beneath is None:
        return None
    known = {each.name: each for each in beneath.columns.columns}
    columns = []
    for own in found:
        assert own is not None
        below = known[own.source]
        if own.as_text and not below.as_text and not _is_bytes(below.source):
            return None  # only Spark converts numbers to text
        columns.append(replace(below, name=own.name, as_text=own.as_text or below.as_text))
    return replace(beneath, columns=ReadColumns(tuple(columns)))


def _of_source(plan: Any, names: Sequence[str]) -> Lineage | None:
    options = {str(name): str(value) for name, value in plan.extraOptions().asCaseSensitiveMap().items()}
    known = {each.name() for each in _each(plan.output())}
    if str(plan.sourceName()) != FORMAT_NAME or not known.issuperset(names):
        return None
    if any(name.lower() in STEPS_IN_READ for name in options):
        return None  # the columns are those of the step
    columns = ReadColumns(tuple(ReadColumn(name, name) for name in names))
    return Lineage(options, _name(plan), columns)


def _column(expression: Any) -> ReadColumn | None:
    """Returns the column that an expression of a projection selects; None for any other expression."""
    if expression is None:
        return None
    if _kind(expression) == "AttributeReference":
        return ReadColumn(expression.name(), expression.name())
    if _kind(expression) != "Alias":
        return None
    child = expression.child()
    if _kind(child) == "AttributeReference":
        return ReadColumn(expression.name(), child.name())
    if _kind(child) != "Cast" or _kind(child.child()) != "AttributeReference":
        return None
    if child.dataType().catalogString() != "string":
        return None
    return ReadColumn(expression.name(), child.child().name(), as_text=True)


def _is_bytes(column: str) -> bool:
    return read_schema(True)[column].dataType.simpleString() == "binary"


def _name(plan: Any) -> str | None:
    """Returns the name that the user gave the source; None if it has none or Spark has no such names."""
    if plan.productArity() < _NAMED:
        return None
    found = plan.sourceIdentifyingName()
    return str(found.name()) if _kind(found) == "UserProvided" else None


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _each(sequence: Any) -> Iterator[Any]:
    """Yields the elements of a Scala sequence."""
    return (sequence.apply(index) for index in range(sequence.size()))
