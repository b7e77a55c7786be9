"""All layers of a model: run one token per row in a decode step, or a block of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.dense import Dense
from kvjax.cache.paged.build import Selected
from kvjax.cache.step import Pending, Storage, share_of_residual, step, steps, sum_over_layers, update_score
from kvjax.inference.cache import Bound, Layer
from kvjax.inference.keep import Kept, keep_after
from kvjax.models.decoder import block, embed
from kvjax.policies.stats import questions, sums_over
from kvjax.rope import Rope, Turns
from kvjax.types import Reading, Spread
from pallas_kernels.attention import with_sink

STEPS = 512
"""Most tokens, of all rows, that a layer reads by decode steps before the next layer does."""


def read_steps(decoder: Bound, storage: Storage, reading: Reading) -> tuple[Storage, Float[Array, "b t width"]]:
    """Run tokens through all layers by decode steps; before attention, a policy chooses the slot that each one takes.

    Each layer reads all tokens, one after another, before the next layer does, so that its weights are read once. If
    statistics are sums over all layers, each token has to run through all layers before the next one.
    """
    if reading.token.shape[1] == 1 or not _sums_over_layers(decoder, storage, reading.part(0, 1)):
        return _through_layers(decoder, storage, reading)

    def one(i: Int[Array, ""], carry: tuple[Any, Array]) -> tuple[Any, Array]:
        storage, made = carry
        storage, x = _through_layers(decoder, storage, reading.part(i, 1))
        return storage, jax.lax.dynamic_update_slice_in_dim(made, x, i, axis=1)

    made = jnp.zeros((*reading.token.shape, decoder.config.width), decoder.weights.dtype)
    return jax.lax.fori_loop(0, reading.counts.max(), one, (storage, made))


def _sums_over_layers(decoder: Bound, storage: Any, reading: Reading) -> bool:
    for index, layer in enumerate(decoder.layers):
        score = layer.policy.score
        here = storage.moved(index, jax.memory.Space.Device) if score.requires.host_memory else storage
        new = reading.ahead(layer.shape, index, decoder.weights.dtype)
        if sums_over(score.asks(here.layers[index], new), "model"):
            return True
    return False


def _through_layers(decoder: Bound, storage: Storage, reading: Reading) -> tuple[Storage, Float[Array, "b t width"]]:
    x = embed(decoder.weights, decoder.config, reading.token, reading.position)
    pending, layers, dtype = list[Pending](), decoder.layers, x.dtype
    ropes = dict.fromkeys(layer.shape.rope for layer in layers if layer.shape.rope is not None)
    turns: dict[Rope | None, Turns] = {rope: reading.turns(rope, dtype) for rope in ropes}
    shapes = decoder.config.layer_configs
    storage = storage.open(decoder.policy, shapes, lambda index: reading.ahead(shapes[index], index, dtype))
    alike = type(storage) is Dense and not decoder.policy.score.requires.host_memory
    for index, layer in enumerate(layers):
        turned = turns.get(layer.shape.rope)
        with jax.named_scope("layer"):
            if alike:
                assert isinstance(storage, Dense)
                numbered = layer.replace(number=jnp.asarray(index))
                alone, x, told = _traced_once(numbered, storage.alone(index), 0, reading, turned, x)
                storage = storage.replace_layer(index, alone.layers[0])
            else:
                storage, x, told = _through_layer(layer, storage, index, reading, turned, x)
        pending.extend(told)
    for index, told in enumerate(sum_over_layers(pending)):
        with jax.named_scope("layer"):
            storage = update_score(layers[index].policy, storage, index, told.asks, told.answers, told.new)
    return storage.close(), x


def _through_layer(
    layer: Layer,
    storage: Storage,
    place: int,
    reading: Reading,
    turns: Turns | None,
    x: Float[Array, "b t width"],
) -> tuple[Storage, Float[Array, "b t width"], list[Pending]]:
    """Run tokens through a layer by decode steps; `place` is the layer's index in the storage."""
    weights, policy, shape = layer.weights, layer.policy, layer.shape

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Storage, list[Pending]]]:
        new = reading.of_layer(shape, layer.number, x, q, k, v, weights.mixer.sinks(shape)).rotated(turns)
        if x.shape[1] > 1:
            after, out = steps(policy, storage, place, new)
            return out, (after, [])
        after, out, pending = step(policy, storage, place, new)
        return out, (after, pending)

    def total(outputs: Array, result: tuple[Storage, list[Pending]]) -> tuple[Array, tuple[Storage, list[Pending]]]:
        outputs, pending = _sum_outputs(shape.spread, outputs, result[1])
        return outputs, (result[0], pending)

    y, (after, pending) = block(weights, layer.config, shape, x, reading.position, attend, total)
    for stats in pending:
        if sums_over(stats.asks, "device"):
            after = update_score(policy, after, place, stats.asks, stats.answers, stats.new)
    return after, y, [stats for stats in pending if not sums_over(stats.asks, "device")]


def _sum_outputs(
    spread: Spread, outputs: Float[Array, "b t width"], pending: list[Pending]
) -> tuple[Float[Array, "b t width"], list[Pending]]:
    """Sum output projections over devices; means over the heads of a layer, if requested, share the collective."""
    if not any(sums_over(stats.asks, "device") for stats in pending):
        return spread.over_attention(outputs), pending
    (stats,) = pending
    asks, tree = questions(stats.asks)
    answers = tree.flatten_up_to(stats.answers)
    shared = [place for place, ask in enumerate(asks) if sums_over(ask, "device")]
    outputs, means = spread.over_attention_and_heads(outputs, [answers[place] for place in shared])
    for place, mean in zip(shared, means, strict=True):
        answers[place] = mean
    return outputs, [stats._replace(answers=tree.unflatten(answers))]


