"""Settings of the training of LESS's kernels."""

from __future__ import annotations

import dataclasses
import math

from kvjax.utils.settings import seed_number


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of the training; the defaults are the paper's (section 3.2).

    Args:
        features: R.
        hidden: R'.
        literal: use equation 2 exactly as printed.
        dropout: rate in both kernels.
        epochs: passes over the training texts.
        batch: texts per step.
        rate: initial learning rate of Adam.
        halve_every: epochs after which the rate is halved.
        held_out: fraction of the texts that are held out to choose the best epoch of each layer.
        seed: seed of kernels, order and dropout.
    """

    features: int = 8
    hidden: int = 512
    literal: bool = False
    dropout: float = 0.3
    epochs: int = 40
    batch: int = 2
    rate: float = 1e-3
    halve_every: int = 10
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("features", "hidden", "epochs", "batch", "halve_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a whole number from 1.")
        seed_number(self.seed)
        if not 0 <= self.dropout < 1 or not 0 < self.held_out < 1 or not 0 < self.rate < math.inf:
            raise ValueError(
                f"dropout={self.dropout}, held_out={self.held_out} and rate={self.rate} are not in [0, 1), (0, 1) and "
                "above 0."
            )
