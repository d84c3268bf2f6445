"""Finds, before a query starts, a step between a sender of packets and the sink that loses packets.

Senders are stateful operators, and reads that set bad records aside (`spark.packet_senders`).

The methods of `spark.operator_frame` cannot see every step: a query may pass through a temporary view, or
through a function that uses Spark's own frame. This module reads the whole plan instead: Spark's analysed
plan through the JVM, or with Spark Connect the plan that the client sends. On Connect, what the server alone
knows, such as the plan of a view, stays unseen. The sink then finds the loss in the first micro-batch
(``KAFKA_EOS.STATE_LOST``, ``KAFKA_EOS.STAGED_READ``), before it sends anything to Kafka.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.runtime.logs import warn_once
from kafka_eos_source.spark.schema import ONLY_BAD_RECORDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One node of a plan.

    Attributes:
        name: what the user wrote, or Spark's name of the node.
        has_changes: whether its result has the column `CHANGELOG`.
        inputs: the nodes whose results it reads.
        drops: why it drops, repeats or replaces rows with state changes; empty if it does not.
        needs: for a join, the positions of the inputs whose rows it keeps; None for other nodes.
        shuffles: whether the tasks after it are others than those before it.
        merges: whether its tasks are numbered in another way than those of its inputs (``coalesce``).
        is_union: whether it puts the tasks of its inputs one after the other.
        is_operator: whether it runs an operator in the task of each shard.
        only_bad_records: whether the packets in its result have no state changes.
        functions: Python functions of the user in its expressions, if its input has packets.
    """

    name: str
    has_changes: bool
    inputs: tuple[Step, ...] = ()
    drops: str = ""
    needs: frozenset[int] | None = None
    shuffles: bool = False
    merges: bool = False
    is_union: bool = False
    is_operator: bool = False
    only_bad_records: bool = False
    functions: tuple[str, ...] = ()


def check_changelog(frame: DataFrame) -> None:
    """Checks that a query passes all packets to the sink: state changes of operators, and bad records.

    Logs a warning about Python functions that Spark also calls for the rows of packets.

    Args:
        frame: the frame that is going to be written, with or without an operator.

    Raises:
        InvalidSchemaError: if a step drops the column `CHANGELOG` or rows with packets, or moves the shards
            of an operator to other tasks.
    """
    plan = _plan(frame)
    check_steps(plan)
    warning = warning_of_functions(plan)
    if warning:
        warn_once(_log, warning)


def warning_of_functions(step: Step) -> str:
    """Returns what to log about Python functions that Spark calls for the rows of packets; "" if none."""
    found: dict[str, None] = {}
    pending = [step]
    while pending:
        each = pending.pop()
        found.update(dict.fromkeys(each.functions))
        pending += each.inputs
    if not found:
        return ""
    names = ", ".join(sorted(found))
    which = "bad records" if step.only_bad_records else "state changes or bad records"
    return (
        f"Spark also calls the Python function(s) {names} for the rows that carry {which} to the sink. All "
        "other columns of these rows are null, so each argument is None: a function must not raise an "
        "exception for that. What it returns for these rows is not used."
    )


def check_generators(frame: DataFrame, step: str) -> None:
    """Checks that the last step of a frame does not use ``explode``, which drops rows with state changes.

    With Spark Connect, `check_changelog` does this when the query starts.

    Raises:
        InvalidSchemaError: if it does.
    """
    jdf = getattr(frame, "_jdf", None)
    node = None if jdf is None else jdf.queryExecution().analyzed()
    while node is not None and node_kind(node) in ("Project", "Generate"):
        if node_kind(node) == "Generate" and not node.outer():
            only_bad_records = ONLY_BAD_RECORDS in (frame.schema[CHANGELOG].metadata or {})
            raise _lost(step, _EXPLODES, only_bad_records=only_bad_records)
        node = node.child()


def check_steps(step: Step) -> None:
    """Checks a plan. Raises: InvalidSchemaError: as `check_changelog`."""
    for each in step.inputs:
        check_steps(each)
    holders = [at for at, each in enumerate(step.inputs) if each.has_changes]
    if not holders:
        return
    only_bad_records = all(step.inputs[at].only_bad_records for at in holders)
    why = step.drops
    if not why and step.needs is not None and not step.needs.issuperset(holders):
        why = "drops or repeats rows with state changes, whose other columns are null"
    if not why and not step.has_changes:
        why = f"drops the column {CHANGELOG!r}"
    if why:
        raise _lost(step.name, why, only_bad_records=only_bad_records)
    moved = step.inputs[1:] if step.is_union else step.inputs if step.merges else ()
    if any(_runs_operator(each) for each in moved):
        raise InvalidSchemaError(
            f"{step.name} after a stateful operator moves the shards of the operator to other tasks than "
            "their own.",
            fix="apply the step to the frame that the operator returned, whose methods prevent this; or add "
            "repartition(n) between the operator and the step.",
        )


