"""Check of a user's own parts: one abstract evaluation of all their members, when a policy is bound to a model."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax.inference.sharding import on_mesh, policy_specs
from kvjax.models.config import ModelConfig
from kvjax.models.model import LanguageModel
from kvjax.models.sharding import on_device
from kvjax.policies.base import Part
from kvjax.policies.contract import check_layer
from kvjax.policies.policy import Policy
from kvjax.types import HEADS, REPLICATED, TokenBatch

TOKENS = 16
"""Tokens of the abstract prompt, unless a score needs more."""


def check_parts(policy: Policy, model: LanguageModel) -> None:
    """Check the members of a policy with a part of a user's own; parts of kvjax are tested instead."""
    if any(kind.__module__.partition(".")[0] != "kvjax" for kind in policy.kinds):
        check_members(policy, model)


def check_members(policy: Policy, model: LanguageModel) -> None:
    """Refuse a bound policy with a part whose members break the contract of their interface.

    Nothing is computed, and a policy of the same form is checked once.

    Raises:
        ValueError: a member returns arrays of other shapes or dtypes, or arrays of heads do not fit the model.
        TypeError: a member needs the value of a traced array.
    """
    config, mesh = model.config, model.mesh
    per_head = _fields_of_heads(policy, config)
    sized = policy.sized((TOKENS,) * config.layers)
    check = functools.partial(_check_layers.eval_shape, sized, config=config, dtype=model.weights.dtype)
    if mesh is None or mesh.shape[HEADS] == 1:
        check(mesh=mesh)
        return
    check(mesh=None)
    try:
        check(mesh=mesh)
    except (TypeError, ValueError) as error:
        fields = ", ".join(per_head) or "fields with an entry for each KV head"
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"a part does not work on one of {mesh.shape[HEADS]} devices, which share the KV heads ({reason}); name "
            f"{fields} in of_heads."
        ) from error


def _fields_of_heads(policy: Policy, config: ModelConfig) -> list[str]:
    """Return fields with arrays that lead with the KV heads and are not in `of_heads`; refuse other ones in it."""
    names: list[str] = []
    for index, layer in enumerate(config.layer_configs):
        for part in _all_parts(policy.layer(index)):
            for field in dataclasses.fields(part):  # type: ignore[arg-type]
                name, value = f"{type(part).__name__}.{field.name}", getattr(part, field.name)
                if isinstance(value, Part) or field.metadata.get("pytree_node") is False:
                    continue
                leads = [np.shape(leaf)[:1] == (layer.kv_heads,) for leaf in jax.tree.leaves(value)]
                if field.name in part.of_heads and not all(leads):
                    shapes = [list(np.shape(leaf)) for leaf in jax.tree.leaves(value)]
                    raise ValueError(
                        f"{name} has shape {shapes[leads.index(False)]} in layer {index}, not an entry for each of "
                        f"{layer.kv_heads} KV heads, as of_heads declares."
                    )
                if field.name not in part.of_heads and any(leads) and name not in names:
                    names.append(name)
    return names


def _all_parts(part: Part) -> list[Part]:
    values = [getattr(part, field.name) for field in dataclasses.fields(part)]  # type: ignore[arg-type]
    return [part, *(inner for value in values if isinstance(value, Part) for inner in _all_parts(value))]


@functools.partial(jax.jit, static_argnames=("config", "mesh", "dtype"))
def _check_layers(policy: Policy, *, config: ModelConfig, mesh: Mesh | None, dtype: DTypeLike) -> tuple[()]:
    def check(policy: Policy) -> tuple[()]:
        local = on_device(config, mesh)
        shapes = local.layer_configs
        tokens = max(TOKENS, policy.score.requires.min_prompt)
        for index in sorted({shapes.index(shape) for shape in shapes if shape.attends}):
            shape, number = shapes[index], jnp.asarray(index)
            rows = 5 if shape.kv_heads != 5 else 7  # not to be mistaken for the heads
            parts = (0, 0), (0, tokens), (tokens, 1)
            read = (_reading(rows, start, count, tokens).ahead(shape, number, dtype) for start, count in parts)
            check_layer(policy.layer(index), *read)
        return ()

    return on_mesh(check, mesh, lambda: ((policy_specs(policy),), REPLICATED))(policy)


def _reading(rows: int, start: int, count: int, prompt: int) -> TokenBatch:
    length = jnp.full(rows, prompt, jnp.int32)
    batch = TokenBatch.of_text(jnp.zeros((rows, count), jnp.int32), length)
    read = length + max(start + count - prompt, 0)
    return batch.replace(position=batch.position + start, read=read, horizon=length, end=2 * length, given=start == 0)
