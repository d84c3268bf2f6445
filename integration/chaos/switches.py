"""Switches off rules of the product in a process of a test."""

from __future__ import annotations

from collections.abc import Iterable


def switch_off(names: Iterable[str]) -> None:
    """Switches off rules for the rest of this process.

    Args:
        names: rules of `mutations`, which imports half of the product and is imported only if there is any.
    """
    for name in names:
        from integration.chaos import mutations

        mutations.switch_off(name)
