"""State of decoding: an immutable pytree of all that a step reads and changes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Key, UInt32

from kvjax.cache.dense import Dense
from kvjax.cache.memory import allocated_bytes
from kvjax.inference.layers import Storage
from kvjax.inference.prepare import full_slots, round_slots
from kvjax.inference.sharding import OF_ROWS, OF_VIEW, lying, on_mesh, policy_specs, shared, storage_specs
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.models.sharding import weight_specs
from kvjax.policies.policy import Policy
from kvjax.types import Kernels, LayerConfig, setting
from kvjax.utils.processes import on_host

ROWS = ("position", "prompt_length", "horizon", "end", "key", "seed", "active")
"""Fields of a state that have one entry for each row."""


class State(struct.PyTreeNode):
    """A model, a policy and a cache; branching from a state is free.

    Rows are independent: the results of one row depend on that row only.
    """

    weights: Weights
    policy: Policy
    storage: Storage
    position: Int[Array, " b"]
    """Position of the next token."""
    prompt_length: Int[Array, " b"]
    """Length of the text, in tokens, up to the last token that was given and not generated."""
    horizon: Int[Array, " b"]
    """Tokens planned to be generated."""
    end: Int[Array, " b"]
    """Planned length of the whole text in tokens, set when the prompt was read."""
    key: Key[Array, " b"]
    seed: UInt32[Array, " b"]
    """Random seed of the policy for each row."""
    active: Bool[Array, " b"]
    """True for rows that read tokens; the other rows never change, and their logits are meaningless."""
    config: ModelConfig = setting(None)
    kernels: Kernels = setting(Kernels())
    mesh: Mesh | None = setting(None)
    """Devices that shard the state, from `kvjax.models.sharding.program_mesh`; None for one device."""


def check_state(state: object, place: str = "first") -> None:
    """Refuse an argument that is not a state.

    Raises:
        TypeError: if it is not a state; the message has its `place` among the arguments.
    """
    if not isinstance(state, State):
        raise TypeError(f"the {place} argument is a state, from kvjax.prefill, not {type(state).__name__}.")


Moving = tuple[Storage, Int[Array, " b"]]


def split_state(state: State) -> tuple[State, Moving]:
    """Split a state into fields that a step only reads and fields that it changes.

    A jitted step returns only the second, because it would copy fields that it returns unchanged.
    """
    return state.replace(storage=(), position=None), (state.storage, state.position)


def join_state(fixed: State, moving: Moving) -> State:
    """Join the two parts of a state; the inverse of `split_state`."""
    return fixed.replace(storage=moving[0], position=moving[1])


def state_specs(state: State) -> tuple[State, Any]:
    """Return the specs of the two parts from `split_state`, for the state's mesh if it has one."""
    weights = weight_specs(state.weights, state.config, state.mesh)
    rows = dict.fromkeys(("prompt_length", "horizon", "end", "key", "seed", "active"), OF_ROWS)
    specs = state.replace(weights=weights, policy=policy_specs(state.policy), storage=(), position=None, **rows)
    return specs, (storage_specs(state.storage), OF_ROWS)


def placed(state: State) -> State:
    """Move a state to the sharding that its programs expect, which avoids a transfer at each step and a recompile."""
    if state.mesh is None:
        return state
    rows = {name: getattr(state, name) for name in ROWS if name != "position"}
    leaves, tree = jax.tree.flatten(state.policy)
    specs = tuple(jax.tree.leaves(policy_specs(state.policy)))
    rows, leaves = _placed(rows, leaves, mesh=state.mesh, specs=specs)
    return state.replace(policy=jax.tree.unflatten(tree, leaves), **rows)


# Only a compiled program reaches the devices of other processes.
@functools.partial(jax.jit, static_argnames=("mesh", "specs"))
def _placed(
    rows: dict[str, Array], leaves: list[Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...]
) -> tuple[dict[str, Array], list[Array]]:
    return lying((rows, leaves), (OF_ROWS, list(specs)), mesh)


def unpacked(state: State) -> State:
    """Unpack a state's pages into buffers of one size for all heads of a layer."""
    mesh = state.mesh

    def unpack(storage: Storage) -> Any:
        return shared(storage.unpack(), mesh)

    made = Dense((OF_VIEW,) * state.config.layers)
    return state.replace(storage=on_mesh(unpack, mesh, (storage_specs(state.storage),), made)(state.storage))


def take_rows(state: State, index: ArrayLike | Sequence[int]) -> State:
    """Return a new state with some rows of a state, in any order.

    Args:
        state: stays unchanged.
        index: indices of the rows, from 0; a row may be taken several times.

    Raises:
        ValueError: if there is no such row, or no index; or if each head has its own slots and the rows cannot be
            sharded evenly over the state's mesh.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> kvjax.take_rows(state, [0, 0]).position.tolist()
        [3, 3]
    """
    check_state(state)
    rows = _rows(state, index)
    fields = {name: getattr(state, name)[rows] for name in ROWS}
    return state.replace(storage=state.storage.take(rows), **fields)


