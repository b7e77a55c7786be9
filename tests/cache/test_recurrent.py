"""The cache of a recurrent layer: the columns of a convolution, and going back along a trail."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.recurrent import Recurrent, Writes, written
from kvjax.types import TokenBatch

RNG = np.random.default_rng(3)
ROWS, HEADS, GROUPS, WIDTH, VALUES, FEATURES, TAPS = 3, 2, 2, 4, 5, 6, 4
COUNTS = (5, 2, 0)
INPUTS = RNG.normal(size=(ROWS, 5, HEADS, FEATURES)) * (np.arange(5) < np.array(COUNTS)[:, None])[..., None, None]
WEIGHTS = jnp.asarray(RNG.normal(size=(HEADS, FEATURES, TAPS)))


def batch(start: int, counts: Any, size: int) -> TokenBatch:
    place, counts = np.arange(size), np.asarray(counts)
    position = jnp.asarray(np.where(place < counts[:, None], start + place, -1), jnp.int32)
    return TokenBatch.of_text(jnp.zeros(position.shape, jnp.int32), jnp.asarray(counts)).replace(position=position)


def filled() -> Recurrent:
    columns = RNG.normal(size=(ROWS, TAPS - 1, HEADS, FEATURES))
    state = RNG.normal(size=(ROWS, HEADS, GROUPS, WIDTH, VALUES))
    return Recurrent(columns=jnp.asarray(columns, jnp.float32), state=jnp.asarray(state, jnp.float32))


def writes(counts: Any) -> Writes:
    real = (np.arange(5) < np.asarray(counts)[:, None])[:, None, None]
    k, u = RNG.normal(size=(ROWS, HEADS, 5, WIDTH)), RNG.normal(size=(ROWS, HEADS, GROUPS, 5, VALUES)) * real[..., None]
    decay = -RNG.exponential(size=(ROWS, HEADS, GROUPS, 5)) * real
    return Writes(*(jnp.asarray(each, jnp.float32) for each in (k, u, decay)))


def test_the_convolution_is_causal_and_remembers_each_row_s_newest_inputs() -> None:
    cache = filled()
    out, after = cache.convolve(jnp.asarray(INPUTS, jnp.float32), WEIGHTS, batch(7, COUNTS, 5))
    columns = np.concatenate([cache.columns, INPUTS], axis=1)
    for row, count in enumerate(COUNTS):
        for place in range(count):
            window = columns[row, place : place + TAPS]
            np.testing.assert_allclose(out[row, place], np.einsum("whf,hfw->hf", window, WEIGHTS), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(after.columns[row], columns[row, count : count + TAPS - 1].astype(np.float32))


@pytest.mark.parametrize("kept", [(0, 0, 0), (3, 1, 0), (5, 2, 0), (9, 9, 9)])
def test_truncation_equals_having_read_fewer_tokens(kept: tuple[int, ...]) -> None:
    cache, change, inputs = filled(), writes(COUNTS), jnp.asarray(INPUTS, jnp.float32)
    _, opened = cache.open().convolve(inputs, WEIGHTS, batch(7, COUNTS, 5))
    after = opened.advance(written(cache.state, change), change).truncate(jnp.asarray(kept) + 7)
    assert type(after) is Recurrent
    for row, (count, most) in enumerate(zip(kept, COUNTS, strict=True)):
        count = min(count, most)
        columns = np.concatenate([cache.columns[row], inputs[row]])[count : count + TAPS - 1]
        np.testing.assert_array_equal(after.columns[row], columns)
        state = np.asarray(cache.state[row])
        for at in range(count):
            outer = np.einsum("hd,hre->hrde", change.k[row, :, at], change.u[row, :, :, at])
            state = np.exp(change.decay[row, :, :, at])[..., None, None] * state + outer
        np.testing.assert_allclose(after.state[row], state, rtol=1e-5, atol=1e-5)


def test_tokens_read_before_the_cache_was_opened_stay() -> None:
    with pytest.raises(ValueError, match="cannot take back tokens that were read before it was opened"):
        filled().open().truncate(jnp.asarray([1, 1, 1]))
    assert not Recurrent.rewinds
