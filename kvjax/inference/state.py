"""Everything that decoding needs and changes: an immutable pytree."""

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
    """A model, a policy and what the cache holds; branching from one is free.

    Rows are independent: whatever happens to one depends on nothing but that row.
    """

    weights: Weights
    policy: Policy
    storage: Storage
    position: Int[Array, " b"]
    """Position of the next token."""
    prompt_length: Int[Array, " b"]
    """Tokens of the text up to the last one that was given and not written by the model."""
    horizon: Int[Array, " b"]
    """Tokens that the cache was planned to generate."""
    end: Int[Array, " b"]
    """Tokens of the whole text, as planned when the prompt was read."""
    key: Key[Array, " b"]
    seed: UInt32[Array, " b"]
    """The policy's randomness."""
    active: Bool[Array, " b"]
    """Rows that read what they are given; the others never change, and their logits mean nothing."""
    config: ModelConfig = setting(None)
    kernels: Kernels = setting(Kernels())
    mesh: Mesh | None = setting(None)
    """The devices that share all this, from `kvjax.models.sharding.program_mesh`; None for one."""


def check_state(state: object, place: str = "first") -> None:
    """Refuse what stands in the place of a state among a function's arguments.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(state, State):
        raise TypeError(f"the {place} argument is a state, from kvjax.prefill, not {type(state).__name__}.")


Moving = tuple[Storage, Int[Array, " b"]]


def split_state(state: State) -> tuple[State, Moving]:
    """What a step only reads, and what it changes: a jitted function copies whatever it returns unchanged."""
    return state.replace(storage=(), position=None), (state.storage, state.position)


def join_state(fixed: State, moving: Moving) -> State:
    """The inverse of `split_state`."""
    return fixed.replace(storage=moving[0], position=moving[1])


def state_specs(state: State) -> tuple[State, Any]:
    """Where what `split_state` gives lies on the state's mesh, if there is one."""
    weights = weight_specs(state.weights, state.config, state.mesh)
    rows = dict.fromkeys(("prompt_length", "horizon", "end", "key", "seed", "active"), OF_ROWS)
    specs = state.replace(weights=weights, policy=policy_specs(state.policy), storage=(), position=None, **rows)
    return specs, (storage_specs(state.storage), OF_ROWS)


def placed(state: State) -> State:
    """The same where its programs have it: elsewhere it would travel at every step, and be compiled for once more."""
    if state.mesh is None:
        return state
    rows = {name: getattr(state, name) for name in ROWS if name != "position"}
    leaves, tree = jax.tree.flatten(state.policy)
    specs = tuple(jax.tree.leaves(policy_specs(state.policy)))
    rows, leaves = _placed(rows, leaves, mesh=state.mesh, specs=specs)
    return state.replace(policy=jax.tree.unflatten(tree, leaves), **rows)


# A program: nothing else reaches the devices of other processes.
@functools.partial(jax.jit, static_argnames=("mesh", "specs"))
def _placed(
    rows: dict[str, Array], leaves: list[Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...]
) -> tuple[dict[str, Array], list[Array]]:
    return lying((rows, leaves), (OF_ROWS, list(specs)), mesh)


def unpacked(state: State) -> State:
    """A state whose layers have buffers of one size for all heads."""
    mesh = state.mesh

    def unpack(storage: Storage) -> Any:
        return shared(storage.unpack(), mesh)

    made = Dense((OF_VIEW,) * state.config.layers)
    return state.replace(storage=on_mesh(unpack, mesh, (storage_specs(state.storage),), made)(state.storage))


def take_rows(state: State, index: ArrayLike | Sequence[int]) -> State:
    """Some rows of a state, in any order, as a state of their own.

    Args:
        state: keeps all of its rows.
        index: which rows, from 0; one may be taken several times.

    Raises:
        ValueError: there is no such row, none is named, or heads have slots of their own and the rows do not lie on the
            state's mesh, as many on each device.

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
    """A state in which some rows are those of another one.

    Args:
        state: of the same model and policy as `rows`.
        index: which rows of it are replaced, one for each row of `rows`.
        rows: from `take_rows` or `prefill`.

    Raises:
        ValueError: the states differ in model, policy or storage, or the rows do not fit.

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
    storage: Any = state.storage  # of the type that the rows' has, too
    return state.replace(storage=storage.put(where, rows.storage), **fields)


def described(policy: Policy) -> tuple[Any, list[tuple[str, float]]]:
    """What policies of other parts or settings differ in: numbers are leaves, and so are arrays that parts learned."""
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
    """Bytes that the caches occupy: keys, values, positions, scores, codes and states, empty slots included.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> kvjax.cache_bytes(state)
        33824
    """
    check_state(state)
    return allocated_bytes(state.storage)


def full_cache_bytes(state: State) -> int:
    """Bytes that policy `full` would allocate for these rows: of their prompts and of all tokens that were planned.

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
    """Slots of a head's buffers, empty ones included, on average over rows, layers and heads."""
    slots = sum(leaf.size for leaf in jax.tree.leaves(state.storage.stored_positions()))
    return slots / sum(limit.size for limit in state.storage.limits())


def held_positions(state: State) -> list[np.ndarray]:
    """For each layer the position of the token in each slot, int [b, h, c] on the host, -1 where there is none.

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
    """For each layer the slots that each row and head may use, int [b, h] on the host."""
    return [on_host(limit) for limit in state.storage.limits()]
