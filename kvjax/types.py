"""Types shared by models, caches and policies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.rope import Rope, Turns, rotate, rotate_heads
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.attention import Partial as Partial
from pallas_kernels.attention import wide as wide
from pallas_kernels.operands import Operand
from pallas_kernels.operands import values as numbers

PyTree = Any


def setting(default: Any) -> Any:
    """Declare a static hyperparameter of a part: each value compiles its own program."""
    return struct.field(pytree_node=False, default=default, metadata={"setting": True})


def number(default: Any) -> Any:
    """Declare a traced hyperparameter: a program takes it as an argument and serves all values of one dtype."""
    return struct.field(default=default, metadata={"setting": True})


def derived(default: Any) -> Any:
    """Declare a field that `__post_init__` computes from hyperparameters; it is static, as a `setting` is."""
    return struct.field(pytree_node=False, default=default, metadata={"setting": False}, repr=False)


def setting_names(part: Any) -> list[str]:
    """Return the names of the hyperparameters of a part or of its class."""
    described = ((field.name, field.metadata) for field in dataclasses.fields(part))
    return [name for name, how in described if how.get("setting", not how.get("pytree_node", True))]


def written(*values: object) -> bool:
    """Return whether all values are a user's own, rather than tracers or other leaves of a pytree."""
    return all(value is None or isinstance(value, (int, float, str, tuple, list, np.generic)) for value in values)


def is_share(value: Any) -> bool:
    """Return whether a number or its tracer is a fraction, of a floating-point dtype, rather than a count."""
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def check(ok: bool, name: str, value: object, expected: str) -> None:
    """Refuse an invalid setting.

    Raises:
        ValueError: if `ok` is False; the message has the name, the value and what is expected.
    """
    if not ok:
        raise ValueError(f"{name}={value!r} is not {expected}.")


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "float": (
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
        "a finite number",
    ),
    "str": (lambda value: isinstance(value, str), "text"),
    "None": (lambda value: value is None, "None"),
    "tuple[int, ...]": (
        lambda value: isinstance(value, tuple) and all(_KINDS["int"][0](each) for each in value),
        "a list of whole numbers such as [5]",
    ),
    "tuple[str, ...]": (
        lambda value: isinstance(value, tuple) and all(isinstance(each, str) for each in value),
        "a list of words",
    ),
}


def check_kind(name: str, value: object, annotation: object) -> None:
    """Refuse a setting whose type differs from its annotation.

    Only annotations made of `_KINDS` are checked: numbers, text, booleans, None and tuples.

    Args:
        name: of the setting.
        value: as given.
        annotation: of the field or parameter, a type or its text.

    Raises:
        ValueError: if the value has another type, or is NaN or infinite.
    """
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kinds = [_KINDS.get(kind) for kind in text.split(" | ")]
    if all(kind is not None for kind in kinds):
        known = [kind for kind in kinds if kind is not None]
        check(any(fits(value) for fits, _ in known), name, value, " or ".join(what for _, what in known))


