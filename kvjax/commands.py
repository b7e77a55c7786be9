"""What all commands share: how a run ends."""

from __future__ import annotations

import sys
from collections.abc import Callable


def finish(command: str, run: Callable[[], object]) -> int:
    """Run a command: a user's mistake is one sentence on standard error and exit code 2, an interruption is 130.

    Args:
        command: what stands after `kvjax`.
        run: does the work.
    """
    try:
        run()
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"kvjax {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