def _runs_operator(step: Step) -> bool:
    """Whether the tasks of a step run an operator, because there is no shuffle between the two."""
    if step.is_operator:
        return True
    return not step.shuffles and any(map(_runs_operator, step.inputs))


_EXPLODES = (
    "drops rows whose array is null or empty, as that of a row with state changes, or repeats each row"
)
_CONDITION = "drops rows with state changes, for which the condition is not true"


_OUTER = (
    "use explode_outer() and then where(), with an array that is null if the columns of the row are: "
    f"explode_outer(items), or explode_outer(when(col({CHANGELOG!r}).isNull(), array(…)))"
)
_DROPS_ROWS = "drops or merges rows, and state changes are among them"
_FIXES = {
    _EXPLODES: f"{_OUTER}, or do this before the operator.",
    _DROPS_ROWS: "do this before the operator, or in a query that reads the output topic.",
}


def _lost(step: str, why: str, *, only_bad_records: bool = False) -> InvalidSchemaError:
    if only_bad_records:
        what = why.replace("state changes", "bad records")
        keeping = {
            _EXPLODES: _OUTER,
            _DROPS_ROWS: "do this in a query that reads the output topic",
        }.get(
            why,
            "use select(), where() and the other methods of the frame that was read, which keep them; in SQL "
            f"of Spark, select {CHANGELOG} too, and write conditions as '… OR {CHANGELOG} IS NOT NULL'",
        )
        return InvalidSchemaError(
            f"{step} after a read with on_bad='dead-letter' {what}. The sink keeps bad records as dead "
            "letters, and needs all of them.",
            fix=f"{keeping}; or read with on_bad='fail' or 'null'.",
        )
    return InvalidSchemaError(
        f"{step} after a stateful operator {why}. The sink commits the state changes of the operator with "
        "its result, and needs all of them.",
        fix=_FIXES.get(
            why,
            "use select(), where() and the other methods of the frame that the operator returned, which keep "
            f"them; in SQL, select {CHANGELOG} too, and write conditions as '… OR {CHANGELOG} IS NOT NULL'.",
        ),
    )


def _plan(frame: DataFrame) -> Step:
    found: Any = frame
    if hasattr(found, "_jdf"):
        return _of_jvm(found._jdf.queryExecution().analyzed())
    return _OfConnect(found._session.client).step(found._plan.plan(found._session.client))


# ------------------------------------------------------------------ the plan of a classic session

_FEWER_ROWS = {
    "Distinct": "distinct()",
    "Deduplicate": "dropDuplicates()",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark()",
    "Except": "exceptAll()",
    "Intersect": "intersect()",
    "GlobalLimit": "limit()",
    "LocalLimit": "limit()",
    "Offset": "offset()",
    "Tail": "tail()",
    "Sample": "sample()",
    "Aggregate": "groupBy().agg()",
    "Expand": "unpivot()",
}


_NAMES = {
    "Filter": "where()",
    "Join": "join()",
    "MapInArrow": "mapInArrow()",
    "MapInPandas": "mapInPandas()",
    "Project": "select() or withColumn()",
    "Union": "union()",
}


def name_of_step(kind: str) -> str:
    """Returns what the user wrote for a kind of node, of either kind of session; else the kind itself."""
    for names in (_FEWER_ROWS, _NAMES, _FEWER_ROWS_CONNECT, _NAMES_CONNECT, _OTHER_STEPS):
        if kind in names:
            return names[kind]
    return kind


def node_kind(node: Any) -> str:
    """Returns the name of the class of a node or an expression in the JVM."""
    return str(node.getClass().getSimpleName())


def elements(sequence: Any) -> Iterator[Any]:
    """Yields the elements of a Scala sequence."""
    return (sequence.apply(index) for index in range(sequence.size()))


