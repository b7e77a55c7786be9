"""Progress bars on standard error."""

from __future__ import annotations

import math
import sys
import time


class Bar:
    """Progress on standard error: on a terminal a bar with the time left, otherwise only lines of text."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        shown = sys.stderr.isatty()
        # Otherwise what a command prints into a file would be shown above the bar instead.
        redirected = sys.stdout is not None and sys.stdout.isatty()
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, disable=not shown, transient=True, redirect_stdout=redirected)
        self._shown, self._total, self._done = shown, total, done
        self._task = self._bar.add_task(what, total=total, completed=done)
        self._began, self._made, self._said = time.monotonic(), 0, -math.inf

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, is_new: bool = True) -> None:
        """Count one more; `is_new` is False for a result that already existed."""
        self._done += 1
        self._made += is_new
        self._bar.advance(self._task)

    def update(self, done: int, text: str, force: bool = False) -> None:
        """Set the count and the text; without a terminal, print them at most every 10 seconds unless `force`."""
        self._made += done - self._done
        self._done = done
        self._bar.update(self._task, completed=done, description=text)
        if not self._shown and (force or time.monotonic() - self._said > 10):
            self._said = time.monotonic()
            self.say(text)

    def say(self, line: str) -> None:
        """Print a line above the bar; without a terminal, prefix it with the count and the time left."""
        if not self._shown:
            remaining = time_left(self._made, self._total - self._done, time.monotonic() - self._began)
            line = f"[{self._done}/{self._total}{remaining}] {line}"
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def time_left(done: int, remaining: int, seconds: float) -> str:
    """Return the end of a line of progress, after `done` pieces of work in so many seconds: the time for the rest."""
    if not done or not remaining:
        return ""
    seconds_left = remaining * seconds / done
    return f", {seconds_left:.0f} s left" if seconds_left < 100 else f", {seconds_left / 60:.0f} min left"