def put_rows(state: State, index: ArrayLike | Sequence[int], rows: State) -> State:
    """Return a state in which rows of another state replace some rows.

    Args:
        state: of the same model and policy as `rows`.
        index: indices of the replaced rows, one for each row of `rows`.
        rows: from `take_rows` or `prefill`.

    Raises:
        ValueError: if the states differ in model, policy or storage, or the rows do not fit.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42], [8]], budget=16, max_new_tokens=8)
        >>> kvjax.put_rows(state, [1], kvjax.take_rows(state, [0])).position.tolist()
        [3, 3]
    """
    check_state(state)
    check_state(rows, "third")
    where = _rows(state, index)
    count = len(rows.position)
    if len(set(where.tolist())) != len(where) or len(where) != count:
        raise ValueError(f"index={where.tolist()} does not name a row of its own for each of {count} rows.")
    if state.config != rows.config:
        raise ValueError("rows of another model's state do not fit; read them with the model of the state.")
    mine, theirs = (described(part.policy) for part in (state, rows))
    if mine != theirs or type(state.storage) is not type(rows.storage):
        raise ValueError(
            f"rows under policy {rows.policy.name!r} do not fit a state under {state.policy.name!r} or with other "
            "settings; read them with the policy of the state."
        )
    dtypes = [sorted({str(leaf.dtype) for leaf in jax.tree.leaves(part.storage)}) for part in (state, rows)]
    if dtypes[0] != dtypes[1]:
        raise ValueError(f"rows of {dtypes[1]} do not fit a state of {dtypes[0]}; use one dtype for both.")
    fields = {name: getattr(state, name).at[where].set(getattr(rows, name)) for name in ROWS}
    storage: Any = state.storage  # both storages have one type, checked above
    return state.replace(storage=storage.put(where, rows.storage), **fields)


def described(policy: Policy) -> tuple[Any, list[tuple[str, float]]]:
    """Return a policy's structure and numeric settings, to compare policies; learned arrays are left out."""
    leaves, structure = jax.tree.flatten(policy)
    numbers = (np.asarray(leaf) for leaf in leaves if np.ndim(leaf) == 0)
    return structure, [(number.dtype.kind, float(number.astype(np.float32))) for number in numbers]


def _rows(state: State, index: ArrayLike | Sequence[int]) -> Int[np.ndarray, " m"]:
    rows, count = np.atleast_1d(np.asarray(index)), len(state.position)
    whole = rows.ndim == 1 and rows.size > 0 and np.issubdtype(rows.dtype, np.integer)
    if not whole or rows.min() < 0 or rows.max() >= count:
        raise ValueError(f"index={rows.tolist()} does not name rows of a state with rows 0 to {count - 1}.")
    return rows


def cache_bytes(state: State) -> int:
    """Return the bytes of the caches: keys, values, positions, scores, codes and states, empty slots included.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> kvjax.cache_bytes(state)
        33824
    """
    check_state(state)
    return allocated_bytes(state.storage)


def full_cache_bytes(state: State) -> int:
    """Return the bytes that policy `full` would allocate for these rows, with their prompts and all planned tokens.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> kvjax.full_cache_bytes(state)
        66592
    """
    check_state(state)
    size = state.weights.embedding.dtype.itemsize
    slots = full_slots(int(on_host(state.end - state.horizon).max()), int(on_host(state.horizon).max()))
    number = np.dtype(np.int32).itemsize  # a slot's position, a head's limit

    def of_head(layer: LayerConfig) -> int:
        held = slots if layer.window is None else min(slots, round_slots(layer.window))
        return held * ((layer.key_width + layer.value_width) * size + number) + number

    return len(state.end) * sum(layer.kv_heads * of_head(layer) for layer in state.config.layer_configs)


def allocated_slots(state: State) -> float:
    """Return the slots per head, empty ones included, averaged over rows, layers and heads."""
    slots = sum(leaf.size for leaf in jax.tree.leaves(state.storage.stored_positions()))
    return slots / sum(limit.size for limit in state.storage.limits())


def held_positions(state: State) -> list[np.ndarray]:
    """Return the position of the token in each slot, by layer, int [b, h, c] on the host; -1 in empty slots.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> first, *_ = kvjax.held_positions(state)
        >>> first.shape, sorted(first[0, 0].tolist())[-4:]
        ((1, 2, 16), [-1, 0, 1, 2])
    """
    check_state(state)
    return state.storage.positions()


def slot_limits(state: State) -> list[np.ndarray]:
    """Return the slots that each row and head may use, by layer, int [b, h] on the host."""
    return [on_host(limit) for limit in state.storage.limits()]
