"""Runs one JVM and ends it when whoever started us goes away, however that happens.

``python supervisor.py LOG REMOVE COMMAND…``: our standard input is a pipe that only the parent holds open.
It ends when the parent closes it, exits or is killed; then the JVM is ended too, in good order, and the
folder ``REMOVE``, unless that is empty, goes with it. SIGTERM ends the JVM and removes nothing. The first
line printed is the JVM's process id.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading

_GRACE_SECONDS = 10.0


def main() -> int:
    log, remove, *command = sys.argv[1:]
    with open(log, "ab") as out:
        jvm = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    ending = threading.Event()
    parent_left = threading.Event()

    def end(*_: object) -> None:
        if not ending.is_set():
            ending.set()
            threading.Thread(target=_end, args=(jvm, bool(remove))).start()

    def watch_parent() -> None:
        while os.read(0, 1024):
            pass
        parent_left.set()
        end()

    signal.signal(signal.SIGTERM, end)
    print(jvm.pid, flush=True)
    threading.Thread(target=watch_parent, daemon=True).start()
    code = jvm.wait()
    if remove and parent_left.is_set():
        shutil.rmtree(remove, ignore_errors=True)
    return code


def _end(jvm: subprocess.Popen[bytes], at_once: bool) -> None:
    """``at_once`` where nothing is kept: a broker among others that end too would wait for them."""
    if not at_once:
        jvm.send_signal(signal.SIGCONT)  # it may have been paused
        jvm.terminate()
        try:
            jvm.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            jvm.kill()
    else:
        jvm.kill()


if __name__ == "__main__":
    sys.exit(main())
