"""Data and measurements for all sections of LESS's report."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.less.checkpoints import Kernels, Shelf
from experiments.runs import Run, Runs
from kvjax import methods
from kvjax.evaluation.figures import save_figure


@dataclasses.dataclass
class Less:
    """The report's measurements, by their names in it.

    Args:
        runs: runs that measure.
        shelf: the kernels.
        sweep: kernels of different sizes with the same training.
        budgets: slots of the table, by their share of the context.
    """

    runs: Runs
    shelf: Shelf
    sweep: Shelf
    budgets: dict[str, int]

    def full(self) -> Run | None:
        """Run the full cache."""
        return self.runs.run("full", methods.policy("full"))

    def baseline(self, base: str, slots: int) -> Run | None:
        """Run a base policy alone."""
        return self.runs.run(base, self.shelf.base(base), slots)

    def plus(self, base: str, slots: int, features: int | None = None) -> Run | None:
        """Run a base policy with R/2 more slots: the same as `baseline_plus`, by the baseline's compiled program."""
        return self.baseline(base, slots + (self.shelf.features if features is None else features) // 2)

    def performer(self, base: str, slots: int) -> Run | None:
        """Run LESS with random features over a base policy."""
        policy = methods.policy("less", base=self.shelf.base(base), kernels="performer", features=self.shelf.features)
        return self.runs.run(f"{base} performer", policy, slots)

    def less(self, kernels: Kernels | None, base: str, slots: int) -> Run | None:
        """Run LESS with trained kernels over a base policy; return None without kernels."""
        if kernels is None:
            return None
        policy = kernels.over(self.shelf.base(base))
        return self.runs.run(f"less {kernels.name} on {base}", policy, slots, kernels=kernels.digest)

    def figure(self, name: str, figure: Any) -> str:
        """Save a figure; return the Markdown that shows it in the report."""
        file = self.runs.directory / "less" / f"{name}.png"
        save_figure(figure, file)
        return f"\n![{name}](less/{name}.png)\n"
