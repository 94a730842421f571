"""The console: a live rich display on a terminal, plain lines without control characters anywhere else.

Draws only when it is told something (no refresh thread); decides nothing about what is worth saying.
"""

import time
from collections.abc import Mapping
from typing import TextIO

import rich.console
import rich.progress


class Progress:
    """The display of one run; `steps` is the length of the stage that is running."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._console = rich.console.Console(file=stream, highlight=False, markup=False, emoji=False) if stream.isatty() else None
        self._live: rich.progress.Progress | None = None
        self._task = None
        self._stage, self.steps = "", 0
        self._started, self._first = time.monotonic(), 0

    def start(self, stage: str, steps: int, done: int) -> None:
        """A new stage of `steps` steps of which `done` are done."""
        self.stop()
        self._stage, self.steps, self._started, self._first = stage, steps, time.monotonic(), done
        if self._console:
            columns = (rich.progress.TextColumn("{task.description}", markup=False), rich.progress.BarColumn(), rich.progress.MofNCompleteColumn())
            self._live = rich.progress.Progress(*columns, rich.progress.TimeElapsedColumn(), console=self._console, auto_refresh=False, transient=True)
            self._task = self._live.add_task(stage, total=steps, completed=done)
            self._live.start()

    def phase(self, name: str, numbers: Mapping[str, int | float]) -> None:
        """Shows what is being done; a terminal only, since a log wants no line a poll."""
        if self._live:
            words = [f"{key.replace('_', ' ')} {value:,.0f}" for key, value in numbers.items()]
            self._live.update(self._task, description=f"{self._stage}: {', '.join([name, *words])}", refresh=True)

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        if self._live:
            self._live.update(self._task, completed=step, refresh=True)

    def line(self, text: str) -> None:
        """Prints a line above the display."""
        if self._console:
            self._console.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def title(self, step: int) -> str:
        """The head of a step's line: stage and place in it."""
        return f"{self._stage} {step}/{self.steps}"

    def remaining(self, step: int) -> str:
        """The time left at the pace since the start of the stage (or its resume), as the tail of a line; "" before there is a pace."""
        done = step - self._first
        if done <= 0 or step >= self.steps:
            return ""
        seconds = (time.monotonic() - self._started) / done * (self.steps - step)
        unit, size = next((unit, size) for unit, size, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, float("inf"))) if seconds < limit)
        return f"  {seconds / size:.0f} {unit} left"

    def stop(self) -> None:
        """Takes the live display away; safe to call twice."""
        if self._live:
            self._live.stop()
            self._live = None
