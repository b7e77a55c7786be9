"""Converted checkpoints of earlier versions."""

from __future__ import annotations

import numpy as np

import kvjax
from tests.paths import DATA


def test_a_checkpoint_converted_by_0_2_0_is_the_same_model() -> None:
    """Two random layers of Qwen3, and one logit at each position as 0.2.0 computed it."""
    model = kvjax.load(DATA / "checkpoint_0.2.0")
    logits = np.asarray(model.logits([[3, 14, 15, 9, 26, 5]]))
    expected = [-0.174909, -0.045427, -0.008964, -0.102119, -0.032304, -0.109128]
    np.testing.assert_allclose(logits[0, :, 7], expected, atol=2e-6)
