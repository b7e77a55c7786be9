"""Given text: prompts into an empty cache, chunks and turns on top of a filled one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from kvjax.cache.dense import Dense
from kvjax.cache.paged import build
from kvjax.cache.paged.storage import Paged
from kvjax.cache.paged.table import page_slots, table
from kvjax.inference.autotune import settle_before
from kvjax.inference.decode import settle_step
from kvjax.inference.layers import Reading, read_block
from kvjax.inference.prefill import lower_prompts, prompt_shapes, read_prompts
from kvjax.inference.prepare import Budget, Tokens, bucket, check_length, check_on_host, check_tokens, prepare
from kvjax.inference.sharding import OF_POOL, OF_ROWS, OF_SELECTED, joined, logits_spec, on_mesh, pool_specs, shared
from kvjax.inference.state import Moving, State, Storage, check_state, join_state, placed, split_state, state_specs
from kvjax.methods.registry import name_of
from kvjax.models.decoder import unembed
from kvjax.models.model import rows_of
from kvjax.models.sharding import on_device
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.types import HEADS, ROWS, Kernels
from kvjax.utils.processes import on_host

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


def prefill(
    model: LanguageModel,
    policy: Policy | str,
    tokens: Tokens,
    budget: Budget = 1.0,
    *,
    lengths: ArrayLike | Sequence[int] | None = None,
    max_new_tokens: int = 256,
    key: Key[Array, ""] | Key[Array, " b"] | None = None,
    plan: Plan | str | None = None,
    prefill_chunk: int | None = None,
    budget_of: str = "text",
    implementation: str | Kernels = "auto",
) -> tuple[State, Float[Array, "b vocab"]]:
    """Read prompts into a cache that holds no more than its budget.

    Args:
        model: from `kvjax.load`.
        policy: which tokens stay; a name or a `Policy`.
        tokens: prompts [b, n], padded on the right; or a list of lists of unequal lengths.
        budget: slots per KV head, that of the token being read included; or a fraction, per row; or slots for each
            layer. A paper that attends over budget + 1 slots and then evicts has one slot more at the same number.
            Omit the budget for policies that decide how many slots each head needs. If other layers of the model see
            further, a layer with a window keeps that window under any policy once the text exceeds it. The budget
            applies to the other layers.
        lengths: tokens of each prompt [b], 1 to n; None if none is padded.
        max_new_tokens: planned number of generated tokens; fractions, schedules, the full cache and length-dependent
            RoPE depend on it.
        key: random key for sampling and random policies, one for all rows or one each; None is `jax.random.key(0)`.
        plan: how the budget is spread over layers or heads; a name, a `Plan`, or None for the policy's own.
        prefill_chunk: compress after each chunk of this many prompt tokens, so that memory never exceeds budget +
            chunk; None for the policy's default, mostly the whole prompt; 1 reads it by decode steps.
        budget_of: base of a fractional budget: `text` (prompt + `max_new_tokens`), `prompt`, or `context` (the
            model's positions).
        implementation: of every operation: `auto`, `xla`, `pallas`, `triton`, `mosaic`, or a list such as `pallas,xla`
            for the first that can run; see `pallas_kernels.common.choose`.

    Returns:
        The state to decode from, and the logits for the first new token [b, vocab].

    Raises:
        ValueError: if a prompt is empty or does not fit the model, or the budget does not fit the policy; or if a
            user's own score gives NaN, or other than one number for each slot.
        TypeError: if the tokens are not rows of ids, or a class is given instead of an instance.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> state.position.tolist(), logits.shape
        ([3], (1, 2048))
    """
    settings: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=key, plan=plan, chunk=prefill_chunk)
    prompts = prepare(model, policy, tokens, budget, lengths, budget_of=budget_of, **settings)
    kernels = implementation if isinstance(implementation, Kernels) else Kernels(implementation)
    settle_before(lambda kernels: prompt_shapes(model, prompts, kernels), kernels)
    storage, position, seed, logits = read_prompts(model, prompts, kernels)
    if prompts.policy.plan.sizing.per_head:
        storage = _on_pages(storage, page_slots(prompts.tokens.shape[1] + max_new_tokens), model.mesh)
    state = State(
        weights=model.weights,
        policy=jax.tree.map(jnp.asarray, prompts.policy),  # else every step would transfer host numbers
        storage=storage,
        position=position,
        prompt_length=jnp.asarray(prompts.lengths),
        horizon=jnp.asarray(prompts.horizon),
        end=jnp.asarray(prompts.lengths + prompts.horizon),
        key=prompts.keys,
        seed=seed,
        active=jnp.asarray(np.ones(prompts.lengths.shape, bool)),
        config=model.config,
        kernels=kernels,
        mesh=model.mesh,
    )
    state = placed(state)
    settle_step(state)
    if jnp.isnan(logits).any():
        raise ValueError(
            f"{type(prompts.policy.score).__name__}.score gives NaN for tokens of a prompt, or the model does; a score "
            "has to give numbers, or -inf, +inf."
        )
    return state, logits


def _on_pages(selected: tuple[build.Selected, ...], page_size: int, mesh: Mesh | None) -> Paged:
    # Read the sizes on the host; one program then moves the tokens.
    limits = np.stack([on_host(layer.view.limit) for layer in selected])
    devices = (1, 1) if mesh is None else (mesh.shape[ROWS], mesh.shape[HEADS])
    *tables, most = table(limits, page_size, devices)
    return _pack(selected, *map(jnp.asarray, tables), page_size=page_size, most=most, devices=devices, mesh=mesh)


@functools.partial(jax.jit, static_argnames=("page_size", "most", "devices", "mesh"))
def _pack(selected: tuple[build.Selected, ...], *tables: Array, mesh: Mesh | None, **sizes: Any) -> Paged:
    given = (OF_SELECTED,) * len(selected), *(OF_POOL,) * 3
    made = pool_specs(len(selected), sizes["most"], sizes["devices"])
    return on_mesh(functools.partial(build.pack, **sizes), mesh, given, made)(selected, *tables)


def lower_prefill(
    model: LanguageModel,
    policy: Policy | str,
    tokens: Tokens,
    budget: Budget = 1.0,
    *,
    lengths: ArrayLike | Sequence[int] | None = None,
    max_new_tokens: int = 256,
    plan: Plan | str | None = None,
    prefill_chunk: int | None = None,
    budget_of: str = "text",
) -> list[jax.stages.Lowered]:
    """Lower the programs of `prefill` for these arguments, to compile them and read their `memory_analysis()`."""
    settings: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=None, plan=plan, chunk=prefill_chunk)
    prompts = prepare(model, policy, tokens, budget, lengths, budget_of=budget_of, **settings)
    return lower_prompts(model, prompts)


def extend(
    state: State,
    tokens: ArrayLike | Sequence[Sequence[int]],
    lengths: ArrayLike | Sequence[int] | None = None,
    logits: str = "last",
) -> tuple[State, Float[Array, "b vocab"] | Float[Array, "b n vocab"]]:
    """Read more text on top of a cache: a second turn, or the next chunk of a text.

    All tokens attend to the cache and to each other before any of them is evicted; memory is that of the cache and of
    the tokens. Use `decode_step` for generated tokens.

    Args:
        state: from `prefill` or a later call; it stays valid.
        tokens: [b, n], padded on the right; or a list of lists, some of which may be empty.
        lengths: tokens of each row [b], 0 to n; None if none is padded.
        logits: `last` for logits after each row's last token, `all` for logits after every token.

    Returns:
        The state to decode from, and logits [b, vocab] or [b, n, vocab]; NaN where a row has read nothing.

    Raises:
        TypeError: if the tokens are a list of anything but rows.
        ValueError: if the tokens do not fit the state or the model; or if the text exceeds its planned length, under
            policies that reserve slots for all of it.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> state, logits = kvjax.extend(state, [[8, 15, 99]])
        >>> state.position.tolist(), logits.shape
        ([6], (1, 2048))
    """
    check_state(state)
    check_on_host("extend", state.position, tokens, lengths)
    if logits not in ("last", "all"):
        raise ValueError(f"logits={logits!r} is not 'last' or 'all'.")
    rows = len(state.position)
    if isinstance(tokens, (list, tuple)):
        tokens, counted = rows_of(tokens)
        tokens = tokens if tokens.size else np.zeros((len(tokens), 1), np.int64)  # all rows are empty
        lengths = counted if lengths is None else lengths
    ids = np.asarray(tokens)
    if ids.ndim != 2 or len(ids) != rows or ids.shape[1] == 0:
        raise ValueError(f"tokens of shape {ids.shape} are not text for each of {rows} rows [b, n].")
    counts = np.full(rows, ids.shape[1]) if lengths is None else np.asarray(lengths)
    check_tokens(ids, counts, state.config, least=0)
    counts = np.where(on_host(state.active), counts, 0)
    read, end = on_host(state.position) + counts, on_host(state.end)
    check_length(int(read.max()), state.policy, state.config)
    if state.policy.plan.sizing.fixed_length and (read > end).any():
        raise ValueError(
            f"a text of {int(read.max())} tokens does not fit the {int(end[read > end].min())} that "
            f"{name_of(state.policy)} set slots aside for; give prefill more max_new_tokens."
        )
    size = bucket(ids.shape[1])
    padded = jnp.asarray(np.pad(ids, ((0, 0), (0, size - ids.shape[1]))), jnp.int32)
    texts, every = (padded, jnp.asarray(counts, jnp.int32)), logits == "all"
    settle_before(
        lambda kernels: read_more.eval_shape(state.replace(kernels=kernels), *texts, every=every), state.kernels
    )
    storage, found = read_more(state, *texts, every=every)
    position = state.position + jnp.asarray(counts, jnp.int32)
    given = jnp.where(jnp.asarray(counts) > 0, position, state.prompt_length)
    after = state.replace(storage=storage, position=position, prompt_length=given)
    return after, found[:, : ids.shape[1]] if logits == "all" else found


@functools.partial(jax.jit, static_argnames="every")
def read_more(
    state: State, tokens: Int[Array, "b n"], lengths: Int[Array, " b"], *, every: bool
) -> tuple[Storage, Float[Array, "b *n vocab"]]:
    """Run `extend` on checked tokens, also inside programs that are compiled as a whole."""
    fixed, moving = split_state(state)
    of_fixed, of_moving = state_specs(state)
    logits = logits_spec(state.config, state.mesh)
    logits = PartitionSpec(logits[0], None, *logits[1:]) if every else logits
    given, made = (of_fixed, of_moving, OF_ROWS, OF_ROWS), (of_moving[0], logits)
    read = on_mesh(functools.partial(_extend_on_device, every=every), state.mesh, given, made)
    return read(fixed, moving, tokens, lengths)


def _extend_on_device(
    fixed: State, moving: Moving, tokens: Int[Array, "b n"], lengths: Int[Array, " b"], *, every: bool
) -> tuple[Storage, Float[Array, "b *n vocab"]]:
    state = join_state(fixed, moving)
    config, policy = on_device(state.config, state.mesh), state.policy
    place = jnp.arange(tokens.shape[1])
    valid = place < lengths[:, None]
    read = state.position + lengths
    reading = Reading(
        token=tokens,
        position=jnp.where(valid, state.position[:, None] + place, -1),
        prompt_length=jnp.where(lengths > 0, read, state.prompt_length),
        read=read,
        horizon=state.horizon,
        end=state.end,
        seed=state.seed,
        kernels=state.kernels,
    )
    # While a block is read, pages are unpacked into buffers of one size for all heads.
    dense = joined(state.storage, state.mesh).unpack()
    capacities = tuple(view.capacity for view in dense.layers)
    after, hidden = read_block(state.weights, config, policy, dense, reading, capacities)
    assert isinstance(after, Dense)
    storage = shared(state.storage.pack(after), state.mesh)
    if every:
        logits = unembed(state.weights, config, hidden)
        return storage, jnp.where(valid[..., None], logits, jnp.nan)
    last = jnp.einsum("btw,bt->bw", hidden, (place == (lengths - 1)[:, None]).astype(hidden.dtype))
    return storage, jnp.where((lengths > 0)[:, None], unembed(state.weights, config, last), jnp.nan)
