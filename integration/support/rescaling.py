"""Runs ``kafka-eos`` in processes that are killed at given steps, each of which continues after the last."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence

#: Forks a process for each step at which to be killed, so that the imports run only once.
_KILLED = """
import json, os, sys
from integration.chaos.switches import switch_off
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.cli import main
import kafka_eos_source.operate.rescale, kafka_eos_source.operate.shared
from kafka_eos_source.operate import rescale_copy
from kafka_eos_source.state.changelog import restore
steps, words, slice_records, mutations = json.loads(sys.argv[1])
if slice_records:
    restore.CHUNK_RECORDS = rescale_copy.SLICE_RECORDS = slice_records
switch_off(mutations)
for step in steps:
    pid = os.fork()
    if pid == 0:
        if step:
            os.environ[failpoints.ENVIRONMENT_VARIABLE] = step + "=kill-worker"
        main(words, standalone_mode=False)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    print("ended", step or "-", code, flush=True)
    if code == 0:
        break
"""


def killed_at(
    steps: Sequence[str],
    words: Sequence[str],
    *,
    slice_records: int | None = None,
    mutations: Sequence[str] = (),
) -> tuple[list[str], str]:
    """Runs a command once for each step, until it is not killed.

    Args:
        steps: failpoints; "" = run to the end.
        words: the command and its arguments.
        slice_records: size of a slice of a rescale.
        mutations: rules to switch off, see `integration.chaos.mutations`.

    Returns:
        The steps at which the command was killed, and all that it printed.
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            _KILLED,
            json.dumps([list(steps), list(words), slice_records, list(mutations)]),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ended ")]
    return [step for step, code in ends if int(code) == -signal.SIGKILL], done.stdout + done.stderr
