"""What all commands share: how a run ends, and where compiled programs are kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import jax


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


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache directory; `KVJAX_CACHE_DIR` names another, empty none."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    directory = os.environ.get("KVJAX_CACHE_DIR", str(Path(base) / "kvjax" / "xla"))
    if directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
