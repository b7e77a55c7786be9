"""L2: the largest key norm leaves first; skipped layers keep their newest tokens."""

from __future__ import annotations

import math

import numpy as np

from tests.oracles.decoder import Oracle


def rounded(score: float) -> float:
    """To 15 significant bits, so that equal tokens have equal scores."""
    mantissa, exponent = math.frexp(float(np.float32(score)))
    return math.ldexp(round(mantissa * 2**15), exponent - 15)


class L2(Oracle):
    skip_layers: int

    def scores(self, h, new):
        head = self.heads[h]
        if self.layer < self.skip_layers:
            return head.positions
        return [-rounded(math.sqrt(sum(float(x) ** 2 for x in key))) for key in head.raw_keys]
