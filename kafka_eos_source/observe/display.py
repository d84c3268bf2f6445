"""Shows something that changes: in the output of a notebook's cell, or on the screen of a terminal."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live

#: The width of a frame in the text that stands in for HTML.
_TEXT_WIDTH = 100

Frame = TypeVar("Frame")


class Watch(Generic[Frame]):
    """The output of a cell that refreshes itself until what it shows ends.

    Args:
        look: returns the present frame, and whether what it shows still runs.
        show: replaces the output.
        interval_seconds: time between two refreshes.
        end: called once after the last refresh.
    """

    def __init__(
        self,
        look: Callable[[], tuple[Frame, bool]],
        show: Callable[[Frame], None],
        interval_seconds: float,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._look = look
        self._show = show
        self._interval_seconds = interval_seconds
        self._end = end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="kafka-eos-watch", daemon=True)

    def start(self) -> None:
        """Starts the thread that refreshes the output."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the refreshing; the output keeps its last frame. What it shows goes on."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _ipython_display_(self) -> None:
        """Shows nothing more when the object is the last expression of a cell."""

    def _refresh(self) -> None:
        try:
            while not self._stopped.wait(self._interval_seconds):
                try:
                    found, runs = self._look()
                    self._show(found)
                except Exception:  # noqa: BLE001 - the session has ended, and with it what is shown
                    return
                if not runs:
                    return
        finally:
            self._end()


def notebook_display() -> Callable[..., Any] | None:
    """Returns IPython's ``display`` if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

    return partial(display)


def bundle(html: str, shown: RenderableType) -> dict[str, str]:
    """Returns a frame as HTML, and as text for frontends that do not show HTML."""
    text = io.StringIO()
    # rich would print to the cell's output by itself
    console = Console(width=_TEXT_WIDTH, color_system=None, file=text, force_jupyter=False)
    console.print(shown)
    return {"text/html": html, "text/plain": text.getvalue()}


def show_in_terminal(
    look: Callable[[], tuple[Frame, bool]],
    first: Frame,
    runs: bool,
    draw: Callable[[Frame, int | None], RenderableType],
    interval_seconds: float,
) -> None:
    """Shows a screen until what it shows ends or Ctrl-C is pressed, then prints the last frame.

    Without a terminal, it prints the first frame only.

    Args:
        look: returns the present frame, and whether what it shows still runs.
        first: the first frame.
        runs: whether what it shows ran then.
        draw: returns a frame for a terminal with this number of lines; None = no limit.
        interval_seconds: time between two refreshes.
    """
    console = Console(markup=False, highlight=False)
    found = first
    if console.is_terminal:
        pause = threading.Event()
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while runs:
                    live.update(draw(found, console.height), refresh=True)
                    pause.wait(interval_seconds)
                    found, runs = look()
        except KeyboardInterrupt:
            found, _ = look()
    console.print(draw(found, None))
