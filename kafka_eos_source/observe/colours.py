"""Colours of the groups of steps and of the status, the same in the notebook and in the terminal.

They have medium lightness, so that they stand out from a white and from a black background.
"""

from __future__ import annotations

from collections.abc import Mapping

from kafka_eos_source.observe.figures import StepGroup
from kafka_eos_source.observe.view import Status

STEPS: Mapping[StepGroup, str] = {
    StepGroup.TASKS: "#5b8def",
    StepGroup.VERIFY: "#8d99a8",
    StepGroup.DECIDE: "#a878d8",
    StepGroup.WRITE: "#1fa9b5",
    StepGroup.COMMIT: "#35a45c",
    StepGroup.SINKS: "#dd9a24",
    StepGroup.RETRY: "#e0524f",
    StepGroup.TIDY: "#b6a48d",
}
STATUS: Mapping[Status, str] = {
    Status.RUNNING: "#35a45c",
    Status.IDLE: "#35a45c",
    Status.WAITING: "#dd9a24",
    Status.RETRYING: "#dd9a24",
    Status.FAILED: "#e0524f",
    Status.STOPPED: "#8d99a8",
    Status.ELSEWHERE: "#8d99a8",
}
