"""The cache of a layer with attention: slots of its heads, of which a policy evicts the lowest-ranked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.cache.attention import attend_slots
from kvjax.cache.buffers import as_wide, in_memory
from kvjax.cache.evict import Attended, Victim, entries, ranked, where_read, write_token
from kvjax.cache.fused import FusedStep, may_fuse
from kvjax.cache.keep import allocated, keep_best
from kvjax.cache.known import attend_known
from kvjax.cache.layer import DEVICE as DEVICE
from kvjax.cache.layer import HOST as HOST
from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.cache.layer import SlotCache as SlotCache
from kvjax.cache.layer import Step as Step
from kvjax.cache.pending import Pending
from kvjax.cache.ranks import shrunk
from kvjax.policies.policy import Policy
from kvjax.types import OF_HEADS, OF_SLOTS, Evicted, LayerConfig, LayerTokens, PyTree, TokenBatch, View, setting
from kvjax.utils.fields import values_of
from pallas_kernels.attention import LowRank, Partial, attend, with_sink
from pallas_kernels.op import options_of


class Slots(View, SlotCache, kw_only=True):
    """Slots in buffers [b h c ...], of which each head has equally many."""

    victim: Victim | None = None
    """Slot of each head that the next token takes, if devices share slots and it is known before the layer runs."""

    def evict_and_attend(self, policy: Policy, new: LayerTokens, requests: PyTree, **options: Any) -> Step:
        """Write one token per row into a slot of each head, and attend to all slots, in one kernel if there is one."""
        if new.spread.slots > 1 or not options_of().runs_kernels:
            return super().evict_and_attend(policy, new, requests)
        with jax.named_scope("eviction"):
            slots = self.prepared(policy, new)
            ranking = ranked(policy, slots, new)
        in_two_kernels = functools.partial(super(Slots, slots).evict_and_attend, policy, new, requests, ranking=ranking)
        if not may_fuse(policy, slots, new):
            return in_two_kernels()
        operands = policy.codec.operands(slots, new, room=ranking.rules.limit)
        fused = FusedStep(policy, slots, new, requests, ranking, operands)
        if not fused.supported:
            return in_two_kernels()
        with jax.named_scope("attention"):
            slots, attended, evicted = fused()
            partial = with_sink(attended.partial, new.sink_logits)
        if evicted is None:
            return Step(slots, partial.out, attended.stats)
        assert policy.residual is not None  # only a residual requests the evicted pair
        with jax.named_scope("residual"):
            # Absorbed late, to the same effect: the residual has its own state.
            state, out = policy.residual.step(slots.state.residual, evicted, new, partial)
            return Step(slots.with_state(residual=state), out, attended.stats)

    def prepared(self, policy: Policy, new: LayerTokens) -> Self:
        """Return the slots in which one new token per row can take one slot of each head."""
        slots = shrunk(policy, self, new) if policy.may_shrink else self
        return policy.codec.begin(slots, new)

    def write_token(self, policy: Policy, new: LayerTokens, *, pairs: bool, **options: Any) -> tuple[Self, Evicted]:
        slots = self if "ranking" in options else self.prepared(policy, new)
        return write_token(policy, slots, new, victim=slots.victim, pairs=pairs, **options)

    def attend_token(
        self, policy: Policy, new: LayerTokens, requests: PyTree, evicted: LowRank | Partial | None
    ) -> tuple[Self, Attended]:
        return self, attend_slots(policy, self, new, requests, evicted)

    def close(self, policy: Policy) -> LayerCache:
        return super().close(policy).replace(victim=None)

    def update_slots(self, policy: Policy, requests: PyTree, stats: PyTree, new: LayerTokens) -> Self:
        """Update scores with the requested statistics. If there are none, the kernel has already added them."""
        if stats is None:
            return self
        score = where_read(new, policy.score.update_slot(stats, self, new), self.slots.score)
        return self.replace(slots=self.slots.replace(score=score))

    def with_scores(self, out: Array) -> tuple[Self, Array]:
        """Make the output of attention depend on the layer's updated scores.

        Otherwise statistics of all layers may stay in memory until the end of the step.
        """
        score, out = jax.lax.optimization_barrier((self.slots.score, out))
        return self.replace(slots=self.slots.replace(score=score)), out

    def moved(self, space: Any) -> Self:
        return in_memory(self, space)

    def of_slots(self, change: Callable[[Array], Array]) -> Self:
        kv, position, slots = jax.tree.map(change, (self.kv, self.position, self.slots))
        return self.replace(kv=kv, position=position, slots=slots)

    def appended(self, policy: Policy, new: LayerTokens) -> Self:
        """Return the slots with those of a block of text behind them; no token is evicted."""

        def join(buffer: Array, block: Array) -> Array:
            return jnp.concatenate([buffer, block], axis=2)

        return policy.codec.settle(policy.codec.begin(self, new).with_block(policy, new, join), new)

    def with_block(self, policy: Policy, new: LayerTokens, put: Callable[[Array, Array], Array]) -> Self:
        """Return the slots with a block of text, whose arrays [b h t ...] a function puts into the buffers."""
        position = jnp.broadcast_to(new.position[:, None], new.k.shape[:3]).astype(jnp.int32)
        block = entries(policy, self, new) | {"position": position}
        buffers = {"kv": self.kv, "slots": self.slots, "position": self.position}
        return self.replace(**jax.tree.map(put, buffers, block))

    def widened(self, like: LayerCache, number: int) -> LayerCache:
        return as_wide(like, self, number) if isinstance(like, View) else self

    def grow(self, slots: int | None = None) -> LayerCache:
        size = self.capacity if slots is None else slots
        return GrowingSlots(**values_of(View, self), size=size, is_prompt=slots is not None)

    def open(self) -> OpenSlots:
        return OpenSlots(**values_of(View, self))


class GrowingSlots(Slots, kw_only=True):
    """Slots while a block of text is read: none is evicted before all of its tokens have attended."""

    size: int = setting(0)
    """Slots per head after the block."""
    is_prompt: bool = setting(False)
    """True for a whole prompt, after which the policy's plan allocates slots to heads."""

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "b h g t d"],
        k: Float[Array, "b h t d"],
        v: Float[Array, "b h t e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "b h g t e"], Self]:
        """Append the tokens to the slots, and attend from them to all slots; see `SlotCache.attend`."""
        policy, new = tokens.policy, tokens.attending(q, k, v, sink_logits).rotated(tokens.turns)
        slots = in_memory(self, DEVICE) if policy.score.requires.host_memory else self
        slots = slots.appended(policy, new)
        requests = {
            "score": policy.score.attention_stats(slots, new),
            "plan": policy.plan.attention_stats(slots, new) if self.is_prompt else (),
        }
        evicted = slots.memory_of_evicted(policy, new)
        _, attended = slots.attend_token(policy, new, requests, evicted)
        out = with_sink(attended.partial, new.sink_logits).out
        return out, slots.replace(pending=Pending(requests, attended.stats, new))

    def attend_token(
        self, policy: Policy, new: LayerTokens, requests: PyTree, evicted: LowRank | Partial | None
    ) -> tuple[Self, Attended]:
        return self, attend_slots(policy, self, new, requests, evicted, block=True)

    def sum_outputs(
        self, tokens: MixerInput, outputs: Float[Array, "b t width"]
    ) -> tuple[Float[Array, "b t width"], Self]:
        return tokens.shape.spread.over_attention(outputs), self  # statistics of a block have collectives of their own

    def close(self, policy: Policy) -> LayerCache:
        """Update the score, allocate slots to heads after a prompt, and evict the lowest-ranked tokens."""
        assert self.pending is not None
        requests, stats, new = self.pending
        slots = Slots(**values_of(View, self.updated(policy, Pending(requests["score"], stats["score"], new))))
        if self.is_prompt:
            slots = allocated(policy, slots, stats["plan"], new)
        select_heads = self.is_prompt and policy.plan.sizing.per_head
        kept = keep_best(policy, slots, new, self.size, select_heads=select_heads)
        return kept.slots.replace(undefined=kept.undefined)


class OpenSlots(Slots, kw_only=True):
    """Slots while known tokens are read that may be taken back, under a policy that evicts nothing."""

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "b h g t d"],
        k: Float[Array, "b h t d"],
        v: Float[Array, "b h t e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "b h g t e"], Self]:
        """Write the tokens into empty slots in place, and attend from them to all slots; they are then `pending`."""
        new, policy = tokens.attending(q, k, v, sink_logits).rotated(tokens.turns), tokens.policy
        slots, block = self.written(policy, new), self.with_block(policy, new, lambda _, block: block)
        out = with_sink(attend_known(policy, slots, block, new), sink_logits).out
        return out, slots.replace(pending=Pending((), (), new))

    def attend_token(
        self, policy: Policy, new: LayerTokens, requests: PyTree, evicted: LowRank | Partial | None
    ) -> tuple[Self, Attended]:
        spec = new.config.spec
        mask, bias = spec.mask(new.position, self.position), spec.bias(new.position[:, None], self.position)
        return self, Attended(attend(new.q, self.keys(new), self.values(new), mask, spec, bias)[0], requests)

    def written(self, policy: Policy, new: LayerTokens) -> Self:
        """Return the slots with some known tokens in free ones; those for which there is none are dropped.

        Slots of tokens before the window of all new tokens are free, and taken before empty ones.
        """
        rows, heads, capacity = self.position.shape
        window, live = new.config.window, self.live
        if window is not None:
            live &= self.position > new.position[:, :1, None] - window
        order = jnp.where(live, -1.0, jnp.where(self.live, 1.0, 0.0))  # a CPU sorts only numbers that are no floats
        slot = jax.lax.top_k(order, new.k.shape[2])[1]
        is_free = ~jnp.take_along_axis(live, slot, axis=-1) & new.valid[:, None]
        at = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None], jnp.where(is_free, slot, capacity)
        return self.with_block(policy, new, lambda buffer, block: buffer.at[at].set(block, mode="drop"))

    def truncate(self, length: Int[Array, " b"]) -> Slots:
        """Return the slots without the tokens at `length` and later ones."""
        earlier = self.position < length[:, None, None]
        return Slots(**values_of(View, self.replace(position=jnp.where(earlier, self.position, -1))))


def empty_slots(
    policy: Policy,
    shape: LayerConfig,
    number: int | Int[Array, ""],
    *,
    limit: Int[Array, "b h"],
    slots: int,
    dtype: DTypeLike,
) -> Slots:
    """Create empty slots for a layer.

    Args:
        number: index of the layer.
        limit: slots that each head may use.
        slots: slots of each head in the buffers.
        dtype: dtype of the model.
    """
    rows = len(limit)
    none = TokenBatch.of_text(jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32))
    new = none.ahead(shape, number, dtype)
    state = policy.init_head(new)

    def empty_buffer(leaf: Array) -> Array:
        return jnp.zeros((*limit.shape, slots, *leaf.shape[3:]), leaf.dtype)

    contents = policy.codec.encode(new, state.codec), policy.slots(new, state)
    kv, states = jax.tree.map(empty_buffer, contents)
    return Slots(limit, state, kv, jnp.full((*limit.shape, slots), -1, jnp.int32), states)


Slots.specs = Slots(OF_HEADS, OF_HEADS, OF_SLOTS, OF_SLOTS, OF_SLOTS)
OpenSlots.specs = OpenSlots(OF_HEADS, OF_HEADS, OF_SLOTS, OF_SLOTS, OF_SLOTS)
