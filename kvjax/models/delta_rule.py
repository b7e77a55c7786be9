"""The gated delta rule: one token after another, or blocks of text by products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache.recurrent import Writes
from pallas_kernels.op import platform_of

CHUNK = 64
"""Most tokens of a chunk, which is read by products of matrices: a power of two."""
SEGMENT = 16
"""Most chunks whose matrices are made together, except on a CPU, which is fastest with one after another."""


class DeltaTokens(NamedTuple):
    """Tokens as the rule reads them: `r` value heads share each of `h` key heads."""

    q: Float[Array, "b h t d"]
    k: Float[Array, "b h t d"]
    v: Float[Array, "b h r t e"]
    beta: Float[Array, "b h r t"]
    """How much of each value is written; 0 for padding."""
    decay: Float[Array, "b h r t"]
    """Logarithm of the factor of the state at each token, at most 0; 0 for padding."""


class Reads(NamedTuple):
    """What tokens read from a state, and the state after them."""

    out: Float[Array, "b h r t e"]
    state: Float[Array, "b h r d e"]
    writes: Writes


def read_token(tokens: DeltaTokens, state: Float[Array, "b h r d e"]) -> Reads:
    r"""Read one token per row.

    .. math:: S_t = e^{g_t} S_{t-1} + k_t u_t^\top, \quad u_t = \beta_t (v_t - e^{g_t} S_{t-1}^\top k_t), \quad
        o_t = S_t^\top q_t
    """
    q, k = tokens.q[:, :, 0], tokens.k[:, :, 0]
    state = state * jnp.exp(tokens.decay)[..., None]
    error = tokens.v[..., 0, :] - jnp.einsum("bhrde,bhd->bhre", state, k, precision="highest")
    u = tokens.beta * error
    state = state + jnp.einsum("bhd,bhre->bhrde", k, u, precision="highest")
    out = jnp.einsum("bhrde,bhd->bhre", state, q, precision="highest")
    return Reads(out[..., None, :], state, Writes(tokens.k, u[..., None, :], tokens.decay))


def read_tokens(tokens: DeltaTokens, state: Float[Array, "b h r d e"]) -> Reads:
    r"""Read a block of text in chunks; the result is that of `read_token` for one token after another.

    With :math:`G` the sums of :math:`g` within a chunk and :math:`\Gamma_{ij} = e^{G_i - G_j}` for :math:`j \le i`, the
    vectors that a chunk writes follow from its first state (Yang et al. 2025, section 3.3, the WY form):

    .. math:: U = T (\beta V - (\beta e^G K) S), \quad T = (I + \mathrm{tril}(\beta K K^\top \circ \Gamma, -1))^{-1}

        O = (e^G Q) S + (Q K^\top \circ \Gamma) U, \quad S' = e^{G_C} S + (e^{G_C - G} K)^\top U
    """
    count = tokens.q.shape[2]
    size = min(CHUNK, 1 << (count - 1).bit_length())
    segments = -(-count // (size * (1 if platform_of(None) == "cpu" else SEGMENT)))
    chunks = -(-count // (size * segments))

    def split(x: Array, axis: int) -> Array:
        # The axis of tokens in segments, at the front, and in chunks.
        x = jnp.pad(x, [(0, (segments * chunks * size - count) * (at == axis)) for at in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], segments, chunks, size, *x.shape[axis + 1 :]), axis, 0)

    def join(x: Array, axis: int) -> Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 3 :])[(slice(None),) * axis + (slice(count),)]

    parts = DeltaTokens(*map(split, tokens, (2, 2, 3, 3, 3)))
    state, (out, u) = jax.lax.scan(_read_segment, state, parts)
    return Reads(join(out, 3), state, Writes(tokens.k, join(u, 3), tokens.decay))


def _read_segment(state: Float[Array, "b h r d e"], tokens: DeltaTokens) -> tuple[Array, tuple[Array, Array]]:
    # Tokens have axes [b h (r) n c ...] for n chunks of c tokens.
    q, k, v, beta, decay = tokens
    total = jnp.cumsum(decay, axis=-1)
    c = q.shape[-2]
    causal = jnp.tril(jnp.ones((c, c), bool))
    gamma = jnp.exp(jnp.where(causal, total[..., :, None] - total[..., None, :], -jnp.inf))
    keys = jnp.einsum("bhncd,bhnmd->bhncm", k, k, precision="highest")[:, :, None]
    weights = jnp.einsum("bhncd,bhnmd->bhncm", q, k, precision="highest")[:, :, None] * gamma
    inverse = inverse_of_unit(jnp.where(causal & ~jnp.eye(c, dtype=bool), beta[..., None] * keys * gamma, 0))
    values = jnp.einsum("bhrncm,bhrnme->bhrnce", inverse, beta[..., None] * v, precision="highest")
    grown = (beta * jnp.exp(total))[..., None] * k[:, :, None]
    readers = jnp.einsum("bhrncm,bhrnmd->bhrncd", inverse, grown, precision="highest")
    queries = jnp.exp(total)[..., None] * q[:, :, None]
    last = total[..., -1:]
    later = jnp.exp(last - total)[..., None] * k[:, :, None]

    def read_chunk(state: Array, chunk: Sequence[Array]) -> tuple[Array, tuple[Array, Array]]:
        values, readers, queries, weights, later, last = chunk
        u = values - jnp.einsum("bhrcd,bhrde->bhrce", readers, state, precision="highest")
        out = jnp.einsum("bhrcd,bhrde->bhrce", queries, state, precision="highest")
        out = out + jnp.einsum("bhrcm,bhrme->bhrce", weights, u, precision="highest")
        state = jnp.exp(last)[..., None] * state + jnp.einsum("bhrcd,bhrce->bhrde", later, u, precision="highest")
        return state, (out, u)

    chunks = [jnp.moveaxis(x, 3, 0) for x in (values, readers, queries, weights, later, last)]
    state, results = jax.lax.scan(read_chunk, state, chunks)
    out, u = (jnp.moveaxis(x, 0, 3) for x in results)
    return state, (out, u)


def inverse_of_unit(lower: Float[Array, "*b c c"]) -> Float[Array, "*b c c"]:
    r"""Return :math:`(I + L)^{-1}` of strictly lower triangular matrices, whose size is a power of two.

    Inverses of diagonal blocks of twice the size follow from two products: solvers of triangular systems take about ten
    times as long for many small matrices on a CPU, and powers of L would lose digits.
    """
    *lead, c, _ = lower.shape
    inverse, size = jnp.ones((*lead, c, 1, 1), lower.dtype), 1
    while size < c:
        count = c // (2 * size)
        blocks = lower.reshape(*lead, count, 2, size, count, 2, size)[..., 1, :, :, 0, :]
        corner = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        first, second = jnp.moveaxis(inverse.reshape(*lead, count, 2, size, size), -3, 0)
        below = -jnp.matmul(jnp.matmul(second, corner, precision="highest"), first, precision="highest")
        top, bottom = jnp.concatenate([first, jnp.zeros_like(first)], -1), jnp.concatenate([below, second], -1)
        inverse, size = jnp.concatenate([top, bottom], -2), 2 * size
    return inverse[..., 0, :, :]
