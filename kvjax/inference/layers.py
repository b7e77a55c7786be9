"""All layers of a model: run one token per row in a decode step, or a block of text."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from kvjax.cache.dense import Dense
from kvjax.cache.paged.build import Selected
from kvjax.cache.step import Pending, Storage, share_of_residual, step, steps, sum_over_layers, update_score
from kvjax.inference.keep import Kept, keep_after
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import LayerWeights, Weights, embed, finish_block, project, sink_logits_of
from kvjax.policies.base import Part
from kvjax.policies.policy import Policy
from kvjax.policies.stats import of_all_layers, of_devices, questions
from kvjax.rope import Rope, Turns, turns_of
from kvjax.types import Kernels, LayerConfig, New, setting
from pallas_kernels.attention import with_sink

STEPS = 512
"""Most tokens, of all rows, that a layer reads by decode steps before the next layer does."""


class Reading(struct.PyTreeNode):
    """Tokens being read, the same for all layers; the fields are those of `New`."""

    token: Int[Array, "b t"]
    position: Int[Array, "b t"]
    prompt_length: Int[Array, " b"]
    read: Int[Array, " b"]
    horizon: Int[Array, " b"]
    end: Int[Array, " b"]
    seed: UInt32[Array, " b"]
    given: bool = setting(True)
    replayed: bool = setting(False)
    kernels: Kernels = setting(Kernels())

    @property
    def counts(self) -> Int[Array, " b"]:
        """Number of tokens of each row that are text and not padding, which is on the right."""
        return (self.position >= 0).sum(1, dtype=jnp.int32)

    def part(self, start: int | Int[Array, ""], size: int) -> Reading:
        """Return some successive tokens of each row, as they are read after the tokens before them."""
        read = jnp.minimum(self.read, self.read - self.counts + start + size)
        token, position = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (self.token, self.position))
        return self.replace(token=token, position=position, read=read)

    def at_last(self, hidden: Float[Array, "b t width"], otherwise: Float[Array, "b width"]) -> Float[Array, "b width"]:
        """Return the hidden state of each row's last given token, or `otherwise` if that token is not among these."""
        is_last = self.position == (self.prompt_length - 1)[:, None]
        newest = jnp.einsum("btw,bt->bw", hidden, is_last.astype(hidden.dtype))
        return jnp.where(is_last.any(1)[:, None], newest, otherwise)

    def turns(self, rope: Rope, dtype: DTypeLike) -> Turns:
        """Return the rotations of the tokens' queries and keys."""
        return turns_of(rope, self.position, dtype, self.end)

    def new(
        self,
        config: LayerConfig,
        layer: int | Int[Array, ""],
        x: Array,
        q: Array,
        k: Array,
        v: Array,
        turns: Turns | None = None,
        sink_logits: Array | None = None,
    ) -> New:
        """Make a layer's `New` from the input of its block and its unrotated queries, keys and values.

        Args:
            config: configuration of the layer.
            layer: its index.
            x: input of its block.
            q, k, v: unrotated.
            turns: rotations of `config.rope`, if layers share them.
            sink_logits: logits of the layer's query heads; None for a layer without sinks.
        """
        raw = q, k
        if config.rope is not None:
            turns = turns or self.turns(config.rope, q.dtype)
            q, k, v = config.rotated((q, k), turns, self.kernels, (v,))
        return self._of_layer(config, layer, x, raw, (q, k, v), sink_logits)

    def ahead(self, config: LayerConfig, layer: int, x: Array) -> New:
        """Make a layer's `New` before the layer runs: its activations are zeros of the right shapes."""
        rows, tokens = self.token.shape
        keys = jnp.zeros((rows, config.kv_heads, tokens, config.key_width), x.dtype)
        values = jnp.zeros((rows, config.kv_heads, tokens, config.value_width), x.dtype)
        queries = jnp.zeros((rows, config.kv_heads, config.groups, tokens, config.key_width), x.dtype)
        return self._of_layer(config, layer, jnp.zeros_like(x), (queries, keys), (queries, keys, values))

    def _of_layer(
        self,
        config: LayerConfig,
        layer: int | Int[Array, ""],
        x: Array,
        raw: tuple[Array, Array],
        read: tuple[Array, Array, Array],
        sink_logits: Array | None = None,
    ) -> New:
        (raw_q, raw_k), (q, k, v) = raw, read
        return New(
            q=q,
            k=k,
            v=v,
            raw_q=raw_q,
            raw_k=raw_k,
            hidden=x,
            position=self.position,
            token=self.token,
            prompt_length=self.prompt_length,
            read=self.read,
            horizon=self.horizon,
            end=self.end,
            seed=self.seed,
            head=config.numbers(x.shape[0]),
            layer=layer,
            sink_logits=sink_logits,
            config=config,
            given=self.given,
            replayed=self.replayed,
            kernels=self.kernels,
        )


