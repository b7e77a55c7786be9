"""Protocol of a layer's cache: what a loop over layers calls, for every kind; and the tokens that a layer reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.pending import Pending
from kvjax.policies.policy import Policy
from kvjax.rope import Turns
from kvjax.types import OF_ROWS, LayerConfig, LayerTokens, TokenBatch


class MixerInput(NamedTuple):
    """Tokens that one layer reads, for its mixer and its cache."""

    reading: TokenBatch
    hidden: Float[Array, "b t width"]
    """Input of the layer's block, before its norm."""
    shape: LayerConfig
    """Attention of the layer."""
    number: int | Int[Array, ""]
    """Index of the layer in the model; an array if layers share a program."""
    policy: Policy
    """Policy as the layer uses it."""
    turns: Turns | None
    """Rotations of queries and keys, if layers share them."""

    def attending(
        self,
        q: Float[Array, "b h g t d"],
        k: Float[Array, "b h t d"],
        v: Float[Array, "b h t e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> LayerTokens:
        """Return the tokens with their queries, keys and values, which are not rotated yet."""
        return self.reading.of_layer(self.shape, self.number, self.hidden, q, k, v, sink_logits)


class LayerCache(struct.PyTreeNode, kw_only=True):
    """State of one layer: an immutable pytree of buffers of fixed shapes. The first axis of every leaf is rows.

    A loop over layers calls `link`, the layer's mixer, `unlink`, and then `close`. Before a block of text it calls
    `grow`. The mixer calls methods of its own kind of cache, such as `attend` of `kvjax.cache.slots.Slots`.
    """

    specs: ClassVar[Any] = OF_ROWS
    """`PartitionSpec` of the arrays on a mesh: one for all of them, or a cache of this kind with specs for arrays."""
    reads: ClassVar[tuple[int, ...]] = ()
    """Indices of earlier layers whose caches this layer reads."""

    undefined: Bool[Array, " b"] | None = None
    """True for rows whose results are meaningless, because a score is NaN; the loop clears it."""

    pending: Pending | None = None
    """Attention statistics of the tokens just read, which have not updated a score yet."""

    @property
    def waits(self) -> bool:
        """True if the cache needs sums over all layers before it is closed."""
        return self.pending is not None and self.pending.over_layers

    def waits_after(self, tokens: MixerInput) -> bool:
        """Return whether a decode step of these tokens, whose contents are not known yet, `waits` for all layers."""
        return False

    def link(self, earlier: Sequence[Any], pool: Any) -> Self:
        """Return the cache with what it borrows while its layer runs.

        Args:
            earlier: caches of the layers before this one.
            pool: memory that several layers share, `Cache.pool`.
        """
        return self

    def unlink(self, pool: Any) -> tuple[Self, Any]:
        """Return the cache without what it borrowed, and the shared memory as it has changed."""
        return self, pool

    def grow(self, slots: int | None = None) -> LayerCache:
        """Return the cache in a form in which all tokens of a block are read before any of them is evicted.

        Args:
            slots: slots per head that a whole prompt leaves, which the policy's plan then allocates; None for a chunk
                or a turn, after which the cache is as large as before.
        """
        return self

    def open(self) -> LayerCache:
        """Return the cache in a form in which known tokens are read that `truncate` may take back."""
        return self

    def truncate(self, length: Int[Array, " b"]) -> LayerCache:
        """Return an `open` cache without the tokens at `length` and later ones; it replaces `close`."""
        raise ValueError(f"a {type(self).__name__} cannot take tokens back; give its class a method truncate.")

    def sum_outputs(
        self, tokens: MixerInput, outputs: Float[Array, "b t width"]
    ) -> tuple[Float[Array, "b t width"], Self]:
        """Sum the outputs of attention over devices, together with what else the cache has to sum."""
        return tokens.shape.spread.over_attention(outputs), self

    def close(self, policy: Policy) -> LayerCache:
        """Return the cache after the last layer that reads it, at its own size."""
        return self

    def unpacked(self) -> LayerCache:
        """Return the cache in buffers, in which a block of text can be read; this one, unless it has pages."""
        return self

    def packed(self, contents: Any) -> LayerCache:
        """Return the cache with the contents of an `unpacked` one."""
        return contents

    def widened(self, like: LayerCache, number: int) -> LayerCache:
        """Return the cache in buffers as large as those of another one; raise a ValueError that names the layer."""
        return self

    def moved(self, space: Any) -> Self:
        """Move what the policy keeps in host memory there, or back to the device."""
        return self

    def of_slots(self, change: Callable[[Array], Array]) -> Self:
        """Apply a function to each array of slots [b h c ...]."""
        return self


Caches = tuple[LayerCache, ...]
"""Caches of all layers."""
