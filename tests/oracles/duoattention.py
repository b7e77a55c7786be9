"""DuoAttention: retrieval heads keep everything, the others the ends of the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.oracles.simlayerkv import SimLayerKV


class DuoAttention(SimLayerKV):
    full: Sequence[Sequence[bool]]
    """Whether a head of a layer is a retrieval head."""

    def read(self, prompt):
        self.length = prompt.prompt_length
        # The token being read has one of the slots, unless it takes it first.
        slots = self.sinks + self.recent - (0 if self.evicts_first else 1)
        slots += sum(token in self.special for token in prompt.tokens[self.sinks :])
        for h, retrieves in enumerate(self.full[self.layer]):
            self.limits[h] = self.limits[h] if retrieves else min(slots, self.limits[h])


def repeated_attention(probs: Sequence[Sequence[np.ndarray]], length: int) -> list[float]:
    """What each head of a layer pays, in a text of so many tokens that is repeated, to the token after the same one.

    Args:
        probs: [h][g], each [query, key] over the whole text.
        length: tokens before they are repeated.
    """
    found = []
    for head in probs:
        pays = [float(of_group[t, t - length + 1]) for of_group in head for t in range(length, 2 * length - 1)]
        found.append(sum(pays) / len(pays))
    return found