def read_steps(
    weights: Weights, config: ModelConfig, policy: Policy, storage: Storage, reading: Reading
) -> tuple[Storage, Float[Array, "b t width"]]:
    """Run tokens through all layers by decode steps; before attention, a policy chooses the slot that each one takes.

    Each layer reads all tokens, one after another, before the next layer does, so that its weights are read once. If
    statistics are sums over all layers, each token has to run through all layers before the next one.
    """
    if reading.token.shape[1] == 1 or not _sums_over_layers(config, policy, storage, reading.part(0, 1), weights.dtype):
        return _through_layers(weights, config, policy, storage, reading)

    def one(i: Int[Array, ""], carry: tuple[Any, Array]) -> tuple[Any, Array]:
        storage, made = carry
        storage, x = _through_layers(weights, config, policy, storage, reading.part(i, 1))
        return storage, jax.lax.dynamic_update_slice_in_dim(made, x, i, axis=1)

    made = jnp.zeros((*reading.token.shape, config.width), weights.dtype)
    return jax.lax.fori_loop(0, reading.counts.max(), one, (storage, made))


def _sums_over_layers(config: ModelConfig, policy: Policy, storage: Any, reading: Reading, dtype: DTypeLike) -> bool:
    x = jnp.zeros((*reading.token.shape, config.width), dtype)
    for index, shape in enumerate(config.layer_configs):
        here = storage.moved(index, jax.memory.Space.Device) if policy.score.requires.host_memory else storage
        asks = policy.layer(index).score.asks(here.heads(index), reading.ahead(shape, index, x))
        if of_all_layers(asks):
            return True
    return False


def _through_layers(
    weights: Weights, config: ModelConfig, policy: Policy, storage: Storage, reading: Reading
) -> tuple[Storage, Float[Array, "b t width"]]:
    x = embed(weights, config, reading.token, reading.position)
    pending: list[Pending] = []
    shapes, begun = config.layer_configs, x
    ropes = dict.fromkeys(shape.rope for shape in shapes if shape.rope is not None)
    turns: dict[Rope | None, Turns] = {rope: reading.turns(rope, x.dtype) for rope in ropes}
    storage = storage.open(policy, shapes, lambda index: reading.ahead(shapes[index], index, begun))
    alike = type(storage) is Dense and not policy.score.requires.host_memory
    policies = [policy.layer(index) for index in range(config.layers)]
    for index, (layer, shape) in enumerate(zip(weights.layers, shapes, strict=True)):
        turned = turns.get(shape.rope)
        with jax.named_scope("layer"):
            if alike:
                assert isinstance(storage, Dense)
                given = layer, policies[index], storage.alone(index), 0, jnp.asarray(index), reading, turned, x
                alone, x, told = _traced_once(*given, config=config, shape=shapes.index(shape))
                storage = storage.replace_layer(index, alone.layers[0])
            else:
                given = layer, policies[index], storage, index, index, reading, turned, x
                storage, x, told = _through_layer(*given, config=config, shape=index)
        pending.extend(told)
    for index, told in enumerate(sum_over_layers(pending)):
        with jax.named_scope("layer"):
            storage = update_score(policies[index], storage, index, told.asks, told.answers, told.new)
    return storage.close(), x


def _parts(policy: Policy) -> list[Part]:
    found = [getattr(policy, field.name) for field in dataclasses.fields(policy)]
    return [part for part in found if isinstance(part, Part)]


