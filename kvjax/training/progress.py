"""Progress of a run for the user."""

from __future__ import annotations

import sys
import time


class Progress:
    """Progress as a bar on a terminal, and as lines of text elsewhere.

    Args:
        total: steps of the run.
        done: steps already done by an earlier run.
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
        """Show the number of steps done; without a terminal, print at most every 10 seconds unless `force`."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, description=text)
        elif force or time.monotonic() - self.spoken > 10:
            self.spoken = time.monotonic()
            print(f"{step}/{self.total} {text}", flush=True)

    def close(self) -> None:
        """Close the bar and release the terminal."""
        if self.bar is not None:
            self.bar.stop()
