"""Turns aggregates in Spark's words (``F.sum("amount")``, ``"sum(amount)"``) into declarations.

An aggregate of the operator reads columns by their names. If the operand is an expression, as in
``F.sum(F.col("amount") * 2)``, it becomes a column of the frame first. Its name is made of the result's name,
because the store's description contains it: ``<result>__input``. A plain column stays as it is, so that the
tasks that read Kafka can still combine its rows (`in_read.frame.lineage`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.errors import AnalysisException
from pyspark.sql import Column, functions

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.schema import quoted
from kafka_eos_source.state import aggregates as declared
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.operator.column_tree import (
    Alias,
    Call,
    Constant,
    Name,
    Node,
    Other,
    Over,
    Sql,
    Star,
    as_column,
    calls,
    nodes,
    parse,
    tree,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: An aggregate as a user writes it: ``F.sum("amount")``, ``"sum(amount)"``, or a declaration.
SparkAggregate: TypeAlias = Aggregate | Column | str


@dataclass(frozen=True)
class _Function:
    """How the arguments of a function of Spark become a declaration.

    Attributes:
        declare: function of `state.aggregates`.
        columns: number of arguments that are columns; they come first.
        settings: names of the literals that may follow.
    """

    declare: Callable[..., Aggregate]
    columns: int = 1
    settings: tuple[str, ...] = ()


_FIRST = _Function(declared.first, settings=("ignore_nulls",))
_LAST = _Function(declared.last, settings=("ignore_nulls",))
_PERCENTILE = _Function(declared.percentile_approx, settings=("percentage", "accuracy"))

#: Functions of Spark by their names. `count`, `count_distinct` and `count_if` are read by `_Reader` itself.
_FUNCTIONS = {
    "any_value": _FIRST,
    "approx_count_distinct": _Function(declared.approx_count_distinct, settings=("rsd",)),
    "approx_percentile": _PERCENTILE,
    "array_agg": _Function(declared.collect_list),
    "avg": _Function(declared.avg),
    "bool_and": _Function(declared.bool_and),
    "bool_or": _Function(declared.bool_or),
    "collect_list": _Function(declared.collect_list),
    "collect_set": _Function(declared.collect_set),
    "every": _Function(declared.bool_and),
    "first": _FIRST,
    "first_value": _FIRST,
    "last": _LAST,
    "last_value": _LAST,
    "max": _Function(declared.max),
    "max_by": _Function(declared.max_by, columns=2),
    "mean": _Function(declared.avg),
    "min": _Function(declared.min),
    "min_by": _Function(declared.min_by, columns=2),
    "percentile_approx": _PERCENTILE,
    "some": _Function(declared.bool_or),
    "std": _Function(declared.stddev_samp),
    "stddev": _Function(declared.stddev_samp),
    "stddev_pop": _Function(declared.stddev_pop),
    "stddev_samp": _Function(declared.stddev_samp),
    "sum": _Function(declared.sum),
    "var_pop": _Function(declared.var_pop),
    "var_samp": _Function(declared.var_samp),
    "variance": _Function(declared.var_samp),
}

#: Names of all aggregates that can be used. The table in ``docs/aggregates.md`` lists the same.
NAMES = tuple(sorted([*_FUNCTIONS, "count", "count_distinct", "count_if"]))

#: Aggregates of Spark that the operator does not have, so that a message can say so.
_OF_SPARK_ONLY = frozenset(
    {
        *("bit_and", "bit_or", "bit_xor", "bitmap_construct_agg", "bitmap_or_agg", "corr", "covar_pop"),
        *("count_min_sketch", "covar_samp", "grouping", "grouping_id", "histogram_numeric", "kurtosis"),
        *("hll_sketch_agg", "hll_union_agg", "listagg", "median", "mode", "percentile", "percentile_cont"),
        *("percentile_disc", "product", "regr_avgx", "regr_avgy", "regr_count", "regr_intercept", "regr_r2"),
        *("regr_slope", "regr_sxx", "regr_sxy", "regr_syy", "skewness", "string_agg", "try_avg", "try_sum"),
    }
)

#: What to write instead of some of them.
_INSTEAD = {
    "median": "F.percentile_approx(column, 0.5)",
    "percentile": "F.percentile_approx(column, percentage)",
    "percentile_cont": "F.percentile_approx(column, percentage)",
    "percentile_disc": "F.percentile_approx(column, percentage)",
    "try_avg": "F.avg(column)",
    "try_sum": "F.sum(column), which fails the query if the sum does not fit",
    "listagg": "F.collect_list(column), and F.array_join after the operator",
    "string_agg": "F.collect_list(column), and F.array_join after the operator",
}

#: Arguments of ``aggregate()`` that a misspelt name of a result may mean.
_ARGUMENTS = ("options", "key", "store", "shards", "window", "emit", "removed", "at_most_every", "combine")


def read_aggregates(
    frame: DataFrame, aggregates: Mapping[str, SparkAggregate] | Sequence[Column] | Column
) -> tuple[DataFrame, dict[str, Aggregate]]:
    """Turns aggregates in Spark's words into declarations, and computes the columns that they read.

    Args:
        frame: streaming frame.
        aggregates: aggregates by the name of their result; or Spark columns with an alias.

    Returns:
        The frame, with a column for each operand that is an expression, and the declarations by the name of
        their result.

    Raises:
        InvalidSchemaError: if an aggregate is not one that the operator has, or its operand cannot be
            computed.
    """
    reader = _Reader(frame)
    read = {result: reader.read(result, each) for result, each in _by_result(aggregates)}
    return reader.frame(), read


def _by_result(aggregates: Any) -> list[tuple[str, Any]]:
    """Returns each aggregate with the name of its result."""
    if isinstance(aggregates, Mapping):
        named = list(aggregates.items())
        strange = [result for result, _ in named if not isinstance(result, str)]
        if strange:
            raise InvalidSchemaError(
                f"an aggregation has the result {strange[0]!r}; expected the name of a column.",
                fix=_HOW,
            )
        return named
    columns = [aggregates] if isinstance(aggregates, Column) else aggregates
    if not isinstance(columns, (list, tuple)):
        raise InvalidSchemaError(f"the aggregates are {_shown(columns)}.", fix=_HOW)
    found: list[tuple[str, Any]] = []
    for each in columns:
        node = tree(each) if isinstance(each, Column) else None
        if not isinstance(node, Alias) or len(node.names) != 1:
            raise InvalidSchemaError(
                f"the aggregate {_shown(each)} has no name for its result.",
                fix="name each result: [F.count('*').alias('orders')], or {'orders': F.count('*')}.",
            )
        if node.names[0] in dict(found):
            raise InvalidSchemaError(
                f"two aggregates have the alias {node.names[0]!r}.", fix="give each a name of its own."
            )
        found.append((node.names[0], each))
    return found


_HOW = (
    "pass a mapping of names to aggregates: {'orders': F.count('*'), 'revenue': F.sum('amount')}, with "
    "F = pyspark.sql.functions."
)


class _Reader:
    """Reads the aggregates of one operator, and collects the columns that they need.

    Args:
        frame: the operator's input.
    """

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame
        self._columns = [name for name in frame.columns if name != CHANGELOG]
        self._computed: dict[str, Column] = {}
        self._shown: dict[str, str] = {}

    def frame(self) -> DataFrame:
        """Returns the frame with the computed columns.

        Raises:
            InvalidSchemaError: if Spark cannot compute one of them.
        """
        if not self._computed:
            return self._frame
        try:
            frame = self._frame.withColumns(self._computed)
            _ = frame.schema  # Spark Connect analyses the frame only now
        except AnalysisException as error:
            operands = ", ".join(f"{shown} of {name!r}" for name, shown in self._shown.items())
            raise InvalidSchemaError(
                f"Spark cannot compute what is aggregated ({operands}): {_first_line(error)}",
                fix="try the expression with frame.withColumn(name, expression); the frame has the columns "
                f"{', '.join(self._columns)}.",
            ) from error
        return frame

    def read(self, result: str, aggregate: Any) -> Aggregate:
        """Returns the declaration of one aggregate.

        Args:
            result: name of its result.
            aggregate: what the user wrote.

        Raises:
            InvalidSchemaError: if it is not an aggregate that the operator has.
        """
        if isinstance(aggregate, Aggregate):
            return aggregate
        if isinstance(aggregate, str):
            node = parse(aggregate)
            if isinstance(node, Name):
                return self._word(result, node)
        elif isinstance(aggregate, Column):
            node = self._without_alias(result, tree(aggregate))
        else:
            raise _not_an_aggregate(result, aggregate)
        return self._aggregate(result, node)

    def _word(self, result: str, node: Name) -> Aggregate:
        """Reads text that is only a name: ``"count"``."""
        word = str(node).lower()
        if word == "count":
            return declared.count()
        if word in NAMES:
            column = result if result in self._columns else self._columns[0]
            raise InvalidSchemaError(
                f"the result {result!r} of an aggregation is the function {str(node)!r} without a column. "
                "The names are those of the results, and each aggregate names the column that it reads.",
                fix=f"write {{{result!r}: '{word}({column})'}}.",
            )
        raise self._unknown(result, word)

    def _without_alias(self, result: str, node: Node) -> Node:
        while isinstance(node, Alias):
            if node.names != (result,):
                raise InvalidSchemaError(
                    f"the result {result!r} of an aggregation has the alias {', '.join(node.names)!r}, so it "
                    "would have two names.",
                    fix=f"remove .alias(…), or name the result {node.names[0]!r}.",
                )
            if node.has_metadata:
                raise InvalidSchemaError(
                    f"the alias of the result {result!r} has metadata, which the operator does not keep.",
                    fix="attach the metadata after the operator: "
                    f".withMetadata({result!r}, metadata) on its frame.",
                )
            node = node.child
            while isinstance(node, Alias):
                node = node.child  # an alias within an alias: the outer one counts
        return node

    def _aggregate(self, result: str, node: Node) -> Aggregate:
        """Returns the declaration that a call of an aggregate stands for."""
        if not isinstance(node, Call) or (
            node.name not in NAMES and any(each.name in NAMES for each in calls(node) if each is not node)
        ):
            raise self._no_call(result, node)
        if node.by_name:
            raise InvalidSchemaError(
                f"the result {result!r} of an aggregation is call_function({node.name!r}, …), which may call "
                "a function of the user's.",
                fix=f"use F.{node.name}(…) itself. {_usable()}" if node.name in NAMES else _usable(),
            )
        if node.name not in NAMES and not node.name.isidentifier():
            raise self._no_call(result, node)  # an operator, such as *
        if node.name not in NAMES:
            raise self._unknown(result, node.name)
        if node.distinct and node.name != "count":
            raise InvalidSchemaError(
                f"the result {result!r} of an aggregation is {node}: DISTINCT can be used only with count.",
                fix=f"use F.{node.name}(…), or F.collect_set(…) and aggregate the array after the operator. "
                + _usable(),
            )
        for each in nodes(Other(None, "operands", node.arguments)):
            if isinstance(each, Over):
                raise self._no_call(result, each)
            if isinstance(each, Call) and (each.name in NAMES or each.name in _OF_SPARK_ONLY):
                raise InvalidSchemaError(
                    f"the result {result!r} of an aggregation is {node}, an aggregate of the aggregate "
                    f"{each.name}.",
                    fix="aggregate twice: pass the result of this operator to another one "
                    "(emit='changes' and removed='removed').",
                )
        if node.name in ("count", "count_distinct"):
            return self._count(result, node)
        if node.name == "count_if":
            (condition,) = self._arguments(result, node, 1, ())[0]
            column = functions.when(self._column(condition), functions.lit(True))
            return declared.count(self._compute(result, 1, condition, column))
        function = _FUNCTIONS[node.name]
        operands, settings = self._arguments(result, node, function.columns, function.settings)
        names = [self._operand(result, index, each) for index, each in enumerate(operands, 1)]
        return function.declare(*names, **settings)

    def _count(self, result: str, node: Call) -> Aggregate:
        is_distinct = node.distinct or node.name == "count_distinct"
        if not is_distinct and len(node.arguments) != 1:
            raise self._arity(result, node, "count(*) or one column")
        stars = [each for each in node.arguments if isinstance(each, Star)]
        if stars and (is_distinct or stars[0].target is not None):
            raise InvalidSchemaError(
                f"the result {result!r} of an aggregation is {node}, which counts the columns that "
                f"{stars[0]} stands for.",
                fix="name the columns: F.count_distinct('a', 'b')." if is_distinct else "use F.count('*').",
            )
        if is_distinct:
            if not node.arguments:
                raise self._arity(result, node, "one or more columns")
            names = (self._operand(result, index, each) for index, each in enumerate(node.arguments, 1))
            return declared.count_distinct(*names)
        (operand,) = node.arguments
        if stars or (isinstance(operand, Constant) and operand.value is not None):
            return declared.count()
        return declared.count(self._operand(result, 1, operand))

    def _arguments(
        self, result: str, node: Call, columns: int, settings: Sequence[str]
    ) -> tuple[list[Node], dict[str, Any]]:
        """Divides the arguments of a call into columns and literals."""
        operands, rest = list(node.arguments[:columns]), node.arguments[columns:]
        if len(operands) < columns or len(rest) > len(settings):
            takes = "one column" if columns == 1 else f"{columns} columns"
            raise self._arity(result, node, ", ".join([takes, *settings]))
        if node.name in ("percentile_approx", "approx_percentile") and not rest:
            raise self._arity(result, node, "one column and a percentage")
        values = {}
        for name, each in zip(settings, rest, strict=False):
            values[name] = _value(each)
            if values[name] is None:
                raise InvalidSchemaError(
                    f"the result {result!r} of an aggregation is {node}; expected a literal for {name!r}.",
                    fix=f"pass a Python value for {name!r}.",
                )
        return operands, values

    def _arity(self, result: str, node: Call, takes: str) -> InvalidSchemaError:
        return InvalidSchemaError(
            f"the result {result!r} of an aggregation is {node}; expected {takes}.",
            fix=f"pass {takes} to {node.name}.",
        )

    # -- operands

    def _operand(self, result: str, index: int, node: Node) -> str:
        """Returns the name of the column that holds an operand.

        Args:
            result: name of the result.
            index: which operand of the aggregate it is, from 1.
            node: the operand.
        """
        while isinstance(node, Alias):
            node = node.child
        plain = self._plain(node)
        return self._compute(result, index, node, self._column(node)) if plain is None else plain

    def _plain(self, node: Node) -> str | None:
        """Returns the name of the frame's column if the operand is nothing else; None for an expression.

        Raises:
            InvalidSchemaError: if the frame has no such column.
        """
        if not isinstance(node, Name) or (len(node.parts) > 1 and not node.of_frame):
            return None
        if node.of_frame:
            return self._of_frame(node)
        (name,) = node.parts
        if name in self._columns:
            return name
        same = [each for each in self._columns if each.lower() == name.lower()]
        if len(same) == 1 and not self._is_case_sensitive():
            return same[0]
        near = difflib.get_close_matches(name, self._columns, n=2, cutoff=0.6)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise InvalidSchemaError(
            f"an aggregate reads the column {name!r}, which the frame does not have.{hint}",
            fix=f"use one of the columns {', '.join(self._columns)}.",
        )

    def _of_frame(self, node: Name) -> str | None:
        """Returns the name of a column taken from a frame (``df["x"]``); None if it is a field of one."""
        try:
            (name,) = self._frame.select(as_column(node.source)).columns
        except AnalysisException as error:
            raise InvalidSchemaError(
                f"an aggregate reads the column {str(node)!r} of another frame than the operator's input: "
                f"{_first_line(error)}",
                fix=f"name the column: F.col({str(node)!r}). The frame has the columns "
                f"{', '.join(self._columns)}.",
            ) from error
        return name if len(node.parts) == 1 and self._columns.count(name) == 1 else None

    def _is_case_sensitive(self) -> bool:
        return str(self._frame.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true"

    def _column(self, node: Node) -> Column:
        """Returns the column of an operand."""
        if node.source is not None:
            # Spark refuses a function such as explode(), which would multiply the rows, within another one.
            return functions.coalesce(as_column(node.source))
        if isinstance(node, Name):
            return functions.col(quoted(*node.parts))
        if isinstance(node, Constant):
            return functions.lit(node.value)
        raise InvalidSchemaError(
            f"an aggregate has the operand {str(node)!r}, which text cannot express.",
            fix="write it with Spark's functions: F.sum(F.col('amount') * 2).",
        )

    def _compute(self, result: str, index: int, node: Node, column: Column) -> str:
        """Adds a column to the frame, and returns its name."""
        name = f"{result}__input" if index == 1 else f"{result}__input{index}"
        if name.lower() in (each.lower() for each in self._columns):
            raise InvalidSchemaError(
                f"the result {result!r} of an aggregation needs a column {name!r} for {node}, and the frame "
                "has a column of this name.",
                fix=f"rename the column {name!r} or the result {result!r}.",
            )
        self._computed[name] = column
        self._shown[name] = str(node)
        return name

    # -- refusals

    def _no_call(self, result: str, node: Node) -> InvalidSchemaError:
        within = list(dict.fromkeys(each.name for each in calls(node) if each.name in NAMES))
        if isinstance(node, Sql):
            reason = f"is F.{node}, whose text only Spark reads"
            fix = "write the aggregate with Spark's functions, or as text without F.expr: 'sum(amount)'."
        elif isinstance(node, Over):
            reason = f"is the window function {node}"
            fix = "remove .over(…); the operator groups by its key columns and by window=."
        elif within:
            reason = f"is {node}, an expression around {' and '.join(within)}"
            fix = (
                "give each aggregate a result of its own, and compute the expression after the operator with "
                "withColumn."
            )
        else:
            reason = f"is {node}, which is not an aggregate"
            fix = (
                f"aggregate it, such as F.max({str(node)!r})." if isinstance(node, Name) else "aggregate it."
            )
        return InvalidSchemaError(
            f"the result {result!r} of an aggregation {reason}.", fix=f"{fix} {_usable()}"
        )

    def _unknown(self, result: str, name: str) -> InvalidSchemaError:
        """Describes a name that is not the name of an aggregate."""
        if name in self._columns:
            return InvalidSchemaError(
                f"the result {result!r} of an aggregation is the column {name!r} and no aggregate.",
                fix=f"aggregate it, such as 'max({name})'. {_usable()}",
            )
        if name in _OF_SPARK_ONLY:
            instead = f"use {_INSTEAD[name]}. " if name in _INSTEAD else ""
            return InvalidSchemaError(
                f"the result {result!r} of an aggregation is the aggregate {name} of Spark, which the "
                "operator does not have.",
                fix=instead + _usable(),
            )
        near = difflib.get_close_matches(name, NAMES, n=2, cutoff=0.6)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        return InvalidSchemaError(
            f"the result {result!r} of an aggregation is {name!r}, which is not an aggregate.{hint}",
            fix=_usable(),
        )


def _not_an_aggregate(result: str, value: Any) -> InvalidSchemaError:
    near = difflib.get_close_matches(result, _ARGUMENTS, n=1, cutoff=0.6)
    hint = f" Did you mean the argument {near[0]!r}?" if near else ""
    if callable(value) and getattr(value, "__name__", None) in NAMES:
        fix = f"call the function of pyspark.sql.functions: F.{value.__name__}(…)."
    else:
        fix = f"pass a Spark column such as F.sum('amount'), or text such as 'sum(amount)'. {_usable()}"
    return InvalidSchemaError(f"the result {result!r} of an aggregation is {_shown(value)}.{hint}", fix=fix)


def _shown(value: Any) -> str:
    """Returns a value for a message: a column by its tree, others by their type and text."""
    if isinstance(value, Column):
        return str(tree(value))
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"


def _value(node: Node) -> Any:
    """Returns the value of a literal, or of an array of literals; None for anything else."""
    if isinstance(node, Constant):
        return node.value
    if isinstance(node, Call) and node.name == "array":
        values = [_value(each) for each in node.arguments]
        return None if None in values else values
    return None


def _usable(names: Iterable[str] = NAMES) -> str:
    return f"The operator has these functions of F: {', '.join(names)}."


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
