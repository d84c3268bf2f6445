"""A double of a column of a classic session: the nodes that Spark has in the JVM, without a JVM.

`classic` builds it from the column of Spark Connect for the same expression, so a test states each expression
once. The nodes have the methods that py4j offers on those of Spark; integration tests read real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kafka_eos_source.state.operator.column_tree import name_parts


class _Seq:
    """A Scala sequence."""

    def __init__(self, elements: Sequence[Any]) -> None:
        self._elements = elements

    def size(self) -> int:
        return len(self._elements)

    def apply(self, index: int) -> Any:
        return self._elements[index]


class _Option:
    """A Scala option."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def isDefined(self) -> bool:  # noqa: N802
        return self._value is not None

    def get(self) -> Any:
        assert self._value is not None
        return self._value


def node(kind: str, **methods: Any) -> Any:
    """Returns a node of a class, whose methods return these values."""
    simple = SimpleNamespace(getSimpleName=lambda: kind)
    calls = {name: (lambda value=value: value) for name, value in methods.items()}
    return SimpleNamespace(getClass=lambda: simple, **calls)


def classic(column: Any) -> Any:
    """Returns the classic double of a column of Spark Connect."""
    return SimpleNamespace(_jc=node("Column", node=_node(column._expr)))


def of_frame(name: str) -> Any:
    """Returns the double of ``df[name]``, which a classic session resolves at once."""
    attribute = node("AttributeReference", name=name)
    return SimpleNamespace(_jc=node("Column", node=node("ExpressionColumnNode", expression=attribute)))


def _node(expression: Any) -> Any:
    children = [_node(each) for each in expression.children]
    match type(expression).__name__:
        case "UnresolvedFunction" | "CallFunction" as kind:
            return node(
                "UnresolvedFunction",
                functionName=expression._name,
                arguments=_Seq([_node(each) for each in expression._args]),
                isDistinct=getattr(expression, "_is_distinct", False),
                isUserDefinedFunction=kind == "CallFunction",
            )
        case "ColumnReference":
            parts = _Seq(name_parts(expression._unparsed_identifier))
            return node("UnresolvedAttribute", nameParts=parts, planId=_Option(expression._plan_id))
        case "LiteralExpression":
            return node("Literal", value=expression._value)
        case "UnresolvedStar":
            target, plan = _Option(expression._unparsed_target), _Option(expression._plan_id)
            return node("UnresolvedStar", unparsedTarget=target, planId=plan)
        case "ColumnAlias":
            names, metadata = _Seq(expression._alias), _Option(expression._metadata)
            return node("Alias", name=names, metadata=metadata, child=children[0])
        case "SQLExpression":
            return node("SqlExpression", expression=expression._expr)
        case "WindowExpression":
            return node("Window", windowFunction=_node(expression._windowFunction))
        case kind:
            return node(kind.removesuffix("Expression"), children=_Seq(children))
