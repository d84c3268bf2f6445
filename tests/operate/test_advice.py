"""Each fix text that tells a user to set an option or to run a command names one that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import kafka_eos_source
from kafka_eos_source.cli import main
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.options.table import OPTIONS

_PACKAGE = Path(kafka_eos_source.__file__).parent
#: Stands for a value that is filled in when the error is raised.
_FILLED_IN = "7"
_OPTION = re.compile(r"\.option\('([a-zA-Z.]+)', (?:'([^']*)'|…|7)\)")
_WORD = "[a-z]+(?:-[a-z]+)*"
_COMMAND = re.compile(
    rf"(?:`|\b(?:with|run) |: )kafka-eos ({_WORD}(?: {_WORD})*)((?: --{_WORD}(?: (?!-)[^ `;,)]+)?)*)"
)
#: Answers for one batch or one query: without its name they would act again.
_ANSWER = re.compile(
    r"(?:onMissingState=|')(changelog|new|assume_committed|assume_not_committed|overwrite)(?!:|\w)"
)
#: Names of variables that hold a fix.
_CONSTANT = re.compile(r"(?i)fix$|_start_over|_restart|if_gone|^_gone")
_NAMES = {option.name: option for option in OPTIONS}


def _text(node: ast.expr) -> Iterator[str]:
    """Yields the literal text of an expression, in which formatted values are replaced by a number."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(text for value in values for text in _text(value))
        case ast.FormattedValue():
            yield _FILLED_IN
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield "".join((*_text(left), *_text(right)))
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_text(body), *_text(orelse))


def _found() -> Iterator[tuple[str, str]]:
    """Yields where each fix text of the package is, and the text."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (isinstance(node, ast.keyword) and node.arg in ("fix", "if_gone")) or (
                isinstance(node, ast.Assign)
                and any(isinstance(each, ast.Name) and _CONSTANT.search(each.id) for each in node.targets)
            ):
                for text in _text(node.value):
                    yield f"{path.relative_to(_PACKAGE)}:{node.value.lineno}", text


@pytest.fixture(scope="module")
def advice() -> list[tuple[str, str]]:
    return list(_found())


def test_the_texts_are_found(advice: list[tuple[str, str]]) -> None:
    assert len(advice) > 500


def test_each_option_exists_and_accepts_the_value(advice: list[tuple[str, str]]) -> None:
    wrong = []
    for where, text in advice:
        for name, value in _OPTION.findall(text):
            option = _NAMES.get(name)
            if option is None:
                if not name.startswith(("kafka.", "sink.")):
                    wrong.append(f"{where}: no option {name!r}")
            elif value and "…" not in value and not value.startswith("assume_7"):
                try:
                    option.parse(name, value)
                except InvalidOptionError as error:
                    wrong.append(f"{where}: {error}")
    assert wrong == []


def test_answers_name_the_batch_for_which_they_are_given(advice: list[tuple[str, str]]) -> None:
    assert [where for where, text in advice if _ANSWER.search(text)] == []


def test_each_command_and_its_flags_exist(advice: list[tuple[str, str]]) -> None:
    wrong = []
    for where, text in advice:
        for words, flags in _COMMAND.findall(text):
            command: click.Command = main
            for word in words.split():
                if not isinstance(command, click.Group):
                    break
                found = command.commands.get(word)
                if found is None:
                    wrong.append(f"{where}: no command {word!r} in {words!r}")
                    break
                command = found
            if "--" in flags and "--yes" not in flags and any(each.name == "yes" for each in command.params):
                wrong.append(f"{where}: {words}{flags} changes nothing without --yes")
            known = {flag for each in command.params for flag in each.opts}
            wrong += [
                f"{where}: {words}{flag}" for flag in re.findall(r"--[a-z-]+", flags) if flag not in known
            ]
    assert wrong == []


@pytest.mark.parametrize(
    "text", ["onMissingState=changelog and", "onMissingState=new.", "'assume_committed'"]
)
def test_an_answer_without_a_batch_is_found(text: str) -> None:
    assert _ANSWER.search(text)
    assert not _ANSWER.search("onMissingState=changelog:7, or 'assume_not_committed:7'")
