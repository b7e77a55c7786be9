"""Preparation of prompts on the host: checks, slots per layer, padding to a bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key

from kvjax.methods.compatibility import fitted
from kvjax.methods.registry import name_of, plan_by_name
from kvjax.methods.registry import policy as policy_by_name
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.models.model import rows_of
from kvjax.policies.allocation import Plan, layer_slots
from kvjax.policies.policy import Policy
from kvjax.types import ROWS, SLOTS
from kvjax.utils.settings import whole_number

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel

Tokens = ArrayLike | Sequence[Sequence[int]]
Budget = int | float | Sequence[int]
WHOLES = ("text", "prompt", "context")
"""Bases of a fractional budget."""


class Loaded(Protocol):
    """Model or decoder that reads prompts."""

    @property
    def weights(self) -> Weights: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def mesh(self) -> Mesh | None: ...


class Prompts(NamedTuple):
    """Arguments of the program that reads prompts."""

    policy: Policy
    tokens: Int[np.ndarray, "b n"]
    """Padded to a bucket, and to whole chunks."""
    lengths: Int[np.ndarray, " b"]
    horizon: Int[np.ndarray, " b"]
    keys: Key[Array, " b"]
    limits: tuple[Int[np.ndarray, "b h"], ...]
    """Slots that each head may use, by layer."""
    capacities: tuple[int, ...]
    """Slots of the buffers, by layer."""
    lines: tuple[int, ...]
    """Most slots that a head may use, by layer, rounded as buffers are."""
    chunk: int | None
    """Tokens read between two compressions; None for the whole prompt."""


def prepare(
    model: LanguageModel,
    policy: Policy | str,
    tokens: Tokens,
    budget: Budget,
    lengths: ArrayLike | Sequence[int] | None,
    *,
    max_new_tokens: int,
    key: Key[Array, ""] | Key[Array, " b"] | None,
    plan: Plan | str | None,
    chunk: int | None = None,
    budget_of: str = "text",
) -> Prompts:
    """Check the arguments of `kvjax.prefill` and prepare its prompts.

    Raises:
        ValueError: if a prompt is empty or does not fit the model, or the budget does not fit the policy.
    """
    check_on_host("prefill", tokens, lengths, key, budget)
    bound, budget = bind(model, policy, budget, plan)
    settings: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=key, chunk=chunk, budget_of=budget_of)
    return prepare_bound(model, bound, tokens, budget, lengths, **settings)


def bind(model: LanguageModel, policy: Policy | str, budget: Budget, plan: Plan | str | None) -> tuple[Policy, Budget]:
    """Return a policy bound to its model and budget, and the budget as Python numbers.

    Raises:
        TypeError: the model is of another type.
        ValueError: the policy does not fit the model or the budget.
    """
    check_on_host("prefill", budget)
    if not hasattr(model, "name"):  # a state has a model's weights and config, too
        raise TypeError(f"the first argument is a model, from kvjax.load, not {type(model).__name__}.")
    budget = checked_budget(budget)
    policy = ready(model, policy, budget, plan)
    if policy.plan.sizing.mode == "profiled" and not (isinstance(budget, float) and budget == 1.0):
        raise ValueError(
            f"{name_of(policy)} decides itself how many slots each head gets, so budget={budget!r} has no "
            "effect; leave it out and change its settings."
        )
    check_bounded(policy, budget)
    return policy, budget


def prepare_bound(
    model: Loaded,
    policy: Policy,
    tokens: Tokens,
    budget: Budget,
    lengths: ArrayLike | Sequence[int] | None,
    *,
    max_new_tokens: int,
    key: Key[Array, ""] | Key[Array, " b"] | None,
    chunk: int | None = None,
    budget_of: str = "text",
) -> Prompts:
    """Prepare prompts for a policy from `bind`.

    Raises:
        ValueError: if a prompt is empty or does not fit the model, or the budget does not fit the policy.
    """
    check_on_host("prefill", tokens, lengths, key)
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
    config = model.config
    requires = policy.score.requires
    own, per_head = requires.prompt_chunk, policy.plan.sizing.per_head
    if (per_head or requires.whole_prompt) and (chunk or own) is not None:
        what, instead = f"prefill_chunk={chunk}", "leave it out"
        if chunk is None:
            what = f"policy {policy.name}, which reads prompts in chunks of {own},"
            instead = "let it read whole prompts (block=None or prompt='one_shot'), or choose another plan"
        known = "a budget for each head" if per_head else f"policy {policy.name}"
        raise ValueError(f"{what} does not go with {known}, which only the whole prompt can tell; {instead}.")
    chunk = own if chunk is None else whole_number("prefill_chunk", chunk)
    padded, real = _pad_rows(tokens, lengths)
    rows, width = padded.shape
    _check_prompts(padded, real, policy, config)
    check_rows(rows, model.mesh)
    check_prompt(policy, int(real.min()))
    policy.codec.check_layers(config.layer_configs)
    limits, capacities = plan_slots(policy, budget, real, max_new_tokens, config, width, budget_of)
    size = bucket(width) if chunk is None or chunk >= width else -(-bucket(width) // chunk) * chunk
    chunk = None if chunk is None or (chunk >= width and chunk > 1) else chunk
    keys = checked_key(key, rows)
    return Prompts(
        policy=policy,
        tokens=np.pad(padded, ((0, 0), (0, size - width))).astype(np.int32),
        lengths=real.astype(np.int32),
        horizon=np.full(rows, max_new_tokens, np.int32),
        keys=jnp.broadcast_to(keys, (rows,)) if keys.ndim == 0 else keys,
        limits=tuple(limit.astype(np.int32) for limit in limits),
        capacities=among_devices(capacities, model.mesh),
        lines=lines_of(limits),
        chunk=chunk,
    )


def check_on_host(name: str, *values: Any) -> None:
    """Refuse traced values, because slots are planned on the host.

    Raises:
        TypeError: if one of the values is traced.
    """
    if any(isinstance(value, Tracer) for value in values):
        raise TypeError(
            f"{name} plans slots on the host and cannot be traced by jit, vmap or scan; call it outside, and trace "
            "decode_step."
        )


def check_bounded(policy: Policy, budget: Budget) -> None:
    """Refuse a budget for a policy that keeps everything.

    Raises:
        ValueError: if the policy keeps everything and the budget is not 1.0; the message names both.
    """
    if not policy.bounded and not (isinstance(budget, float) and budget == 1.0):
        raise ValueError(
            f"budget={budget!r} has no effect under policy {name_of(policy)}, which keeps everything; leave it out, "
            "or choose another policy."
        )


def check_prompt(policy: Policy, shortest: int) -> None:
    """Refuse a prompt that is too short for a policy's score.

    Args:
        policy: the policy.
        shortest: tokens of the shortest prompt.

    Raises:
        ValueError: the score needs a longer one; the message names its settings.
    """
    if shortest < policy.score.requires.min_prompt:
        raise ValueError(
            f"{policy.score!r} needs {policy.score.requires.min_prompt} tokens of a prompt, and one has {shortest}; "
            "use longer prompts or other settings."
        )


def checked_key(key: Any, rows: int) -> Key[Array, "*b"]:
    """Check random keys, and return one for all rows or one for each.

    Args:
        key: from `jax.random.key` or `jax.random.PRNGKey`, a seed, or None for seed 0.
        rows: number of rows.

    Raises:
        TypeError: if `key` is none of these.
        ValueError: if the number of keys is neither 1 nor `rows`.
    """
    if key is None or (isinstance(key, (int, np.integer)) and not isinstance(key, bool)):
        return jax.random.key(0 if key is None else whole_number("key", key, -(2**63), 2**63 - 1))
    if isinstance(key, (jax.Array, np.ndarray)) and key.dtype == jnp.uint32 and key.ndim and key.shape[-1] == 2:
        key = jax.random.wrap_key_data(jnp.asarray(key))  # of jax.random.PRNGKey
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"key={key!r} is no random key; give jax.random.key(seed), or one for each row.")
    if key.shape not in ((), (rows,)):
        raise ValueError(f"key has shape {list(key.shape)}; give one random key, or one for each of {rows} rows.")
    return key


def ready(model: LanguageModel, policy: Policy | str, budget: Budget, plan: Plan | str | None) -> Policy:
    """Return a policy bound to its model, its budget and the plan that distributes the budget.

    Raises:
        ValueError: if the policy was made for another model, or its parts do not fit each other or the model.
    """
    chosen = policy_by_name(policy).bind(model)
    chosen.protection.check_tokens(model.config.vocab_size)
    if chosen.codec.positions == "cache" and model.config.position == "learned":
        raise ValueError(
            f"positions='cache' does not go with model {model.name!r}, which adds learned positions to embeddings "
            "before there are keys; use positions='original'."
        )
    return fitted(chosen.budgeted(budget).spread(plan_by_name(plan)))


def instead(config: ModelConfig) -> str:
    """Return the advice for texts beyond the model's positions, as the end of a sentence; empty if there is none."""
    return config.remark if config.bounded else ", or use a policy with positions='cache'"


