"""Decides whether a SQL text may run as a step in the read, from the syntax tree that DuckDB makes of it.

A step in the read sees its input in batches, and where one batch ends and the next begins depends on how fast
records arrive. So the result of a text must be the same for every division of the input into batches: each
input row yields its own result rows, whatever rows are next to it. And because Spark repeats tasks, the same
input must always give the same result. `check` refuses every text for which that is not certain. It allows
only what it knows; a kind of node that a later version of the engine adds is refused.

Queries over static tables alone may do more, because a static table is the same for every batch: they may
aggregate, sort, limit and number the rows of the table.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from kafka_eos_source.errors import InvalidSqlError

#: A node of the syntax tree, as ``json_serialize_sql`` of DuckDB writes it.
Node = Mapping[str, Any]

#: What to use instead of an aggregate.
AGGREGATE = "compute it with aggregate() (App.aggregate), which keeps its state across batches."
_WHOLE_INPUT = (
    "a step in the read sees one batch of records at a time, and a batch is not the table: batches end where "
    "the task happened to stop reading"
)
_WITHOUT_IT = "remove it; in a query over a static table alone, it is allowed."


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Scalar functions whose result depends on the time zone, which this package sets, and otherwise only on
#: their arguments. The engine calls them "consistent within a query", as it does ``now()``.
_OF_TIME_ZONE = _names(
    "+ - century date_diff date_part date_sub date_trunc datediff datepart datesub datetrunc day "
    "dayname dayofmonth dayofweek dayofyear decade era generate_series hour isodow isoyear julian "
    "last_day make_timestamptz microsecond millennium millisecond minute month monthname quarter range "
    "second strftime time_bucket timezone timezone_hour timezone_minute week weekday weekofyear year "
    "yearweek"
)

#: Functions that the engine calls volatile only because they always raise an error.
_RAISING = frozenset({"error"})

#: Macros of the engine that expand to functions of their arguments alone.
_MACROS = _names(
    "array_append array_pop_back array_pop_front array_prepend array_push_back array_push_front "
    "array_reverse array_to_string array_to_string_comma_default assert_true date_add days_in_month "
    "fdiv fmod generate_subscripts if json list_any_value list_append list_approx_count_distinct "
    "list_avg list_bit_and list_bit_or list_bit_xor list_bool_and list_bool_or list_count list_entropy "
    "list_first list_histogram list_kurtosis list_kurtosis_pop list_last list_mad list_max list_median "
    "list_min list_mode list_prepend list_product list_reverse list_sem list_skewness list_stddev_pop "
    "list_stddev_samp list_string_agg list_sum list_var_pop list_var_samp map_contains_entry "
    "map_contains_value md5_number_lower md5_number_upper nullif regexp_split_to_table split_part"
)

#: Scalar functions that depend on the engine or its session, although the engine calls them consistent.
_OF_SESSION = _names(
    "current_setting getvariable in_search_path version get_type make_type json_serialize_sql "
    "json_serialize_plan json_deserialize_sql parse_duckdb_log_message"
)

#: Names that stand for the time or the session even without parentheses, where no column has the name.
_BARE_FUNCTIONS = _names(
    "current_catalog current_database current_date current_localtime current_localtimestamp "
    "current_role current_schema current_time current_timestamp current_user localtime localtimestamp "
    "session_user user"
)

_TIMES_OF_ZONE = frozenset({"TIMETZ", "TIME WITH TIME ZONE"})

#: Aggregates whose result is random.
_RANDOM_AGGREGATES = frozenset({"reservoir_quantile"})
_LIST_AGGREGATE = frozenset({"list_aggr", "list_aggregate", "array_aggr", "array_aggregate", "aggregate"})

#: Functions that make a list or text of a given length, and which of their arguments say how long it is.
_GROWING: Mapping[str, slice] = {
    "range": slice(0, 3),
    "generate_series": slice(0, 3),
    "list_resize": slice(1, 2),
    "array_resize": slice(1, 2),
    "repeat": slice(1, 2),
    "lpad": slice(1, 2),
    "rpad": slice(1, 2),
}
_LONGEST = 100_000
_LENGTHS = _names(
    "len length array_length list_count strlen json_array_length cardinality octet_length bit_length"
)

_EXPRESSIONS = _names(
    "COLUMN_REF CONSTANT FUNCTION CAST COMPARISON CONJUNCTION OPERATOR CASE BETWEEN SUBQUERY STAR "
    "LAMBDA LAMBDA_REF COLLATE TYPE WINDOW PARAMETER POSITIONAL_REFERENCE"
)

#: Parts of ``*`` that change which columns it selects, so that they are not those of the input.
_CHANGES_OF_STAR = ("expr", "columns", "replace_list", "rename_list", "qualified_exclude_list")

_NO_POSITION = 2**64 - 1

#: The most characters of a line that an error shows before the place.
_BEFORE_CARET = 60


@dataclass(frozen=True)
class SqlText:
    """A SQL text and how to point at a place in it.

    Attributes:
        text: the text.
    """

    text: str

    def error(self, message: str, fix: str, offset: int | None = None) -> InvalidSqlError:
        """Returns an error about the text: a sentence, and the place with a caret under it.

        Args:
            message: what is wrong, without a full stop.
            fix: what to write instead.
            offset: position of the place, in bytes of UTF-8; None if it is not known.
        """
        if offset is None:
            return InvalidSqlError(f"SQL text: {message}.", fix=fix)
        before = self.text.encode()[:offset].decode(errors="ignore")
        line = before.count("\n")
        column = len(before) - (before.rfind("\n") + 1)
        start = max(0, column - _BEFORE_CARET)
        shown = self.text.split("\n")[line][start : start + 2 * _BEFORE_CARET].replace("\t", " ")
        caret = " " * (column - start) + "^"
        return InvalidSqlError(
            f"SQL text, line {line + 1}, column {column + 1}: {message}.\n    {shown}\n    {caret}\n", fix=fix
        )


def selected(tree: Node, name: str, columns: Collection[str], names: Collection[str]) -> dict[str, str]:
    """Returns the columns of the result that are columns of the input, unchanged; for a join it finds none.

    Args:
        tree: the text.
        name: name of the input in the text.
        columns: names of its columns.
        names: names of the columns of the result.
    """
    table = tree.get("from_table") or {}
    is_plain = tree["type"] == "SELECT_NODE" and not tree["cte_map"]["map"]
    if not is_plain or table.get("type") != "BASE_TABLE" or table["column_name_alias"]:
        return {}
    if str(table["table_name"]).lower() != name.lower():
        return {}
    of_input = {each.lower(): each for each in columns}
    # With an alias, the name of the input is free, and may be that of a struct.
    qualified = str(table["alias"] or name).lower()
    found: dict[str, str] = {}
    for each in tree["select_list"]:
        if each["class"] == "COLUMN_REF":
            *qualifier, column = (str(part).lower() for part in each["column_names"])
            if qualifier in ([], [qualified]) and column in of_input:
                found[str(each["alias"] or column).lower()] = of_input[column]
        elif each["class"] == "STAR" and not any(each[part] for part in _CHANGES_OF_STAR):
            left = {str(column).lower() for column in each["exclude_list"]}
            found |= {column: own for column, own in of_input.items() if column not in left}
    return {each: found[each.lower()] for each in names if each.lower() in found}


def input_first(node: Any, of_input: Mapping[int, bool]) -> Any:
    """Returns a copy of a syntax tree in which each join has the rows of the input on its left side.

    It makes the same rows, but ``*`` has the columns in another order.

    Args:
        node: the tree, or a part of it.
        of_input: as in `Checked`.
    """
    if isinstance(node, list):
        return [input_first(each, of_input) for each in node]
    if not isinstance(node, Mapping):
        return node
    found = {key: input_first(each, of_input) for key, each in node.items()}
    swapped = {"INNER": "INNER", "RIGHT": "LEFT"}.get(str(node.get("join_type")))
    if swapped is not None and of_input.get(id(node.get("right"))):
        found |= {"left": found["right"], "right": found["left"], "join_type": swapped}
    return found


def position(node: object) -> int | None:
    """Returns the first position in the text of a node or what it contains; None if none is known."""
    found: list[int] = []
    pending = [node]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            at = each.get("query_location")
            if isinstance(at, int) and at != _NO_POSITION:
                found.append(at)
            pending.extend(each.values())
        elif isinstance(each, list):
            pending.extend(each)
    return min(found, default=None)


@dataclass(frozen=True)
class Functions:
    """Functions of the engine, by their names in lower case.

    Attributes:
        scalar: functions of their arguments alone.
        aggregates: aggregates and window functions.
        others: functions with a result that depends on something else, such as the time or the session.
    """

    scalar: frozenset[str]
    aggregates: frozenset[str]
    others: frozenset[str]

    @classmethod
    def of(cls, listed: Iterable[tuple[str, str, str | None]]) -> Functions:
        """Returns the functions that the engine lists, each with its name, type and stability."""
        scalar: set[str] = set()
        aggregates: set[str] = set()
        others: set[str] = set()
        for name, kind, stability in listed:
            if kind in {"aggregate", "window"}:
                aggregates.add(name)
            elif kind == "macro":
                (scalar if name in _MACROS else others).add(name)
            elif kind == "scalar":
                same = stability == "CONSISTENT" or name in _OF_TIME_ZONE or name in _RAISING
                (scalar if same and name not in _OF_SESSION else others).add(name)
        return cls(frozenset(scalar), frozenset(aggregates), frozenset(others))


@dataclass
class Checked:
    """What `check` found out about a text.

    Attributes:
        unnamed: position of the first expression of the result that has no name; None if all have one.
        of_input: for the id of each query and table in the tree, whether its rows come from the input.
    """

    unnamed: int | None
    of_input: Mapping[int, bool]


def check(
    tree: Node,
    text: SqlText,
    name: str,
    columns: Collection[str],
    tables: Mapping[str, Collection[str]],
    functions: Functions,
) -> Checked:
    """Checks that each input row yields its own result rows, and always the same.

    Args:
        tree: the query of the only statement.
        text: the text, for errors.
        name: name of the input.
        columns: names of its columns.
        tables: names of the columns of each static table.
        functions: functions of the engine.

    Raises:
        InvalidSqlError: if that is not certain; it names the place and what to use instead.
    """
    lower = {each.lower(): {column.lower() for column in names} for each, names in tables.items()}
    checker = _Checker(text, name.lower(), functions, lower, {each.lower() for each in columns})
    checker.names = checker.known_names(tree)
    if not checker.query(tree, {}):
        raise text.error(
            f"the query does not read its input {name!r}, so its rows would come once for each batch",
            fix=f"write FROM {name} in the outermost query.",
        )
    return Checked(_unnamed(tree), checker.of_input)


def _unnamed(tree: Node) -> int | None:
    while tree["type"] == "SET_OPERATION_NODE":
        tree = tree["children"][0]
    for each in tree["select_list"]:
        if each["class"] not in {"COLUMN_REF", "STAR"} and not each.get("alias"):
            found = position(each)
            return 0 if found is None else found
    return None


@dataclass
class _Checker:
    text: SqlText
    input: str
    functions: Functions
    tables: Mapping[str, Collection[str]]
    columns: set[str]
    names: set[str] = field(default_factory=set)
    of_input: dict[int, bool] = field(default_factory=dict)

    def refuse(self, what: str, fix: str, node: object = None) -> NoReturn:
        raise self.text.error(what, fix, position(node))

    def known_names(self, node: object) -> set[str]:
        """Returns all names that may mean a column: those of the tables, and every alias in the text."""
        found = set(self.columns).union(*self.tables.values())
        pending = [node]
        while pending:
            each = pending.pop()
            if isinstance(each, Mapping):
                if alias := each.get("alias"):
                    found.add(str(alias).lower())
                found.update(str(name).lower() for name in each.get("column_name_alias") or ())
                found.update(str(name).lower() for name in each.get("aliases") or () if isinstance(name, str))
                pending.extend(each.values())
            elif isinstance(each, list):
                pending.extend(each)
        return found

    # ------------------------------------------------------------------ queries

    def query(self, node: Node, outer: Mapping[str, bool]) -> bool:
        """Checks a query; returns whether its rows come from the input (True) or from static tables alone.

        Args:
            node: the query.
            outer: the same for each common table expression (``WITH``) that it may read.
        """
        ctes = dict(outer)
        for each in (node.get("cte_map") or {}).get("map") or ():
            name = str(each["key"]).lower()
            if name == self.input or name in self.tables:
                self.refuse(
                    f"WITH {each['key']} has the name of a table",
                    "choose another name.",
                    each["value"],
                )
            ctes[name] = self.query(each["value"]["query_node"], ctes)
        kind = node["type"]
        if kind in {"SELECT_NODE", "SET_OPERATION_NODE"}:
            of_input = self.select(node, ctes) if kind == "SELECT_NODE" else self.set_operation(node, ctes)
            self.of_input[id(node)] = of_input
            return of_input
        if kind == "RECURSIVE_CTE_NODE":
            self.refuse("WITH RECURSIVE is not possible in the read", "write the levels one by one.", node)
        return self.refuse(f"a query of the kind {kind} is not possible in the read", "write a SELECT.", node)

    def set_operation(self, node: Node, ctes: Mapping[str, bool]) -> bool:
        of_input = {self.query(each, ctes) for each in node["children"]}
        kind = str(node.get("setop_type", "")).replace("_", " ")
        if True in of_input:
            if not (node.get("setop_all") and kind in {"UNION", "UNION BY NAME"}):
                self.refuse(
                    f"{kind} compares rows of the input with each other; {_WHOLE_INPUT}",
                    "use UNION ALL; to drop duplicates, use drop_duplicates or aggregate().",
                    node["children"][1],
                )
            if False in of_input:
                self.refuse(
                    f"one side of UNION ALL does not read the input {self.input!r}, so its rows would come "
                    "once for each batch",
                    f"read {self.input} on both sides.",
                    node["children"],
                )
            self.modifiers(node)
        self.expressions(node.get("modifiers"), ctes, per_row=True in of_input)
        return True in of_input

    def select(self, node: Node, ctes: Mapping[str, bool]) -> bool:
        source = node["from_table"]
        of_input = self.table(source, ctes)
        per_row = (
            of_input or source["type"] == "EMPTY"
        )  # without FROM, an aggregate is one of the outer query
        if node.get("sample"):
            self.refuse("a sample is random, and a repeated task must give the same rows", "remove it.", node)
        if of_input:
            grouped = node.get("group_expressions") or node.get("group_sets")
            if grouped or node.get("having") or node.get("aggregate_handling") != "STANDARD_HANDLING":
                self.refuse(
                    f"GROUP BY and HAVING are not possible in the read: {_WHOLE_INPUT}",
                    AGGREGATE,
                    node.get("group_expressions") or node.get("having"),
                )
            if node.get("qualify"):
                self.refuse(
                    f"QUALIFY is not possible in the read: {_WHOLE_INPUT}", AGGREGATE, node["qualify"]
                )
            self.modifiers(node)
        for part in ("select_list", "where_clause", "group_expressions", "having", "qualify", "modifiers"):
            self.expressions(node.get(part), ctes, per_row=per_row)
        return of_input

    def modifiers(self, node: Node) -> None:
        for each in node.get("modifiers") or ():
            kind = str(each["type"])
            if kind.startswith("DISTINCT"):
                self.refuse(
                    f"DISTINCT is not possible in the read: {_WHOLE_INPUT}",
                    "use drop_duplicates or aggregate(), which keep their state across batches.",
                    each,
                )
            if kind.startswith("ORDER"):
                self.refuse(
                    f"ORDER BY is not possible in the read: {_WHOLE_INPUT}. The result has the order of the "
                    "input",
                    _WITHOUT_IT,
                    each,
                )
            self.refuse(f"LIMIT and OFFSET are not possible in the read: {_WHOLE_INPUT}", _WITHOUT_IT, each)

    # ------------------------------------------------------------------ tables

    def table(self, node: Node, ctes: Mapping[str, bool]) -> bool:
        """Checks a table in FROM; returns what `query` returns."""
        self.of_input[id(node)] = found = self.kind_of_table(node, ctes)
        return found

    def kind_of_table(self, node: Node, ctes: Mapping[str, bool]) -> bool:
        kind = node["type"]
        if node.get("sample"):
            self.refuse("a sample is random, and a repeated task must give the same rows", "remove it.", node)
        if kind == "EMPTY":
            return False
        if kind == "BASE_TABLE":
            return self.base_table(node, ctes)
        if kind == "SUBQUERY":
            return self.query(node["subquery"]["node"], ctes)
        if kind == "JOIN":
            return self.join(node, ctes)
        if kind == "EXPRESSION_LIST":
            self.expressions(node["values"], ctes, per_row=True)
            return False
        if kind == "TABLE_FUNCTION":
            name = node["function"]["function_name"]
            self.refuse(
                f"the table function {name} is not possible in the read",
                f"write {name}(…) AS name in the select list: SELECT id, unnest(items) AS item FROM …"
                if name == "unnest"
                else "give the rows as a static table (tables=).",
                node,
            )
        what = {"SHOW_REF": "DESCRIBE, SHOW and SUMMARIZE are", "PIVOT": "PIVOT and UNPIVOT are"}
        return self.refuse(
            f"{what.get(kind, f'FROM with a {kind} is')} not possible in the read", "write a SELECT.", node
        )

    def base_table(self, node: Node, ctes: Mapping[str, bool]) -> bool:
        name = str(node["table_name"])
        path = (node.get("qualified_name") or {}).get("path") or [name]
        if len(path) == 1:
            if name.lower() == self.input:
                return True
            if name.lower() in ctes:
                return ctes[name.lower()]
            if name.lower() in self.tables:
                return False
        written = ".".join(map(str, path))
        known = [self.input, *ctes, *self.tables]
        near = difflib.get_close_matches(written.lower(), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return self.refuse(
            f"there is no table {written!r}",
            f"the text may read {', '.join(known)}; it cannot read files.{hint}",
            node,
        )

    def join(self, node: Node, ctes: Mapping[str, bool]) -> bool:
        left, right = self.table(node["left"], ctes), self.table(node["right"], ctes)
        kind, form = node["join_type"], node["ref_type"]
        self.expressions(node.get("condition"), ctes, per_row=left or right)
        if not left and not right:
            return False
        if left and right:
            self.refuse(
                f"a join of the input with itself is not possible in the read: {_WHOLE_INPUT}",
                "keep the other rows in state: aggregate(), or a StatefulProcessor.",
                node,
            )
        if form not in {"REGULAR", "CROSS"}:
            self.refuse(
                f"a {form} JOIN is not possible in the read",
                {
                    "NATURAL": "name the columns: JOIN … USING (column).",
                    "ASOF": "write the range as a condition: ON r.since <= t AND t < r.until.",
                }.get(form, "join by a condition: JOIN … ON …."),
                node,
            )
        kept = {"INNER": True, "LEFT": left, "RIGHT": right, "SEMI": left, "ANTI": left}.get(kind, False)
        if not kept:
            self.refuse(
                f"a {kind} JOIN that keeps rows of a static table would return them once for each batch",
                f"keep the rows of {self.input}: FROM {self.input} LEFT JOIN ….",
                node,
            )
        return True

    # ------------------------------------------------------------------ expressions

    def expressions(self, found: object, ctes: Mapping[str, bool], *, per_row: bool) -> None:
        """Checks all expressions in a part of a query.

        Args:
            found: the part.
            ctes: as for `query`.
            per_row: whether the query has one group for each row, so that it cannot aggregate.
        """
        if isinstance(found, list):
            for each in found:
                self.expressions(each, ctes, per_row=per_row)
        elif isinstance(found, Mapping):
            kind = found.get("class")
            if kind is not None:
                self.expression(found, str(kind), ctes, per_row)
            for key, each in found.items():
                if key != "subquery":
                    self.expressions(each, ctes, per_row=per_row)

    def expression(self, node: Node, kind: str, ctes: Mapping[str, bool], per_row: bool) -> None:
        if kind not in _EXPRESSIONS:
            self.refuse(f"an expression of the kind {kind} is not possible in the read", "remove it.", node)
        if kind == "SUBQUERY":
            if self.query(node["subquery"]["node"], ctes):
                self.refuse(
                    f"a subquery over the input is not possible in the read: {_WHOLE_INPUT}",
                    "read a static table there (tables=), or keep the other rows in state: aggregate().",
                    node,
                )
        elif kind == "WINDOW":
            if per_row:
                self.refuse(
                    f"the window function {node.get('function_name')} is not possible in the read: "
                    f"{_WHOLE_INPUT}",
                    "keep the other rows in state: aggregate(), or a StatefulProcessor.",
                    node,
                )
        elif kind == "TYPE" and str(node.get("type_name")).upper() in _TIMES_OF_ZONE:
            # its offset in a zone with summer time is that of today
            self.refuse_other("a time with a time zone", node)
        elif kind == "PARAMETER":
            self.refuse("a parameter has no value here", "write the value into the text.", node)
        elif kind == "POSITIONAL_REFERENCE":
            self.refuse("a column is named by its position", "write its name.", node)
        elif kind == "COLUMN_REF":
            names = node["column_names"]
            if len(names) == 1 and str(names[0]).lower() in _BARE_FUNCTIONS - self.names:
                self.refuse_other(str(names[0]), node)
        elif kind == "FUNCTION":
            self.function(node, per_row)

    def function(self, node: Node, per_row: bool) -> None:
        name = str(node["function_name"]).lower()
        arguments = [each.get("expression", each) for each in node.get("arguments") or ()]
        if name == "age" and len(arguments) == 2:  # with one argument, it takes the current date
            return
        if name in self.functions.others:
            self.refuse_other(name, node)
        if name in self.functions.aggregates and name not in self.functions.scalar:
            if name in _RANDOM_AGGREGATES:
                self.refuse_other(name, node)
            if per_row:
                shown = "count(*)" if name == "count_star" else name
                self.refuse(
                    f"the aggregate {shown} is not possible in the read: {_WHOLE_INPUT}", AGGREGATE, node
                )
        if name in _LIST_AGGREGATE:
            chosen = _constant(arguments[1]) if len(arguments) > 1 else None
            if not isinstance(chosen, str) or chosen.lower() in _RANDOM_AGGREGATES:
                self.refuse(
                    f"{name} needs the name of an aggregate that is not random, as text",
                    "write it as in list_aggr(items, 'sum').",
                    node,
                )
        for each in arguments[_GROWING.get(name, slice(0, 0))]:
            if not _bounded(each):
                self.refuse(
                    f"a record could make {name} as long as it likes, and so use up the memory",
                    f"limit the length, as in least(n, 1000); at most {_LONGEST:,}.",
                    node,
                )

    def refuse_other(self, name: str, node: Node) -> NoReturn:
        self.refuse(
            f"the result of {name} does not depend on its arguments alone, and a repeated task must give the "
            "same rows",
            "use a column instead, such as the timestamp of the record.",
            node,
        )


def _constant(node: Node) -> object:
    """Returns the value of a constant; None for another expression."""
    if node.get("class") == "CAST":
        return _constant(node["child"])
    literal = node.get("literal") or {}
    if node.get("class") != "CONSTANT":
        return None
    text = literal.get("text")
    if literal.get("kind") in {"INTEGER", "NUMBER"}:
        try:
            return int(str(text))
        except ValueError:
            return None
    return text


def _bounded(node: Node) -> bool:
    """Returns whether an expression is certain to be at most about `_LONGEST`: it is small, or a length."""
    value = _constant(node)
    if isinstance(value, int):
        return abs(value) <= _LONGEST
    if node.get("class") == "CAST":
        return _bounded(node["child"])
    if node.get("class") != "FUNCTION":
        return False
    name = str(node["function_name"]).lower()
    arguments = [each.get("expression", each) for each in node.get("arguments") or ()]
    if name in _LENGTHS:
        return True
    if name == "least":
        return any(map(_bounded, arguments))
    return name in {"+", "-", "greatest", "abs"} and all(map(_bounded, arguments))
