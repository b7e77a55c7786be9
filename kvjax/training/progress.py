"""How far a run is, for whoever watches it."""

from __future__ import annotations

import sys
import time


class Progress:
    """A bar on a terminal, a plain line every few seconds elsewhere.

    Args:
        total: steps of the run.
        done: steps that an earlier run took.
    """

    def __init__(self, total: int, done: int) -> None:
        self.bar = None
        self.total, self.spoken = total, 0.0
        if sys.stdout.isatty():
            from rich.progress import Progress as Bar

            self.bar = Bar()
            self.task = self.bar.add_task("", total=total, completed=done)
            self.bar.start()

    def show(self, step: int, text: str, force: bool = False) -> None:
        """Say that so many steps are done; on a plain file now if `force`, else when it is time."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=text)
        elif force or time.monotonic() - self.spoken > 10:
            self.spoken = time.monotonic()
            print(f"{step}/{self.total} {text}", flush=True)

    def close(self) -> None:
        """Give the terminal back."""
        if self.bar is not None:
            self.bar.stop()
