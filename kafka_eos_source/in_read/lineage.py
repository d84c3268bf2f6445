"""Whether a frame's columns come straight from this source: what may then be left to the read.

Looks at Spark's analysed plan, through its JVM: source, and above it nothing but projections of plain
columns, renamed ones and ``cast(… as string)`` of bytes. Anything else, and any plan that looks unfamiliar,
means "no": then all is done after the read, as with any other source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kafka_eos_source.in_read.columns import ReadColumn, ReadColumns
from kafka_eos_source.model import FORMAT_NAME
from kafka_eos_source.spark.schema import read_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Fields of a ``StreamingRelationV2`` that can have a name.
_NAMED = 9


@dataclass(frozen=True)
class Lineage:
    """Where the columns of a frame come from.

    Attributes:
        options: of the source.
        name: that ``readStream.name(…)`` gave the source; None = none.
        columns: those that were asked for.
    """

    options: dict[str, str]
    name: str | None
    columns: ReadColumns

    def read(self, option: str, step: str, session: SparkSession) -> DataFrame:
        """The source once more, with a step that its tasks do before Spark sees a row.

        Args:
            option: of the source.
            step: its value.
        """
        reader: Any = session.readStream.format(FORMAT_NAME).options(**self.options)
        if self.name is not None:
            reader = reader.name(self.name)
        read: DataFrame = reader.option(option, step).load()
        return read


def lineage(frame: DataFrame, names: Sequence[str]) -> Lineage | None:
    """Of the columns ``names`` of a streaming frame; None = they are not the source's own.

    With Spark Connect there is no plan to look at.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is None:
        return None
    return _of_plan(jdf.queryExecution().analyzed(), names)


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
        return None  # a name that is there twice
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
            return None  # a number's digits: Spark's to write
        columns.append(replace(below, name=own.name, as_text=own.as_text or below.as_text))
    return replace(beneath, columns=ReadColumns(tuple(columns)))


def _of_source(plan: Any, names: Sequence[str]) -> Lineage | None:
    options = {str(name): str(value) for name, value in plan.extraOptions().asCaseSensitiveMap().items()}
    known = {each.name() for each in _each(plan.output())}
    if str(plan.sourceName()) != FORMAT_NAME or not known.issuperset(names):
        return None
    columns = ReadColumns(tuple(ReadColumn(name, name) for name in names))
    return Lineage(options, _name(plan), columns)


def _column(expression: Any) -> ReadColumn | None:
    """Of a projection: the column's own name, and that of the column beneath."""
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
    """Spark names sources since 4.2 or so (``UserProvided``); one that it numbers itself has none."""
    if plan.productArity() < _NAMED:
        return None
    found = plan.sourceIdentifyingName()
    return str(found.name()) if _kind(found) == "UserProvided" else None


def _kind(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _each(sequence: Any) -> Iterator[Any]:
    """The elements of a Scala sequence."""
    return (sequence.apply(index) for index in range(sequence.size()))
