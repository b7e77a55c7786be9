"""TriAttention on a mesh of four virtual devices, held against one device: test_triattention runs it in a process."""

from __future__ import annotations

import jax
import numpy as np

import kvjax
from kvjax.model import Model
from tests.compiling import compile_fast
from tests.mesh_runs import placed
from tests.methods.test_triattention import LENGTHS, STEPS, TEXT, model, policy


def follow(model: Model, made: kvjax.Policy) -> tuple[np.ndarray, list[list[list[int]]]]:
    """Logits of every step, and the positions that each head holds at the end."""
    prompts = [TEXT[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    state, logits = kvjax.prefill(model, made, prompts, 14, max_new_tokens=STEPS)
    found = [np.asarray(logits)]
    for token in TEXT[:, -STEPS:].T:
        state, logits = kvjax.decode_step(state, token)
        found.append(np.asarray(logits))
    heads = [layer.reshape(-1, layer.shape[-1]).tolist() for layer in kvjax.held_positions(state)]
    return np.stack(found), [[sorted(p for p in head if p >= 0) for head in layer] for layer in heads]


def main() -> None:
    made = policy("gqa", keep_prompt=False)
    halves = placed(model("gqa"), (1, 2, 2))  # of the heads, and of each head's slots
    expected, held = follow(model("gqa"), made)
    logits, holds = follow(halves, made)
    np.testing.assert_allclose(logits, expected, rtol=1e-8, atol=1e-9)
    assert holds == held


if __name__ == "__main__":
    compile_fast()
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.enable_x64(True):
        main()
