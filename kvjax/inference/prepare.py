"""Preparation of prompts on the host: checks, and padding to a bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key, Shaped

from kvjax.inference.budget import Budget, checked_budget, lines_of, plan_slots
from kvjax.inference.cache import Bound
from kvjax.inference.contract import check_parts
from kvjax.inference.padding import among_devices, bucket, check_rows
from kvjax.methods.registry import name_of, replaced
from kvjax.methods.registry import policy as policy_by_name
from kvjax.models.config import ModelConfig
from kvjax.models.model import LanguageModel, rows_of
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.utils.host_memory import check_host_memory
from kvjax.utils.settings import whole_number

Tokens = ArrayLike | Sequence[Sequence[int]]


class Prompts(NamedTuple):
    """Arguments of the program that reads prompts."""

    policy: Policy
    tokens: Int[np.ndarray, "b n"]
    """Padded to a bucket, and to whole chunks."""
    lengths: Int[np.ndarray, " b"]
    horizon: Int[np.ndarray, " b"]
    keys: Key[Array, " b"]
    rope_length: Int[np.ndarray, " b"] | None
    """Length of each text that its RoPE frequencies are those of; None if they do not depend on it."""
    limits: tuple[Int[np.ndarray, "b _"], ...]
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
    plan: Plan | str | None,
    **settings: Any,
) -> Prompts:
    """Check the arguments of `kvjax.prefill`, with its errors, and prepare its prompts; see `prepare_bound`."""
    bound_policy, budget = bind(model, policy, budget, plan)
    return prepare_bound(model, bound_policy, tokens, budget, lengths, **settings)


def bind(model: LanguageModel, policy: Policy | str, budget: Budget, plan: Plan | str | None) -> tuple[Policy, Budget]:
    """Return a policy bound to its model and budget, which have to fit it, and the budget as Python numbers."""
    check_on_host("prefill", budget)
    if not hasattr(model, "name"):  # a state has a model's weights and config, too
        raise TypeError(f"the first argument is a model, from kvjax.load, not {type(model).__name__}.")
    budget = checked_budget(budget)
    policy = bind_policy(model, policy, budget, plan)
    if policy.plan.sizing.mode == "profiled" and not (isinstance(budget, float) and budget == 1.0):
        raise ValueError(
            f"{name_of(policy)} decides itself how many slots each head gets, so budget={budget!r} has no "
            "effect; leave it out and change its settings."
        )
    check_bounded(policy, budget)
    return policy, budget


def prepare_bound(
    model: LanguageModel | Bound,
    policy: Policy,
    tokens: Tokens,
    budget: Budget,
    lengths: ArrayLike | Sequence[int] | None,
    *,
    max_new_tokens: int,
    key: Key[Array, ""] | Key[Array, " b"] | None,
    chunk: int | None = None,
    budget_of: str = "text",
    rope_length: int | None = None,
    beyond_window: int = 0,
) -> Prompts:
    """Check the arguments of `Decoder.prefill` and prepare its prompts, for a policy and a budget from `bind`."""
    check_on_host("prefill", tokens, lengths, key)
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
    config = model.config
    if rope_length is not None:
        rope_length = whole_number("rope_length", rope_length)
    requires = policy.score.requires
    policy_chunk, per_head = requires.prompt_chunk, policy.plan.sizing.per_head
    if (per_head or requires.whole_prompt) and (chunk or policy_chunk) is not None:
        what, instead = f"prefill_chunk={chunk}", "leave it out"
        if chunk is None:
            what = f"policy {policy.name}, which reads prompts in chunks of {policy_chunk},"
            instead = "let it read whole prompts (block=None or prompt='one_shot'), or choose another plan"
        subject = "a budget for each head" if per_head else f"policy {policy.name}"
        raise ValueError(f"{what} does not go with {subject}, which only the whole prompt can tell; {instead}.")
    chunk = policy_chunk if chunk is None else whole_number("prefill_chunk", chunk)
    check_chunk(policy, chunk)
    padded, counted = rows_of(tokens)
    rows, width = padded.shape
    real = checked_lengths(counted if lengths is None else lengths)
    if padded.size == 0 or (real.size and real.min() < 1):
        raise ValueError("a prompt is empty; give at least one token.")
    check_tokens(padded, real, config)
    check_length(int(real.max()), policy, config)
    check_rows(rows, model.mesh)
    check_prompt(policy, int(real.min()))
    policy.codec.check_layers(config.layer_configs)
    limits, capacities = plan_slots(
        policy, budget, real, max_new_tokens, config, width, budget_of, beyond_window=beyond_window
    )
    size = bucket(width)
    chunk = None if chunk is None or (chunk >= width and chunk > 1) else chunk
    keys = checked_key(key, rows)
    return Prompts(
        policy=policy,
        tokens=np.pad(padded, ((0, 0), (0, size - width))).astype(np.int32),
        lengths=real.astype(np.int32),
        horizon=np.full(rows, max_new_tokens, np.int32),
        keys=jnp.broadcast_to(keys, (rows,)) if keys.ndim == 0 else keys,
        rope_length=config.rope_length(real + max_new_tokens if rope_length is None else np.full(rows, rope_length)),
        limits=tuple(limit.astype(np.int32) for limit in limits),
        capacities=among_devices(capacities, model.mesh),
        lines=lines_of(limits),
        chunk=chunk,
    )


def check_on_host(name: str, *values: Any) -> None:
    """Refuse traced values with a TypeError, because slots are planned on the host."""
    if any(isinstance(value, Tracer) for value in values):
        raise TypeError(
            f"{name} plans slots on the host and cannot be traced by jit, vmap or scan; call it outside, and trace "
            "decode_step."
        )


def check_bounded(policy: Policy, budget: Budget) -> None:
    """Refuse a budget other than 1.0 for a policy that keeps everything."""
    if not policy.bounded and not (isinstance(budget, float) and budget == 1.0):
        raise ValueError(
            f"budget={budget!r} has no effect under policy {name_of(policy)}, which keeps everything; leave it out, "
            "or choose another policy."
        )


def check_prompt(policy: Policy, shortest: int) -> None:
    """Refuse prompts of which the shortest has too few tokens for a policy's score."""
    if shortest < policy.score.requires.min_prompt:
        raise ValueError(
            f"{policy.score!r} needs {policy.score.requires.min_prompt} tokens of a prompt, and one has {shortest}; "
            "use longer prompts or other settings."
        )


