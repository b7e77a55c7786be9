"""Known tokens that are read at once and taken back equal tokens that are read step by step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inference.verify import truncate, verify
from kvjax.rope import Rope
from tests.small_models import (
    GQA,
    HYBRID,
    LEARNED,
    LOCAL,
    MHA,
    MIXED,
    MQA,
    SINKS,
    SLOPED,
    YARN,
    random_model,
    small_config,
)

TEXT = np.random.default_rng(4).integers(0, 64, (3, 30))
CONFIGS = {
    "mha": MHA,
    "gqa": GQA,
    "mqa": MQA,
    "alibi": SLOPED,
    "learned": LEARNED,
    "sinks": SINKS,
    "moe": MIXED,
    "yarn": YARN,
    "recurrent": HYBRID,
}
CASES = [(name, None) for name in CONFIGS] + [("gqa", "int8"), ("alibi", "int8")]


@pytest.mark.parametrize(("name", "codec"), CASES)
def test_verified_tokens_equal_steps(name: str, codec: str | None, x64: None) -> None:
    model = random_model(CONFIGS[name], dtype=jnp.float64)
    policy = kvjax.policy("full", codec=codec) if codec else kvjax.policy("full")
    decoder = kvjax.decoder(model, policy)
    cache, _ = decoder.prefill(TEXT[:, :12], lengths=[12, 7, 9], max_new_tokens=12)
    cache, expected, caches = cache.replace(key=None), [], []
    stepped = cache
    for number in range(5):
        stepped, logits = jax.jit(type(decoder).step)(decoder, stepped, jnp.asarray(TEXT[:, 12 + number]))
        expected.append(np.asarray(logits))
        caches.append(stepped)
    opened, logits = jax.jit(verify)(decoder, cache, jnp.asarray(TEXT[:, 12:17]), jnp.asarray([5, 5, 2]))
    for number, step in enumerate(expected):
        rows = [row for row, count in enumerate((5, 5, 2)) if number < count]
        np.testing.assert_allclose(np.asarray(logits)[rows, number], step[rows], rtol=1e-9, atol=1e-9)
    kept = np.array([3, 1, 2])
    after = jax.jit(truncate)(opened, cache.position + kept)
    assert after.position.tolist() == (np.asarray(cache.position) + kept).tolist()
    token = jnp.asarray([40, 41, 42])
    _, following = jax.jit(type(decoder).step)(decoder, after, token)
    for row, count in enumerate(kept):
        _, alone = jax.jit(type(decoder).step)(decoder, caches[count - 1], token)
        np.testing.assert_allclose(following[row], alone[row], rtol=1e-9, atol=1e-9)


def test_a_verification_writes_in_place() -> None:
    decoder = kvjax.decoder(random_model(small_config(4, 2, head_width=64, rope=Rope(width=64))), "full")
    cache, _ = decoder.prefill(TEXT[:, :12], max_new_tokens=1000)

    def one_round(decoder: Any, cache: Any, tokens: Any) -> Any:
        opened, logits = verify(decoder, cache, tokens, jnp.full(3, 4))
        return truncate(opened, cache.position + 2), logits

    program = jax.jit(one_round, donate_argnums=1).lower(decoder, cache.replace(key=None), jnp.asarray(TEXT[:, :4]))
    memory: Any = program.compile().memory_analysis()
    keys = sum(leaf.nbytes for slots in cache.slots for leaf in jax.tree.leaves(slots.kv))
    assert memory.alias_size_in_bytes >= keys > 4 * memory.temp_size_in_bytes


@pytest.mark.parametrize(
    ("model", "policy", "message"),
    [
        (GQA, "h2o", "h2o evicts tokens, which no roll-back brings back"),
        (LOCAL, "full", "layer 0 keeps a window of 12 tokens"),
    ],
)
def test_what_cannot_be_taken_back_is_refused(model: Any, policy: str, message: str) -> None:
    decoder = kvjax.decoder(random_model(model), policy, 8 if policy == "h2o" else 1.0)
    cache, _ = decoder.prefill(TEXT[:, :12], max_new_tokens=8)
    with pytest.raises(ValueError, match=message):
        verify(decoder, cache.replace(key=None), jnp.asarray(TEXT[:, :2]), jnp.full(3, 2))


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_rows_step_over_as_many_tokens_as_they_have(policy: str, x64: None) -> None:
    decoder = kvjax.decoder(random_model(GQA, dtype=jnp.float64), policy, 8 if policy == "h2o" else 1.0)
    cache, _ = decoder.prefill(TEXT[:, :12], max_new_tokens=12)
    lengths = jnp.asarray([3, 0, 1])
    some, logits = jax.jit(type(decoder).steps)(decoder, cache.replace(key=None), jnp.asarray(TEXT[:, 12:15]), lengths)
    assert some.position.tolist() == [15, 12, 13]
    every = cache.replace(key=None)
    for number in range(3):
        active = every.replace(active=number < lengths)
        every, expected = jax.jit(type(decoder).step)(decoder, active, jnp.asarray(TEXT[:, 12 + number]))
        rows = np.flatnonzero(np.asarray(number < lengths))
        np.testing.assert_allclose(logits[rows, number], expected[rows], rtol=1e-9, atol=1e-9)
    jax.tree.map(np.testing.assert_array_equal, some.positions(), every.positions())
