"""Random numbers as a pure function of seed, layer, head and position, so no buffer has to store them."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.lax import erf_inv
from jaxtyping import Array, Float, Int, UInt32

GUMBEL_MEAN = 0.5772156649015329
GUMBEL_DEVIATION = math.pi / math.sqrt(6)


def mix(x: UInt32[Array, "*b"]) -> UInt32[Array, "*b"]:
    """Apply the finalizer of MurmurHash3: each input bit flips each output bit half of the time."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def layer_seed(seed: UInt32[Array, "*b"], layer: int | Int[Array, ""]) -> UInt32[Array, "*b"]:
    """Return the seed of a layer: with it, layer 0 draws the numbers that `layer` draws with `seed`."""
    return seed ^ jnp.uint32(layer) * jnp.uint32(0x9E3779B9)


def hashed_bits(
    seed: UInt32[Array, "*#b"],
    layer: int | Int[Array, ""],
    head: UInt32[Array, "*#b"],
    position: UInt32[Array, "*#b"],
) -> UInt32[Array, "*b"]:
    """Return 32 random bits for each seed, layer, head and position."""
    bits = mix(layer_seed(seed, layer))
    bits = mix(bits ^ (head * jnp.uint32(0x7FEB352D) + jnp.uint32(1)))
    return mix(bits ^ (position * jnp.uint32(0x846CA68B) + jnp.uint32(1)))


def uniform(bits: UInt32[Array, "*b"]) -> Float[Array, "*b"]:
    """Return numbers strictly between 0 and 1 from random bits: 23 of them plus a half, exact in float32."""
    return ((bits >> 9).astype(jnp.int32).astype(jnp.float32) + 0.5) / 2**23  # a TPU converts only signed integers


def uniform_at(
    seed: UInt32[Array, " b"],
    layer: int | Int[Array, ""],
    position: Int[Array, "b h c"],
    query: Int[Array, "b t"] | None = None,
    head: Int[Array, "b h"] | None = None,
) -> Float[Array, "b h c"] | Float[Array, "b h t c"]:
    """Return numbers in (0, 1), float32, one for each seed, layer, KV head and position.

    Args:
        query: positions of the queries, if each draws separate numbers.
        head: numbers of the KV heads; None for all of them in order.
    """
    heads = jnp.arange(position.shape[1], dtype=jnp.uint32)[None] if head is None else head.astype(jnp.uint32)
    heads = heads[..., None]
    seeds, positions = seed[:, None, None], position.astype(jnp.uint32)
    if query is not None:
        mixed = mix(seed[:, None] ^ mix(query.astype(jnp.uint32) + jnp.uint32(0x632BE5AB)))
        seeds, heads, positions = mixed[:, None, :, None], heads[..., None], positions[:, :, None]
    return uniform(hashed_bits(seeds, layer, heads, positions))


def gumbel(uniform: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return standard Gumbel noise, of mean 0.5772 and deviation 1.2825, from uniform numbers."""
    return -jnp.log(-jnp.log(uniform))


def gaussian(uniform: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return Gaussian noise with the Gumbel distribution's mean and deviation, from uniform numbers."""
    return GUMBEL_MEAN + GUMBEL_DEVIATION * math.sqrt(2) * erf_inv(2 * uniform - 1)


KINDS = {"gumbel": gumbel, "gaussian": gaussian, "none": jnp.zeros_like}
"""Keyformer's noise functions by name."""