def longest_text(policy: Policy, config: ModelConfig) -> float:
    """Return the most tokens that a text may have; infinity if the policy uses positions in the cache."""
    return config.max_positions if config.bounded or policy.codec.positions == "original" else math.inf


def checked_budget(budget: Any) -> Budget:
    """Check a budget and return it as Python numbers.

    Raises:
        TypeError: if the budget is neither a number nor a number of slots for each layer.
        ValueError: if it is out of range.
    """
    if isinstance(budget, (list, tuple, np.ndarray)) and np.ndim(budget) > 0:
        return [whole_number("budget", slots) for slots in budget]
    if isinstance(budget, (float, np.floating)):
        return float(budget)
    if isinstance(budget, (bool, np.bool_)) or not isinstance(budget, (int, np.integer)):
        raise TypeError(
            f"budget={budget!r} is not a number of slots, a fraction of the text, nor slots for each layer."
        )
    if budget >= 2**31:
        raise ValueError(f"budget={budget} is more slots than a cache can count, 2147483647.")
    return int(budget)


def bucket(tokens: int) -> int:
    """Return the padded length of a text: the next power of two or halfway point, at least 16.

    Texts of one padded length share a program.
    """
    power = 16
    while power < tokens:
        power *= 2
    return power * 3 // 4 if power > 16 and power * 3 // 4 >= tokens else power


