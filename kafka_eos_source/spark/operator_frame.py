"""The frame of a stateful operator, or of a read that sets bad records aside: its steps keep all packets.

An operator passes its state changes to the sink in rows of the frame, and a read with
``on_bad="dead-letter"`` its bad records. In such a row, only the column `CHANGELOG` has a value, a packet. In
all other rows, this column is null. A step of Spark knows nothing of that: ``select("key")`` drops the
column, and ``where("n > 1")`` drops the rows, in which ``n`` is null.

Therefore both return a subclass of the session's DataFrame, classic or of Spark Connect. `METHODS` says of
each public method of DataFrame what the subclass does with it. What a subclass cannot see, such as
``spark.sql`` on a temporary view, `check_changelog` finds in the plan when the query starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, TypeAlias, TypeVar

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import DoubleType, FloatType, StructType

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.model import FORMAT_NAME
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.arrow import arrow_schema, past_packets
from kafka_eos_source.spark.changelog_check import check_changelog, check_generators
from kafka_eos_source.spark.schema import quoted

_T = TypeVar("_T")

#: Attribute of a subclass: the class of Spark that it extends.
_BASE = "_kafka_eos_base"
#: Attribute of a frame: number of tasks that run its operators after a shuffle; 0 = they run in the read.
_TASKS = "_kafka_eos_tasks"
#: Attribute of a frame: its `Senders`.
_SENDERS = "_kafka_eos_senders"
#: Attribute of a writer: the format that was set; without one, Spark writes Parquet.
_FORMAT = "_kafka_eos_format"


@dataclass(frozen=True)
class Senders:
    """What sends packets to the sink through a frame.

    Attributes:
        stores: names of the stores of its operators.
        reads: ids of the frames that were read with ``on_bad="dead-letter"``.
    """

    stores: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def __add__(self, other: Senders) -> Senders:
        return Senders((*self.stores, *other.stores), (*self.reads, *other.reads))


def operator_frame(frame: DataFrame, tasks: int = 0, senders: Senders | None = None) -> DataFrame:
    """Returns the same frame with methods that keep the rows and the column of its packets.

    Args:
        frame: the result of an operator, of a read that sets bad records aside, or of a step after it; it has
            the column `CHANGELOG`.
        tasks: number of tasks that run the operator after a shuffle; 0 if there is none, or it runs in the
            read.
        senders: all operators and reads whose packets the frame has.
    """
    plain = spark_frame(frame)
    made = _with_class(plain, _frame_class(_class_of(plain)))
    made.__dict__[_TASKS] = tasks
    made.__dict__[_SENDERS] = senders or Senders()
    return made


def senders_of(frame: Any) -> Senders:
    """Returns what sends packets through a frame that an operator, a read, or a step after it returned."""
    found: Senders = frame.__dict__.get(_SENDERS, Senders())
    return found


def spark_frame(frame: DataFrame) -> DataFrame:
    """Returns the same frame with Spark's own methods, which know nothing of state changes."""
    return _as_of_spark(frame)


def spark_grouping(grouped: Any) -> Any:
    """Returns the result of ``groupBy`` with Spark's own methods, which a frame of an operator refuses."""
    return _as_of_spark(grouped)


def is_operator_frame(frame: object) -> bool:
    """Whether the methods of a frame keep state changes."""
    return isinstance(frame, DataFrame) and hasattr(type(frame), _BASE)


def _as_of_spark(found: _T) -> _T:
    base = getattr(type(found), _BASE, None)
    return found if base is None else _with_class(found, base)


def _class_of(found: object) -> Any:
    return type(found)


def _with_class(found: _T, wanted: type) -> _T:
    """Returns an object with the same attributes, and another class."""
    made: Any = object.__new__(wanted)
    made.__dict__.update(found.__dict__)
    result: _T = made
    return result


# ------------------------------------------------------------------ steps that are adapted


def _select(frame: DataFrame, *columns: Any) -> DataFrame:
    listed = list(columns[0]) if len(columns) == 1 and isinstance(columns[0], (list, tuple)) else columns
    return _once(frame.select(*listed, CHANGELOG), lambda: frame.select(*listed))


def _select_expr(frame: DataFrame, *expressions: Any) -> DataFrame:
    listed: list[str] = []
    for each in expressions:
        listed.extend([each] if isinstance(each, str) else each)
    return _once(frame.selectExpr(*listed, CHANGELOG), lambda: frame.selectExpr(*listed))


