"""Protocol of a layer's cache: what a loop over layers calls, for every kind, and mixers for those with slots."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.evict import Attended, where_read
from kvjax.cache.pending import Pending
from kvjax.policies.policy import Policy
from kvjax.policies.score import takes_attention
from kvjax.policies.stats import flatten_requests, of_own_heads, sums_over
from kvjax.rope import Turns
from kvjax.types import OF_ROWS, Evicted, Heads, LayerConfig, LayerTokens, PyTree, TokenBatch
from pallas_kernels.attention import LowRank, Partial, with_sink

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


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

    kind: ClassVar[str] = "slots"
    """Name under which the bytes of such caches are reported."""
    specs: ClassVar[Any] = OF_ROWS
    """`PartitionSpec` of the arrays on a mesh: one for all of them, or a cache of this kind with specs for arrays."""
    rewinds: ClassVar[bool] = True
    """False if `truncate` takes back only tokens that were read while the cache was `open`."""
    undefined: Bool[Array, " b"] | None = None
    """True for rows whose results are meaningless, because a score is NaN; the loop clears it."""

    pending: Pending | None = None
    """Attention statistics of the tokens just read, which have not updated a score yet."""

    @property
    def reads(self) -> tuple[int, ...]:
        """Indices of earlier layers whose caches this layer reads."""
        return ()

    @property
    def waits(self) -> bool:
        """True if the cache needs sums over all layers before it is closed."""
        return self.pending is not None and self.pending.over_layers

    def waits_after(self, tokens: MixerInput) -> bool:
        """Return whether a token has to run through all layers before the next one is read.

        Args:
            tokens: a decode step, whose contents are not known yet.
        """
        return False

    def link(self, earlier: Sequence[Any], pool: Any) -> Self:
        """Return the cache with what it borrows while its layer runs.

        Args:
            earlier: caches of the layers before this one, which have read the same tokens and are not closed if this
                layer `reads` them.
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


class Step(NamedTuple):
    """One token per row in a layer's cache."""

    cache: Any
    out: Float[Array, "b h g 1 e"]
    """Attention over slots, evicted pairs and the sink."""
    stats: Any
    """Statistics that the policy requested, in the form of the kind of cache; None if scores include them."""