def _of_jvm(node: Any) -> Step:
    kind = node_kind(node)
    names = [each.name() for each in elements(node.output())]
    inputs = tuple(map(_of_jvm, elements(node.children())))
    more: dict[str, Any] = {}
    name = _NAMES.get(kind, kind)
    if not any(each.has_changes for each in inputs):
        more = {"is_operator": kind == "MapInArrow" and CHANGELOG in names and _takes_shards(node)}
    elif kind in _FEWER_ROWS:
        name, more = _FEWER_ROWS[kind], {"drops": _DROPS_ROWS}
    elif kind == "Filter" and not _is_true_for_packets(node.condition()):
        more = {"drops": _CONDITION}
    elif kind == "Generate" and not node.outer():
        name, more = "explode()", {"drops": _EXPLODES}
    elif kind == "Project" and any(map(_replaces, elements(node.projectList()))):
        more = {"drops": f"replaces the values of the column {CHANGELOG!r}"}
    elif kind == "Join":
        streams = [each.isStreaming() for each in elements(node.children())]
        more = {"needs": _kept_by(str(node.joinType().sql()), streams)}
    elif kind == "Repartition":
        name = "repartition()" if node.shuffle() else "coalesce()"
        more = {"shuffles": bool(node.shuffle()), "merges": not node.shuffle()}
    elif kind == "MapInArrow":
        more = {"is_operator": _takes_shards(node)}
    more.setdefault("shuffles", kind == "RepartitionByExpression")
    packets = [each for each in elements(node.output()) if each.name() == CHANGELOG]
    only_bad = bool(packets) and all(ONLY_BAD_RECORDS in str(each.metadata().json()) for each in packets)
    return Step(
        name,
        _has_changes(node, names),
        inputs,
        is_union=kind == "Union",
        only_bad_records=only_bad,
        functions=_functions_of(node, inputs),
        **more,
    )


#: Nodes that call a function themselves. Packets go around it, or the operator expects them.
_CALLERS = ("MapInArrow", "MapInPandas", "map_partitions")


def _functions_of(node: Any, inputs: Sequence[Step]) -> tuple[str, ...]:
    """Returns the names of the Python functions in the expressions of a node whose input has packets."""
    if node_kind(node) in _CALLERS or not any(each.has_changes for each in inputs):
        return ()
    pattern = _jvm().org.apache.spark.sql.catalyst.trees.TreePattern.PYTHON_UDF()
    if not node.containsPattern(pattern):  # asks for the whole plan below, without a call for each expression
        return ()
    found: list[str] = []
    pending = list(elements(node.expressions()))
    while pending:
        each = pending.pop()
        if each.containsPattern(pattern):
            if node_kind(each) == "PythonUDF":
                found.append(str(each.name()))
            pending += elements(each.children())
    return tuple(found)


def _jvm() -> Any:
    from pyspark import SparkContext

    context: Any = SparkContext._active_spark_context
    return context._jvm


def _has_changes(node: Any, names: Sequence[str]) -> bool:
    """Whether a node has the column, or packed batches of rows with it (`map_in_read`)."""
    return CHANGELOG in names or (
        len(names) == 1 and CHANGELOG in str(node.output().apply(0).metadata().json())
    )


def _takes_shards(node: Any) -> bool:
    """Whether a node is an operator: its input has the columns that decide the shard of a row."""
    (child,) = elements(node.children())
    names = [each.name() for each in elements(child.output())]
    return any(name.startswith("__kafka_eos_") and name != CHANGELOG for name in names)


def _replaces(expression: Any) -> bool:
    """Whether a projection computes the column instead of passing it on."""
    if node_kind(expression) != "Alias" or expression.name() != CHANGELOG:
        return False
    return not _is_changelog(expression.child())


def _is_changelog(expression: Any) -> bool:
    return node_kind(expression) == "AttributeReference" and expression.name() == CHANGELOG


def _is_true_for_packets(expression: Any) -> bool:
    """Whether a condition is certainly true for rows with packets."""
    kind = node_kind(expression)
    children = list(elements(expression.children()))
    if kind == "Or":
        return any(map(_is_true_for_packets, children))
    if kind == "And":
        return all(map(_is_true_for_packets, children))
    if kind == "IsNotNull":
        return _is_changelog(children[0])
    if kind == "Not":
        return node_kind(children[0]) == "IsNull" and _is_changelog(children[0].child())
    if kind in ("CaseWhen", "If"):  # the children begin with the first condition and its value
        return _is_true_for_packets(children[0]) and _is_true_for_packets(children[1])
    return kind == "Literal" and str(expression) == "true"


