"""Dense caches: all heads of a layer have the same number of slots, with one buffer [b h c ...] per stored quantity."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from kvjax.cache import attention, slots
from kvjax.cache.buffers import replace_rows, select_rows
from kvjax.cache.evict import (
    evicted_pairs,
    foreseen,
    hashed_codes,
    ranked,
    replace_slot,
    replace_slot_sharded,
    victims_of,
)
from kvjax.cache.recompute import with_again, without_again
from kvjax.cache.slots import Attended
from kvjax.policies.policy import Policy
from kvjax.policies.score import AccumulatedScore
from kvjax.types import KV, Evicted, LayerConfig, New, PyTree, View
from kvjax.utils.processes import on_host
from pallas_kernels.attention import LowRank, Partial
from pallas_kernels.decode_attention import Sinks
from pallas_kernels.fused_decode import Hashed, Query, Slots, Token, fused_decode
from pallas_kernels.fused_decode import Ranking as Choice
from pallas_kernels.fused_decode import one_pass as step_in_one_pass
from pallas_kernels.operands import Operand


class Dense(struct.PyTreeNode):
    """Caches of a model, layer by layer: an immutable pytree of fixed-shape buffers."""

    layers: tuple[View, ...]
    victims: tuple[slots.Victim, ...] | None = None
    """Victims of each layer during a step, if devices share slots and victims are known before layers run."""

    def put_state(self, layer: int, **state: PyTree) -> Dense:
        """Replace states of some parts for a layer, given by the parts' names."""
        view = self.layers[layer]
        return self.replace_layer(layer, view.replace(state=view.state.replace(**state)))

    def replace_layer(self, layer: int, view: View) -> Dense:
        """Replace the slots of a layer."""
        return self.replace(layers=(*self.layers[:layer], view, *self.layers[layer + 1 :]))

    def alone(self, layer: int) -> Dense:
        """Return a storage of this layer only."""
        return Dense((self.layers[layer],), None if self.victims is None else (self.victims[layer],))

    def of_slots(self, change: Callable[[Array], Array]) -> Dense:
        """Apply a function to each array of slots [b h c ...]."""

        def changed(view: View) -> View:
            held = jax.tree.map(change, (view.kv, view.position, view.slots))
            return view.replace(kv=held[0], position=held[1], slots=held[2])

        return Dense(tuple(map(changed, self.layers)))

    def exchange(self, policy: Policy, layer: int, new: New, *, pairs: bool = False) -> tuple[Dense, Evicted]:
        """Write one new token per row into the lowest-ranked slot of each head; a row of padding changes nothing.

        Return the evicted pairs, too, if `pairs` is True. A residual has already absorbed all evicted pairs but these.
        """
        if policy.may_shrink:
            self = self._shrunk(policy, layer, new)
        view = policy.codec.begin(self.layers[layer], new)
        added = jax.tree.map(lambda leaf: leaf[:, :, 0], _entries(policy, view, new))
        held = (view.position, new.position[:, 0], {"kv": view.kv, "slots": view.slots}, added)
        if new.spread.slots > 1:
            known = self.victims[layer] if self.victims is not None else victims_of([policy], [view], [new])[0]
            taken = replace_slot_sharded(view, new, known, held, pairs=pairs)
        else:
            taken = replace_slot(policy, view, new, held, pairs=pairs or policy.codec.ordered)
        left, taken, position, buffers = taken
        written = view.replace(position=position, **buffers)
        if policy.codec.ordered:
            written = policy.codec.exchanged(written, new, taken["slots"].codec, left)
        kv = taken["kv"] if pairs else None
        return self.replace_layer(layer, written), evicted_pairs(view.state, new, kv, left)

    def exchange_and_attend(
        self, policy: Policy, layer: int, new: New, asks: PyTree
    ) -> tuple[Dense, Attended, Evicted | None] | None:
        """Run `exchange` and `attend` in one kernel that reads keys and values once; return None if impossible.

        Evicted pairs are returned for a residual. Statistics are None if scores include them already.
        """
        # If the codec tracks the order of slots, the positions of keys are known only after the eviction.
        view, spec, codec = self.layers[layer], new.config.spec, policy.codec
        if new.spread.slots > 1 or codec.ordered or not codec.encoded_by_kernels:
            return None

        def inputs() -> tuple[Array, Operand, Operand, Sinks | None, Hashed | None] | None:
            _, found = codec.operands(view, new).with_bias(new, policy.slot_bias(view))
            hashed = hashed_codes(policy.ranking(view, new), view)
            return None if found.places is not None else (found.q[:, :, :, 0], *found.stored, found.sinks, hashed)

        shapes = jax.eval_shape(inputs)
        if shapes is None:
            return None

        def one_pass(scores: Any) -> bool:
            q, k, v, sinks, hashed = shapes
            return step_in_one_pass(Query(q, spec, sinks, scores), k, v, hashed, **new.kernels._asdict())

        if not one_pass(None):
            return None
        own = without_again(asks)
        scores, summed = attention.kernel_scores(own, new)
        if not one_pass(scores):
            return None
        if policy.may_shrink:
            self = self._shrunk(policy, layer, new)
        view = policy.codec.begin(self.layers[layer], new)
        added = {"kv": policy.codec.numbers(new, view.state.codec), "slots": policy.slots(new, view.state)}
        entry = jax.tree.map(lambda leaf: leaf[:, :, 0], added)
        standing, bounds, keep, hashed = ranked(policy, view, new)
        before = view.slots.score
        adds = isinstance(policy.score, AccumulatedScore) and policy.score.only_adds(asks, new)
        adds &= summed and standing is before and before.dtype == jnp.float32
        held = view.slots, entry["slots"]
        apart = adds or hashed is not None
        remembered, begun = (each.replace(score=None) for each in held) if apart else held
        given = policy.codec.operands(view, new, room=bounds.limit)
        done = fused_decode(
            Slots(view.position, *given.stored, remembered),
            Token(new.position[:, 0], entry["kv"].k, entry["kv"].v, begun),
            Choice(standing if hashed is None else hashed, bounds, keep, policy.may_shrink),
            Query(given.q[:, :, :, 0], spec, given.sinks, scores),
            pairs=policy.residual is not None,
            adds=adds,
            rounds=policy.residual is None,
            **new.kernels._asdict(),
        )
        position, k, v, buffers = done.slots
        written = view.replace(position=position, kv=view.kv.replace(k=k, v=v), slots=buffers)
        if done.codes is not None:
            written = written.replace(slots=buffers.replace(score=done.codes))
        if adds:
            written, answers = written.replace(slots=buffers.replace(score=done.attended.scores)), None
        else:
            given = given._replace(k=k, v=v)
            answers = attention.requested_stats(own, done.attended, given, written.position, new, summed=summed)
            answers = with_again(asks, answers, policy.codec, given, written, new)
        evicted = None
        if done.pair is not None:
            evicted = evicted_pairs(view.state, new, KV(*done.pair), done.evicted_position)
        return self.replace_layer(layer, written), Attended(done.attended.partial, answers), evicted

    def append(self, policy: Policy, layer: int, new: New) -> Dense:
        """Append slots for a block of text; no token is evicted."""
        view = policy.codec.begin(self.layers[layer], new)
        position = jnp.broadcast_to(new.position[:, None], new.k.shape[:3]).astype(jnp.int32)
        added = _entries(policy, view, new) | {"position": position}
        held = {"kv": view.kv, "slots": view.slots, "position": view.position}
        joined = jax.tree.map(lambda old, block: jnp.concatenate([old, block], axis=2), held, added)
        return self.replace_layer(layer, policy.codec.settle(view.replace(**joined), new))

    def attend(
        self,
        policy: Policy,
        layer: int,
        new: New,
        asks: PyTree,
        remembered: LowRank | Partial | None,
        *,
        block: bool = False,
    ) -> tuple[Dense, Attended]:
        """Attend from new tokens, which have slots already, to all slots of a layer."""
        view = self.layers[layer]
        given = policy.codec.operands(view, new, block=block)
        if given.k is not new.k:  # a whole text has no slots with a bias yet
            new, given = given.with_bias(new, policy.slot_bias(view))
        attend = attention.attend_block if block else attention.attend_token
        own = without_again(asks)
        partial, answers = attend(given, view, new, own, remembered, policy.selection)
        return self, Attended(partial, with_again(asks, answers, policy.codec, given, view, new))

    def fold(self, policy: Policy, layer: int, asks: PyTree, answers: PyTree, new: New) -> Dense:
        """Update scores with the requested statistics. If there are none, the kernel has already added them."""
        if answers is None:
            return self
        view = self.layers[layer]
        after = slots.where_read(new, policy.score.fold(answers, view, new), view.slots.score)
        return self.replace_layer(layer, view.replace(slots=view.slots.replace(score=after)))

    def with_scores(self, layer: int, out: Array) -> tuple[Dense, Array]:
        """Make the output of attention depend on the layer's updated scores.

        Otherwise statistics of all layers may stay in memory until the end of the step.
        """
        view = self.layers[layer]
        score, out = jax.lax.optimization_barrier((view.slots.score, out))
        return self.replace_layer(layer, view.replace(slots=view.slots.replace(score=score))), out

    def compress(self, policy: Policy, layer: int, new: New, capacity: int) -> tuple[Dense, Bool[Array, "b h c"]]:
        """Keep the best slots of each head in buffers of `capacity` slots; also return a mask of the evicted slots.

        Rows without new tokens keep their slots in place.
        """
        view = self.layers[layer]
        best, kept, leaving = slots.best_slots(policy, view, new, capacity)
        kv, position, states = jax.tree.map(lambda leaf: slots.gather(leaf, best), (view.kv, view.position, view.slots))
        smaller = view.replace(kv=kv, position=jnp.where(kept, position, -1), slots=states)
        return self.replace_layer(layer, policy.codec.settle(smaller, new)), leaving

    def _shrunk(self, policy: Policy, layer: int, new: New) -> Dense:
        """Evict the lowest-ranked slots of rows whose slot limit has just fallen; the new token finds an empty slot."""
        view = self.layers[layer]
        before = jnp.maximum(new.read - 1, new.prompt_length)
        fewer = slots.slots_at(policy, view.limit, new) < slots.slots_at(policy, view.limit, new, before)
        fewer &= new.valid[:, :1]

        # The branch returns only masks and the order of slots: XLA would copy a returned cache at every step.
        def losing() -> Any:
            leaving = slots.best_slots(policy, view, new, view.capacity * new.spread.slots, coming=1)[2]
            leaving &= fewer[..., None]
            after = policy.codec.settle(view.replace(position=jnp.where(leaving, -1, view.position)), new)
            return leaving, after.slots.codec, after.state.codec

        def same() -> Any:
            return jnp.zeros(view.position.shape, bool), view.slots.codec, view.state.codec

        leaving, queue, known = jax.lax.cond(fewer.any(), losing, same)
        state = view.state.replace(codec=known)
        if (residual := policy.residual) is not None:
            folded = functools.partial(slots.fold_evicted, residual, view, new, leaving)
            state = state.replace(residual=jax.lax.cond(fewer.any(), folded, lambda: state.residual))
        position = jnp.where(leaving, -1, view.position)
        return self.replace_layer(
            layer, view.replace(position=position, slots=view.slots.replace(codec=queue), state=state)
        )

    def open(self, policy: Policy, configs: Sequence[LayerConfig], ahead: Callable[[int], New]) -> Dense:
        """Prepare steps over all layers; find all victims if devices shard the slots and no layer has to run first.

        `ahead` gives the tokens of a layer, with valid positions and shapes but without contents.
        """
        if configs[0].spread.slots == 1 or policy.may_shrink or policy.score.requires.host_memory:
            return self
        tokens = [ahead(index) for index in range(len(configs))]
        policies = [policy.layer(index) for index in range(len(configs))]
        several = tokens[0].position.shape[1] > 1  # the second one's victims depend on the first one
        if several or not foreseen(policies, self.layers, tokens):
            return self
        return self.replace(victims=victims_of(policies, self.layers, tokens))

    def close(self) -> Dense:
        """Drop the victims at the end of a step."""
        return self.replace(victims=None)

    def unpack(self) -> Dense:
        """Return all layers as dense buffers, here unchanged."""
        return self

    def pack(self, dense: Dense) -> Dense:
        """Return a storage with the slots of an `unpack`ed one."""
        return dense

    def moved(self, layer: int, space: Any) -> Dense:
        """Move a layer's score state and protection mask to host or device memory."""
        view = self.layers[layer]
        score, mask, known = jax.tree.map(
            lambda leaf: jax.device_put(leaf, space), (view.slots.score, view.slots.protection, view.state.score)
        )
        remembered = view.slots.replace(score=score, protection=mask)
        return self.replace_layer(layer, view.replace(slots=remembered, state=view.state.replace(score=known)))

    def take(self, index: Int[np.ndarray, " m"] | Int[Array, " m"]) -> Dense:
        """Select rows, in any order."""
        return select_rows(self, index)

    def put(self, index: Int[np.ndarray, " m"], rows: Dense) -> Dense:
        """Replace some rows; buffers may be larger than those of `rows`."""
        return Dense(replace_rows(self.layers, index, rows.layers))

    def stored_positions(self) -> tuple[Int[Array, "b h c"], ...]:
        """Return positions as stored, for collection inside a loop."""
        return tuple(view.position for view in self.layers)

    def positions(self, stored: Any = None) -> list[np.ndarray]:
        """Return positions [b h c] by layer on the host, -1 in empty slots; `stored` are those of an earlier step."""
        return [on_host(layer) for layer in (self.stored_positions() if stored is None else stored)]


def _entries(policy: Policy, view: View, new: New) -> dict[str, PyTree]:
    """Return what new tokens store in their slots, except positions: leaves [b h t ...]."""
    return {"kv": policy.codec.encode(new, view.state.codec), "slots": policy.slots(new, view.state)}