@contextlib.contextmanager
def layer_numbered(policy: Policy, number: int | Int[Array, ""]) -> Generator[None]:
    """Trace a layer, and explain the error of a part that uses a traced layer index as a Python number.

    Raises:
        TypeError: if a part does so.
    """
    try:
        yield
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
    ) as error:
        if isinstance(number, int):
            raise
        parts = ", ".join(type(part).__name__ for part in _parts(policy))
        raise TypeError(
            f"one of {parts} takes an array for a number of Python ({str(error).splitlines()[0]}); where that is "
            "new.layer, override layer(index) instead, which is called with each layer's number."
        ) from error


def _through_layer(
    layer: LayerWeights,
    policy: Policy,
    storage: Storage,
    place: int,
    number: int | Int[Array, ""],
    reading: Reading,
    turns: Turns | None,
    x: Float[Array, "b t width"],
    *,
    config: ModelConfig,
    shape: int,
) -> tuple[Storage, Float[Array, "b t width"], list[Pending]]:
    """Run tokens through a layer by decode steps; `place` is its index in the storage, `number` that in the model."""
    kind, pending, of_heads = config.layer_configs[shape], list[Pending](), list[Pending]()

    def total(parts: Array) -> Array:
        # Means over a layer's heads share a collective with the sum that attention needs anyway.
        if not of_heads:
            return kind.spread.over_attention(parts)
        told = of_heads.pop()
        asks, tree = questions(told.asks)
        answers = tree.flatten_up_to(told.answers)
        waiting = [place for place, ask in enumerate(asks) if of_devices(ask)]
        summed, means = kind.spread.over_attention_and_heads(parts, [answers[place] for place in waiting])
        for place, mean in zip(waiting, means, strict=True):
            answers[place] = mean
        of_heads.append(told._replace(answers=tree.unflatten(answers)))
        return summed

    with layer_numbered(policy, number):
        normed, q, k, v = project(layer, config, kind, x, reading.position)
        new = reading.new(kind, number, x, q, k, v, turns, sink_logits_of(layer, kind))
        if x.shape[1] == 1:
            storage, out, told = step(policy, storage, place, new)
        else:
            storage, out = steps(policy, storage, place, new)
            told = []
        for each in told:
            (of_heads if of_devices(each.asks) else pending).append(each)
        after = finish_block(layer, config, kind, x, normed, out, total)
        for told in of_heads:
            storage = update_score(policy, storage, place, told.asks, told.answers, told.new)
    return storage, after, pending


# The compiler inlines it; sharing saves tracing and lowering.
_traced_once = jax.jit(_through_layer, static_argnames=("place", "config", "shape"))


