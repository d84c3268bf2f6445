"""What Spark's plan says about the sources of a frame, and whether tasks of a source can run its steps.

A step can run in the tasks that read only if all columns of its input come directly from this source. The
plan must then consist of the source and of projections that select columns, rename them, or apply
``cast(… as string)`` to bytes. `trace` finds out, and otherwise says what else is in the plan (`Obstacle`).
In a classic session, the analysed plan is read through the JVM; with Spark Connect, the plan that the client
sends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.step import ReadColumn, ReadColumns, StepInRead
from kafka_eos_source.model import FORMAT_NAME
from kafka_eos_source.options.parse import parse_read
from kafka_eos_source.options.table import STEP_IN_READ
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.changelog_check import connect_relations, elements, name_of_step, node_kind
from kafka_eos_source.spark.operator_frame import Senders, operator_frame
from kafka_eos_source.spark.pickled import from_option
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
        self, step: StepInRead, session: SparkSession, more: Mapping[str, str] | None = None
    ) -> DataFrame:
        """Returns a frame that reads the source with a step that its tasks apply before Spark sees a row.

        Args:
            step: the step.
            session: session of the frame.
            more: further options of the source.
        """
        reader: Any = session.readStream.format(FORMAT_NAME).options(**self.options)
        if self.name is not None:
            reader = reader.name(self.name)
        frame: DataFrame = reader.option(STEP_IN_READ, step.to_option()).options(**(more or {})).load()
        return frame_of(step, frame)


def frame_of(step: StepInRead, frame: DataFrame) -> DataFrame:
    """Returns the frame that reads with a step, whose methods keep the bad records that it sets aside."""
    if not (isinstance(step, RowsInRead) and step.sets_aside):
        return frame
    return operator_frame(frame, senders=Senders(reads=(step.frame,)))


@dataclass(frozen=True)
class Obstacle:
    """The step of a query that the tasks which read cannot run.

    Attributes:
        what: the step, as the user wrote it: ``where()``, ``the expression upper(x)``. Of several, it is the
            first after the source.
        fix: what to do so that they can; empty if there is nothing.
    """

    what: str
    fix: str = ""


#: What to do about a step of Spark that SQL in the read has, too.
IN_SQL = "write it in app.sql(…), whose text runs in the tasks that read"
_SQL_HAS = frozenset({"where()", "explode()", "dropna()", "join()"})


def _of_step(kind: str) -> Obstacle:
    name = name_of_step(kind)
    return Obstacle(name, IN_SQL if name in _SQL_HAS else "")


def lineage(frame: DataFrame, names: Sequence[str]) -> Lineage | None:
    """Returns the lineage of columns of a frame; None if they do not all come directly from this source."""
    found = trace(frame, names)
    return found if isinstance(found, Lineage) else None


def trace(frame: DataFrame, names: Sequence[str]) -> Lineage | Obstacle:
    """Returns the lineage of columns of a frame, or what stands between them and the source.

    The column of packets is left out: a step in the read gets it from the one before it
    (`ReadColumns.sets_aside`). Spark Connect does not show the plan of a view or of SQL text.
    """
    names = [name for name in names if name != CHANGELOG]
    jdf = getattr(frame, "_jdf", None)
    if jdf is not None:
        return _resolved(_of_jvm(jdf.queryExecution().analyzed()), names)
    plan: Any = getattr(frame, "_plan", None)
    if plan is None:
        return Obstacle("an unknown plan")
    node = _of_connect(plan.plan(frame.sparkSession.client))
    if not isinstance(node, Obstacle) and list(node.names) != frame.columns:
        return Obstacle("a step that the client of Spark Connect cannot read")
    return _resolved(node, names)


# ------------------------------------------------------------------ the plan, of both kinds of sessions


@dataclass(frozen=True)
class _Source:
    """A stream of this package: its options, its name, and its columns."""

    options: dict[str, str]
    name: str | None
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Projection:
    """Columns that a projection selects from the node below, and what computes its other columns, by name."""

    columns: tuple[tuple[str, ReadColumn | str], ...]
    below: _Source | _Projection

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.columns)


def _resolved(node: _Source | _Projection | Obstacle, names: Sequence[str]) -> Lineage | Obstacle:
    if isinstance(node, Obstacle):
        return node
    missing = [name for name in names if name not in node.names]
    if missing:
        return Obstacle(f"a step that hides the column {missing[0]!r}")
    if isinstance(node, _Source):
        return _of_source(node, names)
    projected = dict(node.columns)
    if len(projected) < len(node.columns):
        return Obstacle("two columns of one name")
    found: list[ReadColumn] = []
    for name in names:
        column = projected[name]
        if isinstance(column, str):
            return Obstacle(column, IN_SQL)
        found.append(column)
    beneath = _resolved(node.below, list(dict.fromkeys(each.source for each in found)))
    if isinstance(beneath, Obstacle):
        return beneath
    known = {each.name: each for each in beneath.columns.columns}
    columns = []
    for own in found:
        below = known[own.source]
        if own.as_text and not below.as_text and not _is_bytes(beneath.columns, below.source):
            return Obstacle(f"cast({own.source} as string)", IN_SQL)  # only Spark converts numbers to text
        columns.append(replace(below, name=own.name, as_text=own.as_text or below.as_text))
    return replace(beneath, columns=replace(beneath.columns, columns=tuple(columns)))


def _is_bytes(columns: ReadColumns, source: str) -> bool:
    return bool(pa.types.is_binary(columns.given.field(source).type))


def _of_source(source: _Source, names: Sequence[str]) -> Lineage | Obstacle:
    """Returns the lineage of columns of a source.

    The rows of a `RowsInRead` are columns as those of the source itself. Rows of other steps in the read are
    not: they are packed, or carry state changes.
    """
    before, options = None, source.options
    carried = [each for each in options if each.lower() == STEP_IN_READ]
    if carried:
        before = from_option(options[carried[0]])
        if not isinstance(before, RowsInRead):
            return Obstacle("map_in_read() or a stateful operator")
        options = {each: value for each, value in options.items() if each not in carried}
    columns = ReadColumns(tuple(ReadColumn(each, each) for each in names), before)
    return Lineage(options, source.name, columns)


# ------------------------------------------------------------------ the plan of a classic session


def _of_jvm(plan: Any) -> _Source | _Projection | Obstacle:
    kind = node_kind(plan)
    if kind == "SubqueryAlias":
        return _of_jvm(plan.child())
    if kind == "StreamingRelationV2":
        return _source_of_jvm(plan)
    if kind != "Project":
        # what keeps the query from the read is the first such step after the source
        children = list(elements(plan.children()))
        first = _of_jvm(children[0]) if len(children) == 1 else _of_step(kind)
        found = first if isinstance(first, Obstacle) else _resolved(first, first.names)
        return found if isinstance(found, Obstacle) else _of_step(kind)
    below = _of_jvm(plan.child())
    if isinstance(below, Obstacle):
        return below
    columns = tuple((each.name(), _column_of_jvm(each)) for each in elements(plan.projectList()))
    return _Projection(columns, below)


def _source_of_jvm(leaf: Any) -> _Source | Obstacle:
    if str(leaf.sourceName()) != FORMAT_NAME:
        return Obstacle(f"the source {leaf.sourceName()}")
    options = {str(name): str(value) for name, value in leaf.extraOptions().asCaseSensitiveMap().items()}
    return _Source(options, _name(leaf), tuple(each.name() for each in elements(leaf.output())))


def _column_of_jvm(expression: Any) -> ReadColumn | str:
    """Returns the column that an expression of a projection selects, or the text of another expression."""
    if node_kind(expression) == "AttributeReference":
        return ReadColumn(expression.name(), expression.name())
    if node_kind(expression) == "Alias":
        child = expression.child()
        if node_kind(child) == "AttributeReference":
            return ReadColumn(expression.name(), child.name())
        is_cast = node_kind(child) == "Cast" and node_kind(child.child()) == "AttributeReference"
        if is_cast and child.dataType().catalogString() == "string":
            return ReadColumn(expression.name(), child.child().name(), as_text=True)
        expression = child
    return _computed(str(expression.sql()))


def _computed(text: str) -> str:
    return f"the expression {text if len(text) <= 100 else text[:100] + '…'}"


def _name(plan: Any) -> str | None:
    """Returns the name that the user gave the source; None if there is none, or this Spark has no names."""
    if plan.productArity() < _NAMED:
        return None
    found = plan.sourceIdentifyingName()
    return str(found.name()) if node_kind(found) == "UserProvided" else None


# ------------------------------------------------------------------ the plan of a client of Spark Connect

_IDENTIFIER = r"(`(?:[^`]|``)+`|[A-Za-z_]\w*)"
_SELECTED = re.compile(rf"\s*{_IDENTIFIER}(?:\s+(?:as\s+)?{_IDENTIFIER})?\s*", re.I)
_AS_TEXT = re.compile(
    rf"\s*cast\s*\(\s*{_IDENTIFIER}\s+as\s+string\s*\)(?:\s+(?:as\s+)?{_IDENTIFIER})?\s*", re.I
)


def _of_connect(relation: Any) -> _Source | _Projection | Obstacle:
    kind = str(relation.WhichOneof("rel_type"))
    node = getattr(relation, kind)
    if kind == "read":
        return _source_of_connect(node)
    if kind not in ("project", "subquery_alias", "with_columns_renamed", "to_df", "drop", "with_columns"):
        return _of_step(kind)
    if not node.HasField("input"):
        return Obstacle("rows that are no stream")
    below = _of_connect(node.input)
    if isinstance(below, Obstacle) or kind == "subquery_alias":
        return below
    same: dict[str, ReadColumn | str] = {name: ReadColumn(name, name) for name in below.names}
    columns: list[tuple[str, ReadColumn | str]] = []
    if kind == "project":
        for each in node.expressions:
            columns += same.items() if _is_star(each) else [_column_of_connect(each, below.names)]
    elif kind == "with_columns":
        for each in node.aliases:
            name = ".".join(each.name)
            same[_among(name, below.names) or name] = _column_of_connect(each.expr, below.names)[1]
        columns += [(name, _named(each, name)) for name, each in same.items()]
    elif kind == "drop":
        dropped = {_among(each, below.names) for each in node.column_names}
        dropped |= {_attribute(each, below.names) for each in node.columns}
        columns += [(name, each) for name, each in same.items() if name not in dropped]
    else:
        if kind == "to_df":
            renamed = dict(zip(below.names, node.column_names, strict=False))
        else:
            renamed = dict(node.rename_columns_map)
            renamed |= {each.col_name: each.new_col_name for each in node.renames}
            renamed = {_among(name, below.names) or name: new for name, new in renamed.items()}
        columns += [(new, ReadColumn(new, name)) for name in below.names for new in [renamed.get(name, name)]]
    return _Projection(tuple(columns), below)


def _source_of_connect(read: Any) -> _Source | Obstacle:
    source = read.data_source
    if not read.is_streaming or source.format != FORMAT_NAME:
        return Obstacle(f"the source {source.format or 'table'}")
    options = {str(name): str(value) for name, value in source.options.items()}
    name = str(getattr(source, "source_name", "")) or None
    step = next((value for each, value in options.items() if each.lower() == STEP_IN_READ), None)
    try:
        if step is not None:
            return _Source(options, name, tuple(from_option(step).schema.names))
        found = parse_read(options, streaming=True)
    except KafkaEosError:  # the server reports what is wrong
        return Obstacle("a source whose options are not valid")
    return _Source(options, name, tuple(read_schema(found.include_headers, found.columns).names))


def _is_star(expression: Any) -> bool:
    kind = expression.WhichOneof("expr_type")
    if kind == "unresolved_star":
        return not expression.unresolved_star.unparsed_target
    return kind == "expression_string" and str(expression.expression_string.expression).strip() == "*"


def _column_of_connect(expression: Any, below: Sequence[str]) -> tuple[str, ReadColumn | str]:
    """Returns the name of a projected column, and the column that it selects or what computes it."""
    kind = expression.WhichOneof("expr_type")
    if kind == "alias" and len(expression.alias.name) == 1:
        name, child = str(expression.alias.name[0]), expression.alias.expr
        return name, _named(_column_of_connect(child, below)[1], name)
    if kind == "expression_string":
        return _column_of_text(expression.expression_string.expression, below)
    if kind == "cast":
        cast = expression.cast
        inner = _attribute(cast.expr, below)
        is_text = cast.type_str.lower() == "string" or cast.type.WhichOneof("kind") == "string"
        if inner is not None and is_text and not cast.eval_mode:
            return inner, ReadColumn(inner, inner, as_text=True)
    found = _attribute(expression, below)
    if found is not None:
        name = _unquoted(expression.unresolved_attribute.unparsed_identifier)
        return name, ReadColumn(name, found)
    text = re.sub(r"\s+", " ", str(expression))
    return text, _computed(text)


def _column_of_text(text: str, below: Sequence[str]) -> tuple[str, ReadColumn | str]:
    for pattern, as_text in ((_SELECTED, False), (_AS_TEXT, True)):
        match = pattern.fullmatch(text)
        found = None if match is None else _among(_unquoted(match[1]), below)
        if match is not None and found is not None:
            name = _unquoted(match[2] or match[1])
            return name, ReadColumn(name, found, as_text)
    alias = re.search(rf"\s+as\s+{_IDENTIFIER}\s*$", text, re.I)
    return _unquoted(alias[1]) if alias else text, _computed(text)


def _named(column: ReadColumn | str, name: str) -> ReadColumn | str:
    return column if isinstance(column, str) else replace(column, name=name)


def _attribute(expression: Any, below: Sequence[str]) -> str | None:
    """Returns the column of the node below that an expression names; None for other expressions."""
    if expression.WhichOneof("expr_type") != "unresolved_attribute":
        return None
    identifier = str(expression.unresolved_attribute.unparsed_identifier)
    return _among(_unquoted(identifier), below) if re.fullmatch(_IDENTIFIER, identifier) else None


def _unquoted(identifier: str) -> str:
    return identifier[1:-1].replace("``", "`") if identifier.startswith("`") else identifier


def _among(name: str, names: Sequence[str]) -> str | None:
    """Returns the one column that Spark takes for a name, whose case does not matter."""
    if name in names:
        return name
    found = [each for each in names if each.lower() == name.lower()]
    return found[0] if len(found) == 1 else None


# ------------------------------------------------------------------ the sources of a frame


def source_options(frame: DataFrame) -> list[dict[str, str]]:
    """Returns the options of each source of this package that a frame reads, with names in lower case.

    Spark Connect does not show the sources of a view or of SQL text.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is None:
        plan: Any = getattr(frame, "_plan", None)
        return [] if plan is None else list(_connect_sources(plan.plan(frame.sparkSession.client)))
    leaves = elements(jdf.queryExecution().analyzed().collectLeaves())
    return [
        {str(name).lower(): str(value) for name, value in leaf.extraOptions().asCaseSensitiveMap().items()}
        for leaf in leaves
        if node_kind(leaf) == "StreamingRelationV2" and str(leaf.sourceName()) == FORMAT_NAME
    ]


