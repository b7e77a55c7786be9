"""What prompt attention with column sums promises beyond the table: any shape, float64, linear memory, refusals."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.attention import attend, causal_mask
from kvjax.policies.keyformer import Keyformer
from kvjax.types import KV, LayerCache, NewTokens
from pallas_kernels import noise
from pallas_kernels.common import Unsupported
from pallas_kernels.prefill_scores import prefill_scores
from tests.kernel_cases.prefill_scores import case, inputs
from tests.kernels import XLA, Way, check


@settings(max_examples=8)
@given(
    b=st.integers(1, 3),
    h=st.integers(1, 3),
    g=st.integers(1, 4),
    n=st.integers(1, 300),
    cached=st.sampled_from([0, 1, 37]),
    window=st.sampled_from([None, 1, 50]),
    extra=st.sets(st.sampled_from(["noise", "weights", "slopes"])),
)
def test_any_shape_agrees_with_numpy(b, h, g, n, cached, window, extra):
    check(case("any", b, h, g, n, 8, cached=cached, window=window, extra=tuple(extra), ways=(XLA,)), XLA)


def test_double_precision(x64):
    made = case("double", 1, 2, 2, 90, 8, dtype="float64", extra=("noise",), tau=1.5, ways=(XLA,))
    found = made.run(*jax.tree.map(jnp.asarray, made.arrays), implementation="xla")
    for name, wanted in made.expected().items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-11, atol=1e-11, err_msg=name)


def test_keyformer_counts_the_same(x64):
    made: dict[str, Any] = {name: jnp.asarray(x) for name, x in inputs(2, 2, 2, 48, 8, dtype="float64").items()}
    q, k, v, position = (made[name] for name in ("q", "k", "v", "query_position"))
    seed, length = jnp.array([3, 4], jnp.uint32), (position >= 0).sum(1)
    new = NewTokens(
        q=q, k=k, v=v, position=position, token=position, prompt_length=length, read=length,
        horizon=jnp.full(2, 8), seed=seed, layer=1,
    )  # fmt: skip
    policy, slots = Keyformer(damping=0.9), jnp.broadcast_to(position[:, None], (2, 2, 48))
    stats = jnp.zeros(slots.shape)
    cache = LayerCache(
        kv=KV(k, v), position=slots, keep=None, order=None, stats=stats, state=None, limit=jnp.full((2, 2), 48)
    )
    _, probs = attend(q, k, v, causal_mask(position, slots, None))
    wanted = policy.observe(cache, probs, new).stats
    age = length[:, None] - 1 - position
    weights = jnp.where(position >= 0, 0.9**age, 0.0)[:, None]
    zeta = noise.gumbel(noise.uniform_at(seed, 1, slots).astype(jnp.float64))
    found = prefill_scores(**made, weights=weights, noise=zeta).scores
    assert found is not None
    np.testing.assert_allclose(found.sum(2), jnp.where(slots >= 0, wanted, 0), rtol=1e-9, atol=1e-12)


def test_blocks_of_an_accelerator_agree_with_numpy():
    check(case("large", 1, 1, 2, 2500, 8, extra=("noise",), ways=(XLA,)), Way("xla", platform="gpu"))


def test_memory_is_linear_in_the_prompt():
    def temporary(n: int) -> int:
        made = jax.tree.map(jnp.asarray, inputs(1, 2, 2, n, 16, padding=False))
        compiled = jax.jit(functools.partial(prefill_scores, implementation="xla")).lower(**made).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary(4096) < 2.2 * temporary(2048)


def test_a_prompt_does_not_depend_on_its_neighbours():
    made = jax.tree.map(jnp.asarray, inputs(3, 1, 2, 70, 8))
    alone = prefill_scores(**{name: x[1:2] for name, x in made.items()})
    together = prefill_scores(**made)
    jax.tree.map(lambda one, all_: np.testing.assert_allclose(one[0], all_[1], rtol=2e-6, atol=1e-6), alone, together)


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, dict(implementation="pallas", platform="gpu"), "d=8 is not a power of two from 16"),
        ({}, dict(implementation="pallas", platform="cpu"), "compiles for tpu and gpu, not for cpu"),
        ({}, dict(implementation="triton", platform="gpu"), "no such kernel"),
        (
            {"dtype": "float64"},
            dict(implementation="pallas", platform="tpu"),
            "float64 are not all float32",
        ),
        ({"d": 12}, dict(implementation="pallas", platform="tpu"), "d=12 is not a multiple of 8"),
    ],
)
def test_what_cannot_run_is_refused_before_compilation(changes, options, reason, x64):
    made = inputs(**(dict(b=1, h=1, g=1, n=4, d=8) | changes))
    with pytest.raises(Unsupported, match=reason):
        prefill_scores(**made, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tau": 0.0}, "tau=0.0 is not a temperature above 0"),
        ({"window": 0}, "window=0 is not a number of tokens from 1"),
    ],
)
def test_settings_out_of_range_are_named(options, reason):
    with pytest.raises(ValueError, match=reason):
        prefill_scores(**inputs(1, 1, 1, 4, 8), **options)


def test_fewer_keys_than_queries_are_refused():
    made = inputs(1, 1, 1, 4, 8)
    made |= {name: made[name][:, :, :3] for name in "kv"}
    with pytest.raises(ValueError, match="3 keys are fewer than the 4 queries' own"):
        prefill_scores(**made)
