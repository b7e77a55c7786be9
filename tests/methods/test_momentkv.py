"""MomentKV: against its definition in NumPy, its limits, its numbers and its bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import generate
from kvjax.cache.ranks import TOKEN_BLOCK
from kvjax.cli import options
from kvjax.methods.momentkv import Moments, MomentState
from kvjax.types import Evicted, LayerConfig, LayerTokens
from tests.cases import PAIRS, slow
from tests.held import layers
from tests.methods.test_oracles import SHAPES, compare_with_oracle
from tests.small_models import GQA, LOCAL, SINKS, SLOPED, random_model

RNG = np.random.default_rng(2)


@pytest.mark.parametrize(
    ("name", "shape"), [("momentkv+h2o", "mha"), ("momentkv+h2o", "mqa"), slow("momentkv+h2o", "learned")]
)
def test_equals_its_definition_in_other_shapes(name: str, shape: str, x64: None) -> None:
    config, lengths = SHAPES[shape]
    compare_with_oracle(PAIRS[name], random_model(config, seed=1, dtype=jnp.float64), lengths, 40)


@pytest.mark.parametrize("config", [SINKS, slow(LOCAL)])
def test_goes_beside_learned_sinks_and_windows(config: Any, x64: None) -> None:
    compare_with_oracle(PAIRS["momentkv+h2o"], random_model(config, seed=1, dtype=jnp.float64), (41, 9), 30)


def token(q: np.ndarray, width: int, *, soft_cap: float | None = None) -> LayerTokens:
    """One token per row, of a layer with keys and values of different widths."""
    (b, h, g, t, d), scale = q.shape, 0.7
    config = LayerConfig(h * g * d, h, g, d, width, None, scale, soft_cap)
    each, kind = jnp.ones(b, jnp.int32), jnp.dtype(q.dtype)
    counts: dict[str, Any] = dict(prompt_length=each, read=each, horizon=each, end=each, seed=each.astype(jnp.uint32))
    raw: dict[str, Any] = dict(q=jnp.asarray(q), raw_q=jnp.asarray(q))
    keys = jnp.zeros((b, h, t, d), kind)
    raw |= dict(k=keys, raw_k=keys, v=jnp.zeros((b, h, t, width), kind), hidden=keys[:, 0])
    ones = jnp.ones((b, t), jnp.int32)
    return LayerTokens(**raw, **counts, position=ones, token=ones, config=config)


def absorbed(k: np.ndarray, v: np.ndarray, *sizes: int) -> MomentState:
    """The moments of pairs that leave in blocks of these sizes, each with an entry that holds no pair."""
    new = token(np.zeros((*k.shape[:2], 1, 1, k.shape[-1]), k.dtype), v.shape[-1])
    state, start = Moments().init_head(new), 0
    for size in sizes:
        k_of, v_of = (np.pad(x[:, :, start : start + size], [(0, 0), (0, 0), (0, 1), (0, 0)]) for x in (k, v))
        k_of[:, :, -1], v_of[:, :, -1] = np.nan, np.inf
        position = np.pad(np.zeros((*k.shape[:2], size), np.int32), [(0, 0), (0, 0), (0, 1)], constant_values=-1)
        state = Moments().absorb(state, Evicted(jnp.asarray(k_of), jnp.asarray(v_of), jnp.asarray(position)))
        start += size
    return state


@pytest.mark.parametrize("far", [0.0, 300.0])
def test_moments_do_not_depend_on_the_order_of_leaving(far: float) -> None:
    k, v = (RNG.normal(far, 1, (2, 3, 20, width)).astype(np.float32) for width in (5, 4))
    count, key, value, products = absorbed(k, v, 7, 1, 12)
    exact = [x.astype(np.float64) for x in (k, v)]
    keys, values = (x - x.mean(2, keepdims=True) for x in exact)
    np.testing.assert_array_equal(count, np.full((2, 3), 20))
    np.testing.assert_allclose(key, exact[0].mean(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, exact[1].mean(2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(products, np.einsum("bhme,bhmd->bhed", values, keys), atol=1e-2 if far else 1e-4)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_is_the_attention_to_evicted_pairs_to_first_order(soft_cap: float | None, x64: None) -> None:
    """Halving the spread of the keys quarters what is missing."""

    def missing(spread: float) -> list[float]:
        rng = np.random.default_rng(5)
        k, v, q = (rng.normal(size=shape) for shape in ((1, 2, 30, 5), (1, 2, 30, 4), (1, 2, 2, 1, 5)))
        k = k.mean(2, keepdims=True) + spread * (k - k.mean(2, keepdims=True))
        new = token(q, 4, soft_cap=soft_cap)
        assert new.config is not None
        found = Moments().share(absorbed(k, v, 30), new)
        weights = np.exp(new.config.spec.capped(jnp.einsum("bhgtd,bhmd->bhgtm", q, k)))
        total = weights.sum(-1)
        out = np.einsum("bhgtm,bhme->bhgte", weights, v) / total[..., None]
        return [float(np.abs(found.out - out).max()), float(np.abs(found.lse - np.log(total)).max())]

    for wide, narrow in zip(missing(0.02), missing(0.01), strict=True):
        assert 3.5 < wide / narrow < 4.5
    assert max(missing(0.0)) < 1e-12


@pytest.mark.parametrize("chunk", [None, 7])
def test_remembers_what_leaves_a_prompt(chunk: int | None, x64: None) -> None:
    """Keys of the first layer depend on nothing that was evicted, so its moments are known."""
    budget, lengths = 20, [3 * TOKEN_BLOCK + 11, 60]
    model, tokens = random_model(GQA, dtype=jnp.float64), RNG.integers(0, GQA.vocab_size, (2, max(lengths)))
    whole, _ = kvjax.prefill(model, "full", tokens, 1.0, max_new_tokens=1, lengths=lengths)
    policy = kvjax.policy("window", residual="momentkv")
    read = {"max_new_tokens": 1, "lengths": lengths, "prefill_chunk": chunk}
    state, _ = kvjax.prefill(model, policy, tokens, budget, **read)
    cache, moments = layers(whole)[0], layers(state)[0].state.residual
    for row, length in enumerate(lengths):
        gone = (cache.position[row] >= 0) & (cache.position[row] < length - budget)
        for head in range(GQA.kv_heads):
            k, v = (np.asarray(leaf)[row, head][gone[head]] for leaf in (cache.kv.k, cache.kv.v))
            assert moments.pairs[row, head] == length - budget
            np.testing.assert_allclose(moments.key[row, head], k.mean(0), rtol=1e-9)
            expected = (v - v.mean(0)).T @ (k - k.mean(0))
            np.testing.assert_allclose(moments.products[row, head], expected, rtol=1e-8, atol=1e-10)


def test_is_the_base_while_nothing_has_left_and_counts_its_bytes() -> None:
    model, tokens = random_model(GQA), RNG.integers(0, GQA.vocab_size, (2, 12))
    read = {"max_new_tokens": 4, "lengths": [12, 9]}
    (plain, expected), (state, logits) = (
        kvjax.prefill(model, kvjax.policy("h2o", residual=residual), tokens, 16, **read)
        for residual in (None, "momentkv")
    )
    np.testing.assert_array_equal(logits, expected)
    (_, logits), (_, expected) = (kvjax.decode_step(each, tokens[:, 0]) for each in (state, plain))
    np.testing.assert_array_equal(logits, expected)
    d = GQA.head_width
    numbers = GQA.layers * 2 * GQA.kv_heads * (d * d + 2 * d + 1)
    assert kvjax.cache_bytes(state) == kvjax.cache_bytes(plain) + 4 * numbers


def test_bfloat16_stays_finite_and_sums_in_float32() -> None:
    tokens = RNG.integers(0, GQA.vocab_size, (2, 60))
    policy = kvjax.policy("h2o", residual="momentkv")
    state, _ = kvjax.prefill(random_model(GQA, dtype=jnp.bfloat16), policy, tokens, 12, max_new_tokens=8)
    for step in range(4):
        state, logits = kvjax.decode_step(state, tokens[:, step])
        assert np.isfinite(logits).all()
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(layers(state)[0].state.residual))


def test_is_written_like_less() -> None:
    def choice(*words: str) -> kvjax.Policy:
        return options.policy_and_budget(generate.parser().parse_args(words))[0]

    made = kvjax.policy("h2o", residual="momentkv", recent=0.25)
    assert made == dataclasses.replace(kvjax.policy("h2o", recent=0.25), residual=Moments())
    assert choice("--policy", "h2o+momentkv[recent=0.25]") == made
    assert choice("--policy", "h2o", "--residual", "momentkv", "--set", "recent=0.25") == made


def test_distances_in_the_logits_are_refused() -> None:
    policy = kvjax.policy("h2o", residual="momentkv")
    with pytest.raises(ValueError, match=r"momentkv sums keys without their distances, .*; use another policy"):
        kvjax.prefill(random_model(SLOPED), policy, [[1, 2, 3]], 16)
