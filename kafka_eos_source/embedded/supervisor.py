"""Runs one JVM, and ends it when the parent process ends in any way.

``python supervisor.py LOG REMOVE COMMAND…``: standard input is a pipe that only the parent holds open. When
it closes, because the parent closed it, exited or was killed, the supervisor ends the JVM and deletes the
folder ``REMOVE`` (an empty ``REMOVE`` = no folder). On SIGTERM, it ends the JVM and deletes nothing. The
first line of the output is the process id of the JVM.
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
    """Runs the command of the command line; returns the exit code of the JVM."""
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
    """Ends the JVM.

    Args:
        jvm: the process.
        at_once: kill it, because its data is deleted anyway. In an orderly shutdown, a broker would wait for
            the other brokers, which end too.
    """
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
