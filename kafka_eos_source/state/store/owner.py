"""The file ``owner`` beside a database: who has it open, for messages. RocksDB has the real lock."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from kafka_eos_source.state.store.files import replace_text


def write_owner(path: Path) -> None:
    """Says in the folder of the database ``path`` that this process has it open."""
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since_ms": int(time.time() * 1000)}
    replace_text(path.parent / "owner", json.dumps(owner))


def remove_owner(path: Path) -> bool:
    """True if there was one: the last owner did not close the database."""
    try:
        (path.parent / "owner").unlink()
    except FileNotFoundError:
        return False
    return True


def owner_of(path: Path) -> str:
    try:
        owner = json.loads((path.parent / "owner").read_text())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"
