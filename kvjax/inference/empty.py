"""Empty states of texts that are read only by decode steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.dense import Dense
from kvjax.cache.empty import empty_layers
from kvjax.inference.budget import Budget, lines_of, plan_slots
from kvjax.inference.cache import Cache, policy_seeds
from kvjax.inference.decoder import Decoder
from kvjax.inference.padding import among_devices
from kvjax.inference.state import State
from kvjax.policies.policy import Policy

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


def empty_state(
    model: LanguageModel, policy: Policy, rows: int, length: int, budget: Budget, *, seed: int = 0
) -> State:
    """Return a state in which the first of `length` tokens counts as the prompt; `policy` comes from `ready`."""
    config = model.config
    config.check_bound(length)
    limits, capacities = plan_slots(policy, budget, np.ones(rows, np.int64), length - 1, config, 1)
    policy, allowed = policy.sized(lines_of(limits)), [jnp.asarray(limit, jnp.int32) for limit in limits]
    buffers = among_devices(capacities, model.mesh)
    storage = Dense(empty_layers(policy, config.layer_configs, allowed, buffers, model.weights.dtype))
    keys, end = jax.random.split(jax.random.key(seed), rows), jnp.full(rows, length, jnp.int32)
    cache = Cache.empty(storage, 1, end - 1, end, policy_seeds(keys), keys)
    placed = jax.tree.map(jnp.asarray, policy)
    return State(Decoder(weights=model.weights, policy=placed, config=config, mesh=model.mesh), cache)
