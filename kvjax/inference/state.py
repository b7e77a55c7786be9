"""State of decoding: a decoder and a cache, an immutable pytree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Key, UInt32

from kvjax.cache.buffers import allocated_bytes
from kvjax.cache.layer import LayerCache
from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder
from kvjax.inference.padding import full_slots, round_slots
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.policies.policy import Policy
from kvjax.types import Kernels, LayerConfig
from kvjax.utils.modes import on_the_host
from kvjax.utils.processes import on_host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A decoder and a cache, the pair that `decode_step` takes and returns; branching from a state copies nothing.

    Its attributes are those of both. Rows are independent: the results of one row depend on that row only.
    """

    decoder: Decoder
    cache: Cache

    def __repr__(self) -> str:
        return f"State({self.policy.label}, {self.cache.described()})"

    def replace(self, **changes: Any) -> State:
        """Return a state with other values of some attributes, of its cache or of its decoder."""
        fields = {field.name for field in dataclasses.fields(Cache)}
        of_cache = {name: changes.pop(name) for name in fields & changes.keys()}
        members = {name: changes.pop(name) for name in ("decoder", "cache") if name in changes}
        state = dataclasses.replace(self, **members)
        return State(state.decoder.replace(**changes), state.cache.replace(**of_cache))

    @property
    def evicting(self) -> State:
        """State of the policy that evicts: of the draft, if the state has one, and otherwise the state itself."""
        return State(self.decoder.decoders[-1], self.cache.caches[-1])

    @property
    def weights(self) -> Weights:
        """Weights of the model."""
        return self.decoder.weights

    @property
    def policy(self) -> Policy:
        """The policy, bound to the model."""
        return self.decoder.policy

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self.decoder.config

    @property
    def kernels(self) -> Kernels:
        """Implementation of every operation."""
        return self.decoder.kernels

    @property
    def mesh(self) -> Mesh | None:
        """Devices that shard the state; None for one device."""
        return self.decoder.mesh

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """State of each layer, of the kind that its mixer has."""
        return self.cache.layers

    @property
    def position(self) -> Int[Array, " b"]:
        """Position of the next token."""
        return self.cache.position

    @property
    def prompt_length(self) -> Int[Array, " b"]:
        """Length of the text up to the last token that was given and not generated."""
        return self.cache.prompt_length

    @property
    def horizon(self) -> Int[Array, " b"]:
        """Tokens planned to be generated."""
        return self.cache.horizon

    @property
    def end(self) -> Int[Array, " b"]:
        """Planned length of the whole text in tokens."""
        return self.cache.end

    @property
    def key(self) -> Key[Array, " b"]:
        """Random key of each row."""
        return self.cache.key

    @property
    def seed(self) -> UInt32[Array, " b"]:
        """Random seed of the policy for each row."""
        return self.cache.seed

    @property
    def active(self) -> Bool[Array, " b"]:
        """True for rows that read tokens."""
        return self.cache.active


def check_state(state: object, place: str = "first") -> None:
    """Refuse an argument that is not a state with a TypeError, which has its `place` among the arguments."""
    if not isinstance(state, State):
        raise TypeError(f"the {place} argument is a state, from kvjax.prefill, not {type(state).__name__}.")


@on_the_host
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
    return State(state.decoder, state.cache.take(_rows(state, index)))


@on_the_host
def put_rows(state: State, index: ArrayLike | Sequence[int], rows: State) -> State:
    """Return a state in which rows of another state replace some rows.

    Args:
        state: state of the same model and policy as `rows`.
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
    form, form_of_rows = ([described(each.policy) for each in part.decoder.decoders] for part in (state, rows))
    if form != form_of_rows or (state.cache.pool is None) != (rows.cache.pool is None):
        raise ValueError(
            f"rows under policy {rows.policy.name!r} do not fit a state under {state.policy.name!r} or with other "
            "settings; read them with the policy of the state."
        )
    dtypes = [sorted({str(leaf.dtype) for leaf in jax.tree.leaves(part.cache.memory)}) for part in (state, rows)]
    if dtypes[0] != dtypes[1]:
        raise ValueError(f"rows of {dtypes[1]} do not fit a state of {dtypes[0]}; use one dtype for both.")
    return State(state.decoder, state.cache.put(where, rows.cache))


def described(policy: Policy) -> tuple[Any, list[tuple[str, float]]]:
    """Return a policy's structure and numeric settings without learned arrays, to compare policies."""
    leaves, structure = jax.tree.flatten(policy)
    numbers = (np.asarray(leaf) for leaf in leaves if np.ndim(leaf) == 0)
    return structure, [(number.dtype.kind, float(number.astype(np.float32))) for number in numbers]


def _rows(state: State, index: ArrayLike | Sequence[int]) -> Int[np.ndarray, " m"]:
    rows, count = np.atleast_1d(np.asarray(index)), len(state.position)
    are_numbers = rows.ndim == 1 and rows.size > 0 and np.issubdtype(rows.dtype, np.integer)
    if not are_numbers or rows.min() < 0 or rows.max() >= count:
        raise ValueError(f"index={rows.tolist()} does not name rows of a state with rows 0 to {count - 1}.")
    return rows


@on_the_host
def cache_bytes(state: State) -> int:
    """Return the bytes of the caches: keys, values, positions, scores, codes and states, empty slots included.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> kvjax.cache_bytes(state)
        33824
    """
    check_state(state)
    return allocated_bytes(state.cache.memory)


def bytes_by_kind(state: State) -> dict[str, int]:
    """Return the bytes of the caches by the kinds of layers, such as slots and recurrent states."""
    sizes = dict[str, int]()
    for cache in state.cache.caches:
        for kind, size in cache.bytes_by_kind.items():
            sizes[kind] = sizes.get(kind, 0) + size
    return sizes


@on_the_host
def full_cache_bytes(state: State) -> int:
    """Return the bytes that policy `full` would allocate for these rows, with their prompts and all planned tokens.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> kvjax.full_cache_bytes(state)
        66592
    """
    check_state(state)
    size = state.weights.dtype.itemsize
    slots = full_slots(int(on_host(state.end - state.horizon).max()), int(on_host(state.horizon).max()))
    number = np.dtype(np.int32).itemsize  # a slot's position, a head's limit

    def of_head(layer: LayerConfig) -> int:
        layer_slots = slots if layer.window is None else min(slots, round_slots(layer.window))
        return layer_slots * (layer.slot_width * size + number) + number

    sizes = state.cache.caches[0].bytes_by_kind
    without_slots = sum(sizes.values()) - sizes.get("slots", 0)
    layers = [state.config.layer(index) for index in state.config.storing]
    return len(state.end) * sum(layer.kv_heads * of_head(layer) for layer in layers) + without_slots


def allocated_slots(state: State) -> float:
    """Return the slots per head, empty ones included, averaged over rows, layers and heads."""
    return state.cache.allocated_slots


@on_the_host
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
    return state.cache.positions()


@on_the_host
def slot_limits(state: State) -> list[np.ndarray]:
    """Return the slots that each row and head may use, by layer, int [b, h] on the host."""
    return [on_host(heads.limit) for heads in state.cache.attending]
