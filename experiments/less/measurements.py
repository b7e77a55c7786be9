"""What the sections of LESS's report share."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.less.checkpoints import Kernels, Shelf
from kvjax import methods
from kvjax.evaluation.claims import Claim
from kvjax.evaluation.figures import save_figure
from kvjax.evaluation.runs import Run, Runs


@dataclasses.dataclass(frozen=True)
class Section:
    """One piece of the report.

    Args:
        title: its heading.
        claims: what should show.
        body: tables and figures, Markdown.
    """

    title: str
    claims: list[Claim]
    body: str


@dataclasses.dataclass
class Less:
    """The report's measurements by what they are called in it.

    Args:
        runs: that make them.
        shelf: the kernels.
        sweep: kernels of different sizes that were trained alike.
        budgets: slots of the table, by their share of the context.
    """

    runs: Runs
    shelf: Shelf
    sweep: Shelf
    budgets: dict[str, int]

    def full(self) -> Run | None:
        """With everything in the cache."""
        return self.runs.run("full", methods.policy("full"))

    def baseline(self, base: str, slots: int) -> Run | None:
        """A base policy alone."""
        return self.runs.run(base, self.shelf.base(base), slots)

    def plus(self, base: str, slots: int, features: int | None = None) -> Run | None:
        """A base policy with R/2 more slots: what `baseline_plus` is, by the baseline's compiled program."""
        return self.baseline(base, slots + (self.shelf.features if features is None else features) // 2)

    def performer(self, base: str, slots: int) -> Run | None:
        """LESS with random features over a base policy."""
        policy = methods.policy("less", base=self.shelf.base(base), kernels="performer", features=self.shelf.features)
        return self.runs.run(f"{base} performer", policy, slots)

    def less(self, kernels: Kernels | None, base: str, slots: int) -> Run | None:
        """LESS with trained kernels over a base policy; None without kernels."""
        if kernels is None:
            return None
        policy = kernels.over(self.shelf.base(base))
        return self.runs.run(f"less {kernels.name} on {base}", policy, slots, kernels=kernels.digest)

    def figure(self, name: str, figure: Any) -> str:
        """Save a figure; what shows it in the report."""
        file = self.runs.directory / "less" / f"{name}.png"
        save_figure(figure, file)
        return f"\n![{name}](less/{name}.png)\n"