class SlotCache(Heads, LayerCache):
    """Cache whose slots a policy evicts, in buffers or in pages."""

    def waits_after(self, tokens: MixerInput) -> bool:
        score, cache = tokens.policy.score, self
        if score.requires.host_memory:
            cache = self.moved(DEVICE)
        new = tokens.reading.ahead(tokens.shape, tokens.number, tokens.hidden.dtype)
        return sums_over(score.attention_stats(cache, new), "model")

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "b h g t d"],
        k: Float[Array, "b h t d"],
        v: Float[Array, "b h t e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "b h g t e"], Self]:
        """Attend from tokens to the slots, in which they get a place.

        Args:
            tokens: the tokens, of which each takes the slot that ranks lowest once those before it have one.
            q: queries before RoPE, as keys.
            sink_logits: logits of learned sinks in the softmax; None for a layer without sinks.
        """
        new = tokens.attending(q, k, v, sink_logits).rotated(tokens.turns)
        return self.step(tokens.policy, new) if q.shape[3] == 1 else self.steps(tokens.policy, new)

    def attend_only(
        self, tokens: MixerInput, q: Float[Array, "b h g t d"], sink_logits: Float[Array, "h g"] | None
    ) -> Float[Array, "b h g t e"]:
        """Attend from the queries of a later layer to the slots, which stay as they are.

        Args:
            tokens: the tokens that were read last, in the later layer; or the newest one of each row.
            q: queries before RoPE.
        """
        shape, policy, reading = tokens.shape, tokens.policy, tokens.reading
        cache = self.moved(DEVICE) if policy.score.requires.host_memory else self
        own = reading.ahead(shape, tokens.number, q.dtype) if self.pending is None else self.pending.new
        new = tokens.attending(q, own.k, own.v, sink_logits)
        if shape.rope is not None:
            turns = tokens.turns or reading.turns(shape.rope, q.dtype)
            new = new.replace(q=shape.rotated((q,), turns)[0])
        evicted = cache.memory_of_evicted(policy, new)
        _, attended = cache.attend_token(policy, new, (), evicted)
        return with_sink(attended.partial, sink_logits).out

    def step(self, policy: Policy, new: LayerTokens, *, alone: bool = False) -> tuple[Float[Array, "b h g 1 e"], Self]:
        """Give one token per row a slot, attend from it, and update the score; a row of padding changes nothing.

        `alone` is True if the caller combines no statistics of devices, so that they need a collective of their own.
        Statistics that have to be summed over devices or layers before they update the score are left in `pending`.
        """
        cache = self.moved(DEVICE) if policy.score.requires.host_memory else self
        requests = policy.score.attention_stats(cache, new)
        # If output weights also sum over slots, statistics of heads need a collective of their own.
        if not alone and new.spread.heads > 1 and new.spread.outputs == 1:
            requests = of_own_heads(requests)
        cache, out, stats = cache.evict_and_attend(policy, new, requests)
        pending = Pending(requests, stats, new)
        if sums_over(requests, "model", "device"):
            return out, cache.replace(pending=pending)
        cache = cache.updated(policy, pending)
        if flatten_requests(requests)[0]:
            cache, out = cache.with_scores(out)
        return out, cache.moved(HOST) if policy.score.requires.host_memory else cache

    def steps(self, policy: Policy, new: LayerTokens) -> tuple[Float[Array, "b h g t e"], Self]:
        """Run a `step` for each of some known tokens, one after another.

        None of the statistics that the policy requests is a sum over layers.
        """

        def one(i: Int[Array, ""], carry: tuple[Any, Array]) -> tuple[Any, Array]:
            cache, out = carry
            attended, cache = cache.step(policy, new.part(i, 1), alone=True)
            return cache, jax.lax.dynamic_update_slice_in_dim(out, attended.astype(out.dtype), i, axis=3)

        out = jnp.zeros((*new.q.shape[:4], new.v.shape[-1]), new.v.dtype)
        cache, out = jax.lax.fori_loop(0, new.counts.max(), one, (self, out))
        return out, cache

    def sum_outputs(
        self, tokens: MixerInput, outputs: Float[Array, "b t width"]
    ) -> tuple[Float[Array, "b t width"], Self]:
        """Sum output projections over devices; means over the heads of a layer, if requested, share the collective."""
        pending, spread = self.pending, tokens.shape.spread
        if pending is None or not sums_over(pending.requests, "device"):
            return super().sum_outputs(tokens, outputs)
        requests, tree = flatten_requests(pending.requests)
        stats = tree.flatten_up_to(pending.stats)
        means = [place for place, request in enumerate(requests) if getattr(request, "over", None) == "device"]
        outputs, sums = spread.over_attention_and_heads(outputs, [stats[place] for place in means])
        for place, mean in zip(means, sums, strict=True):
            stats[place] = mean
        return outputs, self.updated(tokens.policy, pending._replace(stats=tree.unflatten(stats)))

    def close(self, policy: Policy) -> LayerCache:
        """Update the score with the statistics that had to wait."""
        return self if self.pending is None else self.updated(policy, self.pending)

    def updated(self, policy: Policy, pending: Pending) -> Self:
        """Return the cache with a score that is updated after attention."""
        requests, stats, new = pending
        cache = self.replace(pending=None)
        if requests is None or not (flatten_requests(requests)[0] or takes_attention(type(policy.score))):
            return cache
        with jax.named_scope("scores"):
            state = policy.score.update_head(cache, new)
            if not policy.score.requires.keeps_idle_rows:
                state = where_read(new, state, cache.state.score)
            cache = cache.update_slots(policy, requests, stats, new)
        return cache if state is None else cache.with_state(score=state)

    def with_state(self, **state: PyTree) -> Self:
        """Replace the states of some parts, given by the parts' names."""
        return self.replace(state=self.state.replace(**state))

    def memory_of_evicted(self, policy: Policy, new: LayerTokens) -> LowRank | Partial | None:
        """Return the attention of the new queries to evicted pairs, as the residual has it; None without a residual."""
        with jax.named_scope("residual"):
            return None if policy.residual is None else policy.residual.share(self.state.residual, new)

    def write(self, policy: Policy, new: LayerTokens, **options: Any) -> tuple[Self, Evicted]:
        """Write one token per row into a slot of each head, and let the residual absorb the evicted pairs.

        Return the evicted pairs, too. Without a residual they are empty, unless the option `pairs` is True.
        """
        with jax.named_scope("eviction"):
            options["pairs"] = options.get("pairs", False) or policy.residual is not None
            cache, evicted = self.write_token(policy, new, **options)
        if policy.residual is None:
            return cache, evicted
        with jax.named_scope("residual"):
            return cache.with_state(residual=policy.residual.absorb(cache.state.residual, evicted)), evicted

    def evict_and_attend(self, policy: Policy, new: LayerTokens, requests: PyTree, **options: Any) -> Step:
        """Write one token per row into a slot of each head, and attend to all slots, in two kernels."""
        cache, _ = self.write(policy, new, **options)
        evicted = cache.memory_of_evicted(policy, new)
        with jax.named_scope("attention"):
            cache, attended = cache.attend_token(policy, new, requests, evicted)
            return Step(cache, with_sink(attended.partial, new.sink_logits).out, attended.stats)

    @abc.abstractmethod
    def write_token(self, policy: Policy, new: LayerTokens, *, pairs: bool, **options: Any) -> tuple[Self, Evicted]:
        """Write one token per row into a slot of each head; return the evicted pairs, too, if `pairs` is True."""

    @abc.abstractmethod
    def attend_token(
        self, policy: Policy, new: LayerTokens, requests: PyTree, evicted: LowRank | Partial | None
    ) -> tuple[Self, Attended]:
        """Attend from the tokens that were read last, which have slots, to all slots and to evicted pairs."""

    @abc.abstractmethod
    def update_slots(self, policy: Policy, requests: PyTree, stats: Any, new: LayerTokens) -> Self:
        """Update the score of each slot with the requested statistics."""

    def with_scores(self, out: Array) -> tuple[Self, Array]:
        """Return the cache and the output of attention in a form that makes the output depend on the scores."""
        return self, out
