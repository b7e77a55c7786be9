"""Continuous batching on the device: texts take and free rows, and one program generates tokens for all rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.generation.loop import Drawn, token_buffers, token_logprobs
from kvjax.generation.sampling import Sampling, penalised, sample
from kvjax.inference.cache import Cache, policy_seeds
from kvjax.inference.decoder import Decoder, read_more
from kvjax.inference.sharding import constrain, copying, logits_spec, on_mesh, whole_rows
from kvjax.models.config import ModelConfig
from kvjax.types import OF_ROWS, REPLICATED, ROWS, PyTree, wide

UNDEFINED = -1
"""Value of `left` for rows whose logits are NaN."""


class Sizes(NamedTuple):
    """Static sizes of an engine's rows, for which programs are compiled."""

    config: ModelConfig
    capacities: tuple[tuple[int, ...], ...]
    """Buffer slots of each layer, for each of `Decoder.decoders`."""
    lines: tuple[tuple[int, ...], ...]
    """Maximal slots per head in each layer, rounded like buffers, for each of `Decoder.decoders`."""
    dtype: DTypeLike
    mesh: Mesh | None
    """Mesh that shards the rows, from `kvjax.models.sharding.program_mesh`; None for one device."""


class Planned(NamedTuple):
    """Limits of texts, planned before they are read; see `Cache`."""

    limits: tuple[tuple[Int[Array, "b h"], ...], ...]
    """Slots that each head may use, for each layer, for each of `Decoder.decoders`."""
    seed: UInt32[Array, " b"]
    horizon: Int[Array, " b"]
    end: Int[Array, " b"]
    rope_length: Int[Array, " b"] | None = None


class Text(struct.PyTreeNode):
    """Texts during prefill; reading a chunk returns a new object, and the old one stays valid."""

    cache: Cache
    """On a mesh, all devices along the rows axis have a copy."""
    token_mask: Bool[Array, "b vocab"]
    """True for tokens that have been read."""


class Wishes(NamedTuple):
    """Sampling parameters of each row."""

    sampling: Sampling
    presence_penalty: Float[Array, " b"]
    frequency_penalty: Float[Array, " b"]
    ends: Int[Array, "b e"]
    """Ids that end a row, padded with -1."""
    remaining: Int[Array, " b"]
    """Tokens that may still be generated."""
    tells: Bool[Array, " b"]
    """True if log-probabilities are requested."""


class Rows(struct.PyTreeNode):
    """Batch of texts during decoding; inactive rows are free."""

    cache: Cache
    logits: Float[Array, "b vocab"]
    token_mask: Bool[Array, "b vocab"]
    """True for tokens in each text, for the repetition penalty."""
    token_counts: Int[Array, "b vocab"]
    """Number of times that each token has been generated."""
    wishes: Wishes


class Written(NamedTuple):
    """Output of one dispatch."""

    tokens: Int[Array, "b n"]
    counts: Int[Array, " b"]
    """Number of leading tokens that belong to the row's text; an end id does not."""
    rounds: Int[Array, " b"]
    """Number of passes of the model that added tokens to the row's text."""
    active: Bool[Array, " b"]
    """True for rows that continue."""
    remaining: Int[Array, " b"]
    """Tokens that the row could still generate; `UNDEFINED` if its logits were NaN."""
    position: Int[Array, " b"]
    """Tokens that the row's cache has read."""
    live_slots: Float[Array, " b"]
    """Occupied slots, averaged over layers and heads; those of the draft if there is one."""


class Advance(NamedTuple):
    """What one pass of the model adds to the rows."""

    rows: Rows
    drawn: Drawn
    """Tokens [b n]."""
    counts: Int[Array, " b"]
    """Number of leading tokens that belong to the row's text."""


@functools.partial(jax.jit, static_argnames="sizes")
def begin(decoder: Decoder, planned: Planned, *, sizes: Sizes) -> Text:
    """Create texts with empty caches."""
    text = _empty_text(decoder, planned, sizes)
    return constrain(text, lambda: _text_specs(text), reading_mesh(sizes.mesh))


def reading_mesh(mesh: Mesh | None) -> Mesh | None:
    """Return the mesh for the prefill of texts, before they are inserted into the rows of `mesh`."""
    return None if mesh is None else copying(mesh)


def _empty_text(decoder: Decoder, planned: Planned, sizes: Sizes) -> Text:
    key = jax.vmap(jax.random.key)(planned.seed)
    lengths, caches = (planned.horizon, planned.end), list[Cache]()
    for each, lines, limits, slots in zip(decoder.decoders, sizes.lines, planned.limits, sizes.capacities, strict=True):
        layers = each.replace(policy=each.policy.sized(lines)).init_caches(limits, slots)
        caches.append(Cache.empty(layers, 0, *lengths, policy_seeds(key), key, planned.rope_length))
    return Text(decoder.joined(caches), jnp.zeros((len(key), sizes.config.vocab_size), bool))


