"""Runs one JVM and ends it when whoever started us goes away, however that happens.

``python supervisor.py LOG COMMAND…``: our standard input is a pipe that only the parent holds open. It
ends when the parent closes it, exits or is killed; then the JVM is ended too. SIGTERM does the same.
The first line printed is the JVM's process id.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

_GRACE_SECONDS = 10.0


def main() -> int:
    log, *command = sys.argv[1:]
    with open(log, "ab") as out:
        # a session of its own: Ctrl-C in the terminal reaches the parent, which ends us in good order
        jvm = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    print(jvm.pid, flush=True)
    ended = threading.Event()

    def end(*_: object) -> None:
        if not ended.is_set():
            ended.set()
            threading.Thread(target=_end, args=(jvm,)).start()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch_parent() -> None:
        while os.read(0, 1024):
            pass
        end()

    threading.Thread(target=watch_parent, daemon=True).start()
    return jvm.wait()


def _end(jvm: subprocess.Popen[bytes]) -> None:
    jvm.terminate()
    try:
        jvm.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        jvm.kill()


if __name__ == "__main__":
    sys.exit(main())