def checked_key(key: Any, rows: int) -> Key[Array, "*b"]:
    """Return a random key for all rows or one for each, from keys, those of `PRNGKey`, a seed, or None for seed 0."""
    if key is None or (isinstance(key, (int, np.integer)) and not isinstance(key, bool)):
        return jax.random.key(0 if key is None else whole_number("key", key, -(2**63), 2**63 - 1))
    if isinstance(key, (jax.Array, np.ndarray)) and key.dtype == jnp.uint32 and key.ndim and key.shape[-1] == 2:
        key = jax.random.wrap_key_data(jnp.asarray(key))  # of jax.random.PRNGKey
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"key={key!r} is no random key; give jax.random.key(seed), or one for each row.")
    if key.shape not in ((), (rows,)):
        raise ValueError(f"key has shape {list(key.shape)}; give one random key, or one for each of {rows} rows.")
    return key


def bind_policy(model: LanguageModel, policy: Policy | str, budget: Budget, plan: Plan | str | None) -> Policy:
    """Return a policy bound to its model, its budget and the plan that distributes the budget, which have to fit it."""
    chosen = policy_by_name(policy).bind(model)
    chosen.protection.check_tokens(model.config.vocab_size)
    if chosen.codec.positions == "cache" and (reason := model.config.fixed_positions) is not None:
        raise ValueError(
            f"positions='cache' does not go with model {model.name!r}, which {reason}; use positions='original'."
        )
    if (replay := chosen.score.requires.replay) is not None:
        check_vocabulary(np.array([*replay.prompt, *(replay.later or ())], np.int64), model.config)
    bound_policy = replaced(chosen.budgeted(budget), plan=plan)
    if bound_policy.plan.sizing.per_head:
        model.config.check_equal_heads(f"{name_of(bound_policy)} with slots for each head")
    if bound_policy.plan.sizing.host_memory:
        _check_prompts_on_host(model)
    check_parts(bound_policy, model)
    return bound_policy


