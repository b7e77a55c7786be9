"""Trained LESS kernels by name, with the base policies that they were trained for or may be lent to."""

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
"""Whose kernels serve a base policy that has none of its own: those of one that keeps similar tokens."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels of one checkpoint.

    Args:
        name: in tables.
        settings: what they were made for.
        params: of all layers.
        slots: budget that they were trained at.
    """

    name: str
    settings: checkpoint.Settings
    params: Any
    slots: int

    @property
    def features(self) -> int:
        """R."""
        return self.settings.features

    @property
    def digest(self) -> str:
        """Twelve hex digits of the arrays."""
        made = hashlib.sha256()
        for leaf in jax.tree.leaves(self.params):
            made.update(np.asarray(leaf).tobytes())
        return made.hexdigest()[:12]

    def over(self, base: Policy) -> Policy:
        """LESS with these kernels over a base policy, be it the one that they were trained for or not."""
        return methods.policy("less", base=base, kernels=self.params)


@dataclasses.dataclass(frozen=True)
class Shelf:
    """All kernels of a report."""

    kernels: tuple[Kernels, ...]

    @property
    def features(self) -> int:
        """The R that tables compare: the one that most kernels have, 8 of equals or of none."""
        counts = [kernels.features for kernels in self.kernels]
        return max({*counts} or {8}, key=lambda r: (counts.count(r), r == 8, -r))

    def of(self, base: str, features: int | None = None) -> list[Kernels]:
        """Kernels trained for a base policy, by the budget they were trained at."""
        wanted = self.features if features is None else features
        found = [k for k in self.kernels if k.settings.policy == base and k.features == wanted]
        return sorted(found, key=lambda k: k.slots)

    def nearest(self, base: str, slots: int, features: int | None = None) -> Kernels | None:
        """Those trained at the budget that is nearest in ratio; of a similar policy if a policy has none; or None."""
        found = self.of(base, features) or self.of(LENT.get(base, base), features)
        return min(found, key=lambda k: abs(np.log(k.slots / slots)), default=None)

    def base(self, name: str) -> Policy:
        """A base policy with the settings that its kernels were trained with."""
        found = [k.settings.policy_settings for k in self.kernels if k.settings.policy == name]
        settings: dict[str, Any] = found[0] if found else {}
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        return methods.policy(name, **settings)


def matches(kernels: Kernels, slots: int) -> bool:
    """Whether kernels were trained at a budget, give or take a tenth."""
    return abs(kernels.slots - slots) <= 0.1 * slots


def open_shelf(model: Model, words: Sequence[str]) -> Shelf:
    """Kernels from the command line, or those that are shipped.

    Args:
        model: that they must be made for.
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
    """Slots of a share of the context, rounded down to an even number (LESS, Table 1)."""
    return 2 * int(share * context / 2 + 1e-9)


def _slots(settings: checkpoint.Settings, model: Model) -> int:
    budget = settings.budget
    return int(budget) if isinstance(budget, int) else even_slots(budget, model.config.max_positions)


def _named(word: str) -> tuple[str, Path]:
    name, equals, rest = word.partition("=")
    path = Path(rest if equals else word)
    return (name if equals else path.name), path
