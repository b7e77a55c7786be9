"""The device's side of serving: rows that texts join and leave, and one program that writes to all of them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.cache.dense import Dense, empty
from kvjax.generation.loop import Drawn, room_for, thought
from kvjax.generation.sampling import Sampling, penalised, sample
from kvjax.inference.decode import step
from kvjax.inference.extend import read_more
from kvjax.inference.prefill import policy_seeds
from kvjax.inference.sharding import OF_ROWS, WHOLE, copying, logits_spec, lying, on_mesh, storage_specs, whole_rows
from kvjax.inference.state import ROWS as ROW_FIELDS
from kvjax.inference.state import State
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.policies.policy import Policy
from kvjax.types import ROWS, wide

UNDEFINED = -1
"""As what is `left` of a row: its logits were NaN."""


class Sizes(NamedTuple):
    """What rows of one engine have in common, as programs are compiled for it."""

    config: ModelConfig
    capacities: tuple[int, ...]
    """For each layer the slots of its buffers."""
    lines: tuple[int, ...]
    """For each layer the most slots that a head may use, rounded as buffers are."""
    dtype: DTypeLike
    mesh: Mesh | None
    """The devices that share rows, from `kvjax.models.sharding.program_mesh`; None for one."""


class Planned(NamedTuple):
    """What is known of texts before they are read; see `State`."""

    limits: tuple[Int[Array, "b h"], ...]
    """For each layer the slots that each head may use."""
    seed: UInt32[Array, " b"]
    """Of all randomness."""
    horizon: Int[Array, " b"]
    end: Int[Array, " b"]


class Text(struct.PyTreeNode):
    """Texts that are being read; what comes of one is another, and it stays valid."""

    state: State
    """Without weights and policy; on a mesh all devices along its rows have a copy."""
    seen: Bool[Array, "b vocab"]
    """Which tokens have been read."""


class Wishes(NamedTuple):
    """How rows are to be continued."""

    sampling: Sampling
    """Of arrays [b]."""
    presence_penalty: Float[Array, " b"]
    frequency_penalty: Float[Array, " b"]
    ends: Int[Array, "b e"]
    """Ids that end a row, filled up with -1."""
    left: Int[Array, " b"]
    """Tokens that may still be written."""
    tells: Bool[Array, " b"]
    """Whether anybody asks what the model thought of its tokens."""


class Rows(struct.PyTreeNode):
    """Texts that are being continued; rows that are not active wait for one."""

    state: State
    """Without weights and policy."""
    logits: Float[Array, "b vocab"]
    """For the next token of each."""
    seen: Bool[Array, "b vocab"]
    """Which tokens each text has, for the penalty on repetition."""
    written: Int[Array, "b vocab"]
    """How often each has been written."""
    wishes: Wishes


class Written(NamedTuple):
    """What one dispatch made of its rows."""

    tokens: Int[Array, "b n"]
    counts: Int[Array, " b"]
    """How many of them, from the first, belong to the row's text: an ending id does not."""
    active: Bool[Array, " b"]
    """Which rows go on."""
    left: Int[Array, " b"]
    """Tokens that a row might still have written; `UNDEFINED` where its logits were NaN."""
    position: Int[Array, " b"]
    """Tokens that its cache has read."""
    kept: Float[Array, " b"]
    """Slots that hold one, on average over layers and heads."""


@functools.partial(jax.jit, static_argnames="sizes")
def begin(policy: Policy, planned: Planned, *, sizes: Sizes) -> Text:
    """Texts of which nothing has been read."""
    text = _begun(policy, planned, sizes, None if sizes.mesh is None else copying(sizes.mesh))
    return lying(text, _text_specs(text), text.state.mesh)


def _begun(policy: Policy, planned: Planned, sizes: Sizes, mesh: Mesh | None) -> Text:
    rows, roomy = len(planned.seed), policy.sized(sizes.lines)
    layers = enumerate(zip(sizes.config.layer_configs, planned.limits, sizes.capacities, strict=True))
    made = (
        empty(roomy, shape, layer, limit=limit, slots=capacity, dtype=sizes.dtype)
        for layer, (shape, limit, capacity) in layers
    )
    key = jax.vmap(jax.random.key)(planned.seed)
    state = State(
        weights=None,  # type: ignore[arg-type]
        policy=None,  # type: ignore[arg-type]
        storage=Dense(tuple(made)),
        position=jnp.zeros(rows, jnp.int32),
        prompt_length=jnp.zeros(rows, jnp.int32),
        horizon=planned.horizon,
        end=planned.end,
        key=key,
        seed=policy_seeds(key),
        active=jnp.ones(rows, bool),
        config=sizes.config,
        mesh=mesh,
    )
    return Text(state, jnp.zeros((rows, sizes.config.vocab_size), bool))


