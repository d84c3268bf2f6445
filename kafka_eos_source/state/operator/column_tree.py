"""Reads the expression tree of a Spark ``Column``, and the text form of an aggregate, as one kind of tree.

The text of a column does not show everything: ``str(F.sum_distinct("x"))`` is ``sum(x)``. A classic column
has its tree in the JVM (``org.apache.spark.sql.internal.ColumnNode``), a column of Spark Connect in Python
(``pyspark.sql.connect.expressions``). Both have the same nodes under similar names. Spark documents neither;
``integration/test_state_forms.py`` and the tests of the oldest PySpark read real ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kafka_eos_source.errors import InvalidSchemaError

# ------------------------------------------------------------------ the tree


@dataclass(frozen=True)
class Node:
    """A node of an expression.

    Attributes:
        source: the node of Spark that this one stands for; None if it was read from text.
    """

    source: Any = field(compare=False, repr=False)


@dataclass(frozen=True)
class Name(Node):
    """A column by its name.

    Attributes:
        parts: the name; several parts name a field of a struct, or begin with the alias of a frame.
        of_frame: whether it was taken from a frame, as in ``df["x"]``, so that only Spark knows which it is.
    """

    parts: tuple[str, ...]
    of_frame: bool = False

    def __str__(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True)
class Constant(Node):
    """A literal value."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Star(Node):
    """All columns.

    Attributes:
        target: what the columns belong to, as in ``t.*`` or ``df["*"]``; None for ``*``.
    """

    target: str | None = None

    def __str__(self) -> str:
        return self.target or "*"


@dataclass(frozen=True)
class Call(Node):
    """A call of a function or operator.

    Attributes:
        name: name of the function, in lower case.
        arguments: the arguments.
        distinct: whether it is called with ``DISTINCT``.
        by_name: whether Spark looks the name up among the user's functions, too (``F.call_function``).
    """

    name: str
    arguments: tuple[Node, ...]
    distinct: bool = False
    by_name: bool = False

    def __str__(self) -> str:
        if not self.name[:1].isalpha() and len(self.arguments) == 2:
            return f"{self.arguments[0]} {self.name} {self.arguments[1]}"
        distinct = "DISTINCT " if self.distinct else ""
        return f"{self.name}({distinct}{', '.join(map(str, self.arguments))})"


@dataclass(frozen=True)
class Alias(Node):
    """An expression under a name.

    Attributes:
        child: the expression.
        names: the name; Spark allows several for functions that return several columns.
        has_metadata: whether the alias attaches metadata to the column.
    """

    child: Node
    names: tuple[str, ...]
    has_metadata: bool = False

    def __str__(self) -> str:
        return f"{self.child} AS {', '.join(self.names)}"


@dataclass(frozen=True)
class Sql(Node):
    """The text of ``F.expr``, which Spark parses only when it analyses the query."""

    text: str

    def __str__(self) -> str:
        return f"expr({self.text!r})"


@dataclass(frozen=True)
class Over(Node):
    """A window function: ``….over(…)``."""

    child: Node

    def __str__(self) -> str:
        return f"{self.child} OVER (…)"


@dataclass(frozen=True)
class Other(Node):
    """Any other expression.

    Attributes:
        kind: Spark's name of it, such as ``Cast``.
        children: its operands.
    """

    kind: str
    children: tuple[Node, ...]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(map(str, self.children))})"


def nodes(node: Node) -> Iterator[Node]:
    """Yields all nodes of a tree, the outermost first."""
    yield node
    match node:
        case Call():
            below = node.arguments
        case Alias() | Over():
            below = (node.child,)
        case Other():
            below = node.children
        case _:
            return
    for each in below:
        yield from nodes(each)


def calls(node: Node) -> Iterator[Call]:
    """Yields all calls in a tree, the outermost first."""
    return (each for each in nodes(node) if isinstance(each, Call))


# ------------------------------------------------------------------ columns

#: Target of a star that was taken from a frame: ``df["*"]``.
_STAR_OF_FRAME = "df['*']"


def tree(column: Any) -> Node:
    """Returns the expression tree of a ``Column`` of a classic session or of Spark Connect."""
    own = vars(column)  # a classic column takes each attribute that it lacks for a field of a struct
    return _connect(own["_expr"]) if "_expr" in own else _classic(own["_jc"].node())


def as_column(node: Any) -> Any:
    """Returns the ``Column`` of a node that `tree` read, by the attribute ``source``."""
    if hasattr(node, "getClass"):
        from pyspark import SparkContext
        from pyspark.sql.classic.column import Column as ClassicColumn

        context: Any = SparkContext._active_spark_context
        return ClassicColumn(context._jvm.org.apache.spark.sql.Column(node))
    from pyspark.sql.connect.column import Column

    return Column(node)


