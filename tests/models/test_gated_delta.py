"""The gated delta rule in chunks is that of one token after another, and both are the paper's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.cache.recurrent import written
from kvjax.models import delta_rule
from kvjax.models.delta_rule import DeltaTokens, inverse_of_unit, read_token, read_tokens
from tests.oracles.gated_delta import gated_delta

ROWS, HEADS, GROUPS, WIDTH, VALUES = 2, 2, 2, 5, 3


def drawn(seed: int, count: int, rate: float = 0.1, write: float = 1.0) -> tuple[Any, np.ndarray]:
    """DeltaTokens in NumPy: tokens with keys of length 1 that are alike, and a state before them."""
    rng, heads = np.random.default_rng(seed), (ROWS, HEADS)
    q, k = rng.normal(size=(2, *heads, count, WIDTH))
    k = (k + 1) / np.linalg.norm(k + 1, axis=-1, keepdims=True)
    v = rng.normal(size=(*heads, GROUPS, count, VALUES))
    beta = write * rng.uniform(size=(*heads, GROUPS, count))
    decay = -rate * rng.exponential(size=beta.shape)
    operands: Any = DeltaTokens
    return operands(q, k, v, beta, decay), rng.normal(size=(*heads, GROUPS, WIDTH, VALUES))


def arrays(tokens: Any) -> DeltaTokens:
    return DeltaTokens(*map(jnp.asarray, tokens))


def part(tokens: DeltaTokens, at: int) -> DeltaTokens:
    q, k, v, beta, decay = tokens
    one = slice(at, at + 1)
    return DeltaTokens(q[:, :, one], k[:, :, one], v[..., one, :], beta[..., one], decay[..., one])


@given(
    seed=st.integers(0, 99),
    count=st.integers(2, 150),
    rate=st.sampled_from([0.0, 1e-3, 0.1, 30.0]),
    write=st.sampled_from([1.0, 2.0]),
    segment=st.sampled_from([1, 2, 16]),
)
def test_chunks_equal_the_rule_of_the_paper(seed: int, count: int, rate: float, write: float, segment: int) -> None:
    tokens, state = drawn(seed, count, rate, write)
    expected, last = gated_delta(*tokens, state=state)
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        # Chunks side by side, as on accelerators.
        patch.setattr(delta_rule, "platform_of", lambda _: "cpu" if segment == 1 else "gpu")
        patch.setattr(delta_rule, "SEGMENT", segment)
        reads = read_tokens(arrays(tokens), jnp.asarray(state))
        np.testing.assert_allclose(reads.out, expected, atol=1e-9)
        np.testing.assert_allclose(reads.state, last, atol=1e-9)
        np.testing.assert_allclose(written(jnp.asarray(state), reads.writes), last, atol=1e-9)


def test_tokens_one_by_one_equal_the_rule_of_the_paper(x64: None) -> None:
    tokens, first = drawn(0, 9)
    expected, last = gated_delta(*tokens, state=first)
    state, writes = jnp.asarray(first), list[Any]()
    for at in range(9):
        reads = read_token(part(arrays(tokens), at), state)
        np.testing.assert_allclose(reads.out, expected[..., at : at + 1, :], atol=1e-12)
        state = reads.state
        writes.append(reads.writes)
    np.testing.assert_allclose(state, last, atol=1e-12)
    together = read_tokens(arrays(tokens), jnp.asarray(first)).writes
    for at, one in enumerate(writes):
        np.testing.assert_allclose(together.u[..., at : at + 1, :], one.u, atol=1e-12)


def test_text_of_padding_alone_changes_nothing(x64: None) -> None:
    tokens, state = drawn(1, 70)
    silent = arrays(tokens._replace(beta=0 * tokens.beta, decay=0 * tokens.decay))
    np.testing.assert_allclose(read_tokens(silent, jnp.asarray(state)).state, state, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_inverses_of_triangular_matrices(size: int, x64: None) -> None:
    lower = np.tril(np.random.default_rng(0).normal(size=(3, 2, size, size)), -1) / size
    np.testing.assert_allclose(inverse_of_unit(jnp.asarray(lower)), np.linalg.inv(np.eye(size) + lower), atol=1e-12)


def test_float32_follows_long_texts() -> None:
    tokens, state = drawn(2, 2000, rate=1e-3)
    _, last = gated_delta(*tokens, state=state)
    reads = read_tokens(
        DeltaTokens(*(jnp.asarray(each, jnp.float32) for each in tokens)), jnp.asarray(state, jnp.float32)
    )
    np.testing.assert_allclose(reads.state, last, atol=1e-4)
