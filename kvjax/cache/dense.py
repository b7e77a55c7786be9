"""Dense caches: all heads of a layer have the same number of slots, with one buffer [b h c ...] per stored quantity."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from kvjax.cache import attention, slots
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
from kvjax.policies.quantizer import Codec
from kvjax.policies.selection import Selection
from kvjax.types import KV, Evicted, Heads, LayerConfig, New, Parts, PyTree, View
from kvjax.utils.processes import on_host
from pallas_kernels.attention import LowRank, Partial
from pallas_kernels.decode_attention import Sinks
from pallas_kernels.decode_step import Hashed, decode_step
from pallas_kernels.decode_step import one_pass as step_in_one_pass
from pallas_kernels.operands import Operand


class Stepped(NamedTuple):
    """Result of a kernel that evicts and attends in one pass."""

    partial: Partial
    """Attention over the slots."""
    answers: PyTree
    """Attention statistics; None if the scores include them already."""
    evicted: Evicted | None
    """Evicted pairs, if requested."""


class Dense(struct.PyTreeNode):
    """Caches of a model, layer by layer: an immutable pytree of fixed-shape buffers."""

    layers: tuple[View, ...]
    victims: tuple[slots.Victim, ...] | None = None
    """Victims of each layer during a step, if devices share slots and victims are known before layers run."""

    def heads(self, layer: int) -> Heads:
        """Return the limits and states of a layer's heads."""
        return self.layers[layer]

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

    def exchange(
        self,
        policy: Policy,
        config: LayerConfig,
        layer: int,
        new: New,
        absorb: Callable[[PyTree, Evicted], PyTree] | None = None,
    ) -> tuple[Dense, Evicted]:
        """Write one new token per row into the lowest-ranked slot of each head, and return the evicted pairs.

        Args:
            policy: ranks the slots, and bounds their number.
            config: of the layer.
            layer: its index.
            new: one token per row; a row of padding changes nothing.
            absorb: a residual's `absorb`, which has already received every evicted pair except the returned ones. None
                if there is no residual; then no pairs are returned.
        """
        if policy.may_shrink:
            self = self._shrunk(policy, config, layer, new, absorb)
        view = self.layers[layer]
        view = view.replace(state=view.state.replace(codec=policy.codec.begin(view, new)))
        pairs = absorb is not None
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
        return self.replace_layer(layer, written), evicted_pairs(policy, config, view.state, new, kv, left)

    def exchange_and_attend(
        self,
        policy: Policy,
        config: LayerConfig,
        layer: int,
        new: New,
        asks: Callable[[Heads], PyTree],
        absorb: Callable[[PyTree, Evicted], PyTree] | None = None,
    ) -> tuple[Dense, PyTree, Stepped] | None:
        """Run `exchange` and `attend` in one kernel that reads keys and values once; return None if impossible.

        Args:
            policy: ranks the slots, and bounds their number.
            config: of the layer.
            layer: its index.
            new: one token per row; a row of padding changes nothing.
            asks: returns the requested attention statistics, given limits and states of the heads.
            absorb: a residual's `absorb`, as in `exchange`.

        Returns:
            The storage, the requests, and attention with statistics and evicted pairs.
        """
        view = self.layers[layer]
        spec = config.spec

        def one_pass(scores: Any) -> bool:
            def given() -> tuple[Array, Operand, Operand, Sinks | None, Hashed | None] | None:
                found = policy.codec.operands(config, view, new)
                if found.places is not None:
                    return None
                hashed = hashed_codes(policy.ranking(view, new), view)
                return found.q[:, :, :, 0], *found.stored, found.sinks, hashed

            shapes = jax.eval_shape(given)
            if shapes is None:
                return False
            q, k, v, sinks, hashed = shapes
            return step_in_one_pass(q, k, v, spec, sinks, scores, hashed, **new.kernels._asdict())

        # If the codec tracks the order of slots, the positions of keys are known only after the eviction.
        if new.spread.slots > 1 or policy.codec.ordered or not one_pass(None):
            return None
        wanted = asks(view)
        own = without_again(wanted)
        scores, summed = attention.wanted(own, new)
        if not one_pass(scores):
            return None
        if policy.may_shrink:
            self = self._shrunk(policy, config, layer, new, absorb)
        view = self.layers[layer]
        view = view.replace(state=view.state.replace(codec=policy.codec.begin(view, new)))
        added = {"kv": policy.codec.numbers(new, view.state.codec), "slots": policy.slots(new, view.state)}
        entry = jax.tree.map(lambda leaf: leaf[:, :, 0], added)
        standing, bounds, keep, hashed = ranked(policy, view, new)
        before = view.slots.score
        adds = policy.only_adds(wanted, new) and summed and standing is before and before.dtype == jnp.float32
        held = view.slots, entry["slots"]
        apart = adds or hashed is not None
        remembered, begun = (each.replace(score=None) for each in held) if apart else held
        given = policy.codec.operands(config, view, new, room=bounds.limit)
        done = decode_step(
            standing if hashed is None else hashed,
            view.position,
            new.position[:, 0],
            *given.stored,
            remembered,
            (entry["kv"].k, entry["kv"].v, begun),
            given.q[:, :, :, 0],
            spec,
            protection=bounds,
            keep=keep,
            shrinks=policy.may_shrink,
            pairs=absorb is not None,
            sinks=given.sinks,
            scores=scores,
            adds=adds,
            rounds=absorb is None,
            **new.kernels._asdict(),
        )
        written = view.replace(position=done.position, kv=view.kv.replace(k=done.k, v=done.v), slots=done.buffers)
        if done.codes is not None:
            written = written.replace(slots=done.buffers.replace(score=done.codes))
        if adds:
            written, answers = written.replace(slots=done.buffers.replace(score=done.attended.scores)), None
        else:
            answers = attention.told(own, done.attended, written.position, new, summed=summed)
            given = given._replace(k=done.k, v=done.v)
            earlier = functools.partial(policy.codec.earlier, config, written, given, new)
            answers = with_again(wanted, answers, config, given, written, earlier)
        partial = Partial(done.attended.out[:, :, :, None], done.attended.lse[..., None])
        evicted = None
        if done.pair is not None:
            evicted = evicted_pairs(policy, config, view.state, new, KV(*done.pair), done.left)
        return self.replace_layer(layer, written), wanted, Stepped(partial, answers, evicted)

    def append(self, policy: Policy, config: LayerConfig, layer: int, new: New) -> Dense:
        """Append slots for a block of text; no token is evicted."""
        view = self.layers[layer]
        view = view.replace(state=view.state.replace(codec=policy.codec.begin(view, new)))
        position = jnp.broadcast_to(new.position[:, None], new.k.shape[:3]).astype(jnp.int32)
        added = _entries(policy, view, new) | {"position": position}
        held = {"kv": view.kv, "slots": view.slots, "position": view.position}
        joined = jax.tree.map(lambda old, block: jnp.concatenate([old, block], axis=2), held, added)
        return self.replace_layer(layer, policy.codec.settle(view.replace(**joined), new))

    def attend(
        self,
        policy: Policy,
        config: LayerConfig,
        layer: int,
        new: New,
        asks: PyTree,
        low_rank: LowRank | None,
        selection: Selection | None,
        *,
        block: bool = False,
    ) -> tuple[Dense, Attended]:
        """Attend from new tokens, which have slots already, to all slots of a layer."""
        view = self.layers[layer]
        given = policy.codec.operands(config, view, new, block=block)
        attend = attention.attend_block if block else attention.attend_token
        own = without_again(asks)
        out, answers = attend(config, given, view, new, own, low_rank, selection)
        earlier = functools.partial(policy.codec.earlier, config, view, given, new)
        return self, Attended(out, with_again(asks, answers, config, given, view, earlier))

    def fold(self, policy: Policy, layer: int, asks: PyTree, answers: PyTree, new: New) -> Dense:
        """Update scores with the requested statistics; without statistics the scores include them already."""
        if answers is None:
            return self
        view = self.layers[layer]
        after = slots.where_read(new, policy.fold(answers, view, new), view.slots.score)
        return self.replace_layer(layer, view.replace(slots=view.slots.replace(score=after)))

    def with_scores(self, layer: int, out: Array) -> tuple[Dense, Array]:
        """Make the output of attention depend on the layer's updated scores.

        Otherwise statistics of all layers may stay in memory until the end of the step.
        """
        view = self.layers[layer]
        score, out = jax.lax.optimization_barrier((view.slots.score, out))
        return self.replace_layer(layer, view.replace(slots=view.slots.replace(score=score))), out

    def compress(
        self, policy: Policy, config: LayerConfig, layer: int, new: New, capacity: int
    ) -> tuple[Dense, Bool[Array, "b h c"]]:
        """Keep the best slots of each head, as many as it may use, in buffers of `capacity` slots.

        Rows that have read nothing keep their slots in place.

        Returns:
            The smaller storage, and a mask of the slots of this storage that leave.
        """
        view = self.layers[layer]
        best, kept, leaving = _settled(policy, view, new, capacity)
        smaller = view.replace(
            kv=jax.tree.map(lambda leaf: slots.gather(leaf, best), view.kv),
            slots=jax.tree.map(lambda leaf: slots.gather(leaf, best), view.slots),
            position=jnp.where(kept, slots.gather(view.position, best), -1),
        )
        if policy.codec.ordered:
            smaller = policy.codec.settle(smaller, new)
        return self.replace_layer(layer, smaller), leaving

    def _shrunk(
        self,
        policy: Policy,
        config: LayerConfig,
        layer: int,
        new: New,
        absorb: Callable[[PyTree, Evicted], PyTree] | None,
    ) -> Dense:
        """Evict the lowest-ranked slots of rows whose slot limit has just fallen; the new tokens have no slot yet."""
        view = self.layers[layer]
        before = jnp.maximum(new.read - 1, new.prompt_length)
        fewer = slots.slots_at(policy, view.limit, new) < slots.slots_at(policy, view.limit, new, before)
        fewer &= new.valid[:, :1]

        # The branch returns only masks and the order of slots: XLA would copy a returned cache at every step.
        def losing(self: Dense) -> Any:
            leaving = _settled(policy, view, new, view.capacity * new.spread.slots)[2] & fewer[..., None]
            after = view.replace(position=jnp.where(leaving, -1, view.position))
            after = policy.codec.settle(after, new) if policy.codec.ordered else after
            return leaving, after.slots.codec, after.state.codec

        def same(self: Dense) -> Any:
            return jnp.zeros(view.position.shape, bool), view.slots.codec, view.state.codec

        leaving, queue, known = jax.lax.cond(fewer.any(), losing, same, self)
        state = view.state.replace(codec=known)
        if absorb is not None:
            state = state.replace(
                residual=jax.lax.cond(
                    fewer.any(),
                    lambda kept: slots.fold_evicted(absorb, kept, policy, config, view, new, leaving),
                    lambda kept: kept,
                    state.residual,
                )
            )
        position = jnp.where(leaving, -1, view.position)
        return self.replace_layer(
            layer, view.replace(position=position, slots=view.slots.replace(codec=queue), state=state)
        )

    def open(self, policy: Policy, configs: Sequence[LayerConfig], ahead: Callable[[int], New]) -> Dense:
        """Prepare a step over all layers: find all victims if devices share slots and no layer has to run before.

        Args:
            policy: ranks the slots.
            configs: of the layers.
            ahead: returns the tokens for a layer, with valid positions and shapes but without contents.
        """
        if configs[0].spread.slots == 1 or policy.may_shrink or policy.score.requires.host_memory:
            return self
        tokens = [ahead(index) for index in range(len(configs))]
        policies = [policy.layer(index) for index in range(len(configs))]
        if not foreseen(policies, self.layers, tokens):
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
        return jax.tree.map(lambda leaf: _in_its_memory(leaf, _on_device(leaf)[index]), self)

    def put(self, index: Int[np.ndarray, " m"], rows: Dense) -> Dense:
        """Replace some rows; buffers may be larger than those of `rows`.

        Raises:
            ValueError: the buffers of `rows` are larger.
        """
        layers = []
        for number, (mine, theirs) in enumerate(zip(self.layers, rows.layers, strict=True)):
            room, wanted, theirs = mine.capacity, theirs.capacity, jax.tree.map(_on_device, theirs)
            if wanted > room:
                raise ValueError(
                    f"rows with {wanted} slots per head in layer {number} do not fit a state that has {room}; read "
                    f"them with the budget of the state."
                )

            def fill(leaf: Array, value: Array, missing: int = room - wanted) -> Array:
                return jnp.pad(value, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (value.ndim - 3))

            position = jnp.pad(theirs.position, [(0, 0), (0, 0), (0, room - wanted)], constant_values=-1)
            padded = theirs.replace(
                kv=jax.tree.map(fill, mine.kv, theirs.kv),
                slots=jax.tree.map(fill, mine.slots, theirs.slots),
                position=position,
            )
            padded = padded.replace(state=jax.tree.map(_widened, mine.state, theirs.state))
            layers.append(
                jax.tree.map(lambda old, row: _in_its_memory(old, _on_device(old).at[index].set(row)), mine, padded)
            )
        return Dense(tuple(layers))

    def stored_positions(self) -> tuple[Int[Array, "b h c"], ...]:
        """Return positions as stored, for collection inside a loop."""
        return tuple(view.position for view in self.layers)

    def positions(self, stored: Any = None) -> list[np.ndarray]:
        """Return the position in each slot [b h c] of each layer on the host, -1 for empty slots.

        Args:
            stored: `stored_positions` of an earlier step; None for the current ones.
        """
        return [on_host(layer) for layer in (self.stored_positions() if stored is None else stored)]

    def limits(self) -> tuple[Int[Array, "b h"], ...]:
        """Return the slots that each head may use, for each layer."""
        return tuple(view.limit for view in self.layers)

    def states(self) -> tuple[Parts, ...]:
        """Return the states of the policy's parts for each layer's heads."""
        return tuple(view.state for view in self.layers)