def _once(extended: DataFrame, as_written: Callable[[], DataFrame]) -> DataFrame:
    """Returns the extended projection, unless the user's own one has the column too, as that of ``*`` has."""
    return as_written() if extended.columns.count(CHANGELOG) > 1 else extended


def _where(frame: DataFrame, condition: Any) -> DataFrame:
    if not isinstance(condition, (str, Column)):
        return frame.filter(condition)  # Spark's own error
    # CASE evaluates the user's condition only for rows without a packet. Both sides of OR may be evaluated.
    own = f.expr(condition) if isinstance(condition, str) else condition
    return frame.filter(f.when(f.col(CHANGELOG).isNotNull(), f.lit(True)).otherwise(own))


def _dropna(
    frame: DataFrame, how: str | None = "any", thresh: int | None = None, subset: Any = None
) -> DataFrame:
    if how not in (None, "any", "all"):
        return frame.dropna(how, thresh, subset)  # Spark's own error
    names = [subset] if isinstance(subset, str) else subset
    names = [name for name in frame.columns if name != CHANGELOG] if names is None else list(names)
    wanted = thresh if thresh is not None else len(names) if how == "any" else 1
    floating = {each.name for each in frame.schema if isinstance(each.dataType, (DoubleType, FloatType))}
    present = f.lit(0)
    for name in names:
        column = f.col(quoted(name)) if name in frame.columns else f.col(name)
        has_value = column.isNotNull() & ~f.isnan(column) if name in floating else column.isNotNull()
        present = present + f.when(has_value, 1).otherwise(0)
    return _where(frame, present >= wanted)


def _drop(frame: DataFrame, *columns: Any) -> DataFrame:
    _not_named("drop", columns)
    return frame.drop(*columns)


def _with_column(frame: DataFrame, name: Any, column: Any) -> DataFrame:
    _not_named("withColumn", [name])
    return frame.withColumn(name, column)


def _with_columns(frame: DataFrame, *columns: Any) -> DataFrame:
    _not_named("withColumns", [name for each in columns if isinstance(each, dict) for name in each])
    return frame.withColumns(*columns)


def _with_column_renamed(frame: DataFrame, existing: Any, new: Any) -> DataFrame:
    _not_named("withColumnRenamed", [existing, new])
    return frame.withColumnRenamed(existing, new)


def _with_columns_renamed(frame: DataFrame, columns: Any) -> DataFrame:
    _not_named("withColumnsRenamed", [*columns, *columns.values()] if isinstance(columns, dict) else [])
    return frame.withColumnsRenamed(columns)


def _not_named(step: str, names: Iterable[object]) -> None:
    """Raises: InvalidSchemaError: if a step names the column with state changes."""
    if any(isinstance(name, str) and name.lower() == CHANGELOG for name in names):
        raise InvalidSchemaError(
            f"{step}() names the column {CHANGELOG!r}, which carries state changes of an operator, or bad "
            "records, to the sink; no other step may change it.",
            fix="leave the column out: the frame keeps it, and the sink writes it to no topic and no table.",
        )


def _to_df(frame: DataFrame, *names: str) -> DataFrame:
    at = frame.columns.index(CHANGELOG)
    return frame.toDF(*names) if CHANGELOG in names else frame.toDF(*names[:at], CHANGELOG, *names[at:])


def _to(frame: DataFrame, schema: StructType) -> DataFrame:
    if isinstance(schema, StructType) and CHANGELOG not in schema.names:
        schema = StructType([*schema.fields, frame.schema[CHANGELOG]])
    return frame.to(schema)


def _union(frame: DataFrame, other: DataFrame) -> DataFrame:
    added = _with_changes(other)
    names = [name for name in added.columns if name != CHANGELOG]
    at = frame.columns.index(CHANGELOG)
    return frame.union(added.select(*map(quoted, (*names[:at], CHANGELOG, *names[at:]))))


def _union_by_name(frame: DataFrame, other: DataFrame, *args: Any, **kwargs: Any) -> DataFrame:
    return frame.unionByName(_with_changes(other), *args, **kwargs)


def _with_changes(other: DataFrame) -> DataFrame:
    """Returns the second frame of a union with the column, and with each operator in tasks of its own.

    An operator runs each shard in the task of this number. In a union without a shuffle, Spark numbers the
    tasks of the second frame after those of the first.
    """
    tasks = other.__dict__.get(_TASKS, 0)
    plain = spark_frame(other)
    if CHANGELOG not in plain.columns:
        return plain.withColumn(CHANGELOG, f.lit(None).cast("binary"))
    return plain.repartition(tasks) if tasks else plain


#: Joins that keep each row of the left side which finds no row on the right side.
_KEEPING_JOINS = ("left", "leftouter", "leftanti", "anti")


