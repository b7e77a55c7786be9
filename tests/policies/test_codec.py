"""How keys stand in slots: cheap forms of cache positions, and angles far out in a text."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import kvjax
from kvjax.inference.state import held_positions
from kvjax.methods.compatibility import fitted
from kvjax.methods.window import Recency
from kvjax.policies.codec import Codec
from kvjax.rope import Rope, rope_frequencies, rotate
from kvjax.types import LayerTokens, View
from tests.cases import pairwise
from tests.small_models import GQA, SLOPED, random_model

TEXT = np.random.default_rng(0).integers(0, GQA.vocab_size, (3, 60))
LENGTHS = (41, 3, 33)


@struct.dataclass
class Ranked(Recency):
    """Recency that does not say that it keeps a window: all keys are rotated by rank."""

    def score(self, view: View, new: LayerTokens) -> Any:
        """The same order, by numbers."""
        return view.position.astype(jnp.float32)


def both(sinks, **parts):
    """The same policy with only its sinks turned, and with all of its keys."""
    sliding = kvjax.policy("streaming", sinks=sinks, **parts)
    ranked = fitted(dataclasses.replace(sliding, score=Ranked()))
    assert sliding.codec == Codec("cache", sliding=True, sinks=sinks)
    assert ranked.codec == Codec("cache", sliding=False)
    return sliding, ranked


def follow(model, policy, budget=14, lengths=LENGTHS, **arguments):
    tokens = TEXT[:, : max(lengths)]
    state, logits = kvjax.prefill(model, policy, tokens, budget, lengths=lengths, max_new_tokens=40, **arguments)
    seen = [logits]
    for t in range(30):
        state, logits = kvjax.decode_step(state, jnp.asarray(TEXT[:, t], jnp.int32))
        seen.append(logits)
    return np.stack(seen), held_positions(state)


@pytest.mark.parametrize(("config", "sinks", "chunk"), pairwise([GQA, SLOPED], [0, 4], [None, 8, 1]))
def test_turning_the_sinks_is_turning_everything(config, sinks, chunk, x64):
    model = random_model(config, dtype=jnp.float64)
    sliding, ranked = both(sinks)
    found, held = follow(model, sliding, prefill_chunk=chunk)
    expected, kept = follow(model, ranked, prefill_chunk=chunk)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    for one, other in zip(held, kept, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_prompt_may_be_shorter_than_the_sinks(x64):
    model = random_model(GQA, dtype=jnp.float64)
    sliding, ranked = both(20)
    found, _ = follow(model, sliding, 24, (5, 2, 3))
    expected, _ = follow(model, ranked, 24, (5, 2, 3))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_protected_tokens_leave_gaps_in_the_window():
    assert kvjax.policy("streaming", special=(7,)).codec.ordered
    assert kvjax.policy("streaming", plan="adakv").codec.ordered
    assert kvjax.policy("keyformer", positions="cache").codec.ordered
    assert kvjax.policy("streaming", residual="less").codec.sliding
    assert not kvjax.policy("lambda_mask").codec.ordered and not kvjax.policy("lambda_mask").codec.sliding


def test_a_codec_is_named_at_the_positions_of_the_policy():
    assert kvjax.policy("h2o", codec="int8", positions="original").codec == Codec("original", 8)
    assert kvjax.policy("streaming", codec="int4").codec == Codec("cache", 4, sliding=True, sinks=4)
    assert kvjax.policy("h2o", codec=Codec("cache")).codec == Codec("cache")
    settings: dict[str, Any] = {"codec.bits": 8}
    with pytest.raises(ValueError, match=r"codec\.bits is a setting of a codec; name one"):
        kvjax.policy("h2o", **settings)
    with pytest.raises(ValueError, match="codec 'int8' has no setting 'bits'; it takes none"):
        kvjax.policy("h2o", codec="int8", **settings)


def test_angles_stay_exact_far_out():
    rope, places = Rope(width=16), np.array([0, 1, 4095, 4096, 1_000_003, 10_000_019])
    x = jnp.tile(jnp.asarray([1.0, 0.0]).repeat(8), (len(places), 1))
    turned = rotate(rope, x, jnp.asarray(places, jnp.int32))
    angles = places[:, None] * rope_frequencies(rope)
    np.testing.assert_allclose(turned, np.concatenate([np.cos(angles), np.sin(angles)], 1), atol=2e-3)