@functools.partial(jax.jit, static_argnames=("ends", "sizes"))
def empty_rows(policy: Policy, planned: Planned, *, ends: int, sizes: Sizes) -> Rows:
    """Rows that wait for texts, with room for so many ids that end one."""
    text, rows = _begun(policy, planned, sizes, sizes.mesh), len(planned.seed)
    whole, real = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
    sampling = Sampling.tree_unflatten(None, (real, whole, real, real, real))
    none = jnp.zeros(rows, bool)
    made = Rows(
        state=text.state.replace(active=none),
        logits=jnp.zeros(text.seen.shape, wide(sizes.dtype)),
        seen=text.seen,
        written=jnp.zeros(text.seen.shape, jnp.int32),
        wishes=Wishes(sampling, real, real, jnp.full((rows, ends), -1, jnp.int32), whole, none),
    )
    return lying(made, _rows_specs(made), sizes.mesh)


def _text_specs(text: Text) -> Any:
    """Where texts lie on their mesh."""
    return Text(_state_specs(text.state), OF_ROWS)


def _rows_specs(rows: Rows) -> Any:
    """Where rows lie on their mesh."""
    logits: Any = logits_spec(rows.state.config, rows.state.mesh)
    return Rows(_state_specs(rows.state), logits, OF_ROWS, OF_ROWS, OF_ROWS)


def _state_specs(state: State) -> State:
    return state.replace(storage=storage_specs(state.storage), **dict.fromkeys(ROW_FIELDS, OF_ROWS))