# The compiler inlines it; sharing saves tracing and lowering.
_traced_once = jax.jit(_through_layer, static_argnums=2)


def read_chunks(
    decoder: Bound, storage: Dense, reading: Reading, capacities: tuple[int, ...], chunk: int, *, every: bool = False
) -> tuple[Dense, Float[Array, "b *t width"]]:
    """Run given texts through all layers, and evict after each chunk; chunks of one token are decode steps.

    Return the hidden state after every token, or if `every` is False those after the last token of each row.
    """
    rows, count = reading.token.shape
    # Several decode steps are read together, a power of two, so that few tokens of padded lengths are added.
    size = 1 << (min(max(STEPS // rows, 1), count).bit_length() - 1) if chunk == 1 else min(chunk, count)
    surplus = ((0, 0), (0, -count % size))
    token, position = jnp.pad(reading.token, surplus), jnp.pad(reading.position, surplus, constant_values=-1)
    padded = reading.replace(token=token, position=position)

    def one(i: Int[Array, ""], carry: tuple[Any, Array]) -> tuple[Any, Array]:
        storage, found = carry
        part = padded.part(i * size, size)
        if chunk == 1:
            storage, x = read_steps(decoder, storage, part)
        else:
            storage, x = read_block(decoder, storage, part, capacities)
        if every:
            return storage, jax.lax.dynamic_update_slice_in_dim(found, x, i * size, axis=1)
        return storage, part.at_last(x, otherwise=found)

    found = jnp.zeros((rows, *token.shape[1:] * every, decoder.config.width), decoder.weights.dtype)
    storage, found = jax.lax.fori_loop(0, -(-reading.counts.max() // size), one, (storage, found))
    return storage, found[:, :count] if every else found


def read_block(
    decoder: Bound, storage: Dense, reading: Reading, capacities: tuple[int, ...], *, first: bool = False
) -> tuple[Dense | tuple[Selected, ...], Float[Array, "b t width"]]:
    """Run a prompt, a chunk or a turn through all layers; see `read_layers`."""
    x = embed(decoder.weights, decoder.config, reading.token, reading.position)
    return read_layers(decoder.layers, storage, reading, capacities, x, first=first)


def read_layers(
    layers: Sequence[Layer],
    storage: Dense,
    reading: Reading,
    capacities: tuple[int, ...],
    x: Float[Array, "b t width"],
    *,
    first: bool = False,
) -> tuple[Dense | tuple[Selected, ...], Float[Array, "b t width"]]:
    """Run a block of text through the layers of a storage: attend, update scores, keep the highest-ranked slots.

    `capacities` are the slots of each layer's buffers afterwards. After a `first` text, a whole prompt, the plan
    allocates slots to heads. Return the storage, or the selected slots under a plan with slots for each head; and
    hidden states, NaN in rows with scores of NaN.
    """
    paged = first and layers[0].policy.plan.sizing.per_head
    pending, kept = list[Pending](), list[Kept]()
    for index, layer in enumerate(layers):
        storage, told, x = append_and_attend(layer, storage, index, reading, x, first=first)
        if sums_over(told.asks["score"], "model"):
            pending.append(told)
        else:
            storage, of_layer = keep_after(layer.policy, storage, index, told, capacities[index], first)
            kept.append(of_layer)
    for index, told in enumerate(sum_over_layers(pending)):
        storage, of_layer = keep_after(layers[index].policy, storage, index, told, capacities[index], first)
        kept.append(of_layer)
    for each in kept:
        if each.undefined is not None:  # NaN scores make the kept slots and the logits meaningless
            x = jnp.where(each.undefined[:, None, None], jnp.nan, x)
    return (tuple(each.selected for each in kept if each.selected is not None) if paged else storage), x


def append_and_attend(
    layer: Layer, storage: Dense, index: int, reading: Reading, x: Float[Array, "b t width"], *, first: bool = False
) -> tuple[Dense, Pending, Float[Array, "b t width"]]:
    """Append a block of text to the slots of a layer, attend, and finish the layer's block; nothing is evicted.

    Return the cache, the statistics that the score requested, and for a `first` text the plan, and hidden states.
    `index` is that of the layer in the storage.
    """
    weights, policy, shape = layer.weights, layer.policy, layer.shape

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Dense, Pending]]:
        new = reading.of_layer(shape, layer.number, x, q, k, v, weights.mixer.sinks(shape)).rotated()
        after = storage.moved(index, jax.memory.Space.Device) if policy.score.requires.host_memory else storage
        after = after.append(policy, index, new)
        heads = after.layers[index]
        asks = {"score": policy.score.asks(heads, new), "plan": policy.plan.asks(heads, new) if first else ()}
        remembered = share_of_residual(policy, after, index, new)
        after, attended = after.attend(policy, index, new, asks, remembered, block=True)
        return with_sink(attended.partial, new.sink_logits).out, (after, Pending(asks, attended.answers, new))

    y, (after, pending) = block(weights, layer.config, shape, x, reading.position, attend)
    return after, pending, y
