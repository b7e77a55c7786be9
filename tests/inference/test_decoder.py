"""A decoder's weights are no part of what its steps change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inference.decoder import Decoder
from tests.cases import core, slow

TOKENS = [[5, 17, 42, 8, 15, 99]]


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    return kvjax.load("tiny")


def one(decoder: Decoder, cache: kvjax.Cache, token: jax.Array) -> Any:
    return decoder.step(cache, token)


def four(decoder: Decoder, cache: kvjax.Cache, token: jax.Array) -> Any:
    def step(carry: Any, _: None) -> Any:
        cache, logits = decoder.step(*carry)
        return (cache, logits.argmax(-1).astype(jnp.int32)), logits

    (cache, _), logits = jax.lax.scan(step, (cache, token), length=4)
    return cache, logits


@pytest.mark.compiled_well
@pytest.mark.parametrize(
    ("policy", "program"),
    [
        *(core("h2o", one), ("less", four), ("lsh_e", one)),
        *(slow("h2o", four), slow("less", one), slow("lsh_e", four)),
    ],
)
def test_programs_of_ones_own_copy_no_weights(model: kvjax.Model, policy: str, program: Any) -> None:
    decoder = kvjax.decoder(model, policy, budget=16)
    cache, _ = decoder.prefill(TOKENS, max_new_tokens=8)
    lowered = jax.jit(program, donate_argnums=1).lower(decoder, cache, jnp.asarray([3], jnp.int32))
    memory = lowered.compile().memory_analysis()
    if memory is None:
        pytest.skip("this backend has no memory analysis")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights))
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    assert memory.argument_size_in_bytes > weights > 8 * new


def test_a_decoder_does_what_a_state_does(model: kvjax.Model) -> None:
    decoder = kvjax.decoder(model, "h2o", budget=4)
    cache, found = decoder.prefill(TOKENS, max_new_tokens=8)
    state, wanted = kvjax.prefill(model, "h2o", TOKENS, 4, max_new_tokens=8)
    np.testing.assert_array_equal(found, wanted)
    cache, found = jax.jit(one)(decoder, cache, jnp.asarray([3], jnp.int32))
    state, wanted = kvjax.decode_step(state, [3])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    cache, found = decoder.extend(cache, [[7, 9]], logits="all")
    state, wanted = kvjax.extend(state, [[7, 9]], logits="all")
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(cache.positions(), kvjax.held_positions(state), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_attributes_of_a_state_are_those_of_both(model: kvjax.Model) -> None:
    state, _ = kvjax.prefill(model, "h2o", TOKENS, 4, max_new_tokens=8)
    assert state.weights is state.decoder.weights and state.position is state.cache.position
    resting = state.replace(active=jnp.zeros(1, bool), kernels=state.kernels._replace(implementation="xla"))
    assert not resting.cache.active.any() and resting.decoder.kernels.implementation == "xla"
    with pytest.raises(TypeError, match=r"the first argument is a model, from kvjax\.load, not State"):
        kvjax.decoder(state, "h2o")  # type: ignore[arg-type]