def _classic(node: Any) -> Node:
    kind = str(node.getClass().getSimpleName())
    match kind:
        case "UnresolvedFunction":
            return Call(
                node,
                str(node.functionName()).lower(),
                tuple(map(_classic, _each(node.arguments()))),
                bool(node.isDistinct()),
                bool(node.isUserDefinedFunction()),
            )
        case "UnresolvedAttribute":
            return Name(node, tuple(map(str, _each(node.nameParts()))), bool(node.planId().isDefined()))
        case "ExpressionColumnNode":
            expression = node.expression()
            if expression.getClass().getSimpleName() == "AttributeReference":
                return Name(node, (str(expression.name()),), of_frame=True)
            return Other(node, str(expression.getClass().getSimpleName()), ())
        case "Literal":
            return Constant(node, node.value())
        case "UnresolvedStar":
            target = node.unparsedTarget()
            if target.isDefined():
                return Star(node, str(target.get()))
            return Star(node, _STAR_OF_FRAME if node.planId().isDefined() else None)
        case "Alias":
            names = tuple(map(str, _each(node.name())))
            return Alias(node, _classic(node.child()), names, bool(node.metadata().isDefined()))
        case "SqlExpression":
            return Sql(node, str(node.expression()))
        case "Window":
            return Over(node, _classic(node.windowFunction()))
    return Other(node, kind, tuple(map(_classic, _each(node.children()))))


def _connect(node: Any) -> Node:
    kind = type(node).__name__
    match kind:
        case "UnresolvedFunction":
            return Call(node, node._name.lower(), tuple(map(_connect, node._args)), bool(node._is_distinct))
        case "CallFunction":
            return Call(node, node._name.lower(), tuple(map(_connect, node._args)), by_name=True)
        case "ColumnReference":
            return Name(node, name_parts(node._unparsed_identifier), node._plan_id is not None)
        case "LiteralExpression":
            return Constant(node, node._value)
        case "UnresolvedStar":
            of_frame = None if node._plan_id is None else _STAR_OF_FRAME
            return Star(node, node._unparsed_target or of_frame)
        case "ColumnAlias":
            return Alias(node, _connect(node._child), tuple(node._alias), bool(node._metadata))
        case "SQLExpression":
            return Sql(node, node._expr)
        case "WindowExpression":
            return Over(node, _connect(node._windowFunction))
    return Other(node, kind.removesuffix("Expression"), tuple(map(_connect, node.children)))


def _each(sequence: Any) -> Iterator[Any]:
    """Yields the elements of a Scala sequence."""
    return (sequence.apply(index) for index in range(sequence.size()))


def name_parts(identifier: str) -> tuple[str, ...]:
    """Splits the name of a column at its dots, as Spark does: a part in backquotes may contain dots."""
    parts, position = [], 0
    while True:
        found = _PART.match(identifier, position)
        if found is None:
            return (identifier,)  # Spark refuses it, and names it
        quoted, plain = found.groups()
        parts.append(plain if quoted is None else quoted.replace("``", "`"))
        position = found.end()
        if position == len(identifier):
            return tuple(parts)
        position += 1  # the dot


_PART = re.compile(r"(?:`((?:[^`]|``)+)`|([^.`]+))(?=\.|$)")


# ------------------------------------------------------------------ text

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"|(?P<name>(?:`(?:[^`]|``)+`|[^\W\d]\w*)(?:\.(?:`(?:[^`]|``)+`|\w+))*)"
    r"|(?P<mark>[(),*]))"
)


def parse(text: str) -> Node:
    """Returns the tree of an aggregate as text: ``"count(*)"``, ``"sum(amount)"``.

    The arguments are names of columns, numbers, ``true`` and ``false``. Other expressions are left to Spark's
    functions.

    Raises:
        InvalidSchemaError: if the text has another form.
    """
    tokens: list[tuple[str, str]] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        found = _TOKEN.match(text, position)
        if found is None:
            raise _malformed(text)
        tokens.append((str(found.lastgroup), found[str(found.lastgroup)]))
        position = found.end()
    parser = _Parser(text, tokens)
    node = parser.expression()
    if parser.kind is not None:
        raise _malformed(text)
    return node


class _Parser:
    """Parses the tokens of one text by recursive descent."""

    def __init__(self, text: str, tokens: list[tuple[str, str]]) -> None:
        self._text = text
        self._tokens = tokens
        self._next = 0

    @property
    def kind(self) -> str | None:
        """Kind of the next token: number, name, or the mark itself; None at the end."""
        if self._next == len(self._tokens):
            return None
        kind, token = self._tokens[self._next]
        return token if kind == "mark" else kind

    def _take(self, kind: str) -> str:
        if self.kind != kind:
            raise _malformed(self._text)
        self._next += 1
        return self._tokens[self._next - 1][1]

    def expression(self) -> Node:
        """Parses one argument, or the whole text."""
        if self.kind == "*":
            self._take("*")
            return Star(None)
        if self.kind == "number":
            number = self._take("number")
            return Constant(None, int(number) if number.lstrip("+-").isdigit() else float(number))
        name = self._take("name")
        if self.kind != "(":
            constants = {"true": True, "false": False, "null": None}
            if name.lower() in constants:
                return Constant(None, constants[name.lower()])
            return Name(None, name_parts(name))
        self._take("(")
        distinct = self._takes_distinct()
        arguments: list[Node] = []
        while self.kind != ")":
            if arguments:
                self._take(",")
            arguments.append(self.expression())
        self._take(")")
        return Call(None, name.lower(), tuple(arguments), distinct)

    def _takes_distinct(self) -> bool:
        """Passes the word DISTINCT, unless it is the name of a column."""
        following = self._tokens[self._next : self._next + 2]
        if len(following) < 2 or following[0][1].lower() != "distinct" or following[1][1] in ",)(":
            return False
        self._next += 1
        return True


def _malformed(text: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"the aggregate {text!r} is not of the form function(column), such as 'count(*)', 'sum(amount)' or "
        "'max_by(status, updated)'.",
        fix="write an expression with Spark's functions: F.sum(F.col('amount') * 2).",
    )
