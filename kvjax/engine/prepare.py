"""Everything about prompts that is decided on the host: checks, slots per layer, padding to a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key

from kvjax.models.config import ModelConfig
from kvjax.policies.pairs import fitted
from kvjax.policies.plan import Plan
from kvjax.policies.policy import Policy
from kvjax.policies.registry import name_of, plan_by_name
from kvjax.policies.registry import policy as policy_by_name
from pallas_kernels.attention import SLOT_BLOCK

if TYPE_CHECKING:
    from kvjax.model import Model

Tokens = ArrayLike | Sequence[Sequence[int]]
Budget = int | float | Sequence[int]


class Prompts(NamedTuple):
    """What the program that reads prompts is given."""

    policy: Policy
    tokens: Int[Array, "b n"]
    """Padded to a bucket, and to whole chunks."""
    lengths: Int[Array, " b"]
    horizon: Int[Array, " b"]
    keys: Key[Array, " b"]
    limits: tuple[Int[Array, "b h"], ...]
    """For each layer the slots that each head may use."""
    capacities: tuple[int, ...]
    """For each layer the slots of its buffers."""
    lines: tuple[int, ...]
    """For each layer the most slots that a head may use, rounded as buffers are."""
    chunk: int | None
    """Tokens read between two compressions; None for all of them."""


def prepare(
    model: Model,
    policy: Policy | str,
    tokens: Tokens,
    budget: Budget,
    lengths: ArrayLike | Sequence[int] | None,
    *,
    max_new_tokens: int,
    key: Key[Array, ""] | Key[Array, " b"] | None,
    plan: Plan | str | None,
    chunk: int | None,
) -> Prompts:
    """What reading prompts takes, for the arguments of `kvjax.prefill`.

    Raises:
        ValueError: a prompt is empty or does not fit the model, or the budget does not fit the policy.
    """
    policy = ready(model, policy, budget, plan)
    config = model.config
    if policy.plan.decides and not (isinstance(budget, float) and budget == 1.0):
        raise ValueError(
            f"{name_of(policy)} decides itself how many slots each head gets, so budget={budget!r} means nothing to "
            "it; leave it out and change its settings."
        )
    chunk = policy.score.prefill_chunk if chunk is None else chunk
    if policy.plan.per_head and chunk is not None:
        raise ValueError(
            f"prefill_chunk={chunk} does not go with a budget for each head, which only the whole prompt can tell; "
            "leave it out" + (', or use prompt="one_shot".' if policy.score.prefill_chunk else ".")
        )
    padded, real = _pad_rows(tokens, lengths)
    rows, width = padded.shape
    _check_prompts(padded, real, max_new_tokens, policy, config)
    policy.score.check_prompt(int(real.min()))
    policy.codec.check_widths(config.layer_configs)
    limits, capacities = plan_slots(policy, budget, real, max_new_tokens, config, width)
    if chunk is not None and chunk < 1:
        raise ValueError(f"prefill_chunk={chunk} is not a number of tokens from 1.")
    size = bucket(width) if chunk is None or chunk >= width else -(-bucket(width) // chunk) * chunk
    chunk = None if chunk is None or (chunk >= width and chunk > 1) else chunk
    keys = jax.random.key(0) if key is None else key
    return Prompts(
        policy=policy,
        tokens=jnp.asarray(np.pad(padded, ((0, 0), (0, size - width))), jnp.int32),
        lengths=jnp.asarray(real, jnp.int32),
        horizon=jnp.full(rows, max_new_tokens, jnp.int32),
        keys=jnp.broadcast_to(keys, (rows,)) if keys.ndim == 0 else keys,
        limits=tuple(jnp.asarray(limit, jnp.int32) for limit in limits),
        capacities=capacities,
        lines=lines_of(limits),
        chunk=chunk,
    )


def ready(model: Model, policy: Policy | str, budget: Budget, plan: Plan | str | None) -> Policy:
    """A policy that knows its model, its budget and the plan that spreads it.

    Raises:
        ValueError: it was made for another model, or its parts mean nothing together.
    """
    chosen = policy_by_name(policy) if isinstance(policy, str) else policy
    return fitted(chosen.bind(model).budgeted(budget).spread(plan_by_name(plan)))


def bucket(tokens: int) -> int:
    """The padded length that texts share a program at: the next power of two or halfway point, at least 16."""
    power = 16
    while power < tokens:
        power *= 2
    return power * 3 // 4 if power > 16 and power * 3 // 4 >= tokens else power


def round_slots(slots: int) -> int:
    """Slots in the buffers: the next multiple of 16, of the attention block beyond one block."""
    unit = 16 if slots <= SLOT_BLOCK else SLOT_BLOCK
    return -(-slots // unit) * unit


def plan_slots(
    policy: Policy,
    budget: Budget,
    lengths: Int[np.ndarray, " b"],
    max_new_tokens: int,
    config: ModelConfig,
    width: int,
) -> tuple[list[Int[np.ndarray, "b h"]], tuple[int, ...]]:
    """Slots that each row and head may use, by layer, and those of each layer's buffers.

    Args:
        policy: with the plan that spreads the budget.
        budget: slots per head, a fraction of the text, or slots for each layer.
        lengths: tokens of each prompt.
        max_new_tokens: that are going to be generated.
        config: of the model.
        width: tokens of the longest prompt.

    Raises:
        ValueError: the budget is not positive, does not match the layers or does not fit the policy's protections.
    """
    rows, total, plan = len(lengths), lengths + max_new_tokens, policy.plan
    one = isinstance(budget, (int, float, np.integer, np.floating))
    per_row = _slots_per_row(budget, total) if one else total  # type: ignore[arg-type]
    if not plan.bounded or plan.decides:
        limits = np.broadcast_to(total, (config.layers, rows))
        return _of_heads(limits, config), (round_slots(bucket(width) + max_new_tokens),) * config.layers
    if one:
        limits = np.stack([plan.budgets(int(slots), config.layers) for slots in per_row], axis=1)
    else:
        slots = np.asarray(budget)
        if len(slots) != config.layers or slots.min() < 1:
            raise ValueError(
                f"budget={slots.tolist()} is not a number of slots from 1 for each of {config.layers} layers."
            )
        limits = np.repeat(slots.astype(np.int64)[:, None], rows, axis=1)
    limits = limits + plan.extra_slots
    policy.protection.check_budget(int(limits.min()))
    if policy.score.aligned_layers and (limits != limits[0]).any():
        raise ValueError(f"{name_of(policy)} with one score for all layers needs equal budgets; use plan='uniform'.")
    buffers = (plan.buffer_slots(int(limit.max()), int(lengths.min())) for limit in limits)
    return _of_heads(limits, config), tuple(map(round_slots, buffers))


def lines_of(limits: Sequence[Int[np.ndarray, "b h"]]) -> tuple[int, ...]:
    """For each layer the most slots that a head may use, rounded as buffers are, so that programs are shared."""
    return tuple(round_slots(int(limit.max())) for limit in limits)


def _of_heads(limits: Int[np.ndarray, "layers b"], config: ModelConfig) -> list[Int[np.ndarray, "b h"]]:
    layers = zip(limits, config.layer_configs, strict=True)
    return [np.repeat(limit[:, None], layer.kv_heads, axis=1) for limit, layer in layers]


def _slots_per_row(budget: int | float, total: Int[np.ndarray, " b"]) -> Int[np.ndarray, " b"]:
    if isinstance(budget, (int, np.integer)):
        if budget < 1:
            raise ValueError(f"budget={budget} is not a number of slots from 1, nor a fraction between 0.0 and 1.0.")
        return np.full(len(total), budget)
    if not 0 < budget <= 1:
        raise ValueError(f"budget={budget} is not a fraction in (0.0, 1.0], nor a whole number of slots.")
    return np.maximum(1, np.floor(budget * total + 1e-6).astype(np.int64))


def _pad_rows(
    tokens: Any, lengths: ArrayLike | Sequence[int] | None
) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, " b"]]:
    if isinstance(tokens, (list, tuple)):
        if lengths is None:
            lengths = [len(row) for row in tokens]
        width = max((len(row) for row in tokens), default=0)
        if width == 0:
            raise ValueError("a prompt is empty; give at least one token.")
        tokens = np.array([list(row) + [0] * (width - len(row)) for row in tokens]).reshape(-1, width)
    tokens = np.asarray(tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens of shape {tokens.shape} are not rows of prompts [b, n].")
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
    return tokens, lengths.astype(np.int64)


def check_tokens(
    tokens: Int[np.ndarray, "b n"], lengths: Int[np.ndarray, " b"], config: ModelConfig, least: int = 1
) -> None:
    """Refuse what are no token ids, lengths that do not fit them, and ids that are not in the vocabulary.

    Raises:
        ValueError: naming the value.
    """
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens of type {tokens.dtype} are no token ids; give integers.")
    if lengths.shape != (len(tokens),) or lengths.max() > tokens.shape[1] or lengths.min() < least:
        raise ValueError(f"lengths={lengths.tolist()} do not fit tokens of shape {tokens.shape}.")
    real = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
    if real.size and (real.min() < 0 or real.max() >= config.vocab_size):
        bad = real[(real < 0) | (real >= config.vocab_size)][0]
        raise ValueError(f"token {bad} is not in the vocabulary of {config.vocab_size}.")


def check_length(longest: int, policy: Policy, config: ModelConfig) -> None:
    """Refuse texts that are longer than a model's positions, unless it sees those of the cache.

    Raises:
        ValueError: naming both.
    """
    if longest > config.max_positions and policy.codec.positions == "original":
        raise ValueError(
            f"a prompt of {longest} tokens is longer than the model's {config.max_positions} positions; "
            "shorten it or use a policy with positions='cache'."
        )


def _check_prompts(
    tokens: Int[np.ndarray, "b n"],
    lengths: Int[np.ndarray, " b"],
    max_new_tokens: int,
    policy: Policy,
    config: ModelConfig,
) -> None:
    if len(tokens) == 0 or (lengths.size and lengths.min() < 1):
        raise ValueError("a prompt is empty; give at least one token.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} is not a number of tokens from 1.")
    check_tokens(tokens, lengths, config)
    check_length(int(lengths.max()), policy, config)
