"""States without prompts: empty ones, and shapes of those that `prefill` would return."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.inference.budget import Budget, lines_of, plan_slots
from kvjax.inference.cache import Bound, Cache, policy_seeds
from kvjax.inference.decoder import Decoder
from kvjax.inference.padding import among_devices
from kvjax.inference.prefill import bound_prompts, prompt_shapes
from kvjax.inference.prepare import prepare
from kvjax.inference.sharding import bound_specs, placed_shapes
from kvjax.inference.state import State
from kvjax.methods.registry import name_of
from kvjax.models.model import LanguageModel
from kvjax.models.weights import is_shape
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.types import Kernels
from kvjax.utils.modes import on_the_host


@on_the_host
def state_shapes(
    model: LanguageModel,
    policy: Policy | str,
    rows: int,
    tokens: int,
    budget: Budget = 1.0,
    *,
    max_new_tokens: int = 256,
    plan: Plan | str | None = None,
    prefill_chunk: int | None = None,
    budget_of: str = "text",
    implementation: str | Kernels = "auto",
) -> State:
    """Return the state after prompts of one length, as `jax.ShapeDtypeStruct` with shardings on the model's mesh.

    Nothing is computed. `kvjax.inference.decode.lower_step` lowers its program, also for devices that are not present.

    Args:
        model: its weights may be shapes, which have shardings if the model has a mesh.
        policy: see `kvjax.prefill`, also for all other arguments.
        rows: number of prompts.
        tokens: tokens of each prompt.

    Raises:
        ValueError: the prompts do not fit the model, or the budget does not fit the policy; or the slots of each head
            depend on the prompts' content.
    """
    settings: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=None, plan=plan, chunk=prefill_chunk)
    tokens_of_rows = np.zeros((rows, tokens), np.int32)
    prompts = prepare(model, policy, tokens_of_rows, budget, None, budget_of=budget_of, **settings)
    if prompts.policy.plan.sizing.per_head:
        raise ValueError(
            f"{name_of(prompts.policy)} gives each head slots of its own once it has read a prompt, so shapes cannot "
            "tell how many; use a policy or plan whose budget says it."
        )
    kernels = implementation if isinstance(implementation, Kernels) else Kernels(implementation)
    reader = bound_prompts(model, prompts).replace(kernels=kernels)
    layers, position, seed, _ = prompt_shapes(reader, prompts)
    policy_shapes = jax.tree.map(lambda leaf: leaf if is_shape(leaf) else jnp.asarray(leaf), prompts.policy)
    settings = dict(config=reader.config, kernels=kernels, mesh=reader.mesh, origin=model.origin)
    decoder = Decoder(weights=reader.weights, policy=policy_shapes, **settings)
    lengths: dict[str, Any] = dict.fromkeys(("position", "prompt_length", "horizon", "end"), position)
    active: Any = jax.ShapeDtypeStruct((rows,), np.bool_)
    lengths["rope_length"] = None if prompts.rope_length is None else position
    cache = Cache(layers=layers, **lengths, key=prompts.keys, seed=seed, active=active)
    if model.mesh is None:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), State(decoder, cache))
    return State(*placed_shapes((bound_specs(decoder), cache.specs), (decoder, cache), model.mesh))


@on_the_host
def empty_state(
    model: LanguageModel, policy: Policy, rows: int, length: int, budget: Budget, *, seed: int = 0
) -> State:
    """Return a state in which the first of `length` tokens counts as the prompt; `policy` comes from `bind_policy`."""
    config = model.config
    config.check_bound(length)
    limits, capacities = plan_slots(policy, budget, np.ones(rows, np.int64), length - 1, config, 1)
    policy, allowed = policy.sized(lines_of(limits)), [jnp.asarray(limit, jnp.int32) for limit in limits]
    buffers = among_devices(capacities, model.mesh)
    reader = Bound(model.weights, policy, config)
    layers = reader.init_caches(allowed, buffers)
    keys, end = jax.random.split(jax.random.key(seed), rows), jnp.full(rows, length, jnp.int32)
    rope = config.rope_length(np.full(rows, length))
    cache = Cache.empty(layers, 1, end - 1, end, policy_seeds(keys), keys, None if rope is None else jnp.asarray(rope))
    arrays = jax.tree.map(jnp.asarray, policy)
    decoder = Decoder(weights=model.weights, policy=arrays, config=config, mesh=model.mesh, origin=model.origin)
    return State(decoder, cache)
