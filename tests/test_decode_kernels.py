"""A whole decode step gives the same tokens whichever kernel computes its attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import attention, cache, reading
from kvjax.policies import lsh_e
from pallas_kernels import less_kernels
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.evict import evict
from pallas_kernels.hamming import hamming
from pallas_kernels.prefill_scores import prefill_scores
from tests.kernels import GPU_WAYS, TPU_WAYS

PROMPT = "The name is Tom. What is the name?"
STEPS = 8


def greedy(model, policy):
    """Tokens and logits of a few steps, past the budget."""
    ids = np.asarray([model.tokenizer.encode(PROMPT)])
    state, logits = kvjax.prefill(model, policy, ids, 16, max_new_tokens=STEPS)
    tokens, seen = [], []
    for _ in range(STEPS):
        token = logits.argmax(-1).astype(jnp.int32)
        state, logits = kvjax.decode_step(state, token)
        tokens.append(int(token[0]))
        seen.append(np.asarray(logits))
    return tokens, np.stack(seen)


@pytest.mark.parametrize(
    ("policy", "way"),
    [
        (kvjax.policy("streaming"), TPU_WAYS[0]),
        (kvjax.policy("h2o"), GPU_WAYS[0]),
        (kvjax.policy("h2o"), TPU_WAYS[1]),
        (kvjax.policy("keyformer"), TPU_WAYS[0]),
        (kvjax.policy("keyformer", tau_end=3.0), GPU_WAYS[0]),
        (kvjax.policy("lsh_e", sinks=2, recent=4), TPU_WAYS[0]),
        (kvjax.policy("tova"), TPU_WAYS[0]),
        (kvjax.policy("less", kernels="performer"), GPU_WAYS[0]),
        (kvjax.policy("less", base="keyformer"), TPU_WAYS[0]),
    ],
    ids=lambda value: str(value) if not isinstance(value, kvjax.Policy) else type(value).__name__,
)
def test_kernels_give_the_same_tokens(monkeypatch, compiled_fast, policy, way):
    model = kvjax.load("tiny")
    expected = greedy(model, policy)
    jax.clear_caches()  # or the program compiled for XLA would run again
    monkeypatch.setattr(reading, "decode_attention", functools.partial(decode_attention, **way.options))
    monkeypatch.setattr(attention, "prefill_scores", functools.partial(prefill_scores, **way.options))
    if way in TPU_WAYS:  # what has no form for GPU stays with XLA there
        monkeypatch.setattr(cache, "evict", functools.partial(evict, **way.options))
        monkeypatch.setattr(lsh_e, "hamming", functools.partial(hamming, **way.options))
        monkeypatch.setattr(less_kernels, "phi", functools.partial(less_kernels.phi, **way.options))
        monkeypatch.setattr(less_kernels, "psi", functools.partial(less_kernels.psi, **way.options))
    found = greedy(model, policy)
    jax.clear_caches()
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-3, atol=1e-3)
