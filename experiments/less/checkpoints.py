"""Trained LESS kernels by name, with their base policies, and fallbacks for other policies."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax import methods
from kvjax.methods.less import checkpoint
from kvjax.model import Model
from kvjax.policies.policy import Policy

LENT = {"lambda_mask": "streaming", "tova": "h2o"}
"""Fallback kernels for a base policy without its own: those of a policy that keeps similar tokens."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels of one checkpoint.

    Args:
        name: name in tables.
        settings: settings of their training.
        params: parameters of all layers.
        slots: budget of their training.
    """

    name: str
    settings: checkpoint.Settings
    params: Any
    slots: int

    @property
    def features(self) -> int:
        """Return R."""
        return self.settings.features

    @property
    def digest(self) -> str:
        """Return twelve hex digits of a hash of the arrays."""
        made = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            made.update(np.asarray(leaf).tobytes())
        return made.hexdigest()[:12]

    def over(self, base: Policy) -> Policy:
        """Return LESS with these kernels over a base policy, the one of their training or another."""
        return methods.policy("less", base=base, kernels=self.params)


@dataclasses.dataclass(frozen=True)
class Shelf:
    """All kernels of a report."""

    kernels: tuple[Kernels, ...]

    @property
    def features(self) -> int:
        """Return the R that tables compare: the one of most kernels, and 8 for a tie or without kernels."""
        counts = [kernels.features for kernels in self.kernels]
        return max({*counts} or {8}, key=lambda r: (counts.count(r), r == 8, -r))

    def of(self, base: str, features: int | None = None) -> list[Kernels]:
        """Return the kernels for a base policy, ordered by the budget of their training."""
        wanted = self.features if features is None else features
        found = [k for k in self.kernels if k.settings.policy == base and k.features == wanted]
        return sorted(found, key=lambda k: k.slots)

    def nearest(self, base: str, slots: int, features: int | None = None) -> Kernels | None:
        """Return the kernels with the nearest training budget in ratio, else those of a similar policy, else None."""
        found = self.of(base, features) or self.of(LENT.get(base, base), features)
        return min(found, key=lambda k: abs(np.log(k.slots / slots)), default=None)

    def base(self, name: str) -> Policy:
        """Return a base policy with the settings of its kernels' training."""
        found = [k.settings.policy_settings for k in self.kernels if k.settings.policy == name]
        settings: dict[str, Any] = found[0] if found else {}
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        return methods.policy(name, **settings)


def matches(kernels: Kernels, slots: int) -> bool:
    """Return True if kernels were trained at a budget, within a tenth."""
    return abs(kernels.slots - slots) <= 0.1 * slots


def open_shelf(model: Model, words: Sequence[str]) -> Shelf:
    """Load the kernels from the command line, or the shipped ones.

    Args:
        model: the model that they must fit.
        words: `NAME=DIR` or `DIR`; none for the shipped ones.

    Raises:
        ValueError: a directory holds no kernels, or they are for another model, or two have one name, or kernels of one
            policy were trained with different settings.
    """
    named = [_named(word) for word in words]
    if not words:
        named = [(path.name, path) for path in sorted(checkpoint.SHIPPED.glob("*")) if path.is_dir()]
    made: list[Kernels] = []
    for name, directory in named:
        settings = checkpoint.read_settings(directory)
        params, settings = checkpoint.load(directory, model, settings.policy)
        made.append(Kernels(name, settings, params, _slots(settings, model)))
        alike = [k for k in made if k.settings.policy == settings.policy]
        if len({k.name for k in made}) < len(made):
            raise ValueError(f"two checkpoints are called {name!r}; give names, as in a=DIR b=DIR.")
        if any(k.settings.policy_settings != settings.policy_settings for k in alike):
            raise ValueError(
                f"{directory} was trained with {settings.policy_settings} of {settings.policy}, other checkpoints with "
                f"{alike[0].settings.policy_settings}; evaluate them one after the other."
            )
    return Shelf(tuple(made))


def even_slots(share: float, context: int) -> int:
    """Return the slots for a share of the context, rounded down to an even number (LESS, Table 1)."""
    return 2 * int(share * context / 2 + 1e-9)


def _slots(settings: checkpoint.Settings, model: Model) -> int:
    budget = settings.budget
    return int(budget) if isinstance(budget, int) else even_slots(budget, model.config.max_positions)


def _named(word: str) -> tuple[str, Path]:
    name, equals, rest = word.partition("=")
    path = Path(rest if equals else word)
    return (name if equals else path.name), path