def _check_prompts_on_host(model: LanguageModel) -> None:
    # Refuses a model whose prompts cannot be in host memory, or would not be.
    check_host_memory(model.weights, "memory='host'", "memory")
    model.config.check_all_store("memory='host'")
    if model.mesh is not None:
        raise ValueError("memory='host' keeps the prompts of one device; leave memory out, or load without a mesh.")
    if all(layer.window is not None for layer in model.config.layer_configs):
        raise ValueError(
            f"every layer of {model.name!r} has a window, which stays on the device, so memory='host' has no effect; "
            "leave memory out."
        )


def check_chunk(policy: Policy, chunk: int | None) -> None:
    """Refuse chunks of a prompt or a turn under a policy that keeps prompts in host memory."""
    if chunk is not None and policy.plan.sizing.host_memory:
        raise ValueError(
            f"prefill_chunk={chunk} does not go with memory='host', which moves whole prompts to host memory; leave "
            "prefill_chunk out."
        )


def checked_turn_chunk(policy: Policy, chunk: int | None) -> int | None:
    """Return the size of the chunks of a turn, which has to fit the policy; None to read all of it at once."""
    if chunk is None:
        return None
    check_chunk(policy, chunk)
    if policy.score.requires.whole_prompt:
        raise ValueError(
            f"prefill_chunk={chunk} does not go with policy {name_of(policy)}, which evicts by the end of a text; "
            "leave it out."
        )
    return whole_number("prefill_chunk", chunk)


def instead(config: ModelConfig) -> str:
    """Return the advice for texts beyond the model's positions, as the end of a sentence; empty if there is none."""
    return config.remark if config.bounded or config.fixed_positions else ", or use a policy with positions='cache'"


def longest_text(policy: Policy, config: ModelConfig) -> float:
    """Return the most tokens that a text may have; infinity if the policy uses positions in the cache."""
    return config.max_positions if config.bounded or policy.codec.positions == "original" else math.inf


def checked_lengths(lengths: ArrayLike | Sequence[int]) -> Int[np.ndarray, " b"]:
    """Return lengths of texts as an array; raise a TypeError if they are not whole numbers."""
    array = np.asarray(lengths)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"lengths={array.tolist()} are not whole numbers of tokens.")
    return array.astype(np.int64)


def check_tokens(
    tokens: Int[np.ndarray, "b n"], lengths: Int[np.ndarray, " b"], config: ModelConfig, shortest: int = 1
) -> None:
    """Refuse tokens that are not ids, lengths that do not match or are below `shortest`, and unknown ids."""
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens of type {tokens.dtype} are no token ids; give integers.")
    if lengths.shape != (len(tokens),) or lengths.max() > tokens.shape[1] or lengths.min() < shortest:
        raise ValueError(f"lengths={lengths.tolist()} do not fit tokens of shape {tokens.shape}.")
    check_vocabulary(tokens[np.arange(tokens.shape[1]) < lengths[:, None]], config)


def check_vocabulary(ids: Shaped[np.ndarray, " n"], config: ModelConfig) -> None:
    """Refuse ids outside the vocabulary of a model."""
    wrong = ids[(ids < 0) | (ids >= config.vocab_size)]
    if wrong.size:
        raise ValueError(f"token {wrong[0]} is not in the vocabulary of {config.vocab_size}.")


def check_length(longest: int, policy: Policy, config: ModelConfig) -> None:
    """Refuse texts longer than a model's positions, unless the policy uses positions in the cache."""
    if longest > longest_text(policy, config):
        raise ValueError(
            f"a text of {longest} tokens is longer than the model's {config.max_positions} positions; "
            f"shorten it{instead(config)}."
        )
