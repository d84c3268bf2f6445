"""Extends a SQL text by columns that say in which order the rows of its result belong.

A filter, a projection and `unnest` keep the order of their input. A join does not: the engine reads the
smaller side first, and returns what matches in an order of its own. Neither does UNION ALL, which returns the
rows of one side after those of the other. In these cases, each row of the result carries *keys*: the number
of its input row, which side of a UNION ALL it comes from, the numbers of the static rows that it was joined
with, and its place in a list that was unnested. Sorted by them, the rows are in the order in which nested
loops over the tables would return them, for every division of the input into batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kafka_eos_source.in_read.sql_check import SqlText, position

#: Prefix of the names of keys; key 0 is the number of the input row.
KEY = "__kafka_eos_key_"

#: Prefix of the names of columns that number the rows of a query over static tables.
_NUMBER = "__kafka_eos_static_"

_NO_KEY = "CAST(NULL AS BIGINT)"

#: A node of the syntax tree that may be changed.
_Node = dict[str, Any]

#: Parts of a SELECT with expressions of its rows.
_PARTS = ("select_list", "from_table", "where_clause")

_SPLIT = "do the join in a query of its own: WITH joined AS (SELECT … JOIN …) SELECT … FROM joined."


@dataclass
class _Scope:
    """What the tables of one SELECT add.

    Attributes:
        keys: table and column of each key.
        hidden: columns that ``*`` must leave out, by table.
    """

    keys: list[tuple[str, str]] = field(default_factory=list)
    hidden: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class KeyedOrder:
    """Adds the keys to a syntax tree.

    Attributes:
        text: the text, for errors.
        input: name of the input.
        columns: names of all columns of all tables, in lower case.
        of_input: for the id of each query and table in the tree, whether its rows come from the input.
        parse: returns the tree of a query.
        binds: returns whether a query, given as a tree, has a meaning on its own.
    """

    text: SqlText
    input: str
    columns: frozenset[str]
    of_input: Mapping[int, bool]
    parse: Callable[[str], _Node]
    binds: Callable[[_Node], bool]
    _keys_of_cte: dict[str, list[str]] = field(default_factory=dict)
    _ctes: list[_Node] = field(default_factory=list)
    _count: int = 0

    def add(self, tree: _Node) -> int:
        """Adds the keys to the end of the result of a query, in place, and returns how many there are.

        Raises:
            InvalidSqlError: if the query has a part for which no key is known.
        """
        return len(self._query(tree))

    # ------------------------------------------------------------------ queries

    def _query(self, node: _Node) -> list[str]:
        """Adds the keys to a query over the input; returns the names of their columns."""
        outer, outer_ctes = dict(self._keys_of_cte), list(self._ctes)
        for each in (node.get("cte_map") or {}).get("map") or ():
            name = str(each["key"]).lower()
            original = copy.deepcopy(each)
            if self.of_input[id(each["value"]["query_node"])]:
                self._keys_of_cte[name] = self._query(each["value"]["query_node"])
            else:
                self._keys_of_cte.pop(name, None)
            self._ctes.append(original)
        found = self._union(node) if node["type"] == "SET_OPERATION_NODE" else self._select(node)
        self._keys_of_cte, self._ctes = outer, outer_ctes
        return found

    def _union(self, node: _Node) -> list[str]:
        sides = [(child, self._query(child)) for child in node["children"]]
        width = 2 + max(len(keys) - 1 for _, keys in sides)
        node["children"] = []
        for number, (child, keys) in enumerate(sides):
            values = [keys[0], f"CAST({number} AS BIGINT)", *keys[1:]]
            values += [_NO_KEY] * (width - len(values))
            items = ", ".join(f"{value} AS {KEY}{place}" for place, value in enumerate(values))
            whole = self.parse(f"SELECT * EXCLUDE ({', '.join(keys)}), {items} FROM (SELECT 1) AS side")
            whole["from_table"]["subquery"]["node"] = child
            node["children"].append(whole)
        return [f"{KEY}{place}" for place in range(width)]

    def _select(self, node: _Node) -> list[str]:
        scope = _Scope()
        self._from(node, "from_table", scope)
        for each in _expressions(node["select_list"]):
            if each["class"] == "STAR":
                self._star(each, scope)
        self._refuse_whole_rows([node.get(part) for part in _PARTS], scope)
        items = [f'"{table}"."{column}"' for table, column in scope.keys]
        lists = [each for each in _expressions(node["select_list"]) if _is_unnest(each)]
        items += ["unnest(generate_series(1, len(list)))"] * len(lists)
        names = [f"{KEY}{place}" for place in range(len(items))]
        added = self.parse("SELECT " + ", ".join(map("{} AS {}".format, items, names)))["select_list"]
        for item, unnest in zip(added[len(scope.keys) :], lists, strict=True):
            arguments = unnest["arguments"]
            if len(arguments) != 1:
                raise self.text.error(
                    "unnest with several arguments has no order beside a join or UNION ALL",
                    _SPLIT,
                    position(unnest),
                )
            series = item["arguments"][0]["expression"]
            length = series["arguments"][1]["expression"]
            length["arguments"][0]["expression"] = copy.deepcopy(arguments[0]["expression"])
        node["select_list"] += added
        return names

    def _star(self, node: _Node, scope: _Scope) -> None:
        if node.get("columns"):
            if node.get("expr"):
                raise self.text.error(
                    "COLUMNS with a pattern is not possible beside a join or UNION ALL",
                    "name the columns.",
                    position(node),
                )
            return
        table = str(node.get("relation_name") or "").lower()
        added = [
            name for each, names in scope.hidden.items() if table in {"", each.lower()} for name in names
        ]
        node["exclude_list"] = [*(node.get("exclude_list") or ()), *added]

    def _refuse_whole_rows(self, parts: object, scope: _Scope) -> None:
        """Refuses the name of a table as a value, which would contain the keys, also in subqueries."""
        tables = {each.lower() for each in scope.hidden} - self.columns
        for each in _expressions(parts, subqueries=True):
            names = list(each.get("column_names") or [])
            if each["class"] == "COLUMN_REF" and len(names) == 1 and str(names[0]).lower() in tables:
                raise self.text.error(
                    f"{names[0]} means a whole row, which is not possible beside a join or UNION ALL",
                    "make a struct of its columns: {'a': a, 'b': b}.",
                    position(each),
                )

    # ------------------------------------------------------------------ tables

    def _from(self, parent: _Node, part: str, scope: _Scope) -> None:
        """Adds the keys of a table to the scope, those of the input first."""
        node = parent[part]
        of_input = self.of_input[id(node)]
        if node["type"] == "JOIN":
            sides = ["left", "right"]
            if not self.of_input[id(node["left"])] and self.of_input[id(node["right"])]:
                sides.reverse()
            if node["join_type"] in {"SEMI", "ANTI"}:  # the right side has no columns in the result
                sides = ["left"]
            for side in sides:
                self._from(node, side, scope)
        elif node["type"] == "BASE_TABLE" and (of_input or not self._is_cte(node)):
            name = str(node["table_name"])
            table = str(node.get("alias") or name)
            if not of_input:
                scope.keys.append((table, "rowid"))
                return
            keys = [f"{KEY}0"] if name.lower() == self.input.lower() else self._keys_of_cte[name.lower()]
            scope.keys += [(table, key) for key in keys]
            scope.hidden[table] = list(keys)
        elif of_input:
            self._refuse_lateral(node, node["subquery"]["node"])
            keys = self._query(node["subquery"]["node"])
            node["alias"] = table = str(node.get("alias") or self._new("from"))
            scope.keys += [(table, key) for key in keys]
            scope.hidden[table] = keys
        else:
            if node["type"] == "SUBQUERY":
                self._refuse_lateral(node, node["subquery"]["node"])
            table = str(node.get("alias") or node.get("table_name") or self._new("from"))
            number = self._new(_NUMBER)
            numbered = self.parse(
                f"SELECT 1 FROM (SELECT *, row_number() OVER () AS {number} FROM (SELECT 1) AS part) AS whole"
            )["from_table"]
            numbered["subquery"]["node"]["from_table"] = node
            numbered["alias"] = table
            parent[part] = numbered
            scope.keys.append((table, number))
            scope.hidden[table] = [number]

    def _is_cte(self, node: _Node) -> bool:
        return any(str(each["key"]).lower() == str(node["table_name"]).lower() for each in self._ctes)

    def _new(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix if prefix.startswith('__') else f'__kafka_eos_{prefix}_'}{self._count}"

    def _refuse_lateral(self, table: _Node, query: _Node) -> None:
        alone = copy.deepcopy(query)
        own = (alone.get("cte_map") or {}).get("map") or []
        alone["cte_map"] = {"map": [*copy.deepcopy(self._ctes), *own]}
        if not self.binds(alone):
            raise self.text.error(
                "a query in FROM refers to the tables before it",
                "write the condition behind ON, or use unnest(…) AS name in the select list.",
                position(table),
            )


def _expressions(found: object, *, subqueries: bool = False) -> Iterator[_Node]:
    """Yields all expressions in a part of a query, those in subqueries only if asked."""
    pending = [found]
    while pending:
        each = pending.pop(0)
        if isinstance(each, dict):
            if "class" in each:
                yield each
            pending[:0] = [value for key, value in each.items() if subqueries or key != "subquery"]
        elif isinstance(each, list):
            pending[:0] = each


def _is_unnest(node: _Node) -> bool:
    return node["class"] == "FUNCTION" and str(node["function_name"]).lower() in _UNNESTING


_UNNESTING = frozenset({"unnest", "unlist"})
