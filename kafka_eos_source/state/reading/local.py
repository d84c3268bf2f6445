"""Finds the databases under a state directory: ``<state.dir>/<application.id>/<store>/<shard>/``.

`StoreIdentity.folder` defines this layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kafka_eos_source.errors import StateError


@dataclass(frozen=True, order=True)
class StoreFolder:
    """Folder of one shard's database.

    Attributes:
        application_id: the query's ``application.id``, from the path.
        store: name of the store, from the path.
        shard: number of the shard, from the path.
        path: path of the folder.
    """

    application_id: str
    store: str
    shard: int
    path: Path

    def size_bytes(self) -> int:
        """Returns the current size of the folder's files in bytes."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:  # a compaction of the owner deleted the file
                    continue
        return total


def folders(
    root: str | os.PathLike[str], application_id: str | None = None, store: str | None = None
) -> list[StoreFolder]:
    """Returns the databases under ``root`` in order of their path, without damaged and incomplete ones.

    Args:
        root: the state directory.
        application_id: return only the databases of this application; None = of all.
        store: return only the databases of this store; None = of all.
    """
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
    """Finds the only store under ``root`` with these names.

    Args:
        root: the state directory.
        application_id: the query's ``application.id``; None = any.
        store: name of the store; None = any.

    Returns:
        Its ``application.id``, its name, and the folders of its shards on this machine.

    Raises:
        StateError: if no store or several stores match.
    """
    matches = folders(root, application_id, store)
    names = sorted({(each.application_id, each.store) for each in matches})
    if len(names) == 1:
        return (*names[0], matches)
    requested = f"application.id={application_id!r}, store={store!r}"
    if not names:
        raise StateError(
            f"there is no state of {requested} in {str(root)!r} on this machine.",
            fix="correct state.dir; or set kafka.bootstrap.servers instead, to read the changelog.",
        )
    raise StateError(
        f"there are several stores in {str(root)!r}: {', '.join('/'.join(each) for each in names)}; "
        f"expected one that matches {requested}.",
        fix="set application.id and storeName.",
    )


def _children(folder: Path, name: str | None) -> list[Path]:
    try:
        return [folder / name] if name is not None else [each for each in folder.iterdir() if each.is_dir()]
    except FileNotFoundError:
        return []