def _kept_by(join: str, streams: Sequence[bool]) -> frozenset[int]:
    """Returns the inputs of a join of which each row stays, because the other one is no stream."""
    kind = re.sub(r"[\s_]|JOIN_TYPE", "", join.upper())
    left = kind in ("LEFTOUTER", "LEFTANTI") and not streams[1]
    right = kind == "RIGHTOUTER" and not streams[0]
    return frozenset({0} if left else {1} if right else ())


# ------------------------------------------------------------------ the plan of a client of Spark Connect

_RELATION = "spark.connect.Relation"
#: Relations that drop or merge rows.
_FEWER_ROWS_CONNECT = {
    "limit": "limit()",
    "offset": "offset()",
    "tail": "tail()",
    "sample": "sample()",
    "sample_by": "sampleBy()",
    "deduplicate": "dropDuplicates()",
    "aggregate": "groupBy().agg()",
    "drop_na": "dropna()",
    "unpivot": "unpivot()",
    "transpose": "transpose()",
    "lateral_join": "lateralJoin()",
    "as_of_join": "join()",
}
_NAMES_CONNECT = {
    "filter": "where()",
    "project": "select()",
    "join": "join()",
    "drop": "drop()",
    "map_partitions": "mapInArrow() or mapInPandas()",
    "with_columns": "withColumn()",
}
#: What users wrote for steps that keep each row.
_OTHER_STEPS = {
    "EventTimeWatermark": "withWatermark()",
    "with_watermark": "withWatermark()",
    "Generate": "explode()",
    "Repartition": "repartition()",
    "RepartitionByExpression": "repartition()",
    "repartition": "repartition()",
    "repartition_by_expression": "repartition()",
    "View": "a view",
    "sql": "spark.sql()",
    "set_op": "union()",
}
_GENERATORS = "explode|posexplode|inline|stack|json_tuple"


@dataclass
class _OfConnect:
    """Reads the relations of a plan.

    Attributes:
        client: asks the server for the columns of a relation.
    """

    client: Any
    _schemas: dict[bytes, Any] = field(default_factory=dict, init=False)

    def step(self, relation: Any) -> Step:
        kind = str(relation.WhichOneof("rel_type"))
        node = getattr(relation, kind)
        below = list(connect_relations(node))
        inputs = tuple(map(self.step, below))
        names = self._columns(relation)
        more: dict[str, Any] = {}
        name = _NAMES_CONNECT.get(kind, kind)
        is_union = kind == "set_op" and _value(node, "set_op_type") == "SET_OP_TYPE_UNION"
        is_operator = (
            kind == "map_partitions"
            and CHANGELOG in names
            and any(
                each.startswith("__kafka_eos_") and each != CHANGELOG
                for source in below
                for each in self._columns(source)
            )
        )
        if not any(each.has_changes for each in inputs):
            pass
        elif kind in _FEWER_ROWS_CONNECT:
            name, more = _FEWER_ROWS_CONNECT[kind], {"drops": _DROPS_ROWS}
        elif kind == "set_op" and not is_union:
            name, more = "intersect() or exceptAll()", {"drops": _DROPS_ROWS}
        elif kind == "filter" and not _is_true(node.condition):
            more = {"drops": _CONDITION}
        elif any(_explodes(each) for _, each in _expressions(node)):
            name, more = "explode()", {"drops": _EXPLODES}
        elif any(alias == CHANGELOG and not _names_changes(each) for alias, each in _expressions(node)):
            more = {"drops": f"replaces the values of the column {CHANGELOG!r}"}
        elif kind == "join":
            more = {"needs": _kept_by(_value(node, "join_type"), list(map(self._is_streaming, below)))}
        elif kind == "repartition":
            name = "repartition()" if node.shuffle else "coalesce()"
            more = {"shuffles": bool(node.shuffle), "merges": not node.shuffle}
        more.setdefault("shuffles", kind == "repartition_by_expression")
        return Step(
            "union()" if is_union else name,
            CHANGELOG in names or self._is_packed(relation, names) or self._is_unknown(relation, inputs),
            inputs,
            is_union=is_union,
            is_operator=is_operator,
            only_bad_records=self._only_bad_records(relation),
            functions=(
                tuple(_inline_functions(node))
                if kind not in _CALLERS and any(each.has_changes for each in inputs)
                else ()
            ),
            **more,
        )

    def _schema(self, relation: Any) -> Any:
        from pyspark.sql.connect.proto import Plan

        key = relation.SerializeToString()
        if key not in self._schemas:
            try:
                self._schemas[key] = self.client.schema(Plan(root=relation))
            except PySparkException:
                self._schemas[key] = None
        return self._schemas[key]

    def _columns(self, relation: Any) -> list[str]:
        found = self._schema(relation)
        return [] if found is None else list(found.names)

    def _only_bad_records(self, relation: Any) -> bool:
        found = self._schema(relation)
        packets = [] if found is None else [each for each in found.fields if each.name == CHANGELOG]
        return bool(packets) and all(ONLY_BAD_RECORDS in (each.metadata or {}) for each in packets)

    def _is_packed(self, relation: Any, names: Sequence[str]) -> bool:
        return len(names) == 1 and CHANGELOG in str(self._schema(relation).fields[0].metadata)

    def _is_unknown(self, relation: Any, inputs: Sequence[Step]) -> bool:
        """Whether the server does not tell the columns of a step that could keep state changes."""
        return self._schema(relation) is None and any(each.has_changes for each in inputs)

    def _is_streaming(self, relation: Any) -> bool:
        from pyspark.sql.connect.proto import Plan

        return bool(self.client._analyze(method="is_streaming", plan=Plan(root=relation)).is_streaming)