@jax.jit
def read(
    weights: Weights, policy: Policy, text: Text, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> tuple[Text, Float[Array, "b vocab"]]:
    """Read a chunk on top of what has been read, and return the logits for the token after it.

    Args:
        weights: of the model.
        policy: what stays.
        text: before it.
        tokens: the chunk, padded on the right.
        lengths: tokens of each row, at least 1.
    """
    storage, logits = read_more(text.state.replace(weights=weights, policy=policy), tokens, lengths, every=False)
    position = text.state.position + lengths
    valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
    seen = text.seen.at[jnp.arange(len(tokens))[:, None], tokens].max(valid)
    after = Text(text.state.replace(storage=storage, position=position, prompt_length=position), seen)
    return lying(after, _text_specs(after), text.state.mesh), logits


@functools.partial(jax.jit, donate_argnums=0)
def insert(rows: Rows, row: ArrayLike, text: Text, logits: Float[Array, "1 vocab"], wishes: Wishes) -> Rows:
    """Give a row to a text that has been read; whatever the row had is gone."""
    mesh, count = rows.state.mesh, jnp.zeros(text.seen.shape, jnp.int32)
    one = Rows(text.state.replace(mesh=mesh), logits, text.seen, count, wishes)

    def put(rows: Rows, one: Rows, row: Int[Array, ""]) -> Rows:
        here = len(rows.logits)
        row -= 0 if mesh is None else jax.lax.axis_index(ROWS) * here
        place = jnp.clip(row, 0, here - 1)

        def changed(all: Array, new: Array) -> Array:
            old = jax.lax.dynamic_slice_in_dim(all, place, 1, axis=0)
            # A device that does not have the row writes what is there.
            new = jnp.where(place == row, new.astype(all.dtype), old)
            return jax.lax.dynamic_update_slice_in_dim(all, new, place, axis=0)

        return jax.tree.map(changed, rows, one)

    specs = _rows_specs(rows)
    return on_mesh(put, mesh, (specs, whole_rows(specs), WHOLE), specs)(rows, one, jnp.asarray(row))


@functools.partial(jax.jit, donate_argnums=0)
def free(rows: Rows, kept: Bool[Array, " b"]) -> Rows:
    """End the rows that are not kept."""
    active = lying(rows.state.active & kept, OF_ROWS, rows.state.mesh)
    return rows.replace(state=rows.state.replace(active=active))


@functools.partial(jax.jit, static_argnames=("most", "logprobs"), donate_argnums=2)
def generate(
    weights: Weights, policy: Policy, rows: Rows, steps: ArrayLike, leave: ArrayLike, *, most: int, logprobs: int
) -> tuple[Rows, Written, Drawn]:
    """Write to all active rows; each ends at its own ids, or where it has written what it may.

    Args:
        weights: of the model.
        policy: what stays.
        rows: are consumed.
        steps: tokens of each row at most, 1 to `most`.
        leave: whether to stop as soon as a row has ended.
        most: tokens that there is room for.
        logprobs: how many likeliest tokens to tell of where a row asks.

    Returns:
        The rows, what was written, and what the model thought of it, which means nothing where no row asks.
    """
    began, each = rows.state.active.sum(), len(rows.logits)

    def more(carry: Any) -> Bool[Array, ""]:
        i, rows, _, _ = carry
        active = rows.state.active
        return (i < steps) & active.any() & ~(jnp.asarray(leave) & (active.sum() < began))

    def one(carry: Any) -> Any:
        i, rows, count, made = carry
        rows, drawn, belongs = _written(weights, policy, rows, logprobs)
        made = jax.tree.map(lambda all, new: all.at[:, i].set(new), made, drawn)
        return i + 1, rows, count + belongs, made

    made = room_for((each, most), weights.embedding.dtype, logprobs)
    _, rows, count, made = jax.lax.while_loop(more, one, (jnp.int32(0), rows, jnp.zeros(each, jnp.int32), made))
    state = rows.state
    held = jnp.stack([(layer >= 0).sum(-1).mean(-1) for layer in state.storage.stored_positions()]).mean(0)
    written = Written(made.token, count, state.active, rows.wishes.left, state.position, held)
    return lying(rows, _rows_specs(rows), state.mesh), written, made


def _written(weights: Weights, policy: Policy, rows: Rows, logprobs: int) -> tuple[Rows, Drawn, Bool[Array, " b"]]:
    """One token of each active row, read by its cache unless it is the last; and whether it belongs to its text."""
    storage, mesh = rows.state.storage, rows.state.mesh
    # Each device draws for its rows, or logits would travel to those of others.
    draw = on_mesh(functools.partial(_drawn, logprobs=logprobs), mesh, (OF_ROWS,), OF_ROWS)
    rows, drawn, belongs = draw(rows.replace(state=rows.state.replace(storage=())))
    state, logits = step(rows.state.replace(weights=weights, policy=policy, storage=storage), drawn.token)
    return rows.replace(state=state.replace(weights=None, policy=None), logits=logits), drawn, belongs


def _drawn(rows: Rows, *, logprobs: int) -> tuple[Rows, Drawn, Bool[Array, " b"]]:
    """What `_written` does before caches read."""
    state, wishes, each = rows.state, rows.wishes, jnp.arange(len(rows.logits))
    often, active = rows.written, state.active
    penalty: Any = wishes.sampling.repetition_penalty
    logits = penalised(rows.logits, rows.seen, penalty)
    logits -= (wishes.presence_penalty[:, None] * (often > 0)).astype(logits.dtype)
    logits -= (wishes.frequency_penalty[:, None] * often).astype(logits.dtype)
    token = sample(logits, jax.vmap(jax.random.fold_in)(state.key, state.position), wishes.sampling)

    # One program whoever asks for more, or a row's numbers might depend on what its neighbours ask for.
    def told() -> Drawn:
        return thought(rows.logits, token, logprobs)

    def untold() -> Drawn:
        return jax.tree.map(lambda leaf: leaf[:, 0], room_for((len(each), 1), rows.logits.dtype, logprobs))

    drawn = jax.lax.cond((wishes.tells & active).any(), told, untold)._replace(token=token)
    undefined = active & jnp.isnan(rows.logits.max(-1))
    belongs = active & ~undefined & ~(token[:, None] == wishes.ends).any(-1)
    left = jnp.where(undefined, UNDEFINED, wishes.left - belongs)
    rows = rows.replace(
        state=state.replace(active=belongs & (left > 0)),
        seen=rows.seen.at[each, token].max(belongs),
        written=often.at[each, token].add(belongs),
        wishes=wishes._replace(left=left),
    )
    return rows, drawn, belongs
