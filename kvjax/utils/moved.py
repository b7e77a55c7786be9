"""Old names of modules that have moved; they keep working with a warning for one minor release."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

MOVED: Mapping[str, str] = {
    **{f"kvjax.{name}": f"kvjax.cli.{name}" for name in ("bench", "chat", "convert", "env", "train_less", "tune")},
    **{f"kvjax.engine{name}": f"kvjax.inference{name}" for name in ("", ".decode", ".extend", ".state")},
    "kvjax.asks": "kvjax.policies.stats",
    "kvjax.cache.codec": "kvjax.policies.codec",
    "kvjax.compilation": "kvjax.utils.compilation",
    "kvjax.evaluate": "kvjax.evaluation",
    "kvjax.pictures": "kvjax.evaluation",
    "kvjax.policies.plan": "kvjax.policies.allocation",
    "kvjax.policies.selection": "kvjax.policies.residual",
    "kvjax.sampling": "kvjax.generation",
    "kvjax.sampling.conversation": "kvjax.generation.chat",
    "kvjax.sampling.texts": "kvjax.generation.generate",
    "kvjax.serve": "kvjax.serving",
    "kvjax.serve.command": "kvjax.cli.serve",
    "kvjax.serve.engine": "kvjax.serving.engine",
}
"""Old names of modules that users import or run, and their new ones."""

RENAMED_STATS: Mapping[str, str] = {
    "Again": "ReplayedQueries",
    "Near": "LocalAttention",
    "Probs": "AttentionProbs",
    "Sums": "AttentionSum",
}
"""Old names of requests for attention statistics, and their new ones."""

COMMANDS: Mapping[str, str] = {"kvjax.evaluate": "kvjax.cli.evaluate", "kvjax.serve": "kvjax.cli.serve"}
"""Modules that `python -m` runs for old names whose command is in another module."""


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Importer of modules by their old names; `python -m` with an old name runs its command."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        # `python -m` puts the origin at the head of sys.argv, where jax reads strings.
        new_name = MOVED.get(fullname)
        return None if new_name is None else importlib.util.spec_from_loader(fullname, self, origin=new_name)

    def exec_module(self, module: ModuleType) -> None:
        """Import the moved module under its old name."""
        old = module.__name__
        warnings.warn(f"{old} has moved to {MOVED[old]}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(MOVED[old])

    def get_source(self, fullname: str) -> str:
        """Return the source that `python -m` runs."""
        command = COMMANDS.get(fullname, MOVED[fullname])
        return f"from {command} import main\nraise SystemExit(main())\n"


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, by which old names of its classes keep working with a warning."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {module}.{names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), names[name])

    return get


def keep_old_names() -> None:
    """Make old names of modules importable."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
