"""Codes of queries and keys by random hyperplanes (LSH-E, arXiv 2412.16187, equation 2)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from pallas_kernels.attention import pad_to, wide

WORD = 32
"""Bits of one stored word."""


class Hashing(NamedTuple):
    """Hyperplanes, queries and keys from which codes are computed."""

    planes: Float[Array, "*b h bits d"]
    """R of each KV head, shared by all rows or separate for each."""
    queries: Float[Array, "b h g d"]
    keys: Float[Array, "b h t d"]

    def of_queries(self) -> UInt32[Array, "b h g words"]:
        """Return h(q)."""
        return hashes(self.planes, self.queries)

    def of_keys(self) -> tuple[UInt32[Array, "b h t"], ...]:
        """Return h(k), each of its words in a separate array."""
        return tuple(jnp.moveaxis(hashes(self.planes, self.keys), -1, 0))


def hashes(planes: Float[Array, "*h bits d"], x: Float[Array, "*bh n d"]) -> UInt32[Array, "*bh n words"]:
    r"""Return the packed SimHash :math:`h(x) = \mathbb 1[R x \ge 0]` (equation 2, Charikar 2002).

    Args:
        planes: R; its leading axes broadcast against those of `x`.
        x: vectors, n for each matrix.
    """
    dtype = wide(x.dtype)
    x, planes = x.astype(dtype), planes.astype(dtype)
    # Accelerators would round both factors first, which may flip the signs of small numbers.
    projected = jnp.einsum("...nd,...kd->...nk", x, planes, precision=jax.lax.Precision.HIGHEST)
    return pack_bits(projected >= 0)


def pack_bits(bits: Array) -> UInt32[Array, "*n words"]:
    """Pack bits [... bits], 32 to a word, the first one lowest; unused bits of the last word are zero."""
    words = -(-bits.shape[-1] // WORD)
    padded = pad_to(bits, bits.ndim - 1, words * WORD).reshape(*bits.shape[:-1], words, WORD)
    return jnp.sum(padded.astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