ROWS, HEADS, SLOTS = "rows", "heads", "slots"
"""Mesh axes of a program: rows of a batch, KV heads of a layer, slots of a head."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Sharding and collectives of one device's program, inside `jax.shard_map` over `ROWS`, `HEADS` and `SLOTS`.

    Args:
        heads: devices that shard the KV heads of a layer, and their query heads.
        slots: devices that shard the slots of each head.
        queries: devices that shard the queries of a block of text; each of them has all slots.
        outputs: devices with the same heads that shard the inputs of the output weights.
        mlp: True if the columns of MLPs are sharded over all devices of a model.
        vocab: True if the vocabulary is sharded over all devices of a model.
    """

    heads: int = 1
    slots: int = 1
    queries: int = 1
    outputs: int = 1
    mlp: bool = False
    vocab: bool = False

    def over_heads(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum over the devices that shard a layer's heads."""
        return jax.lax.psum(parts, HEADS) if self.heads > 1 else parts

    def over_slots(self, parts: Array) -> Array:
        """Sum over the devices that shard a head's slots."""
        return jax.lax.psum(parts, SLOTS) if self.slots > 1 else parts

    def most_of_slots(self, most: Array) -> Array:
        """Return the maximum over the devices that shard a head's slots."""
        return jax.lax.pmax(most, SLOTS) if self.slots > 1 else most

    def over_attention(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum products of the output weights over the devices that shard their inputs, a layer's attention."""
        return jax.lax.psum(parts, (HEADS, SLOTS)) if self.outputs > 1 else self.over_heads(parts)

    def over_attention_and_heads(
        self, parts: Float[Array, "b t f"], means: Sequence[Float[Array, "b h c"]]
    ) -> tuple[Float[Array, "b t f"], list[Float[Array, "b h c"]]]:
        """Return `over_attention(parts)` and means over all heads of a layer, from one collective.

        `outputs` must be 1: the sum runs over `HEADS` only.

        Args:
            parts: this device's product of the output weights.
            means: means over this device's heads, repeated for each of them.
        """
        rows, kind = parts.shape[0], jnp.result_type(parts, *means)
        told = [each.astype(kind) for each in (parts.reshape(rows, -1), *(mean[:, 0] for mean in means))]
        sent = jax.lax.psum(jnp.concatenate(told, axis=1), HEADS)
        sizes = [each.shape[1] for each in told]
        summed, *sums = jnp.split(sent, list(np.cumsum(sizes))[:-1], axis=1)
        heard = [
            jnp.broadcast_to(total[:, None] / self.heads, mean.shape).astype(mean.dtype)
            for total, mean in zip(sums, means, strict=True)
        ]
        return summed.reshape(parts.shape).astype(parts.dtype), heard

    def own_features(self, every: Float[Array, "*b f"]) -> Float[Array, "*b own"]:
        """Return the attention features that this device's output weights take, of all features of its heads."""
        if self.outputs == 1:
            return every
        count = every.shape[-1] // self.outputs
        return jax.lax.dynamic_slice_in_dim(every, jax.lax.axis_index(SLOTS) * count, count, axis=-1)

    def all_features(self, own: Float[Array, "b own"]) -> Float[Array, "b f"]:
        """Pad `own_features` to all features of the heads; those of other devices are zero."""
        if self.outputs == 1:
            return own
        count = own.shape[-1]
        none = jnp.zeros((*own.shape[:-1], count * self.outputs), own.dtype)
        return jax.lax.dynamic_update_slice_in_dim(none, own, jax.lax.axis_index(SLOTS) * count, axis=-1)

    def of_slots(
        self, told: Float[Array, "b n"], features: Float[Array, "b f"]
    ) -> tuple[Float[Array, "s b n"], Float[Array, "s b own"]]:
        """Exchange arrays between the devices that shard a head's slots, in one collective.

        Args:
            told: array that every device gets from every other.
            features: attention features; each device gets its `own_features` of them from every other.

        Returns:
            Both, stacked over the devices `s`.
        """
        rows, count = told.shape
        if self.outputs == 1:
            every = jax.lax.all_gather(jnp.concatenate([told, features], axis=-1), SLOTS)
        else:
            pieces = jnp.moveaxis(features.reshape(rows, self.outputs, -1), 1, 0)
            said = jnp.broadcast_to(told, (self.outputs, rows, count))
            every = jax.lax.all_to_all(jnp.concatenate([said, pieces], axis=-1), SLOTS, 0, 0)
        return every[..., :count], every[..., count:]

    def over_devices(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum over all devices that shard the model."""
        return jax.lax.psum(parts, (HEADS, SLOTS))

    def first(self, heads: int) -> int | Int[Array, ""]:
        """Return the index of this device's first KV head in a layer, where each device has `heads` of them."""
        return jax.lax.axis_index(HEADS) * heads if self.heads > 1 else 0

    def all_heads(self, own: Array) -> Array:
        """Gather arrays [b h ...] of all heads from the devices that shard them."""
        return jax.lax.all_gather(own, HEADS, axis=1, tiled=True) if self.heads > 1 else own

    def all_slots(self, own: Array, axis: int = 2) -> Array:
        """Gather arrays of whole heads, along their axis of slots, from the devices that shard the slots."""
        return jax.lax.all_gather(own, SLOTS, axis=axis, tiled=True) if self.slots > 1 else own

    def own_slots(self, every: Array, axis: int = 2) -> Array:
        """Return this device's shard of the slots; the inverse of `all_slots`."""
        if self.slots == 1:
            return every
        count = every.shape[axis] // self.slots
        return jax.lax.dynamic_slice_in_dim(every, jax.lax.axis_index(SLOTS) * count, count, axis)

    def over_queries(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Sum over the devices that shard a block's queries."""
        return jax.lax.psum(parts, SLOTS) if self.queries > 1 else parts

    def own_queries(self, tokens: int, block: int) -> Int[Array, "m"] | None:
        """Return the indices of the tokens whose queries this device computes; None for all of them.

        Devices take blocks of consecutive tokens in turn. Later queries attend to more keys than earlier ones, so this
        balances the work. Indices beyond the last token fill the last turn.

        Args:
            tokens: tokens of the block of text.
            block: consecutive tokens of one device in a turn.
        """
        if self.queries == 1:
            return None
        turns = -(-tokens // (block * self.queries))
        first = (jnp.arange(turns) * self.queries + jax.lax.axis_index(SLOTS)) * block
        return (first[:, None] + jnp.arange(block)).reshape(-1)

    def all_queries(self, own: Array, tokens: int, block: int, axis: int) -> Array:
        """Gather arrays of all tokens, along their axis of tokens, from each device's `own_queries`."""
        if self.queries == 1:
            return own
        turns = own.reshape(*own.shape[:axis], -1, block, *own.shape[axis + 1 :])
        every = jax.lax.all_gather(turns, SLOTS, axis=axis + 1)
        joined = every.reshape(*own.shape[:axis], -1, *own.shape[axis + 1 :])
        return jax.lax.slice_in_dim(joined, 0, tokens, axis=axis)

    def own_heads(self, every: Array) -> Array:
        """Return this device's shard of the heads; the inverse of `all_heads`."""
        if self.heads == 1:
            return every
        count = every.shape[1] // self.heads
        return jax.lax.dynamic_slice_in_dim(every, self.first(count), count, axis=1)


ALONE = Spread()
"""Sharding of a single device."""


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Attention of one layer. Caches, policies and the engine need nothing else about a model's layers.

    Args:
        width: of the hidden state.
        kv_heads: heads of keys and values on this device.
        groups: query heads per KV head.
        key_width: elements of a query or a key.
        value_width: elements of a value.
        rope: rotation of queries and keys; None if there is none.
        scale: factor of the products of queries and keys.
        soft_cap: bound on the logits; None for no bound.
        window: newest tokens that a query attends to, itself included; None for all of them.
        slopes: ALiBi slopes of all devices' query heads, by KV head [kv_heads][groups]; None for no ALiBi.
        local: True if another layer of the model sees further; budgets apply to the layers that see furthest.
        spread: sharding of the layer over devices.
        normed: True if each head of queries and keys is normalised before it is rotated.
    """

    width: int
    kv_heads: int
    groups: int
    key_width: int
    value_width: int
    rope: Rope | None
    scale: float
    soft_cap: float | None = None
    window: int | None = None
    slopes: tuple[tuple[float, ...], ...] | None = None
    local: bool = False
    spread: Spread = ALONE
    normed: bool = False

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.kv_heads * self.groups

    def numbers(self, rows: int) -> Int[Array, "b h"] | None:
        """Return the indices of this device's KV heads in the layer, for each row; None for all of them in order."""
        if self.spread.heads == 1:
            return None
        here = self.spread.first(self.kv_heads) + jnp.arange(self.kv_heads, dtype=jnp.int32)
        return jnp.broadcast_to(here, (rows, self.kv_heads))

    @property
    def spec(self) -> AttentionSpec:
        """Arguments of attention operations, with the slopes of this device's heads."""
        slopes = None if self.slopes is None else self.spread.own_heads(jnp.asarray(self.slopes)[None])[0]
        return AttentionSpec(self.scale, self.soft_cap, self.window, slopes)

    def rotated(
        self, turned: Sequence[Array], turns: Turns, kernels: Kernels, still: Sequence[Array] = ()
    ) -> tuple[Array, ...]:
        """Rotate queries and keys and return values unchanged; see `kvjax.rope.rotate_heads`."""
        assert self.rope is not None
        if self.normed:  # XLA rotates each head in the pass that normalises it
            apart = kernels._replace(implementation="xla")
            found = rotate_heads(self.rope, turned, turns, **apart._asdict())
            return (*found, *(rotate_heads(self.rope, (), turns, still, **kernels._asdict()) if still else ()))
        return rotate_heads(self.rope, turned, turns, still, **kernels._asdict())

    def bounds(self, end: int | Int[Array, "*b"] | Int[np.ndarray, "*b"]) -> Any:
        """Return whether texts of `end` tokens exceed the layer's window, which then overrides the budget.

        This is False for layers that see as far as any other: the budget applies to those.
        """
        return end > (self.window if self.local and self.window is not None else np.iinfo(np.int32).max)


class Kernels(NamedTuple):
    """Implementation of every operation, and its target: see `pallas_kernels.common.choose`."""

    implementation: str = "auto"
    interpret: Any = False
    platform: str | None = None


class New(struct.PyTreeNode):
    """Tokens that one layer reads: a block of text, or the one token of a decode step.

    Queries and keys are rotated by their original positions, in every storage format.
    """

    q: Float[Array, "b h g t d"]
    k: Float[Array, "b h t d"]
    v: Float[Array, "b h t e"]
    raw_q: Float[Array, "b h g t d"]
    """Queries before rotation."""
    raw_k: Float[Array, "b h t d"]
    """Keys before rotation."""
    hidden: Float[Array, "b t width"]
    """Input of the layer's block."""
    position: Int[Array, "b t"]
    """Position in the row's own text; -1 marks padding, which follows the tokens."""
    token: Int[Array, "b t"]
    prompt_length: Int[Array, " b"]
    """Length of the row's text, in tokens, up to the last token that was given and not generated."""
    read: Int[Array, " b"]
    """Tokens of the row read so far, those of this call included."""
    horizon: Int[Array, " b"]
    """Tokens planned to be generated."""
    end: Int[Array, " b"]
    """Planned length of the whole text in tokens, set when its prompt was read."""
    seed: UInt32[Array, " b"]
    """Random seed of the row; numbers drawn from it depend only on layer, head and position."""
    head: Int[Array, "b h"] | None = None
    """Indices of these KV heads; None for all of them in order."""
    layer: int | Int[Array, ""] = 0
    """Index of the layer; an array if layers share a program, see `Part.layer`."""
    config: LayerConfig | None = setting(None)
    """Attention of the layer; None stands for a layer without a window."""
    given: bool = setting(True)
    """True if the tokens are given text (a prompt, a turn), False if the model generated them."""
    kernels: Kernels = setting(Kernels())

    @property
    def spread(self) -> Spread:
        """Sharding of the layer over devices."""
        return ALONE if self.config is None else self.config.spread

    @property
    def valid(self) -> Bool[Array, "b t"]:
        """Mask of the tokens that are text and not padding."""
        return self.position >= 0

    @property
    def length(self) -> Int[Array, " b"]:
        """Length of the row's text so far, in tokens; the whole prompt counts while it is being read."""
        return jnp.maximum(self.read, self.prompt_length)

    @property
    def newest(self) -> Int[Array, " b"]:
        """Position of the row's newest token."""
        return self.read - 1

    @property
    def age(self) -> Int[Array, "b t"]:
        """Number of these tokens that come after each one."""
        return jnp.maximum(self.position.max(1, keepdims=True) - self.position, 0)

    @property
    def last_query(self) -> Float[Array, "b h g d"]:
        """Query of the newest token; arbitrary for a row without text here."""
        if self.q.shape[3] == 1:
            return self.q[:, :, :, 0]
        newest = self.position == self.newest[:, None]
        return jnp.einsum("bhgtd,bt->bhgd", self.q, newest.astype(self.q.dtype))


class KV(struct.PyTreeNode):
    """Stored keys and values [b h c d], in the format of the codec."""

    k: Operand
    v: Operand


class CodecState(struct.PyTreeNode):
    """State of a codec for the heads of one layer."""

    factor: Float[Array, "b h d"] | None = None
    """Divisors of each channel of stored keys; 0 before any key is stored, None if keys are not quantised."""
    count: Int[Array, "b h"] | None = None
    """Number of live slots; None unless keys are rotated by their order in the cache."""


class Pairs(NamedTuple):
    """Decoded keys, rotated by their original positions, and values."""

    k: Float[Array, "b h m d"]
    v: Float[Array, "b h m e"]


def restored(
    rope: Rope | None, kv: KV, position: Int[Array, "b h m"], state: CodecState | None, dtype: DTypeLike
) -> Pairs:
    """Decode stored pairs; keys come out rotated by their original positions.

    Args:
        rope: of the layer.
        kv: stored pairs.
        position: original position of each pair.
        state: codec state of the layer's heads; None if pairs are stored unchanged.
        dtype: of the result.
    """
    keys, values = (numbers(x, dtype) for x in (kv.k, kv.v))
    if state is not None and state.factor is not None:
        keys = (keys * state.factor[:, :, None]).astype(dtype)
    ordered = state is not None and state.count is not None
    return Pairs(rotate(rope, keys, position) if ordered else keys, values)


class Evicted(struct.PyTreeNode):
    """Evicted pairs; keys are rotated by their original positions."""

    k: Float[Array, "b h m d"]
    v: Float[Array, "b h m e"]
    position: Int[Array, "b h m"]
    """Original position; -1 if there is no pair, or if no part may remember it."""
    layer: int | Int[Array, ""] = 0
    kernels: Kernels = setting(Kernels())

    @property
    def leaving(self) -> Bool[Array, "b h m"]:
        """Mask of the entries that hold an evicted pair."""
        return self.position >= 0


class Parts(struct.PyTreeNode):
    """State of a policy: one tree for each part that keeps state. A part only updates its own tree."""

    score: PyTree = None
    protection: PyTree = None
    plan: PyTree = None
    residual: PyTree = None
    codec: PyTree = None


class Heads(struct.PyTreeNode):
    """State of a layer's heads, without their slots."""

    limit: Int[Array, "b h"]
    """Slots that each head may use."""
    state: Parts
    """Per-layer state of the parts: the first axis of every leaf is rows."""


class View(Heads):
    """Heads and their slots, unordered: all slots of each head, or some (then b counts pages of slots, and h is 1)."""

    kv: KV
    position: Int[Array, "b h c"]
    """Original position of the token in each slot; -1 = empty."""
    slots: Parts
    """Per-slot state of the parts: leaves [b h c ...]."""

    @property
    def capacity(self) -> int:
        """Slots per head in the buffers."""
        return self.position.shape[-1]

    @property
    def live(self) -> Bool[Array, "b h c"]:
        """Mask of the slots that hold a token."""
        return self.position >= 0

    def keys(self, new: New) -> Float[Array, "b h c d"]:
        """Return decoded keys, rotated by their original positions; those of empty slots are arbitrary.

        Args:
            new: the tokens that are being read.
        """
        return self._pairs(new).k

    def values(self, new: New) -> Float[Array, "b h c e"]:
        """Return decoded values; those of empty slots are arbitrary.

        Args:
            new: the tokens that are being read.
        """
        return self._pairs(new).v

    def _pairs(self, new: New) -> Pairs:
        rope = None if new.config is None else new.config.rope
        return restored(rope, self.kv, self.position, self.state.codec, new.k.dtype)


def nothing(new: New) -> Float[Array, "b h t"]:
    """Return a zero for each new token and KV head, in the dtype of accumulated attention."""
    return jnp.zeros(new.k.shape[:3], wide(new.k.dtype))
