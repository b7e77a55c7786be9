"""How keys stand in slots: cheap forms of cache positions, and angles far out in a text."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import kvjax
from kvjax import decode
from kvjax.codec import CachePositions, SlidingPositions, codec_of
from kvjax.policies.window import Streaming
from kvjax.rope import Rope, rope_frequencies, rotate
from tests.models import GQA, random_model, small_config

TEXT = np.random.default_rng(0).integers(0, GQA.vocab_size, (3, 60))
LENGTHS = (41, 3, 33)


@struct.dataclass(kw_only=True)
class Ranked(Streaming):
    """Streaming, with all keys rotated by rank."""

    @property
    def slides(self):
        return False


def follow(model, policy, budget=14, lengths=LENGTHS, **arguments):
    tokens = TEXT[:, : max(lengths)]
    state, logits = kvjax.prefill(model, policy, tokens, budget, lengths=lengths, max_new_tokens=40, **arguments)
    seen = [logits]
    for t in range(30):
        state, logits = kvjax.decode_step(state, jnp.asarray(TEXT[:, t], jnp.int32))
        seen.append(logits)
    return np.stack(seen), decode.held_positions(state)


@pytest.mark.parametrize("chunk", [None, 8, 1])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("config", [GQA, small_config(4, 2, position="alibi", rope=None)], ids=["rope", "alibi"])
def test_turning_the_sinks_is_turning_everything(config, sinks, chunk, x64):
    model = random_model(config, dtype=jnp.float64)
    sliding, ranked = Streaming(sinks=sinks), Ranked(sinks=sinks)
    assert isinstance(codec_of(sliding), SlidingPositions) and isinstance(codec_of(ranked), CachePositions)
    found, held = follow(model, sliding, prefill_chunk=chunk)
    expected, kept = follow(model, ranked, prefill_chunk=chunk)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    for one, other in zip(held, kept, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_prompt_may_be_shorter_than_the_sinks(x64):
    model = random_model(GQA, dtype=jnp.float64)
    found, _ = follow(model, Streaming(sinks=20), 24, (5, 2, 3))
    expected, _ = follow(model, Ranked(sinks=20), 24, (5, 2, 3))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_protected_tokens_leave_gaps_in_the_window():
    assert isinstance(codec_of(kvjax.policy("streaming", special=(7,))), CachePositions)
    assert isinstance(codec_of(kvjax.policy("keyformer", positions="cache")), CachePositions)
    assert isinstance(codec_of(kvjax.policy("less", base="streaming")), SlidingPositions)


def test_angles_stay_exact_far_out():
    rope, places = Rope(width=16), np.array([0, 1, 4095, 4096, 1_000_003, 10_000_019])
    x = jnp.tile(jnp.asarray([1.0, 0.0]).repeat(8), (len(places), 1))
    turned = rotate(rope, x, jnp.asarray(places, jnp.int32))
    angles = places[:, None] * rope_frequencies(rope)
    np.testing.assert_allclose(turned, np.concatenate([np.cos(angles), np.sin(angles)], 1), atol=2e-3)
