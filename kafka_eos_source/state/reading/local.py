"""The stores that lie under a state directory: ``<state.dir>/<application.id>/<store>/<shard>/``.

`StoreIdentity.folder` is where they are put.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kafka_eos_source.errors import StateError


@dataclass(frozen=True, order=True)
class StoreFolder:
    """One shard's database.

    Attributes:
        application_id, store, shard: as its path says.
        path: of its folder.
    """

    application_id: str
    store: str
    shard: int
    path: Path

    def size_bytes(self) -> int:
        """Of its files at this moment."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:  # its owner compacts
                    continue
        return total


def folders(
    root: str | os.PathLike[str], application_id: str | None = None, store: str | None = None
) -> list[StoreFolder]:
    """The databases under ``root``, in order; those set aside, half made or half removed are none."""
    return sorted(_walk(Path(root), application_id, store))


def _walk(root: Path, application_id: str | None, store: str | None) -> Iterator[StoreFolder]:
    for application in _children(root, application_id):
        for each in _children(application, store):
            for shard in _children(each, None):
                if shard.name.isdecimal() and (shard / "db" / "CURRENT").exists():
                    yield StoreFolder(application.name, each.name, int(shard.name), shard)


def one_store(
    root: str | os.PathLike[str], application_id: str | None, store: str | None
) -> tuple[str, str, list[StoreFolder]]:
    """The one store that is meant; names may be left out where there is no choice.

    Returns: its ``application.id``, its name, its shards on this machine.

    Raises:
        StateError: there is none, or there are several.
    """
    found = folders(root, application_id, store)
    names = sorted({(each.application_id, each.store) for each in found})
    if len(names) == 1:
        return (*names[0], found)
    asked = f"application.id={application_id!r}, store={store!r}"
    if not names:
        raise StateError(
            f"no state of {asked} lies in {str(root)!r} on this machine.",
            fix="name the query's state.dir; or read its changelog: give kafka.bootstrap.servers instead.",
        )
    raise StateError(
        f"several stores lie in {str(root)!r}: {', '.join('/'.join(each) for each in names)}; {asked}.",
        fix="say which: application.id and storeName.",
    )


def _children(folder: Path, name: str | None) -> list[Path]:
    try:
        return [folder / name] if name is not None else [each for each in folder.iterdir() if each.is_dir()]
    except FileNotFoundError:
        return []
