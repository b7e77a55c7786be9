"""All layers of a model: run one token per row, known tokens one by one, or a block of text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache.evict import Victim, foreseen, victims_of
from kvjax.cache.layer import Caches, LayerCache
from kvjax.cache.pending import sum_over_layers
from kvjax.inference.cache import Bound, Cache
from kvjax.models.decoder import Layer, begin, block
from kvjax.rope import Turns
from kvjax.types import Kernels, TokenBatch, View, wide

STEPS = 512
"""Most tokens, of all rows, that a layer reads by decode steps before the next layer does."""


@functools.partial(jax.jit, static_argnames="kernels")
def _block_once(kernels: Kernels, *arguments: Any) -> Any:
    # The compiler inlines it; sharing saves tracing and lowering.
    return block(*arguments)


def block_once(kernels: Kernels) -> Callable[..., Any]:
    """Return `block` as a function that is traced once for all layers of one shape, whose numbers are arrays."""
    return functools.partial(_block_once, kernels)


def read(
    layers: Sequence[Layer],
    caches: Sequence[LayerCache],
    reading: TokenBatch,
    x: Float[Array, "b t width"],
    *,
    pool: Any = None,
    turns: Sequence[Turns | None] | None = None,
    run: Callable[..., Any] = block,
    close: bool = True,
    first: int = 0,
    last: bool = False,
) -> tuple[Caches, Any, Float[Array, "b t width"]]:
    """Run tokens through layers; each cache is closed after the last layer that reads it.

    Args:
        caches: cache of each layer, grown if the tokens are a block of text of which all attend before any is evicted.
        x: hidden states before the layers.
        pool: memory that the caches share.
        turns: rotations of queries and keys, by layer; None for layers that compute their own.
        run: `block`, or a function that compiles it.
        close: False to leave the caches open, see `LayerCache.truncate`.
        first: index in the model of the first of these layers, if they read no layer before it.
        last: True if only the hidden states after the last given token of each row are needed. The layers at the end
            whose caches have no arrays, and so keep nothing of other tokens, then run for that token alone.

    Returns:
        The caches, their shared memory, and hidden states of all tokens or the last ones [b 1 width], NaN in rows with
        scores of NaN.
    """
    after, last_reader = list(caches), list(range(len(caches)))
    for index, cache in enumerate(caches):
        for source in cache.reads:
            last_reader[source - first] = index
    storing = [index for index, cache in enumerate(caches) if jax.tree.leaves(cache)]
    narrow = max(storing, default=-1) + 1 if last and reading.token.shape[1] > 1 else len(layers)
    for index, layer in enumerate(layers):
        if index == narrow:
            reading, x = only_last(reading, x)
        with jax.named_scope("layer"):
            of_layer = None if turns is None else turns[index]
            earlier = [None] * first + after[:index]
            x, cache = run(layer, after[index].link(earlier, pool), reading, x, of_layer)
            after[index], pool = cache.unlink(pool)
        for source, reader in enumerate(last_reader):
            if close and reader == index and not after[source].waits:
                after[source] = after[source].close(layers[source].policy)
    waiting = {index: cache.pending for index, cache in enumerate(after) if cache.pending is not None and cache.waits}
    if waiting:
        for index, pending in zip(waiting, sum_over_layers([*waiting.values()]), strict=True):
            after[index] = after[index].replace(pending=pending).close(layers[index].policy)
    for index, cache in enumerate(after):
        if cache.undefined is not None:  # NaN scores make the kept slots and the logits meaningless
            x = jnp.where(cache.undefined[:, None, None], jnp.nan, x)
            after[index] = cache.replace(undefined=None)
    return tuple(after), pool, x


def only_last(reading: TokenBatch, x: Float[Array, "b t width"]) -> tuple[TokenBatch, Float[Array, "b 1 width"]]:
    """Return the last given token of each row, as padding if it is not among these, and its hidden state."""

    def of_last(x: Float[Array, "b t width"]) -> Float[Array, "b 1 width"]:
        return reading.at_last(x, otherwise=x[:, 0])[:, None]

    token = jnp.where(reading.is_last, reading.token, 0).sum(1, keepdims=True)
    position = jnp.where(reading.is_last.any(1), reading.prompt_length - 1, -1)[:, None]
    embedding = None if reading.embedding is None else of_last(reading.embedding)
    return reading.replace(token=token, position=position, embedding=embedding), of_last(x)


def read_steps(decoder: Bound, cache: Cache, reading: TokenBatch) -> tuple[Cache, Float[Array, "b t width"]]:
    """Run tokens through all layers by decode steps; before attention, a policy chooses the slot that each one takes.

    Each layer reads all tokens, one after another, before the next layer does, so that its weights are read once. If
    statistics are sums over all layers, each token has to run through all layers before the next one.
    """
    if reading.token.shape[1] == 1 or not _waits(decoder, cache, reading.part(0, 1)):
        return _through_layers(decoder, cache, reading)

    def one(i: Int[Array, ""], carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
        cache, hidden = carry
        cache, x = _through_layers(decoder, cache, reading.part(i, 1))
        return cache, jax.lax.dynamic_update_slice_in_dim(hidden, x, i, axis=1)

    hidden = jnp.zeros((*reading.token.shape, decoder.config.hidden_width), decoder.weights.dtype)
    return jax.lax.fori_loop(0, reading.counts.max(), one, (cache, hidden))


def _waits(decoder: Bound, cache: Cache, reading: TokenBatch) -> bool:
    x = jnp.zeros((*reading.token.shape, decoder.config.width), decoder.weights.dtype)
    layers = zip(decoder.layers, cache.layers, strict=True)
    return any(of_layer.waits_after(layer.tokens(reading, x)) for layer, of_layer in layers)


def _through_layers(decoder: Bound, cache: Cache, reading: TokenBatch) -> tuple[Cache, Float[Array, "b t width"]]:
    reading, x = begin(decoder.weights, decoder.config, reading)
    layers, score = decoder.layers, decoder.policy.score
    ropes = [shape.rope for shape in decoder.config.layer_configs]
    of_rope = {rope: reading.turns(rope, x.dtype) for rope in dict.fromkeys(ropes) if rope is not None}
    turns = [None if rope is None else of_rope[rope] for rope in ropes]
    caches, pool = cache.layers, cache.pool
    if decoder.config.spread.slots > 1 and not score.requires.host_memory:
        caches = _with_victims(layers, caches, reading, x)
    if pool is not None:
        pool = pool.with_logits(decoder.config.layer(0).groups, wide(x.dtype))
    run: Callable[..., Any] = block
    if pool is None and not score.requires.host_memory:
        layers = [layer.replace(number=jnp.asarray(layer.number)) for layer in layers]
        run = block_once(decoder.kernels)
    caches, pool, x = read(layers, caches, reading, x, pool=pool, turns=turns, run=run)
    return cache.replace(layers=caches, pool=pool and pool.replace(logits=None)), x


def _with_victims(layers: Sequence[Layer], caches: Caches, reading: TokenBatch, x: Float[Array, "b t width"]) -> Caches:
    """Choose the victims of slots that devices share for all layers together, if no layer has to run first.

    One collective then serves all layers with equally many heads.
    """
    several = x.shape[1] > 1  # the second token's victims depend on the first one
    if several or layers[0].policy.may_shrink:
        return caches
    views = {index: cache for index, cache in enumerate(caches) if isinstance(cache, View)}
    policies = {index: layers[index].policy for index in views}
    new = {index: reading.ahead(layers[index].shape, index, x.dtype) for index in views}
    if not foreseen(list(policies.values()), list(views.values()), list(new.values())):
        return caches
    victims = dict[int, Victim]()
    for heads in dict.fromkeys(view.limit.shape[1] for view in views.values()):  # one number of them in most models
        alike = {index: view for index, view in views.items() if view.limit.shape[1] == heads}
        of_layers = [policies[index] for index in alike], list(alike.values()), [new[index] for index in alike]
        victims |= dict(zip(alike, victims_of(*of_layers), strict=True))
    return tuple(
        cache.replace(victim=victims[index]) if index in victims else cache for index, cache in enumerate(caches)
    )


def read_chunks(
    decoder: Bound, cache: Cache, reading: TokenBatch, chunk: int, *, every: bool = False
) -> tuple[Cache, Float[Array, "b *t width"]]:
    """Run given texts through all layers, and evict after each chunk; chunks of one token are decode steps.

    Return the hidden state after every token, or if `every` is False those after the last token of each row.
    """
    rows, count = reading.token.shape
    # Several decode steps are read together, a power of two, so that few tokens of padded lengths are added.
    size = 1 << (min(max(STEPS // rows, 1), count).bit_length() - 1) if chunk == 1 else min(chunk, count)
    surplus = ((0, 0), (0, -count % size))
    token, position = jnp.pad(reading.token, surplus), jnp.pad(reading.position, surplus, constant_values=-1)
    padded = reading.replace(token=token, position=position)

    def one(i: Int[Array, ""], carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
        cache, hidden = carry
        part = padded.part(i * size, size)
        if chunk == 1:
            cache, x = read_steps(decoder, cache, part)
        else:
            caches, x = read_block(decoder, cache.layers, part, last=not every)
            cache = cache.replace(layers=caches)
        if every:
            return cache, jax.lax.dynamic_update_slice_in_dim(hidden, x, i * size, axis=1)
        return cache, part.at_last(x, otherwise=hidden)

    hidden = jnp.zeros((rows, *token.shape[1:] * every, decoder.config.hidden_width), decoder.weights.dtype)
    cache, hidden = jax.lax.fori_loop(0, -(-reading.counts.max() // size), one, (cache, hidden))
    return cache, hidden[:, :count] if every else hidden


def read_block(
    decoder: Bound, caches: Caches, reading: TokenBatch, slots: Sequence[int] | None = None, *, last: bool = False
) -> tuple[Caches, Float[Array, "b t width"]]:
    """Run a block of text through all layers: attend, update scores, keep the highest-ranked slots.

    `slots` are those per head that a whole prompt leaves in each layer, which the plan then allocates to heads; None
    for a chunk or a turn, after which caches are as large as before. Return caches, and hidden states, with `last` only
    as far as `TokenBatch.at_last` needs them.
    """
    reading, x = begin(decoder.weights, decoder.config, reading)
    sizes: Sequence[int | None] = [None] * len(caches) if slots is None else slots
    grown = [cache.grow(size) for cache, size in zip(caches, sizes, strict=True)]
    caches, _, x = read(decoder.layers, grown, reading, x, last=last)
    return caches, x