def bucket_rows(rows: int, mesh: Mesh | None = None) -> int:
    """Return the padded rows of a batch: the next power of two or halfway point, divisible among devices."""
    devices = 1 if mesh is None else mesh.shape[ROWS]
    return -(-(bucket(16 * rows) // 16) // devices) * devices


def check_rows(rows: int, mesh: Mesh | None) -> None:
    """Refuse rows that cannot be sharded evenly over devices.

    Raises:
        ValueError: if the rows are not a multiple of the devices; the message names both.
    """
    devices = 1 if mesh is None else mesh.shape[ROWS]
    if rows % devices:
        raise ValueError(
            f"{rows} rows cannot be sharded evenly over data={devices} devices; give a multiple of {devices} rows, "
            "or a mesh with fewer devices along data."
        )


def round_slots(slots: int) -> int:
    """Round slots up to a multiple of 16, or of 64 beyond 1024, so that blocks of attention fit the buffers."""
    unit = 16 if slots <= 1024 else 64
    return -(-slots // unit) * unit


def among_devices(capacities: Sequence[int], mesh: Mesh | None) -> tuple[int, ...]:
    """Round slots of buffers up so that they can be sharded evenly over the devices of a mesh."""
    shares = 1 if mesh is None else mesh.shape[SLOTS]
    return tuple(-(-slots // shares) * shares for slots in capacities)


def full_slots(prompt: int, new: int) -> int:
    """Return the slots per head if nothing is evicted, for the longest prompt and the tokens planned after it."""
    return round_slots(bucket(prompt) + new)


def plan_slots(
    policy: Policy,
    budget: Budget,
    lengths: Int[np.ndarray, " b"],
    max_new_tokens: int | Int[np.ndarray, " b"],
    config: ModelConfig,
    width: int,
    budget_of: str = "text",
) -> tuple[list[Int[np.ndarray, "b h"]], tuple[int, ...]]:
    """Plan the slots that each row and head may use, and those of the buffers, by layer.

    Args:
        policy: policy with the plan that distributes the budget.
        budget: slots per head, a fraction, or slots for each layer. Layers that are bounded by their own window get
            as many slots as the window is wide; the budget is distributed over the other layers.
        lengths: tokens of each prompt.
        max_new_tokens: planned number of later tokens, of all rows or of each.
        config: configuration of the model.
        width: tokens of the longest prompt.
        budget_of: base of a fraction, one of `WHOLES`.

    Raises:
        ValueError: if the budget is not positive, does not match the layers or does not fit the policy's protections.
    """
    rows, total, plan = len(lengths), lengths + max_new_tokens, policy.plan
    one = isinstance(budget, (int, float, np.integer, np.floating))
    if budget_of not in WHOLES:
        raise ValueError(f"budget_of={budget_of!r} is not one of {', '.join(WHOLES)}.")
    wholes = {"text": total, "prompt": lengths, "context": np.full(rows, config.max_positions)}
    per_row = _slots_per_row(budget, wholes[budget_of]) if one else total  # type: ignore[arg-type]
    widths = [np.iinfo(np.int32).max if layer.window is None else layer.window for layer in config.layer_configs]
    windows = np.array(widths)[:, None]
    if plan.sizing.mode != "budget":
        slots = full_slots(width, int(np.max(max_new_tokens)))
        return _of_heads(np.minimum(total, windows), config), tuple(min(slots, round_slots(w)) for w in widths)
    apart = np.stack([layer.bounds(total) for layer in config.layer_configs])
    if apart.any() and policy.score.requires.shared_slots == "layers":
        raise ValueError(
            f"{name_of(policy)} with one score for all layers needs the same tokens in all of them, but some layers of "
            "this model see a window of the text; use shared=False."
        )
    if one:
        limits = np.zeros((config.layers, rows), np.int64)
        for row, slots in enumerate(per_row):
            free = ~apart[:, row]
            limits[free, row] = layer_slots(plan, int(slots), int(free.sum()))
    else:
        slots = np.asarray(budget)
        if len(slots) != config.layers or slots.min() < 1:
            raise ValueError(
                f"budget={slots.tolist()} is not a number of slots from 1 for each of {config.layers} layers."
            )
        limits = np.repeat(slots.astype(np.int64)[:, None], rows, axis=1)
    limits = limits + plan.extra_slots
    row = int(np.where(apart, np.iinfo(np.int64).max, limits).min(0).argmin())
    free = int((~apart[:, row]).sum())
    if one:
        policy.protection.check_budget(
            int(per_row[row]), lambda slots: int(layer_slots(plan, slots, free).min()) + plan.extra_slots
        )
    else:
        policy.protection.check_budget(int(limits[~apart].min()))
    if policy.score.requires.shared_slots == "layers" and (limits != limits[0]).any():
        raise ValueError(f"{name_of(policy)} with one score for all layers needs equal budgets; use plan='uniform'.")
    # A layer cannot use more slots than its window.
    limits = np.where(apart, windows, np.minimum(limits, windows))
    buffers = limits.max(1, where=apart, initial=0)
    for layer, bound in enumerate(apart):
        if not bound.all():
            planned = policy.buffer_slots(int(limits[layer, ~bound].max()), int(lengths.min()))
            buffers[layer] = max(buffers[layer], planned)
    return _of_heads(limits, config), tuple(round_slots(int(slots)) for slots in buffers)


def lines_of(limits: Sequence[Int[np.ndarray, "b h"]]) -> tuple[int, ...]:
    """Return the largest limit of each layer, rounded like buffers so that programs are shared."""
    return tuple(round_slots(int(limit.max())) for limit in limits)


def _of_heads(limits: Int[np.ndarray, "layers b"], config: ModelConfig) -> list[Int[np.ndarray, "b h"]]:
    layers = zip(limits, config.layer_configs, strict=True)
    return [np.repeat(limit[:, None], layer.kv_heads, axis=1) for limit, layer in layers]


def _slots_per_row(budget: int | float, whole: Int[np.ndarray, " b"]) -> Int[np.ndarray, " b"]:
    if isinstance(budget, (int, np.integer)):
        if budget < 1:
            raise ValueError(f"budget={budget} is not a number of slots from 1, nor a fraction between 0.0 and 1.0.")
        return np.full(len(whole), budget)
    if not 0 < budget <= 1:
        raise ValueError(f"budget={budget} is not a fraction in (0.0, 1.0], nor a whole number of slots.")
    return np.maximum(1, np.floor(budget * whole + 1e-6).astype(np.int64))


def _pad_rows(
    tokens: Any, lengths: ArrayLike | Sequence[int] | None
) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, " b"]]:
    tokens, counted = rows_of(tokens)
    if tokens.size == 0:
        raise ValueError("a prompt is empty; give at least one token.")
    return tokens, counted.astype(np.int64) if lengths is None else checked_lengths(lengths)


def checked_lengths(lengths: ArrayLike | Sequence[int]) -> Int[np.ndarray, " b"]:
    """Check that lengths of texts are whole numbers, and return them as an array.

    Raises:
        TypeError: they are not; the message has the values.
    """
    found = np.asarray(lengths)
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"lengths={found.tolist()} are not whole numbers of tokens.")
    return found.astype(np.int64)


def check_tokens(
    tokens: Int[np.ndarray, "b n"], lengths: Int[np.ndarray, " b"], config: ModelConfig, least: int = 1
) -> None:
    """Refuse tokens that are not ids, lengths that do not match, and ids outside the vocabulary.

    Raises:
        ValueError: in each of these cases; the message has the value.
    """
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens of type {tokens.dtype} are no token ids; give integers.")
    if lengths.shape != (len(tokens),) or lengths.max() > tokens.shape[1] or lengths.min() < least:
        raise ValueError(f"lengths={lengths.tolist()} do not fit tokens of shape {tokens.shape}.")
    real = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
    check_vocabulary(real, config)


def check_vocabulary(ids: Int[np.ndarray, " n"], config: ModelConfig) -> None:
    """Refuse ids outside the vocabulary of a model.

    Raises:
        ValueError: if there are any; the message has the first of them.
    """
    wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
    if wrong.size:
        raise ValueError(f"token {wrong[0]} is not in the vocabulary of {config.vocab_size}.")


def check_length(longest: int, policy: Policy, config: ModelConfig) -> None:
    """Refuse texts longer than a model's positions, unless the policy uses positions in the cache.

    Raises:
        ValueError: if the longest text exceeds the positions; the message has both numbers.
    """
    if longest > longest_text(policy, config):
        raise ValueError(
            f"a prompt of {longest} tokens is longer than the model's {config.max_positions} positions; "
            f"shorten it{instead(config)}."
        )


def _check_prompts(
    tokens: Int[np.ndarray, "b n"],
    lengths: Int[np.ndarray, " b"],
    policy: Policy,
    config: ModelConfig,
) -> None:
    if len(tokens) == 0 or (lengths.size and lengths.min() < 1):
        raise ValueError("a prompt is empty; give at least one token.")
    check_tokens(tokens, lengths, config)
    check_length(int(lengths.max()), policy, config)