def steps_in_read(frame: DataFrame) -> tuple[str, ...]:
    """Returns what the tasks that read do before Spark sees the rows of a frame, the first step first."""
    found: dict[str, None] = {}
    for options in source_options(frame):
        if STEP_IN_READ in options:
            found |= dict.fromkeys(from_option(options[STEP_IN_READ]).steps)
    return tuple(found)


def is_of_source(frame: DataFrame, name: str) -> bool:
    """Returns whether a column of a frame is one of a source of this package that no step has computed anew.

    With Spark Connect, it is False after a step that `trace` cannot follow.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is None:
        origin = lineage(frame, [name]) if name in frame.columns else None
        return origin is not None and origin.columns.column_of_source(name) == name
    plan = jdf.queryExecution().analyzed()
    of_sources = set()
    for leaf in elements(plan.collectLeaves()):
        source = _of_jvm(leaf) if node_kind(leaf) == "StreamingRelationV2" else None
        if not isinstance(source, _Source):
            continue
        ids = {each.name(): each.exprId().id() for each in elements(leaf.output())}
        found = _of_source(source, list(ids))
        of_sources |= {
            id_
            for column, id_ in ids.items()
            if isinstance(found, Obstacle) or found.columns.column_of_source(column) == column
        }
    return any(each.name() == name and each.exprId().id() in of_sources for each in elements(plan.output()))


def _connect_sources(relation: Any) -> Iterator[dict[str, str]]:
    """Yields the options of the streams of this package below a relation of Spark Connect's protocol."""
    kind = str(relation.WhichOneof("rel_type"))
    if kind == "read" and relation.read.is_streaming and relation.read.data_source.format == FORMAT_NAME:
        options = relation.read.data_source.options
        yield {str(name).lower(): str(value) for name, value in options.items()}
    for below in connect_relations(getattr(relation, kind)):
        yield from _connect_sources(below)


