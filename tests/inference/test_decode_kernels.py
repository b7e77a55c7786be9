"""A whole decode step gives the same tokens whichever kernel computes its attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inference.state import held_positions
from kvjax.types import Kernels
from tests.cases import slow
from tests.kernels import GPU_WAYS, TPU_WAYS

PROMPT = "The name is Tom. What is the name?"
STEPS = 8
READING, STEPPING = {"decode_attention"}, {"fused_decode"}
KERNELS = ("decode_attention", "fused_decode", "evict", "hamming", "less_phi", "less_psi", "paged_attention")
PERFORMER = {"residual.kernels": "performer"}


def greedy(model, policy, kernels):
    """Tokens and logits of a few steps, past the budget, and the program of a step."""
    ids = np.asarray([model.tokenizer.encode(PROMPT)])
    budget = 1.0 if policy.plan.sizing.mode == "profiled" else 16
    state, logits = kvjax.prefill(model, policy, ids, budget, max_new_tokens=STEPS, implementation=kernels)
    program = str(jax.make_jaxpr(state.decoder.step)(state.cache, jnp.zeros(1, jnp.int32)))
    tokens, seen = [], [np.asarray(logits)]
    for _ in range(STEPS):
        token = logits.argmax(-1).astype(jnp.int32)
        state, logits = kvjax.decode_step(state, token)
        tokens.append(int(token[0]))
        seen.append(np.asarray(logits))
    return tokens, np.stack(seen), program


@pytest.mark.parametrize(
    ("policy", "way", "called"),
    [
        (kvjax.policy("streaming"), TPU_WAYS[0], STEPPING),
        slow(kvjax.policy("streaming"), GPU_WAYS[0], READING),
        slow(kvjax.policy("streaming", codec="int8"), TPU_WAYS[0], STEPPING),
        slow(kvjax.policy("streaming", residual="less"), TPU_WAYS[0], STEPPING | {"less_phi", "less_psi"}),
        slow(kvjax.policy("h2o"), GPU_WAYS[0], READING),
        slow(kvjax.policy("h2o"), TPU_WAYS[0], STEPPING),
        slow(kvjax.policy("h2o"), TPU_WAYS[1], STEPPING),
        slow(kvjax.policy("streaming", positions="original"), TPU_WAYS[0], STEPPING),
        (kvjax.policy("scissorhands"), TPU_WAYS[0], STEPPING),
        (kvjax.policy("h2o", codec="int8"), TPU_WAYS[0], STEPPING),
        slow(kvjax.policy("h2o", codec="int4"), GPU_WAYS[0], READING),
        slow(kvjax.policy("h2o", positions="cache"), TPU_WAYS[0], {"evict"}),
        (kvjax.policy("h2o", plan="adakv"), TPU_WAYS[0], {"paged_attention"}),
        slow(kvjax.policy("keyformer"), TPU_WAYS[0], STEPPING),
        slow(kvjax.policy("keyformer", tau_end=3.0), GPU_WAYS[0], READING),
        slow(kvjax.policy("lsh_e", sinks=2, recent=4), TPU_WAYS[0], STEPPING),
        slow(kvjax.policy("tova"), TPU_WAYS[0], STEPPING),
        slow(kvjax.policy("less", kernels="performer"), GPU_WAYS[0], READING),
        (kvjax.policy("less", base="keyformer"), TPU_WAYS[0], STEPPING | {"less_phi", "less_psi"}),
        slow(kvjax.policy("fastgen", threshold=0.7, **PERFORMER), GPU_WAYS[0], {"paged_attention"}),
    ],
    ids=lambda value: value.name or "less" if isinstance(value, kvjax.Policy) else None,
)
def test_kernels_give_the_same_tokens(policy, way, called):
    model = kvjax.load("tiny")
    expected = greedy(model, policy, Kernels("xla"))
    # What has no form for a platform is left to XLA there.
    found = greedy(model, policy, Kernels("pallas,xla", way.interpret, way.platform))
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-3)
    assert "pallas_call" not in expected[2]
    assert {name for name in KERNELS if f"name={name}" in found[2]} == called


@pytest.mark.parametrize("budget", [5, slow(6), 16])
def test_sinks_are_as_near_before_a_slot_is_empty_as_after(budget):
    """A kernel that finds the slot itself is told where sinks are going to stand."""
    model = kvjax.load("tiny")
    tokens = np.asarray([model.tokenizer.encode(PROMPT)])
    found = []
    for kernels in (Kernels("xla"), Kernels("pallas,xla", TPU_WAYS[0].interpret, TPU_WAYS[0].platform)):
        state, logits = kvjax.prefill(
            model, kvjax.policy("streaming"), tokens[:, :2], budget, max_new_tokens=32, implementation=kernels
        )
        seen = [logits]
        for token in np.tile(tokens[0], 3)[:26]:
            state, logits = kvjax.decode_step(state, jnp.asarray([token], jnp.int32))
            seen.append(logits)
        found.append((np.stack(seen), held_positions(state)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-3, atol=1e-3)
    jax.tree.map(np.testing.assert_array_equal, found[1][1], found[0][1])