def empty(
    policy: Any,
    config: LayerConfig,
    layer: int | Int[Array, ""],
    *,
    limit: Int[Array, "b h"],
    slots: int,
    dtype: DTypeLike,
) -> View:
    """Create empty slots for a layer.

    Args:
        policy: the policy, whose `init` creates the states of its parts.
        config: of the layer.
        layer: its index.
        limit: slots that each head may use.
        slots: number of slots in the buffers.
        dtype: of keys and values.
    """
    rows, heads = limit.shape
    each = jnp.zeros(rows, jnp.int32)
    keys = jnp.zeros((rows, heads, 0, config.key_width), dtype)
    queries = jnp.zeros((rows, heads, config.groups, 0, config.key_width), dtype)
    shape = New(
        q=queries,
        k=keys,
        v=jnp.zeros((rows, heads, 0, config.value_width), dtype),
        raw_q=queries,
        raw_k=keys,
        hidden=jnp.zeros((rows, 0, config.width), dtype),
        position=jnp.zeros((rows, 0), jnp.int32),
        token=jnp.zeros((rows, 0), jnp.int32),
        prompt_length=each,
        read=each,
        horizon=each,
        end=each,
        seed=each.astype(jnp.uint32),
        head=config.numbers(rows),
        layer=layer,
    )
    state = policy.init(shape)
    codec: Codec = policy.codec
    held = (codec.encode(shape, state.codec), policy.slots(shape, state))

    def room(leaf: Array) -> Array:
        return jnp.zeros((rows, heads, slots, *leaf.shape[3:]), leaf.dtype)

    kv, remembered = jax.tree.map(room, held)
    return View(limit, state, kv, jnp.full((rows, heads, slots), -1, jnp.int32), remembered)


