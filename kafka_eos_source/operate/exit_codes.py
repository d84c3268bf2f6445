"""The exit codes of ``kafka-eos``, which docs/command-line.md documents."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command tells the program that called it.

    Attributes:
        meaning: one sentence for the documentation.
    """

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    DONE = 0, "The command did what it was asked, or showed what it would do."
    FAILED = 1, "The command failed. The message names the fix."
    USAGE = 2, "The command line is wrong: an unknown option, or a value that cannot be parsed."
    NEEDS_A_PERSON = 3, "A person has to act first: the command found an error that no restart heals."
    WARNING = 4, "Nothing prevents a query from running, but `doctor` found something to look at."


def table() -> str:
    """Returns the Markdown table of all exit codes."""
    rows = [f"| {code.value} | {code.meaning} |" for code in ExitCode]
    return "\n".join(["| exit code | meaning |", "|--:|---|", *rows])
