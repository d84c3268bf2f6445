"""The pages keep their promises as far as that can be checked without Spark, Kafka and a network.

`integration/test_docs.py` executes the code blocks that are marked with ``run``.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import pytest

from kafka_eos_source import sink_options
from kafka_eos_source.cli import main
from kafka_eos_source.options.table import BY_NAME
from kafka_eos_source.sinks import constructors
from tests.project.public_names import PUBLIC
from tests.support.doc_pages import PAGES, ROOT, SITE, Block, Link, anchors, blocks, links, marks, paths

KINDS = {"bash", "python", "dockerfile", "yaml", "ini", "properties", "json", "java", "scala", "sql"}
BLOCKS = [block for page in PAGES for block in blocks(page)]
CODE = [block for block in BLOCKS if block.is_code]
EXTERNAL = ("https://", "http://", "mailto:")
#: Options that pages show on other formats of Spark, next to ours.
FOREIGN = {"stateVarName", "kafka.isolation.level", "txnVersion", "txnAppId"}


def test_there_are_pages_and_blocks() -> None:
    assert len(PAGES) > 30
    assert len(CODE) > 50


@pytest.mark.parametrize("block", CODE, ids=str)
def test_each_code_block_is_executed_or_says_why_not(block: Block) -> None:
    fix = "write a mark on the line above it, as tests/support/doc_pages.py describes"
    assert block.language in KINDS, "no known language; output is 'text'"
    assert block.mark is not None, fix
    kind, detail = block.mark.kind, block.mark.detail
    if kind == "run":
        assert detail in ("", "long")
        assert block.language in ("bash", "python")
    elif kind == "tested":
        assert (ROOT / detail).is_file()
    else:
        assert len(detail.split()) >= 3, "the reason is a sentence or a phrase"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_mark_stands_above_a_block(page: Path) -> None:
    assert marks(page) == sum(block.mark is not None for block in blocks(page))


@pytest.mark.parametrize("block", [each for each in CODE if each.language == "python"], ids=str)
def test_python_is_valid_and_sets_options_that_exist(block: Block) -> None:
    unknown = [name for name in _options(ast.parse(block.code)) if not _exists(name)]
    assert not unknown


def _options(tree: ast.AST) -> Iterator[str]:
    """Yields the names of options that the code sets with ``.option`` and ``.options``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr == "option" and node.args and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)
        if node.func.attr == "options":
            for keyword in node.keywords:
                if keyword.arg is not None:
                    yield keyword.arg
                elif isinstance(keyword.value, ast.Dict):
                    yield from (str(key.value) for key in keyword.value.keys if isinstance(key, ast.Constant))


def _exists(name: str) -> bool:
    return name in FOREIGN or name.lower() in BY_NAME or name.lower().startswith(("kafka.", "sink."))


def _commands(block: Block) -> Iterator[list[str]]:
    """Yields the arguments of each call of ``kafka-eos`` in a block of shell commands."""
    variables: dict[str, str] = {}
    for line in block.code.replace("\\\n", " ").splitlines():
        if assigned := re.fullmatch(r'(\w+)="(.*)"', line):
            variables[assigned[1]] = assigned[2]
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        for part in re.split(r"&&|\|\||[|;&]|>", line.partition(" #")[0]):
            if part.split()[:1] == ["kafka-eos"]:
                yield shlex.split(part)[1:]


COMMANDS = [
    pytest.param(words, id=f"{block} {' '.join(words)}")
    for block in CODE
    if block.language == "bash"
    for words in _commands(block)
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that commands read while they parse their arguments."""
    monkeypatch.chdir(tmp_path)
    for name in ("client.properties", "sink.properties"):
        (tmp_path / name).touch()


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", COMMANDS)
def test_each_command_exists_with_its_options(words: list[str]) -> None:
    command: click.Command = main
    context = click.Context(main, info_name="kafka-eos")
    rest = words
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found
        context = click.Context(command, info_name=name, parent=context)
    command.parse_args(context, rest)  # raises UsageError


def test_a_command_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(click.UsageError):
        test_each_command_exists_with_its_options(["state", "lst"])
    with pytest.raises(click.UsageError):
        test_each_command_exists_with_its_options(["inspect", "--checkpiont", "x"])


@pytest.mark.parametrize("module", PUBLIC)
def test_the_python_api_shows_every_public_name(module: str) -> None:
    text = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    modules = re.findall(r"automodule:: ([\w.]+)", text)
    shown = [
        getattr(import_module(path), name)
        for path, name in re.findall(r"auto(?:function|class|data):: ([\w.]+)\.(\w+)", text)
    ]
    for name in PUBLIC[module]:
        public = getattr(import_module(module), name)
        assert isinstance(public, ModuleType) or module in modules or any(public is each for each in shown)


@pytest.mark.parametrize("page", [page for page in SITE if page.stem != "index"], ids=lambda page: page.stem)
def test_a_page_begins_with_its_readers(page: Path) -> None:
    """The first paragraph, or the second of a generated page, says for whom the page is."""
    assert "\n\nFor " in page.read_text(encoding="utf-8")[:300]


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    assert not [page.stem for page in SITE if page.stem not in (*index, "index")]


def test_external_links_are_encrypted() -> None:
    """Nothing else is checked of them, because tests have no network; CONTRIBUTING.md names the command."""
    external = [link for page in PAGES for link in links(page) if link.target.startswith(EXTERNAL)]
    assert len(external) > 5
    assert not [str(link) for link in external if link.target.startswith("http://")]


LINKS = [link for page in PAGES for link in links(page) if not link.target.startswith(EXTERNAL)]


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_each_link_leads_somewhere(link: Link) -> None:
    file, _, anchor = link.target.partition("#")
    target = (link.page.parent / file).resolve() if file else link.page
    assert target.is_relative_to(ROOT)
    assert target.exists(), "no such file"
    if anchor:
        assert target.suffix == ".md"
        assert anchor in anchors(target), "no such heading"


@pytest.mark.parametrize("link", [path for page in PAGES for path in paths(page)], ids=str)
def test_each_path_exists(link: Link) -> None:
    assert (ROOT / link.target).exists()


def test_the_check_of_links_finds_broken_ones(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`: c\n## A b c\n[x](page.md#a-b-c) `[y](no.md)` [z](no.md)\n```text\n[v](no.md)\n```\n"
    )
    assert [link.target for link in links(page)] == ["page.md#a-b-c", "no.md"]
    assert anchors(page) == {"a-b-c", "a-b-c-1"}


SINK_PAGES = sorted((ROOT / "docs").glob("sink*.md"))


@pytest.mark.parametrize("page", SINK_PAGES, ids=lambda page: page.name)
def test_a_page_of_sinks_shows_the_same_sinks_as_functions_and_as_options(page: Path) -> None:
    shown = [each.code for each in blocks(page) if each.language == "properties"]
    made = [options for each in blocks(page) if each.language == "python" for options in _sinks(each.code)]
    assert made, "a page shows how to make the sink"
    assert [_properties(each) for each in shown[:1]] == made[:1], "the page shows other options"


def _sinks(code: str) -> Iterator[dict[str, str]]:
    """Yields the options of each mapping of the name ``sinks`` that a block assigns."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "sinks":
            names = {**vars(constructors), "secret": "secret"}
            yield sink_options(eval(ast.unparse(node.value), names))


def _properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.strip().splitlines())