def _join(frame: DataFrame, other: DataFrame, on: Any = None, how: str | None = None) -> DataFrame:
    kind = (how or "inner").lower().replace("_", "")
    if kind not in _KEEPING_JOINS or other.isStreaming:
        raise _lost(
            f"join(how={how or 'inner'!r}) with a {'streaming' if other.isStreaming else 'batch'} frame",
            "finds no partner for rows with state changes, whose columns are null, and drops them",
            "join before the operator; or, with a batch frame, use how='left' and then where(…), which keeps "
            "rows with state changes.",
        )
    return frame.join(spark_frame(other), on, how)


def _map_in_arrow(
    frame: DataFrame, func: Any, schema: StructType | str, barrier: bool = False, profile: Any = None
) -> DataFrame:
    rows = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    assert isinstance(rows, StructType)
    if CHANGELOG in rows.names:  # then the function passes the column on itself
        return frame.mapInArrow(func, rows, barrier, profile)
    output = StructType([*rows.fields, frame.schema[CHANGELOG]])
    return frame.mapInArrow(past_packets(func, arrow_schema(rows)), output, barrier, profile)


def _transform(frame: DataFrame, func: Any, *args: Any, **kwargs: Any) -> DataFrame:
    found = func(frame, *args, **kwargs)
    if not isinstance(found, DataFrame):
        return spark_frame(frame).transform(lambda _: found)  # Spark's own error
    return found


def _group_by(frame: DataFrame, *columns: Any) -> Any:
    grouped = frame.groupBy(*columns)
    made = _with_class(grouped, _grouping_class(_class_of(grouped)))
    made.__dict__[_SENDERS] = senders_of(frame)
    return made


# ------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Adapted:
    """A step that adds the column or a condition.

    Attributes:
        function: takes the frame with Spark's own methods, and the arguments of the user.
        of_itself: whether it takes the frame of this module instead.
        makes_rows: whether its expressions can contain ``explode``.
    """

    function: Callable[..., Any]
    of_itself: bool = False
    makes_rows: bool = False


@dataclass(frozen=True)
class Passed:
    """A step that keeps each row and the column without help."""


@dataclass(frozen=True)
class Refused:
    """A step that would lose state changes.

    Attributes:
        why: what it does to the rows with state changes.
        fix: what to do instead.
    """

    why: str
    fix: str


@dataclass(frozen=True)
class Inherited:
    """A member that is no step of the query, or one that Spark itself refuses for streaming frames."""


_BEFORE = "do this before the operator, or in a query that reads the output topic."
_AGGREGATES = Refused(
    "aggregates rows and drops the state changes among them",
    "use aggregate(…) of this package, which takes the frame or its groupBy(…), for a second step.",
)
_DEDUPLICATES = Refused(
    "keeps some rows of those with equal columns, and the state changes are in rows with equal columns",
    "use deduplicate(…) of this package, which takes the frame or its groupBy(…).",
)
_SOME_ROWS = Refused("drops rows, and state changes are among them", _BEFORE)
_TWO_FRAMES = Refused(
    "drops or repeats rows, and state changes are among them",
    "join before the operator; or use join(batch_frame, …, how='left') and where(…) after it.",
)
_NEW_ROWS = Refused("makes rows of another kind, without the state changes", _BEFORE)
_TWICE = Refused(
    "can compute the operator more than once in a micro-batch, or store what must commit with one",
    "write the frame directly.",
)
_SORTS = Refused("cannot sort a stream; Spark allows it only for a complete result", _BEFORE)


#: What a frame does with a member.
Rule: TypeAlias = Adapted | Passed | Refused | Inherited


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    """Returns one rule for several names."""
    return dict.fromkeys(names.split(), rule)


