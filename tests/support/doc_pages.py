"""Finds the code blocks, links and paths in the repository's Markdown pages.

Each code block has a mark, an HTML comment on the line above it, which readers do not see::

    <!-- run -->                                     integration/test_docs.py executes it
    <!-- run: long -->                               the same, with ./dev soak
    <!-- tested: integration/test_quick_start.py --> another test executes it
    <!-- not run: needs a Kubernetes cluster -->     nothing executes it, for this reason

Blocks in `OUTPUT` languages are no code, and blocks with a language in braces are Sphinx directives.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

_DOCS = sorted((ROOT / "docs").glob("*.md"))
_INCLUDED = re.compile(r"^```\{include\} ([\w.-]+)$", re.MULTILINE)
_PARTS = {name for page in _DOCS for name in _INCLUDED.findall(page.read_text(encoding="utf-8"))}
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")), *_DOCS]
#: Pages of the site, without the parts that another page includes.
SITE = [page for page in _DOCS if page.name not in _PARTS]
#: Languages of blocks that show output, a layout of files, or a diagram.
OUTPUT = frozenset({"console", "mermaid", "text"})

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+|:::+)(?P<language>[^`]*)$")
_MARK = re.compile(r"^ *<!-- (?P<kind>run|tested|not run)(?:: (?P<detail>.+?))? -->$")
_COMMENT = re.compile(r"^ *<!--.*-->$")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]+)\)")
_CODE_SPAN = re.compile(r"(?P<ticks>`+)(?P<text>.+?)(?P=ticks)")
_HEADING = re.compile(r"^(?P<level>#{1,6}) (?P<text>.+)$")
#: Folders that do not exist before a command creates them.
_CREATED = ("benchmarks/results",)
_PATH = re.compile(
    r"(?:benchmarks|docs|examples|integration|kafka_eos_source|newsfragments|notebooks|tests|tools)/[\w./-]*"
)


@dataclass(frozen=True)
class Mark:
    """What happens with a code block.

    Attributes:
        kind: ``run``, ``tested`` or ``not run``.
        detail: ``long`` or empty; the path of the test; the reason.
    """

    kind: str
    detail: str


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        line: number of the line with the opening fence, from 1.
        language: text after the opening fence.
        mark: the mark above it, if there is one.
    """

    page: Path
    line: int
    language: str
    code: str
    mark: Mark | None

    @property
    def is_code(self) -> bool:
        return self.language not in OUTPUT and not self.language.startswith("{")

    @property
    def runs(self) -> bool:
        """Whether `integration/test_docs.py` executes it."""
        return self.mark is not None and self.mark.kind == "run"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Link:
    """A link in a page, by line number."""

    page: Path
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.target}"


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page, in order."""
    return list(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        found = _FENCE.match(lines[number])
        if found is None:
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != found["fence"]:
            end += 1  # an unclosed fence is an IndexError
        code = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
        mark = _MARK.match(lines[number - 1]) if number else None
        yield Block(
            page,
            number + 1,
            found["language"].strip(),
            code,
            Mark(mark["kind"], mark["detail"] or "") if mark else None,
        )
        number = end + 1


def marks(page: Path) -> int:
    """Returns how many marks a page has, wherever they stand."""
    return sum(1 for line in page.read_text(encoding="utf-8").splitlines() if _MARK.match(line))


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yields number and text of the lines that are in no fenced block and are no comment."""
    fence = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        found = _FENCE.match(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif found is not None:
            fence = found["fence"]
        elif not _COMMENT.match(line):
            yield number, line


def links(page: Path) -> list[Link]:
    """Returns the links of a page."""
    return [
        Link(page, number, found["target"])
        for number, line in prose(page)
        for found in _LINK.finditer(_CODE_SPAN.sub(lambda code: "x" * len(code[0]), line))
    ]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and MyST form them."""
    found: set[str] = set()
    for _, line in prose(page):
        heading = _HEADING.match(line)
        if heading is None:
            continue
        text = re.sub(r"[^\w\- ]", "", heading["text"].replace("`", "").lower()).replace(" ", "-")
        name, count = text, 0
        while name in found:
            count += 1
            name = f"{text}-{count}"
        found.add(name)
    return found


def paths(page: Path) -> list[Link]:
    """Returns the paths of files and folders of this repository that a page names as code."""
    return [
        Link(page, number, named[0].rstrip("."))
        for number, line in prose(page)
        for code in _CODE_SPAN.finditer(line)
        if (named := _PATH.match(code["text"])) and not re.search(r"[<>*…]", code["text"])
        if not named[0].startswith(_CREATED)
    ]
