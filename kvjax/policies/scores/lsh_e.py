"""LSH-E: the token whose key points farthest away from the query, by one-bit hashes, leaves before attention."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, UInt32

from kvjax.policies.score import Score
from kvjax.types import New, PyTree, View, check, setting, wide
from pallas_kernels.hamming import distances

if TYPE_CHECKING:
    from kvjax.model import Model

WORD = 32
"""Bits of one stored word."""


@struct.dataclass
class Hamming(Score):
    r"""Hamming distance between hashes of the newest query and of the keys, at every step anew (equations 2, 5, 6).

    .. math::
        h(x) = \mathbb 1[R x \ge 0], \quad R \sim \mathcal N(0, 1)^{bits \times d}, \qquad
        F_t(i) = -\sum_g d_H(h(q_{t,g}), h(k_i))

    R is one matrix per layer and KV head, shared by its keys and all g query heads. Queries and keys are those with
    rotary embeddings. Equation 6 and Algorithm 1 disagree whether q_{t-1} or q_t decides; this is Algorithm 1, q_t.
    The paper does not say which of equal distances leaves: here it is the oldest token. With 16 bits more than half of
    all evictions are such ties, so results depend on this rule.

    Args:
        bits: length of a hash, from 1 to 256; the paper tries 4 to 64 (Table 9) and reports 16. A slot stores
            ceil(bits / 32) words of 4 bytes.
        prompt: `sequential` fills the cache with the first tokens of the prompt and then reads it by Algorithm 1,
            token by token; `one_shot` reads the prompt whole and then keeps the tokens nearest to its last query.
        seed: of the matrices R.
        planes: R of each layer; made by `bind`.
    """

    paper = "LSH-E, arXiv 2412.16187, Algorithm 1"
    compares = True
    numbers_layers = True

    bits: int = setting(16)
    prompt: str = setting("sequential")
    seed: int = setting(0)
    planes: tuple[Float[Array, "h bits d"], ...] | None = None

    def __post_init__(self) -> None:
        check(isinstance(self.bits, int) and 1 <= self.bits <= 256, "bits", self.bits, "a whole number from 1 to 256")
        check(self.prompt in ("sequential", "one_shot"), "prompt", self.prompt, "'sequential' or 'one_shot'")
        check(isinstance(self.seed, int) and 0 <= self.seed < 2**32, "seed", self.seed, "a whole number below 2^32")

    @property
    def prefill_chunk(self) -> int | None:  # type: ignore[override]
        """Algorithm 1 evicts before every token."""
        return 1 if self.prompt == "sequential" else None

    def bind(self, model: Model) -> Hamming:
        """With R for the layers of a model."""
        layers = enumerate(model.config.layer_configs)
        planes = (projections(self.seed, i, layer.kv_heads, self.bits, layer.key_width) for i, layer in layers)
        return dataclasses.replace(self, planes=tuple(planes))

    def _hashes(self, x: Float[Array, "b h n d"], new: New) -> UInt32[Array, "b h n words"]:
        if self.planes is None:
            raise ValueError("lsh_e has no hyperplanes yet: call bind(model), as prefill does.")
        planes = self.planes[new.layer]
        return hashes(planes if new.head is None else planes[new.head], x)

    def slot(self, new: New, state: PyTree) -> tuple[UInt32[Array, "b h t"], ...]:
        """h(k), each of its words in a buffer of its own: numbers of a slot would lie in lanes of 128 on a TPU."""
        return tuple(jnp.moveaxis(self._hashes(new.k, new), -1, 0))

    def code(self, new: New) -> UInt32[Array, "b h g words"]:
        """h(q_t)."""
        return self._hashes(new.last_query, new)

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """F_t = -d_H(h(q_t), H), summed over the query group."""
        return -distances(self.code(new), view.slots.score).astype(jnp.float32)


def projections(seed: int, layer: int, heads: int, bits: int, width: int) -> Float[Array, "h bits d"]:
    """The random hyperplanes R of a layer; float32 whatever the model's dtype, so that hashes do not depend on it."""
    key = jax.random.fold_in(jax.random.key(seed), layer)
    return jax.random.normal(key, (heads, bits, width), jnp.float32)


def hashes(planes: Float[Array, "*h bits d"], x: Float[Array, "*bh n d"]) -> UInt32[Array, "*bh n words"]:
    r"""SimHash :math:`h(x) = \mathbb 1[R x \ge 0]` (equation 2, Charikar 2002), packed.

    Args:
        planes: R; its leading axes broadcast against those of `x`.
        x: vectors, n to each matrix.
    """
    dtype = wide(x.dtype)
    x, planes = x.astype(dtype), planes.astype(dtype)
    # Accelerators would round both factors first, and with them the signs of small numbers.
    projected = jnp.einsum("...nd,...kd->...nk", x, planes, precision=jax.lax.Precision.HIGHEST)
    return pack(projected >= 0)


def pack(bits: Array) -> UInt32[Array, "*n words"]:
    """Bits [... bits], 32 to a word, the first one lowest; what the last word has too many is zero."""
    count = bits.shape[-1]
    words = -(-count // WORD)
    padding = [(0, 0)] * (bits.ndim - 1) + [(0, words * WORD - count)]
    padded = jnp.pad(bits, padding).reshape(*bits.shape[:-1], words, WORD)
    return jnp.sum(padded.astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def unpack(words: UInt32[Array, "*n words"], bits: int) -> Array:
    """The inverse of `pack`: bool [... bits]."""
    spread = words[..., None] >> jnp.arange(WORD, dtype=jnp.uint32) & 1
    return spread.reshape(*words.shape[:-1], -1)[..., :bits].astype(bool)