def read_chunks(
    weights: Weights,
    config: ModelConfig,
    policy: Policy,
    storage: Dense,
    reading: Reading,
    capacities: tuple[int, ...],
    chunk: int,
    *,
    every: bool = False,
) -> tuple[Dense, Float[Array, "b *t width"]]:
    """Run given texts through all layers, and evict after each chunk; chunks of one token are decode steps.

    Args:
        weights: weights of the model.
        config: configuration of the model.
        policy: decides what to keep.
        storage: the cache before.
        reading: the texts, padded on the right.
        capacities: slots of each layer's buffers.
        chunk: tokens of a chunk.
        every: True for the hidden state after every token; False for those after the last token of each row.
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
            storage, x = read_steps(weights, config, policy, storage, part)
        else:
            storage, x = read_block(weights, config, policy, storage, part, capacities)
        if every:
            return storage, jax.lax.dynamic_update_slice_in_dim(found, x, i * size, axis=1)
        return storage, part.at_last(x, otherwise=found)

    found = jnp.zeros((rows, *token.shape[1:] * every, config.width), weights.dtype)
    storage, found = jax.lax.fori_loop(0, -(-reading.counts.max() // size), one, (storage, found))
    return storage, found[:, :count] if every else found


def read_block(
    weights: Weights,
    config: ModelConfig,
    policy: Policy,
    storage: Dense,
    reading: Reading,
    capacities: tuple[int, ...],
    *,
    first: bool = False,
) -> tuple[Dense | tuple[Selected, ...], Float[Array, "b t width"]]:
    """Run a prompt, a chunk or a turn through all layers: attend, update the score, keep the highest-ranked slots.

    Args:
        weights: weights of the model.
        config: configuration of the model.
        policy: decides what to keep.
        storage: the cache before.
        reading: the tokens.
        capacities: slots of each layer's buffers afterwards.
        first: True for a whole prompt, after which the plan allocates slots to heads.

    Returns:
        The storage, or the selected slots under a plan with slots for each head; and hidden states, NaN in rows with
        scores of NaN.
    """
    x = embed(weights, config, reading.token, reading.position)
    numbers, shapes = range(config.layers), config.layer_configs
    policies = [policy.layer(index) for index in numbers]
    return read_layers(weights.layers, numbers, shapes, config, policies, storage, reading, capacities, x, first=first)


def read_layers(
    layers: Sequence[LayerWeights],
    numbers: Sequence[int] | Sequence[Int[Array, ""]],
    shapes: Sequence[LayerConfig],
    config: ModelConfig,
    policies: Sequence[Policy],
    storage: Dense,
    reading: Reading,
    capacities: tuple[int, ...],
    x: Float[Array, "b t width"],
    *,
    first: bool = False,
) -> tuple[Dense | tuple[Selected, ...], Float[Array, "b t width"]]:
    """Run `read_block` through some layers of a model; `storage` holds only those.

    Args:
        layers: their weights.
        numbers: their indices in the model.
        shapes: their configurations.
        config: configuration of the model.
        policies: decide what each layer keeps; see `Policy.layer`.
        storage: the cache before.
        reading: the tokens.
        capacities: slots of each layer's buffers afterwards.
        x: hidden states.
        first: True for a whole prompt.
    """
    paged = first and policies[0].plan.sizing.per_head
    pending: list[Pending] = []
    kept: list[Kept] = []
    for index, (layer, shape, policy) in enumerate(zip(layers, shapes, policies, strict=True)):
        place = index, numbers[index]
        storage, told, x = append_and_attend(layer, config, shape, policy, storage, place, reading, x, first=first)
        if of_all_layers(told.asks["score"]):
            pending.append(told)
        else:
            with layer_numbered(policy, numbers[index]):
                storage, of_layer = keep_after(policy, storage, index, told, capacities[index], first)
            kept.append(of_layer)
    for index, told in enumerate(sum_over_layers(pending)):
        storage, of_layer = keep_after(policies[index], storage, index, told, capacities[index], first)
        kept.append(of_layer)
    for each in kept:
        if each.undefined is not None:  # NaN scores make the kept slots and the logits meaningless
            x = jnp.where(each.undefined[:, None, None], jnp.nan, x)
    return (tuple(each.selected for each in kept if each.selected is not None) if paged else storage), x


def append_and_attend(
    layer: LayerWeights,
    config: ModelConfig,
    shape: LayerConfig,
    policy: Policy,
    storage: Dense,
    place: tuple[int, int | Int[Array, ""]],
    reading: Reading,
    x: Float[Array, "b t width"],
    *,
    first: bool = False,
) -> tuple[Dense, Pending, Float[Array, "b t width"]]:
    """Append a block of text to the slots of a layer, attend, and finish the layer's block; nothing is evicted.

    Args:
        layer: its weights.
        config: of the model.
        shape: configuration of the layer.
        policy: as the layer uses it.
        storage: the cache before.
        place: index of the layer in the storage, and in the model.
        reading: the tokens.
        x: hidden states.
        first: True for a whole prompt.

    Returns:
        The cache, attention statistics that the score and the plan requested, and hidden states.
    """
    index, number = place
    with layer_numbered(policy, number):
        normed, q, k, v = project(layer, config, shape, x, reading.position)
        new = reading.new(shape, number, x, q, k, v, sink_logits=sink_logits_of(layer, shape))
        if policy.score.requires.host_memory:
            storage = storage.moved(index, jax.memory.Space.Device)
        storage = storage.append(policy, index, new)
        heads = storage.heads(index)
        asks = {"score": policy.score.asks(heads, new), "plan": policy.plan.asks(heads, new) if first else ()}
        remembered = share_of_residual(policy, storage, index, new)
        storage, found = storage.attend(policy, index, new, asks, remembered, policy.selection, block=True)
        x = finish_block(layer, config, shape, x, normed, with_sink(found.partial, new.sink_logits).out)
    return storage, Pending(asks, found.answers, new), x
