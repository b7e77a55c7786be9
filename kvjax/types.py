"""What travels between models, caches and policies."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from kvjax.rope import Rope
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.attention import Partial as Partial
from pallas_kernels.attention import wide as wide

PyTree = Any


def setting(default: Any) -> Any:
    """A hyperparameter of a policy: part of the compiled program, not of the data."""
    return struct.field(pytree_node=False, default=default)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What a layer's attention is like: all that caches, policies and the engine know of a model's layers.

    Args:
        kv_heads: heads of keys and values.
        groups: query heads that share one of them.
        key_width: numbers of a query or a key.
        value_width: numbers of a value.
        rope: how queries and keys are rotated; None for not at all.
        scale: of the products of queries and keys.
        soft_cap: bound on the logits; None for none.
        window: newest tokens that a query sees, itself included; None for all of them.
        slopes: ALiBi's of each query head, by KV head [kv_heads][groups]; None for none.
    """

    kv_heads: int
    groups: int
    key_width: int
    value_width: int
    rope: Rope | None
    scale: float
    soft_cap: float | None = None
    window: int | None = None
    slopes: tuple[tuple[float, ...], ...] | None = None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.groups

    @property
    def spec(self) -> AttentionSpec:
        """The same, as operations take it."""
        slopes = None if self.slopes is None else jnp.asarray(self.slopes)
        return AttentionSpec(self.scale, self.soft_cap, self.window, slopes)


class NewTokens(struct.PyTreeNode):
    """Tokens that one layer reads: a block of the prompt, or the one token of a decode step.

    Queries and keys are rotated by their original positions whatever the cache stores.
    """

    q: Float[Array, "b h g t d"]
    k: Float[Array, "b h t d"]
    v: Float[Array, "b h t d"]
    position: Int[Array, "b t"]
    """Position in the row's own text; -1 marks padding."""
    token: Int[Array, "b t"]
    prompt_length: Int[Array, " b"]
    """Tokens of the row's prompt."""
    read: Int[Array, " b"]
    """Tokens of the row read once all of this call's tokens are: a chunk's end, or the prompt's."""
    horizon: Int[Array, " b"]
    """Tokens that are going to be generated."""
    seed: UInt32[Array, " b"]
    """The row's randomness: numbers drawn from it depend on layer, head and position, on nothing else."""
    layer: int = setting(0)
    head: Int[Array, "b h"] | None = None
    """Which KV heads these are; None for all of them in order."""

    @property
    def valid(self) -> Array:
        """Which tokens are text and not padding [b t]."""
        return self.position >= 0

    @property
    def newest(self) -> Int[Array, " b"]:
        """Position of the row's newest token."""
        return self.read - 1

    @property
    def last_query(self) -> Float[Array, "b h g d"]:
        """The newest token's query; zeros for a row that has no text here."""
        newest = self.position == self.newest[:, None]
        return jnp.einsum("bhgtd,bt->bhgd", self.q, newest.astype(self.q.dtype))


class Weighing(struct.PyTreeNode):
    """How a policy sums up the attention that each key of a prompt gets."""

    weights: Float[Array, "b #h t"] | None = None
    """How much each query counts; None for once each."""
    noise: Float[Array, "b h c"] | None = None
    """Added to the logits before a second softmax, the one that is summed."""
    tau: float = setting(1.0)
    """Temperature of that softmax."""


class KV(struct.PyTreeNode):
    """What the cache stores of each token: key and value [b h c d]."""

    k: Float[Array, "b h c d"]
    v: Float[Array, "b h c d"]


class Evicted(struct.PyTreeNode):
    """Pairs on their way out of the cache; keys rotated by their original positions, `leaving` masks the real ones."""

    k: Float[Array, "b h m d"]
    v: Float[Array, "b h m d"]
    leaving: Array
    """bool [b h m]"""
    layer: int = setting(0)


class LayerCache(struct.PyTreeNode):
    """The cache of one layer: fixed-shape buffers, in no order."""

    kv: KV
    position: Int[Array, "b h c"]
    """Original position of the token in each slot; -1 = empty."""
    keep: Array | None
    """bool [b h c], tokens protected for what they are; None where the policy protects no token ids."""
    order: Int[Array, "b h c"] | None
    """How many live slots are older, where keys are rotated by it; else None."""
    stats: PyTree
    """What the policy remembers of each slot: arrays [b h c ...]."""
    state: PyTree
    """What the policy remembers of the layer."""
    limit: Int[Array, "b h"]
    """Slots that each head may use, at most c."""
    sinks: Float[Array, "b h s d"] | None = None
    """Unrotated keys of the first tokens, where `kvjax.codec.SlidingPositions` needs them; else None."""

    @property
    def capacity(self) -> int:
        """Slots per head in the buffers."""
        return self.position.shape[-1]