#: What a frame of an operator does with each public member of DataFrame, of PySpark 4.0 to 4.3.
METHODS: dict[str, Rule] = {
    "select": Adapted(_select, makes_rows=True),
    "selectExpr": Adapted(_select_expr, makes_rows=True),
    "where": Adapted(_where),
    "filter": Adapted(_where),
    "dropna": Adapted(_dropna),
    "drop": Adapted(_drop),
    "withColumn": Adapted(_with_column, makes_rows=True),
    "withColumns": Adapted(_with_columns, makes_rows=True),
    "withColumnRenamed": Adapted(_with_column_renamed),
    "withColumnsRenamed": Adapted(_with_columns_renamed),
    "toDF": Adapted(_to_df),
    "to": Adapted(_to),
    "union": Adapted(_union),
    "unionAll": Adapted(_union),
    "unionByName": Adapted(_union_by_name),
    "join": Adapted(_join),
    "mapInArrow": Adapted(_map_in_arrow),
    "transform": Adapted(_transform, of_itself=True),
    "groupBy": Adapted(_group_by),
    "groupby": Adapted(_group_by),
    **_each("alias fillna hint observe repartition replace withMetadata withWatermark", Passed()),
    **_each(
        "agg approxQuantile corr cov crosstab cube describe freqItems groupingSets rollup summary",
        _AGGREGATES,
    ),
    **_each("distinct dropDuplicates dropDuplicatesWithinWatermark drop_duplicates", _DEDUPLICATES),
    **_each("exceptAll intersect intersectAll limit offset randomSplit sample sampleBy subtract", _SOME_ROWS),
    **_each("crossJoin lateralJoin nearestByJoin zip", _TWO_FRAMES),
    **_each("melt pandas_api toJSON transpose unpivot zipWithIndex", _NEW_ROWS),
    **_each("cache checkpoint localCheckpoint persist repartitionByRange", _TWICE),
    **_each("orderBy sort sortWithinPartitions", _SORTS),
    "coalesce": Refused(
        "moves shards of the operator to other tasks than their own",
        "use repartition(n), which moves the rows after the operator.",
    ),
    "repartitionById": Refused(
        "needs the number of a partition in each row, which is null in rows with state changes",
        "use repartition(n).",
    ),
    "mapInPandas": Refused(
        "passes rows to pandas together with those of state changes, whose columns are null; pandas then "
        "turns integers into floating-point numbers, and large ones change",
        "use mapInArrow, whose function sees only the other rows.",
    ),
    # Names and types; what runs a frame at once, which Spark refuses for a stream; and what passes the frame
    # on to where only the plan shows it.
    **_each(
        "asTable colRegex collect columns count createGlobalTempView createOrReplaceGlobalTempView "
        "createOrReplaceTempView createTempView dtypes executionInfo exists explain first foreach "
        "foreachPartition head inputFiles isEmpty isLocal isStreaming mergeInto metadataColumn na plot "
        "printSchema rdd registerTempTable sameSemantics scalar schema semanticHash show sparkSession stat "
        "storageLevel tail take toArrow toLocalIterator toPandas unpersist write writeStream writeTo",
        Inherited(),
    ),
}


# ------------------------------------------------------------------ the classes


@lru_cache(maxsize=8)
def _frame_class(base: Any) -> type:
    """Returns the subclass of a DataFrame class."""
    members: dict[str, Any] = {
        name: _method(name, getattr(base, name), rule)
        for name, rule in METHODS.items()
        if callable(getattr(base, name, None))
    }
    members[_BASE] = base
    members["__doc__"] = "A DataFrame that carries packets to the sink, and keeps them."
    members["__module__"] = __name__
    members["writeStream"] = property(_write_stream)
    return type("OperatorFrame", (base,), members)


def _method(name: str, of_spark: Any, rule: Rule) -> Callable[..., Any]:
    if isinstance(rule, Refused):
        return wraps(of_spark)(_refusing(f"{name}()", rule))

    def step(self: DataFrame, *args: Any, **kwargs: Any) -> Any:
        plain = spark_frame(self)
        if isinstance(rule, Adapted):
            result = rule.function(self if rule.of_itself else plain, *args, **kwargs)
        else:
            result = getattr(plain, name)(*args, **kwargs)
        if isinstance(rule, Inherited) or not isinstance(result, DataFrame) or is_operator_frame(result):
            return result
        if CHANGELOG not in result.columns:
            raise _lost(f"{name}()", f"drops the column {CHANGELOG!r}", "do not name this column.")
        if isinstance(rule, Adapted) and rule.makes_rows:
            check_generators(result, f"{name}()")
        frames = [self, *(each for each in (*args, *kwargs.values()) if isinstance(each, DataFrame))]
        senders = sum(map(senders_of, frames), Senders())
        if len(set(senders.stores)) < len(senders.stores) or len(set(senders.reads)) < len(senders.reads):
            raise _twice(f"{name}()", senders)
        return operator_frame(result, sum(each.__dict__.get(_TASKS, 0) for each in frames), senders)

    return wraps(of_spark)(step)