@functools.partial(jax.jit, static_argnames="sizes")
def empty_rows(decoder: Decoder, planned: Planned, wishes: Wishes, *, sizes: Sizes) -> Rows:
    """Create free rows."""
    text = _empty_text(decoder, planned, sizes)
    rows = Rows(
        cache=text.cache.replace(active=jnp.zeros(len(planned.seed), bool)),
        logits=jnp.zeros(text.token_mask.shape, wide(sizes.dtype)),
        token_mask=text.token_mask,
        token_counts=jnp.zeros(text.token_mask.shape, jnp.int32),
        wishes=wishes,
    )
    return constrain(rows, lambda: _rows_specs(rows, sizes.config, sizes.mesh), sizes.mesh)


def _text_specs(text: Text) -> Any:
    return Text(text.cache.specs, OF_ROWS)


def _rows_specs(rows: Rows, config: ModelConfig, mesh: Mesh | None) -> Any:
    logits: Any = logits_spec(config, mesh)
    return Rows(rows.cache.specs, logits, OF_ROWS, OF_ROWS, OF_ROWS)


@jax.jit
def read(
    decoder: Decoder, text: Text, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> tuple[Text, Float[Array, "b vocab"]]:
    """Read the next chunk of texts, padded on the right, and return the logits for the token after it."""
    read = [
        read_more(part, cache, tokens, lengths, all_logits=False)
        for part, cache in zip(decoder.decoders, text.cache.caches, strict=True)
    ]
    cache, logits = text.cache.with_caches([cache for cache, _ in read]), read[0][1]
    valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
    token_mask = text.token_mask.at[jnp.arange(len(tokens))[:, None], tokens].max(valid)
    after = Text(cache, token_mask)
    return constrain(after, lambda: _text_specs(after), decoder.mesh), logits


@functools.partial(jax.jit, static_argnames="sizes", donate_argnums=0)
def insert(
    rows: Rows, row: ArrayLike, text: Text, logits: Float[Array, "1 vocab"], wishes: Wishes, *, sizes: Sizes
) -> Rows:
    """Write a prefilled text into a row and replace the row's old contents."""
    mesh, count = sizes.mesh, jnp.zeros(text.token_mask.shape, jnp.int32)
    one = Rows(text.cache, logits, text.token_mask, count, wishes)

    def put(rows: Rows, one: Rows, row: Int[Array, ""]) -> Rows:
        local_rows = len(rows.logits)
        row -= 0 if mesh is None else jax.lax.axis_index(ROWS) * local_rows
        place = jnp.clip(row, 0, local_rows - 1)

        def changed(all: Array, new: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(all, place, 1, axis=0)
            # A device without the row writes its old values back.
            new = jnp.where(place == row, new.astype(all.dtype), old)
            return jax.lax.dynamic_update_slice_in_dim(all, new, place, axis=0)

        return jax.tree.map(changed, rows, one)

    def specs() -> tuple[PyTree, PyTree]:
        row_specs = _rows_specs(rows, sizes.config, mesh)
        return (row_specs, whole_rows(row_specs), REPLICATED), row_specs

    return on_mesh(put, mesh, specs)(rows, one, jnp.asarray(row))


def draw_and_read(decoder: Decoder, rows: Rows, logprobs: int) -> Advance:
    """Draw one token per active row, which rows that continue read."""
    layers = rows.cache.layers

    def draw(rows: Rows) -> tuple[Rows, Drawn, Bool[Array, " b"]]:
        drawn = sample_tokens(rows, logprobs)
        after, belongs = add_tokens(rows, drawn.token, rows.cache.active)
        return after, jax.tree.map(lambda leaf: leaf[:, None], drawn), belongs

    # Each device samples for its own rows, so no logits are transferred between devices.
    draw_here = on_mesh(draw, decoder.mesh, lambda: ((OF_ROWS,), OF_ROWS))
    rows, drawn, belongs = draw_here(rows.replace(cache=rows.cache.replace(layers=())))
    cache, logits = decoder.step(rows.cache.replace(layers=layers), drawn.token[:, 0])
    return Advance(rows.replace(cache=cache, logits=logits), drawn, belongs.astype(jnp.int32))


def sample_tokens(rows: Rows, logprobs: int) -> Drawn:
    """Sample the next token of each row from its logits."""
    cache, wishes, counts = rows.cache, rows.wishes, rows.token_counts
    penalty: Any = wishes.sampling.repetition_penalty
    logits = penalised(rows.logits, rows.token_mask, penalty)
    logits -= (wishes.presence_penalty[:, None] * (counts > 0)).astype(logits.dtype)
    logits -= (wishes.frequency_penalty[:, None] * counts).astype(logits.dtype)
    token = sample(logits, jax.vmap(jax.random.fold_in)(cache.key, cache.position), wishes.sampling)

    # All requests share one program; otherwise, a row's numbers could depend on the requests of its neighbours.
    return jax.lax.cond(
        (wishes.tells & cache.active).any(),
        lambda: token_logprobs(rows.logits, token, logprobs),
        lambda: jax.tree.map(lambda leaf: leaf[:, 0], token_buffers((len(token), 1), rows.logits.dtype, logprobs)),
    )._replace(token=token)


def add_tokens(rows: Rows, token: Int[Array, " b"], among: Bool[Array, " b"]) -> tuple[Rows, Bool[Array, " b"]]:
    """Add a token to the text of each row in `among`, whose caches do not read it; return those whose text it is in.

    A row ends where the token is one of its end ids, which is in no text, and after its last token.
    """
    cache, wishes, index = rows.cache, rows.wishes, jnp.arange(len(token))
    undefined = among & jnp.isnan(rows.logits.max(-1))
    belongs = among & ~undefined & ~(token[:, None] == wishes.ends).any(-1)
    remaining = jnp.where(undefined, UNDEFINED, wishes.remaining - belongs)
    rows = rows.replace(
        cache=cache.replace(active=jnp.where(among, belongs & (remaining > 0), cache.active)),
        token_mask=rows.token_mask.at[index, token].max(belongs),
        token_counts=rows.token_counts.at[index, token].add(belongs),
        wishes=wishes._replace(remaining=remaining),
    )
    return rows, belongs


@functools.partial(jax.jit, static_argnames=("buffer_size", "logprobs", "advance"), donate_argnums=1)
def generate(
    decoder: Decoder,
    rows: Rows,
    running: Bool[Array, " b"],
    steps: ArrayLike,
    leave: ArrayLike,
    *,
    buffer_size: int,
    logprobs: int,
    advance: Callable[[Any, Rows, int], Advance] = draw_and_read,
) -> tuple[Rows, Written, Drawn]:
    """Generate tokens for all active rows; a row ends at one of its end ids or at its maximal number of tokens.

    Args:
        rows: the batch; it is consumed.
        running: False for rows to free, which generate nothing more.
        steps: tokens after which no further pass begins, 1 to `buffer_size`.
        leave: True to stop as soon as a row has ended.
        buffer_size: size of the token buffers, with room for those of the last pass.
        logprobs: number of likeliest tokens to return; log-probabilities are valid only if a row requests them.
        advance: what a pass of the model does: `draw_and_read`, or that of a draft in `kvjax.serving.speculative`.
    """
    active = constrain(rows.cache.active & running, lambda: OF_ROWS, decoder.mesh)
    rows = rows.replace(cache=rows.cache.replace(active=active))
    began, row_count = active.sum(), len(rows.logits)

    def more(carry: Any) -> Bool[Array, ""]:
        i, rows, *_ = carry
        active = rows.cache.active
        return (i < steps) & active.any() & ~(jnp.asarray(leave) & (active.sum() < began))

    def one(carry: Any) -> Any:
        _, rows, counts, rounds, tokens = carry
        after, drawn, new = advance(decoder, rows, logprobs)
        at = counts[:, None] + jnp.arange(drawn.token.shape[1])
        tokens = jax.tree.map(lambda all, some: all.at[index, at].set(some, mode="drop"), tokens, drawn)
        counts += new
        return counts.max(), after, counts, rounds + (new > 0), tokens

    tokens = token_buffers((row_count, buffer_size), decoder.weights.dtype, logprobs)
    index, none = jnp.arange(row_count)[:, None], jnp.zeros(row_count, jnp.int32)
    _, rows, counts, rounds, tokens = jax.lax.while_loop(more, one, (jnp.int32(0), rows, none, none, tokens))
    cache, mesh, evicting = rows.cache, decoder.mesh, rows.cache.caches[-1]
    live_slots = jnp.stack([(layer >= 0).sum(-1).mean(-1) for layer in evicting.stored_positions()]).mean(0)
    output = Written(tokens.token, counts, rounds, cache.active, rows.wishes.remaining, cache.position, live_slots)
    return constrain(rows, lambda: _rows_specs(rows, decoder.config, mesh), mesh), output, tokens
