"""The cache of a layer whose prompts are in host memory, from which it copies them to the device while it runs."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.attention import attend_slots
from kvjax.cache.buffers import as_wide
from kvjax.cache.known import attend_earlier, attend_known
from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.cache.slots import DEVICE, HOST, GrowingSlots, OpenSlots, Slots, empty_slots
from kvjax.policies.policy import Policy
from kvjax.types import KV, LayerTokens, Parts, View, wide
from kvjax.utils.fields import values_of
from pallas_kernels.attention import Partial, merge, with_sink


class HostSlots(OpenSlots, kw_only=True):
    """Slots of the tokens after a prompt, and its keys and values in host memory; no token is evicted.

    `kv`, `position` and `slots` are those of the later tokens, which are written into empty slots. The part in host
    memory never changes.
    """

    prompt: KV
    """Keys and values of the prompt [b h p d], in host memory."""
    prompt_position: Int[Array, "b h p"]
    """Position of each token of the prompt; -1 for padding."""

    @staticmethod
    def of(slots: Slots, prompt: KV, prompt_position: Int[Array, "b h p"]) -> HostSlots:
        """Return slots for later tokens together with those of a prompt."""
        of_host = jax.tree.map(lambda leaf: jax.device_put(leaf, HOST), prompt)
        return HostSlots(**values_of(View, slots), prompt=of_host, prompt_position=prompt_position)

    @staticmethod
    def empty(slots: Slots) -> HostSlots:
        """Return empty slots for later tokens, without a prompt."""
        prompt, position = jax.tree.map(lambda leaf: leaf[:, :, :0], (slots.kv, slots.position))
        return HostSlots.of(slots, prompt, position)

    @property
    def all_positions(self) -> Int[Array, "b h n"]:
        """Positions of the prompt and of later tokens."""
        return jnp.concatenate([self.prompt_position, self.position], axis=2)

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "b h g t d"],
        k: Float[Array, "b h t d"],
        v: Float[Array, "b h t e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "b h g t e"], Self]:
        """Write the tokens into empty slots, and attend from them to these slots and to the prompt."""
        policy, new = tokens.policy, tokens.attending(q, k, v, sink_logits).rotated(tokens.turns)
        slots = policy.codec.begin(self, new)
        after = slots.written(policy, new)
        none = jnp.zeros((*q.shape[:4], v.shape[-1]), wide(q.dtype)), jnp.full(q.shape[:4], -jnp.inf, wide(q.dtype))
        # XLA starts a copy to the device as early as it can, but none of a branch before the branch. Without branches,
        # a program would begin with the copies of all layers.
        partial = jax.lax.cond(new.valid.any(), lambda: slots.attend_all(policy, after, new), lambda: Partial(*none))
        return with_sink(partial, sink_logits).out, after

    def attend_all(self, policy: Policy, after: View, new: LayerTokens) -> Partial:
        """Attend from new tokens, which have slots in `after`, to all tokens, with a copy of the prompt."""
        block = self.with_block(policy, new, lambda _, block: block)
        prompt = self.view_of(jax.tree.map(lambda leaf: jax.device_put(leaf, DEVICE), self.prompt))
        if new.given:  # a turn attends as under any policy: to all earlier slots with its own behind them
            parts = [{"kv": part.kv, "position": part.position} for part in (prompt, self, block)]
            joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=2), *parts)
            return attend_slots(policy, prompt.replace(**joined), new, (), None, block=True).partial
        partial = attend_known(policy, after, block, new)
        return merge(partial, attend_earlier(policy, prompt, new)) if prompt.capacity else partial

    def view_of(self, prompt: KV) -> View:
        """Return the slots of the prompt, with keys and values in the memory of `prompt`."""
        return View(self.limit, self.state, prompt, self.prompt_position, Parts())

    def open(self) -> Self:
        return self

    def truncate(self, length: Int[Array, " b"]) -> Self:
        """Return the slots without the tokens at `length` and later ones."""
        both = self.position, self.prompt_position
        later, prompt = (jnp.where(position < length[:, None, None], position, -1) for position in both)
        return self.replace(position=later, prompt_position=prompt)

    def grow(self, slots: int | None = None) -> LayerCache:
        return self if slots is None else HostPrompt(**values_of(View, self), size=slots, is_prompt=True)

    def widened(self, like: LayerCache, number: int) -> LayerCache:
        assert isinstance(like, HostSlots)
        prompt = as_wide(like.view_of(like.prompt), self.view_of(self.prompt), number)
        return HostSlots.of(as_wide(like, self, number), prompt.kv, prompt.position)


class HostPrompt(GrowingSlots, kw_only=True):
    """Slots of a layer while a whole prompt is read, which then moves to host memory."""

    def close(self, policy: Policy) -> LayerCache:
        """Move the prompt to host memory, and allocate empty slots for later tokens."""
        later = self.size - self.capacity

        def empty(leaf: Array) -> Array:
            return jnp.zeros((*leaf.shape[:2], later, *leaf.shape[3:]), leaf.dtype)

        kv, slots = jax.tree.map(empty, (self.kv, self.slots))
        free = Slots(self.limit, self.state, kv, empty(self.position) - 1, slots)
        return HostSlots.of(free, self.kv, self.position)


def new_slots(tokens: MixerInput, limit: Int[Array, "b h"], slots: int) -> Slots:
    """Return empty slots for a layer with attention, with prompts in host memory if its policy keeps them there.

    The arguments are those of `kvjax.models.decoder.Mixer.init_cache`.
    """
    policy, shape, dtype = tokens.policy, tokens.shape, tokens.hidden.dtype
    empty = empty_slots(policy, shape, tokens.number, limit=limit, slots=slots, dtype=dtype)
    return HostSlots.empty(empty) if policy.plan.sizing.in_host_memory(shape) else empty