#: Spark's steps that use a watermark below them: classes of plans of classic sessions and of Spark Connect.
_STATEFUL = frozenset(
    {
        *("Aggregate", "Distinct", "Deduplicate", "DeduplicateWithinWatermark"),
        *("Join", "AsOfJoin", "LateralJoin"),
        *("FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState", "ApplyInPandasWithState"),
        *("TransformWithState", "TransformWithStateInPandas", "TransformWithStateInPySpark"),
    }
)


def unused_watermark(frame: DataFrame) -> tuple[str, str] | None:
    """Returns the column and the delay of a ``withWatermark`` that no step of Spark below the frame uses.

    Spark Connect does not show the plan of a view or of SQL text, so it finds none in them.
    """
    jdf = getattr(frame, "_jdf", None)
    if jdf is not None:
        return _unused_in_plan(jdf.queryExecution().analyzed())
    plan: Any = getattr(frame, "_plan", None)
    return None if plan is None else _unused_in_connect(plan)


def _unused_in_plan(plan: Any) -> tuple[str, str] | None:
    kind = node_kind(plan)
    if kind in _STATEFUL:
        return None
    if kind == "EventTimeWatermark":
        return str(plan.eventTime().name()), str(plan.delay().toString())
    found = map(_unused_in_plan, elements(plan.children()))
    return next((each for each in found if each is not None), None)


def _unused_in_connect(plan: Any) -> tuple[str, str] | None:
    kind = type(plan).__name__
    if kind in _STATEFUL:
        return None
    if kind == "WithWatermark":
        return str(plan._event_time), str(plan._delay_threshold)
    below = [plan._child, *(getattr(plan, name, None) for name in ("left", "right", "other"))]
    found = (_unused_in_connect(each) for each in below if each is not None)
    return next((each for each in found if each is not None), None)