def connect_relations(message: Any) -> Iterator[Any]:
    """Yields the relations that are fields of a relation."""
    for known, value in message.ListFields():
        if known.message_type is not None and known.message_type.full_name == _RELATION:
            yield from [value] if hasattr(value, "WhichOneof") else value


def _value(node: Any, name: str) -> str:
    """Returns the name of the value of an enumeration."""
    values = node.DESCRIPTOR.fields_by_name[name].enum_type.values_by_number
    return str(values[getattr(node, name)].name)


def _expressions(node: Any) -> Iterator[tuple[str, Any]]:
    """Yields the expressions of a projection or of ``withColumns``, with their names; "" = without one."""
    for each in getattr(node, "expressions", ()):
        aliased = each.WhichOneof("expr_type") == "alias"
        yield (".".join(each.alias.name), each.alias.expr) if aliased else ("", each)
    for each in getattr(node, "aliases", ()):
        yield ".".join(each.name), each.expr


def _explodes(expression: Any) -> bool:
    kind = expression.WhichOneof("expr_type")
    if kind == "expression_string":
        return (
            re.search(rf"\b({_GENERATORS})\s*\(", expression.expression_string.expression, re.I) is not None
        )
    if kind != "unresolved_function":
        return False
    return re.fullmatch(_GENERATORS, expression.unresolved_function.function_name, re.I) is not None


def _inline_functions(message: Any) -> Iterator[str]:
    """Yields the names of the Python functions in the expressions of a relation, not of those below it."""
    for known, value in message.ListFields():
        if known.message_type is None or known.message_type.full_name == _RELATION:
            continue
        for each in [value] if hasattr(value, "ListFields") else value:
            if not hasattr(each, "ListFields"):  # keys of a map
                continue
            if known.name == "common_inline_user_defined_function":
                yield str(each.function_name)
            yield from _inline_functions(each)


def _names_changes(expression: Any) -> bool:
    kind = expression.WhichOneof("expr_type")
    if kind == "unresolved_attribute":
        return str(expression.unresolved_attribute.unparsed_identifier).strip("`") == CHANGELOG
    return False


def _is_true(expression: Any) -> bool:
    """Whether a condition is certainly true for rows with packets, as far as the client sees."""
    kind = expression.WhichOneof("expr_type")
    if kind == "expression_string":
        text = expression.expression_string.expression
        return re.search(rf"\bor\s+`?{CHANGELOG}`?\s+is\s+not\s+null", text, re.I) is not None
    if kind == "literal":
        return bool(expression.literal.boolean)
    if kind != "unresolved_function":
        return False
    name = expression.unresolved_function.function_name.lower()
    arguments = list(expression.unresolved_function.arguments)
    if name == "or":
        return any(map(_is_true, arguments))
    if name == "and":
        return all(map(_is_true, arguments))
    if name == "isnotnull":
        return _names_changes(arguments[0])
    return name in ("when", "if") and _is_true(arguments[0]) and _is_true(arguments[1])
