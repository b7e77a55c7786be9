"""DuoAttention's choice of heads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods.duoattention import RetrievalHeads
from tests.oracles.basic import Full
from tests.oracles.decoder import Decoder
from tests.oracles.duoattention import repeated_attention
from tests.small_models import GQA, MHA, random_model

LENGTH, SEED = 9, 3


class Recording(Full):
    """A full cache that remembers the attention of the prompt."""

    def read(self, prompt):
        self.probs = prompt.probs


def test_retrieval_heads_are_those_that_look_behind_the_same_token(x64: None) -> None:
    model = random_model(GQA, seed=1, dtype=jnp.float64)
    half = np.random.default_rng(SEED).integers(0, GQA.vocab_size, LENGTH).tolist()
    usual: dict[str, Any] = dict(
        kv_heads=GQA.kv_heads, groups=GQA.groups, sinks=0, recent=0, special=(), positions="original"
    )
    layers: list[Any] = [
        Recording([99] * GQA.kv_heads, layer=layer, layers=GQA.layers, recents=[0] * GQA.kv_heads, **usual)
        for layer in range(GQA.layers)
    ]
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.weights)
    Decoder(weights, GQA, layers, horizon=1).prompt([*half, *half])
    pays = np.array([repeated_attention(layer.probs, LENGTH) for layer in layers])
    heads = pays.size
    for count in range(heads + 1):
        plan = kvjax.policy("duoattention", retrieval=count / heads, length=LENGTH, seed=SEED).bind(model).plan
        assert isinstance(plan, RetrievalHeads) and plan.full is not None
        chosen = np.stack(list(map(np.asarray, plan.full)))
        assert chosen.sum() == count
        assert pays[chosen].min(initial=1.0) > pays[~chosen].max(initial=0.0)


def test_a_bound_policy_keeps_its_heads_and_its_model() -> None:
    bound = kvjax.policy("duoattention", length=LENGTH).bind(random_model(GQA))
    assert bound.bind(random_model(GQA)).plan is bound.plan
    with pytest.raises(ValueError, match="bound to a model with KV heads"):
        bound.bind(random_model(MHA))