def _twice(step: str, senders: Senders) -> InvalidSchemaError:
    store = next((each for each in senders.stores if senders.stores.count(each) > 1), None)
    if store is None:
        return InvalidSchemaError(
            f"{step} has two frames that come from one read with on_bad='dead-letter'. Spark would read the "
            "topics twice in each micro-batch, and the sink would get each bad record twice.",
            fix="use the frame once: instead of a union of its parts, use one select() with F.when(…), or "
            "mapInArrow, whose function may return several rows for one; or read each part with an "
            "app.read(…) of its own, of which one has on_bad='dead-letter'.",
        )
    return InvalidSchemaError(
        f"{step} has two frames with the operator of the store {store!r}. Spark would run the operator twice "
        "in each micro-batch.",
        fix="use the frame once: instead of a union of its parts, use one select() with F.when(…), or "
        "mapInArrow, whose function may return several rows for one; or, if these are two operators, give "
        "each a store of its own.",
    )


def _refusing(step: str, rule: Refused) -> Callable[..., Any]:
    """Returns a method that raises an error."""

    def refuse(self: Any, *_args: object, **_kwargs: object) -> None:
        if senders_of(self).stores or not senders_of(self).reads:
            raise _lost(step, rule.why, rule.fix)
        why = rule.why.replace("state changes", "bad records")
        raise InvalidSchemaError(
            f"{step} after a read with on_bad='dead-letter' {why}. The sink keeps bad records as dead "
            "letters, and needs all of them.",
            fix="read with on_bad='fail' or 'null'; or do this in a query that reads the output topic.",
        )

    return refuse


@lru_cache(maxsize=8)
def _grouping_class(base: Any) -> type:
    """Returns the subclass of a GroupedData class, which only the operators of this package can use."""
    members: dict[str, Any] = {
        name: _refusing(f"groupBy().{name}()", _AGGREGATES)
        for name in dir(base)
        if not name.startswith("_") and callable(getattr(base, name))
    }
    members[_BASE] = base
    return type("OperatorGrouping", (base,), members)


def _lost(step: str, why: str, fix: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"{step} after a stateful operator {why}. The sink commits the state changes of the operator with "
        "its result, and needs all of them.",
        fix=fix,
    )


def _write_stream(self: DataFrame) -> Any:
    """Returns Spark's DataStreamWriter, which checks the query's plan before it starts."""
    frame = spark_frame(self)
    writer = frame.writeStream
    checked = _with_class(writer, _writer_class(_class_of(writer)))
    checked.__dict__["_kafka_eos_frame"] = frame
    checked.__dict__[_SENDERS] = senders_of(self)
    return checked


@lru_cache(maxsize=8)
def _writer_class(base: Any) -> type:
    def checked(name: str) -> Callable[..., Any]:
        of_spark = getattr(base, name)

        def start(self: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "toTable":
                _refuse_other_sink(self, "toTable()")
            else:
                given = kwargs.get("format") or (args[1] if len(args) > 1 else None)
                _refuse_other_sink(self, given or self.__dict__.get(_FORMAT, "parquet"))
            check_changelog(self._kafka_eos_frame)
            return of_spark(self, *args, **kwargs)

        return wraps(of_spark)(start)

    def format_(self: Any, source: str) -> Any:
        _refuse_other_sink(self, source)
        self.__dict__[_FORMAT] = source
        return base.format(self, source)

    def function(name: str) -> Callable[..., Any]:
        def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_other_sink(self, f"{name}()")
            return getattr(base, name)(self, *args, **kwargs)

        return wraps(getattr(base, name))(refused)

    members = {name: checked(name) for name in ("start", "toTable")}
    members |= {name: function(name) for name in ("foreach", "foreachBatch")}
    members["format"] = wraps(base.format)(format_)
    return type("DataStreamWriter", (base,), members)


def _refuse_other_sink(writer: Any, sink: str) -> None:
    """Raises `InvalidSchemaError` if another sink would get packets as rows, and commit nothing of them."""
    if sink.lower() == FORMAT_NAME:
        return
    senders = senders_of(writer)
    written = sink if sink.endswith("()") else f"format({sink!r})"
    if not senders.stores and senders.reads:
        raise InvalidSchemaError(
            f"{written} on a frame that was read with on_bad='dead-letter': only the sink {FORMAT_NAME!r} "
            "commits bad records together with the batch; others would get rows of nulls instead of them.",
            fix="read with on_bad='fail' or 'null'; or write with app.write(…), whose sinks= names further "
            "systems.",
        )
    raise InvalidSchemaError(
        f"{written} on the frame of a stateful operator: only the sink {FORMAT_NAME!r} commits its state "
        "together with the batch; others would get rows of nulls, and the state would be lost.",
        fix="write with writeStream.format('kafka-eos') or app.write(…), whose sinks= names further systems.",
    )
