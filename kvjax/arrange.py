"""Everything about prompts that is decided on the host: checks, slots per layer, padding to a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import SLOT_BLOCK
from kvjax.models.config import ModelConfig
from kvjax.plan import PLANS, Plan, Uniform
from kvjax.policies import policy as policy_by_name
from kvjax.policies.base import Policy


def arrange(model, policy, tokens, budget, lengths, *, max_new_tokens, key, plan, chunk):
    """Arrays and static arguments of the program that reads prompts, for the arguments of `kvjax.prefill`.

    Raises:
        ValueError: a prompt is empty or does not fit the model, or the budget does not fit the policy.
    """
    policy = (policy_by_name(policy) if isinstance(policy, str) else policy).bind(model)
    policy = policy.budgeted(budget)
    plan = plan_by_name(plan)
    config = model.config
    own = _check_pages(policy, plan, budget, chunk)
    padded, real = _pad_rows(tokens, lengths)
    rows, width = padded.shape
    _check_prompts(padded, real, max_new_tokens, policy, config)
    policy.check_prompt(int(real.min()))
    limits, capacities = plan_slots(policy, plan, budget, real, max_new_tokens, config, width)
    chunk = policy.prefill_chunk if chunk is None else chunk
    if chunk is not None and chunk < 1:
        raise ValueError(f"prefill_chunk={chunk} is not a number of tokens from 1.")
    if chunk is not None and chunk < width and policy.couples_layers and chunk > 1:
        raise ValueError(f"{type(policy).__name__} shares scores between layers and reads a prompt whole or by 1.")
    size = bucket(width) if chunk is None or chunk >= width else -(-bucket(width) // chunk) * chunk
    chunk = None if chunk is None or (chunk >= width and chunk > 1) else chunk
    keys = jax.random.key(0) if key is None else key
    if keys.ndim == 0:
        keys = jnp.broadcast_to(keys, (rows,))
    start, horizon = jnp.asarray(real, jnp.int32), jnp.full(rows, max_new_tokens, jnp.int32)
    arrays = (
        model.weights,
        policy,
        jnp.asarray(np.pad(padded, ((0, 0), (0, size - width))), jnp.int32),
        start,
        horizon,
        keys,
        tuple(jnp.asarray(limit, jnp.int32) for limit in limits),
    )
    if own is not None:
        capacities = (None,) * config.layers
    return arrays, dict(config=config, capacities=capacities, chunk=chunk, plan=own)


def _check_pages(policy: Policy, plan: Plan | None, budget, chunk: int | None) -> Plan | None:
    # The plan by which heads get slots of their own, or None where all heads of a layer have the same.
    if policy.decides_slots:
        if plan is not None or not (isinstance(budget, float) and budget == 1.0):
            raise ValueError(
                f"{type(policy).__name__} decides itself how many slots each head gets, so budget={budget!r} and "
                f"plan={plan!r} mean nothing to it; leave both out and change its settings."
            )
        plan = Uniform()
    elif plan is None or not plan.per_head:
        return None
    if not policy.pages or not policy.evicts or policy.positions != "original":
        raise ValueError(
            f"{type(policy).__name__} with positions={policy.positions!r} needs the same slots in every head of a "
            "layer; choose another plan, or another policy such as h2o, snapkv or keyformer."
        )
    if chunk is not None or policy.prefill_chunk is not None:
        raise ValueError(
            f"prefill_chunk={chunk} does not go with a budget for each head, which only the whole prompt can tell; "
            "leave it out."
        )
    return plan


def plan_by_name(plan: Plan | str | None) -> Plan | None:
    """A plan given by name or made.

    Raises:
        ValueError: there is no such plan.
    """
    if not isinstance(plan, str):
        return plan
    if plan not in PLANS:
        raise ValueError(f"there is no plan {plan!r}; choose one of {', '.join(PLANS)}.")
    return PLANS[plan]()


def bucket(tokens: int) -> int:
    """The padded length that prompts share a program at: the next power of two or halfway point, at least 16."""
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
    plan: Plan | None,
    budget: int | float | Sequence[int],
    lengths: np.ndarray,
    max_new_tokens: int,
    config: ModelConfig,
    width: int,
) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """Slots that each row and head may use, int [b, h] per layer, and those of each layer's buffers.

    Raises:
        ValueError: the budget is not positive, does not match the layers or does not fit the policy's protections.
    """
    rows, total = len(lengths), lengths + max_new_tokens
    one = isinstance(budget, (int, float, np.integer, np.floating))
    per_row = _slots_per_row(budget, total) if one else total
    if not policy.evicts:
        limits = np.broadcast_to(total, (config.layers, rows))
        capacity = round_slots(bucket(width) + max_new_tokens)
        return [np.repeat(limit[:, None], config.kv_heads, 1) for limit in limits], (capacity,) * config.layers
    if one:
        plan = policy.default_plan() if plan is None else plan
        limits = np.stack([plan.budgets(int(slots), config.layers) for slots in per_row], axis=1)
    else:
        if plan is not None:
            raise ValueError("a budget for each layer leaves nothing to plan; give one number, or no plan.")
        if len(budget) != config.layers or min(budget) < 1:
            raise ValueError(
                f"budget={list(budget)} is not a number of slots from 1 for each of {config.layers} layers."
            )
        limits = np.repeat(np.asarray(budget, np.int64)[:, None], rows, axis=1)
    limits = limits + policy.extra_slots
    policy.check_budget(int(limits.min()))
    capacities = tuple(round_slots(policy.buffer_slots(int(limit.max()))) for limit in limits)
    if policy.couples_layers and (limits != limits[0]).any():
        raise ValueError(
            f"{type(policy).__name__} with one score for all layers needs equal budgets; use plan='uniform'."
        )
    return [np.repeat(limit[:, None], config.kv_heads, 1) for limit in limits], capacities


def _slots_per_row(budget: int | float, total: np.ndarray) -> np.ndarray:
    if isinstance(budget, (int, np.integer)):
        if budget < 1:
            raise ValueError(f"budget={budget} is not a number of slots from 1, nor a fraction between 0.0 and 1.0.")
        return np.full(len(total), budget)
    if not 0 < budget <= 1:
        raise ValueError(f"budget={budget} is not a fraction in (0.0, 1.0], nor a whole number of slots.")
    return np.maximum(1, np.floor(budget * total + 1e-6).astype(np.int64))


def _pad_rows(tokens, lengths) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(tokens, (list, tuple)):
        if lengths is None:
            lengths = [len(row) for row in tokens]
        width = max((len(row) for row in tokens), default=0)
        if width == 0:
            raise ValueError("a prompt is empty; give at least one token.")
        tokens = np.array([list(row) + [0] * (width - len(row)) for row in tokens], np.int32).reshape(-1, width)
    tokens = np.asarray(tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens of shape {tokens.shape} are not rows of prompts [b, n].")
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
    return tokens, lengths.astype(np.int64)


def _check_prompts(
    tokens: np.ndarray, lengths: np.ndarray, max_new_tokens: int, policy: Policy, config: ModelConfig
) -> None:
    if len(tokens) == 0 or lengths.min() < 1:
        raise ValueError("a prompt is empty; give at least one token.")
    if lengths.shape != (len(tokens),) or lengths.max() > tokens.shape[1]:
        raise ValueError(f"lengths={lengths.tolist()} do not fit tokens of shape {tokens.shape}.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} is not a number of tokens from 1.")
    outside = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
    if outside.min() < 0 or outside.max() >= config.vocab_size:
        bad = outside[(outside < 0) | (outside >= config.vocab_size)][0]
        raise ValueError(f"token {bad} is not in the vocabulary of {config.vocab_size}.")
    if lengths.max() > config.max_positions and policy.positions == "original":
        raise ValueError(
            f"a prompt of {lengths.max()} tokens is longer than the model's {config.max_positions} positions; "
            "shorten it or use a policy with positions='cache'."
        )
