"""What travels between models, caches and policies."""

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
    """A hyperparameter of a part: of the compiled program, not of the data."""
    return struct.field(pytree_node=False, default=default, metadata={"setting": True})


def number(default: Any) -> Any:
    """A hyperparameter that programs take as an argument: another number, if as whole as this one, takes the same."""
    return struct.field(default=default, metadata={"setting": True})


def derived(default: Any) -> Any:
    """What `__post_init__` makes of hyperparameters, of the compiled program as a `setting` is."""
    return struct.field(pytree_node=False, default=default, metadata={"setting": False}, repr=False)


def setting_names(part: Any) -> list[str]:
    """Names of the hyperparameters of a part or of its class."""
    described = ((field.name, field.metadata) for field in dataclasses.fields(part))
    return [name for name, how in described if how.get("setting", not how.get("pytree_node", True))]


def written(*values: object) -> bool:
    """Whether numbers are those that a user wrote, and not what stands for them in a program or another pytree."""
    return all(value is None or isinstance(value, (int, float, str, tuple, list, np.generic)) for value in values)


def is_share(value: Any) -> bool:
    """Whether a number, or what stands for it in a program, is a share of something and not a count."""
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def check(ok: bool, name: str, value: object, expected: str) -> None:
    """Refuse a bad setting with one sentence.

    Raises:
        ValueError: `ok` is False.
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
    """Refuse a setting of another type than its annotation's, where that is made of numbers, text, truth and lists.

    Args:
        name: of the setting.
        value: as given.
        annotation: of the field or parameter, a type or its text.

    Raises:
        ValueError: the value is of another type, NaN or infinite.
    """
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kinds = [_KINDS.get(kind) for kind in text.split(" | ")]
    if all(kind is not None for kind in kinds):
        known = [kind for kind in kinds if kind is not None]
        check(any(fits(value) for fits, _ in known), name, value, " or ".join(what for _, what in known))


ROWS, HEADS, SLOTS = "rows", "heads", "slots"
"""Axes of a mesh as programs see it: rows of a batch, KV heads of a layer, slots of a head."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """What a program on one device of a mesh shares with others, inside of `jax.shard_map` over `ROWS` to `SLOTS`.

    Args:
        heads: devices that share the KV heads of a layer, and their query heads with them.
        slots: devices that share the slots of each head.
        queries: devices that share the queries of a block of text over slots that each of them has.
        outputs: devices that share what the output weights of the same heads take in.
        mlp: whether the columns of MLPs are shared among all devices that share a model.
        vocab: whether the vocabulary is.
    """

    heads: int = 1
    slots: int = 1
    queries: int = 1
    outputs: int = 1
    mlp: bool = False
    vocab: bool = False

    def over_heads(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """The sum of what the devices that share a layer's heads have."""
        return jax.lax.psum(parts, HEADS) if self.heads > 1 else parts

    def over_slots(self, parts: Array) -> Array:
        """The sum of what the devices that share a head's slots have."""
        return jax.lax.psum(parts, SLOTS) if self.slots > 1 else parts

    def most_of_slots(self, most: Array) -> Array:
        """The largest of what the devices that share a head's slots have."""
        return jax.lax.pmax(most, SLOTS) if self.slots > 1 else most

    def over_attention(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """The sum of what the output weights make, on each device, of its features of a layer's attention."""
        return jax.lax.psum(parts, (HEADS, SLOTS)) if self.outputs > 1 else self.over_heads(parts)

    def over_attention_and_heads(
        self, parts: Float[Array, "b t f"], means: Sequence[Float[Array, "b h c"]]
    ) -> tuple[Float[Array, "b t f"], list[Float[Array, "b h c"]]]:
        """Return `over_attention` of what output weights make, and means over all heads of a layer, sent at once.

        Args:
            parts: what the output weights make of the features here.
            means: over the heads here, the same for each of them.
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
        """Of the features of the attention of the heads here those that the output weights here take in."""
        if self.outputs == 1:
            return every
        count = every.shape[-1] // self.outputs
        return jax.lax.dynamic_slice_in_dim(every, jax.lax.axis_index(SLOTS) * count, count, axis=-1)

    def all_features(self, own: Float[Array, "b own"]) -> Float[Array, "b f"]:
        """`own_features` in their places, and nothing in those of the others."""
        if self.outputs == 1:
            return own
        count = own.shape[-1]
        none = jnp.zeros((*own.shape[:-1], count * self.outputs), own.dtype)
        return jax.lax.dynamic_update_slice_in_dim(none, own, jax.lax.axis_index(SLOTS) * count, axis=-1)

    def of_slots(
        self, told: Float[Array, "b n"], features: Float[Array, "b f"]
    ) -> tuple[Float[Array, "s b n"], Float[Array, "s b own"]]:
        """What each of the devices that share a head's slots tells all others, and its `own_features`, sent at once."""
        rows, count = told.shape
        if self.outputs == 1:
            every = jax.lax.all_gather(jnp.concatenate([told, features], axis=-1), SLOTS)
        else:
            pieces = jnp.moveaxis(features.reshape(rows, self.outputs, -1), 1, 0)
            said = jnp.broadcast_to(told, (self.outputs, rows, count))
            every = jax.lax.all_to_all(jnp.concatenate([said, pieces], axis=-1), SLOTS, 0, 0)
        return every[..., :count], every[..., count:]

    def over_devices(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """The sum of what all devices have that share the model."""
        return jax.lax.psum(parts, (HEADS, SLOTS))

    def first(self, heads: int) -> int | Int[Array, ""]:
        """Which of a layer's KV heads is the first of the so many that are here."""
        return jax.lax.axis_index(HEADS) * heads if self.heads > 1 else 0

    def all_heads(self, own: Array) -> Array:
        """Of arrays [b h ...] those of all heads."""
        return jax.lax.all_gather(own, HEADS, axis=1, tiled=True) if self.heads > 1 else own

    def all_slots(self, own: Array, axis: int = 2) -> Array:
        """Of arrays whose slots lie along an axis those of whole heads."""
        return jax.lax.all_gather(own, SLOTS, axis=axis, tiled=True) if self.slots > 1 else own

    def own_slots(self, every: Array, axis: int = 2) -> Array:
        """The inverse of `all_slots`."""
        if self.slots == 1:
            return every
        count = every.shape[axis] // self.slots
        return jax.lax.dynamic_slice_in_dim(every, jax.lax.axis_index(SLOTS) * count, count, axis)

    def over_queries(self, parts: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """The sum of what the devices that share a block's queries make of theirs."""
        return jax.lax.psum(parts, SLOTS) if self.queries > 1 else parts

    def own_queries(self, tokens: int, block: int) -> Int[Array, "m"] | None:
        """Which of a block's tokens are read here, so many after each other by turns; None for all of them.

        Later queries see more than earlier ones: by turns everyone has as much to do. Numbers beyond the last token
        fill the last turn.
        """
        if self.queries == 1:
            return None
        turns = -(-tokens // (block * self.queries))
        first = (jnp.arange(turns) * self.queries + jax.lax.axis_index(SLOTS)) * block
        return (first[:, None] + jnp.arange(block)).reshape(-1)

    def all_queries(self, own: Array, tokens: int, block: int, axis: int) -> Array:
        """Of arrays whose tokens lie along an axis, each device's `own_queries`, those of a whole block."""
        if self.queries == 1:
            return own
        turns = own.reshape(*own.shape[:axis], -1, block, *own.shape[axis + 1 :])
        every = jax.lax.all_gather(turns, SLOTS, axis=axis + 1)
        joined = every.reshape(*own.shape[:axis], -1, *own.shape[axis + 1 :])
        return jax.lax.slice_in_dim(joined, 0, tokens, axis=axis)

    def own_heads(self, every: Array) -> Array:
        """The inverse of `all_heads`."""
        if self.heads == 1:
            return every
        count = every.shape[1] // self.heads
        return jax.lax.dynamic_slice_in_dim(every, self.first(count), count, axis=1)


ALONE = Spread()
"""Of a device that shares nothing."""


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What a layer's attention is like: all that caches, policies and the engine know of a model's layers.

    Args:
        width: of the hidden state.
        kv_heads: heads of keys and values.
        groups: query heads that share one of them.
        key_width: numbers of a query or a key.
        value_width: numbers of a value.
        rope: how queries and keys are rotated; None for not at all.
        scale: of the products of queries and keys.
        soft_cap: bound on the logits; None for none.
        window: newest tokens that a query sees, itself included; None for all of them.
        slopes: ALiBi's of each query head, by KV head [kv_heads][groups]; None for none.
        local: whether another layer of the model sees further: budgets are about those that see furthest.
        spread: how its heads lie on devices; `kv_heads` are those that are here, `slopes` those of all.
        normed: whether each head of queries and keys comes out of a norm, and not out of a product of all heads.
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
        """Query heads."""
        return self.kv_heads * self.groups

    def numbers(self, rows: int) -> Int[Array, "b h"] | None:
        """Which of the layer's KV heads are here, for each of some rows; None for all of them in order."""
        if self.spread.heads == 1:
            return None
        here = self.spread.first(self.kv_heads) + jnp.arange(self.kv_heads, dtype=jnp.int32)
        return jnp.broadcast_to(here, (rows, self.kv_heads))

    @property
    def spec(self) -> AttentionSpec:
        """The same, as operations take it."""
        slopes = None if self.slopes is None else self.spread.own_heads(jnp.asarray(self.slopes)[None])[0]
        return AttentionSpec(self.scale, self.soft_cap, self.window, slopes)

    def rotated(
        self, turned: Sequence[Array], turns: Turns, kernels: Kernels, still: Sequence[Array] = ()
    ) -> tuple[Array, ...]:
        """Queries and keys rotated and values as they are, see `kvjax.rope.rotate_heads`."""
        assert self.rope is not None
        if self.normed:  # XLA rotates heads that lie apart where it normalises them
            apart = kernels._replace(implementation="xla")
            found = rotate_heads(self.rope, turned, turns, **apart._asdict())
            return (*found, *(rotate_heads(self.rope, (), turns, still, **kernels._asdict()) if still else ()))
        return rotate_heads(self.rope, turned, turns, still, **kernels._asdict())

    def bounds(self, end: int | Int[Array, "*b"] | Int[np.ndarray, "*b"]) -> Any:
        """Which texts of so many tokens outgrow the layer's window: it keeps that, whatever the policy and its budget.

        In a model all of whose layers see equally far there are none: budgets are about all layers then.
        """
        return end > (self.window if self.local and self.window is not None else np.iinfo(np.int32).max)


class Kernels(NamedTuple):
    """Which implementation of every operation runs, and for what: see `pallas_kernels.common.choose`."""

    implementation: str = "auto"
    interpret: Any = False
    platform: str | None = None


class New(struct.PyTreeNode):
    """Tokens that one layer reads: a block of text, or the one token of a decode step.

    Queries and keys are rotated by their original positions whatever the cache stores.
    """

    q: Float[Array, "b h g t d"]
    k: Float[Array, "b h t d"]
    v: Float[Array, "b h t e"]
    raw_q: Float[Array, "b h g t d"]
    """Queries before rotation."""
    raw_k: Float[Array, "b h t d"]
    """Keys before rotation."""
    hidden: Float[Array, "b t width"]
    """What the layer's block was given."""
    position: Int[Array, "b t"]
    """Position in the row's own text; -1 marks padding, which follows the tokens."""
    token: Int[Array, "b t"]
    prompt_length: Int[Array, " b"]
    """Tokens of the row's text up to the last one that was given and not written by the model."""
    read: Int[Array, " b"]
    """Tokens of the row read once all of this call's tokens are."""
    horizon: Int[Array, " b"]
    """Tokens that are going to be generated."""
    end: Int[Array, " b"]
    """Tokens of the whole text, as planned when its prompt was read."""
    seed: UInt32[Array, " b"]
    """The row's randomness: numbers drawn from it depend on layer, head and position, on nothing else."""
    head: Int[Array, "b h"] | None = None
    """Which KV heads these are; None for all of them in order."""
    layer: int | Int[Array, ""] = 0
    """Which of the model's; an array where layers share a program, see `Part.numbers_layers`."""
    config: LayerConfig | None = setting(None)
    """The layer's; None stands for one without a window."""
    given: bool = setting(True)
    """Whether the tokens are text that was given (a prompt, a turn), not written by the model."""
    kernels: Kernels = setting(Kernels())

    @property
    def spread(self) -> Spread:
        """How the layer's heads lie on devices."""
        return ALONE if self.config is None else self.config.spread

    @property
    def valid(self) -> Bool[Array, "b t"]:
        """Which tokens are text and not padding."""
        return self.position >= 0

    @property
    def length(self) -> Int[Array, " b"]:
        """Tokens of the row's text so far: all that are read, and all of a prompt that is being read."""
        return jnp.maximum(self.read, self.prompt_length)

    @property
    def newest(self) -> Int[Array, " b"]:
        """Position of the row's newest token."""
        return self.read - 1

    @property
    def age(self) -> Int[Array, "b t"]:
        """How many of these tokens came after each."""
        return jnp.maximum(self.position.max(1, keepdims=True) - self.position, 0)

    @property
    def last_query(self) -> Float[Array, "b h g d"]:
        """The newest token's query; anything for a row that has no text here."""
        if self.q.shape[3] == 1:
            return self.q[:, :, :, 0]
        newest = self.position == self.newest[:, None]
        return jnp.einsum("bhgtd,bt->bhgd", self.q, newest.astype(self.q.dtype))


class KV(struct.PyTreeNode):
    """What the cache stores of each token, as its codec has it: key and value [b h c d]."""

    k: Operand
    v: Operand


class CodecState(struct.PyTreeNode):
    """What a codec knows of a layer's heads."""

    factor: Float[Array, "b h d"] | None = None
    """By which the channels of stored keys are divided; 0 before any is stored. None without codes."""
    count: Int[Array, "b h"] | None = None
    """Live slots, where keys are rotated by their order."""


class Pairs(NamedTuple):
    """Keys, rotated by their original positions, and values, as numbers."""

    k: Float[Array, "b h m d"]
    v: Float[Array, "b h m e"]


def restored(
    rope: Rope | None, kv: KV, position: Int[Array, "b h m"], state: CodecState | None, dtype: DTypeLike
) -> Pairs:
    """Return stored pairs as they were before they were stored.

    Args:
        rope: of the layer.
        kv: as slots hold them.
        position: of each.
        state: of the layer's heads; None where slots hold keys and values as they are.
        dtype: of the result.
    """
    keys, values = (numbers(x, dtype) for x in (kv.k, kv.v))
    if state is not None and state.factor is not None:
        keys = (keys * state.factor[:, :, None]).astype(dtype)
    ordered = state is not None and state.count is not None
    return Pairs(rotate(rope, keys, position) if ordered else keys, values)


class Evicted(struct.PyTreeNode):
    """Pairs on their way out of the cache, keys rotated by their original positions."""

    k: Float[Array, "b h m d"]
    v: Float[Array, "b h m e"]
    position: Int[Array, "b h m"]
    """-1 where there is none, or nobody is to remember it."""
    layer: int | Int[Array, ""] = 0
    kernels: Kernels = setting(Kernels())

    @property
    def leaving(self) -> Bool[Array, "b h m"]:
        """Which of them there are."""
        return self.position >= 0


class Parts(struct.PyTreeNode):
    """One tree for each part of a policy that remembers something; nobody writes another's."""

    score: PyTree = None
    protection: PyTree = None
    plan: PyTree = None
    residual: PyTree = None
    codec: PyTree = None


class Heads(struct.PyTreeNode):
    """What is known of a layer's heads as wholes."""

    limit: Int[Array, "b h"]
    """Slots that each head may use."""
    state: Parts
    """What the parts remember of the layer: every leaf begins with rows."""


class View(Heads):
    """Heads and their slots, in no order: all of each head, or some (then b counts pages of slots, and h is 1)."""

    kv: KV
    position: Int[Array, "b h c"]
    """Original position of the token in each slot; -1 = empty."""
    slots: Parts
    """What the parts remember of each slot: leaves [b h c ...]."""

    @property
    def capacity(self) -> int:
        """Slots per head in the buffers."""
        return self.position.shape[-1]

    @property
    def live(self) -> Bool[Array, "b h c"]:
        """Which slots hold a token."""
        return self.position >= 0

    def keys(self, new: New) -> Float[Array, "b h c d"]:
        """Return the keys, rotated by their original positions, whatever slots hold; anything in empty slots.

        Args:
            new: the tokens that are being read.
        """
        return self._pairs(new).k

    def values(self, new: New) -> Float[Array, "b h c e"]:
        """Return the values, whatever slots hold; anything in empty slots.

        Args:
            new: the tokens that are being read.
        """
        return self._pairs(new).v

    def _pairs(self, new: New) -> Pairs:
        rope = None if new.config is None else new.config.rope
        return restored(rope, self.kv, self.position, self.state.codec, new.k.dtype)


def nothing(new: New) -> Float[Array, "b h t"]:
    """A zero for each new token and KV head, of the kind that sums of attention have."""
    return jnp.zeros(new.k.shape[:3], wide(new.k.dtype))