def _settled(policy: Policy, view: View, new: New, capacity: int) -> tuple[Array, Array, Bool[Array, "b h c"]]:
    # Returns the best slots of whole heads in buffers of `capacity`, a mask of those kept, and a mask of this device's
    # slots that leave.
    position = new.spread.all_slots(view.position)
    rows, heads, held = position.shape
    best, count = slots.chosen(policy, view, new)
    idle = ~new.valid.any(1)[:, None, None]
    best = jnp.where(idle, jnp.arange(held, dtype=jnp.int32), best)
    count = jnp.where(idle[..., 0], held, count)
    missing = max(0, capacity - held)
    if missing:
        # Pad with repeats of the last slot, which `kept` excludes.
        best = jnp.concatenate([best, jnp.broadcast_to(best[..., -1:], (rows, heads, missing))], axis=-1)
    best = best[..., :capacity]
    place = jnp.arange(capacity)
    kept = (place < count[..., None]) & (place < capacity - missing)
    kept &= slots.gather(position, best) >= 0
    staying = jnp.zeros(position.shape, bool)
    staying = staying.at[jnp.arange(rows)[:, None, None], jnp.arange(heads)[None, :, None], best].max(kept)
    return best, kept, new.spread.own_slots((position >= 0) & ~staying)


def _on_device(leaf: Array) -> Array:
    """Return an array in device memory: rows can be gathered and scattered only there."""
    return (
        leaf
        if jax.typeof(leaf).memory_space == jax.memory.Space.Device
        else jax.device_put(leaf, jax.memory.Space.Device)
    )


def _in_its_memory(like: Array, leaf: Array) -> Array:
    """Return an array in the same memory space as another array."""
    space = jax.typeof(like).memory_space
    return leaf if space == jax.memory.Space.Device else jax.device_put(leaf, space)


def _widened(mine: Array, theirs: Array) -> Array:
    # States of heads may be allocated larger than those of `theirs`.
    missing = [(0, room - some) for room, some in zip(mine.shape[1:], theirs.shape[1:], strict=True)]
    if any(more < 0 for _, more in missing):
        raise ValueError(
            f"rows that remember {list(theirs.shape[1:])} numbers do not fit a state with room for "
            f"{list(mine.shape[1:])}; read them with the budget of the state."
        )
    return jnp.pad(theirs, [(0, 0), *missing])


def _entries(policy: Policy, view: View, new: New) -> dict[str, PyTree]:
    """Return the slot entries of new tokens, except positions: leaves [b h t ...]."""
    return {"kv": policy.codec.encode(new, view.state.codec), "slots": policy.slots(new, view.state)}
