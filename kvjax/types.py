"""Types shared by models, caches and policies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.rope import Rope, Turns, rotate, rotate_heads, turns_of
from kvjax.utils.collectives import ALONE as ALONE
from kvjax.utils.collectives import HEADS as HEADS
from kvjax.utils.collectives import OF_HEADS as OF_HEADS
from kvjax.utils.collectives import OF_POOL as OF_POOL
from kvjax.utils.collectives import OF_ROWS as OF_ROWS
from kvjax.utils.collectives import OF_SLOTS as OF_SLOTS
from kvjax.utils.collectives import REPLICATED as REPLICATED
from kvjax.utils.collectives import ROWS as ROWS
from kvjax.utils.collectives import SLOTS as SLOTS
from kvjax.utils.collectives import Spread as Spread
from kvjax.utils.fields import ODD as ODD
from kvjax.utils.fields import SEED as SEED
from kvjax.utils.fields import Limit as Limit
from kvjax.utils.fields import above_zero as above_zero
from kvjax.utils.fields import at_least as at_least
from kvjax.utils.fields import check as check
from kvjax.utils.fields import check_kind as check_kind
from kvjax.utils.fields import derived as derived
from kvjax.utils.fields import directory as directory
from kvjax.utils.fields import is_share as is_share
from kvjax.utils.fields import number as number
from kvjax.utils.fields import one_of as one_of
from kvjax.utils.fields import setting as setting
from kvjax.utils.fields import setting_names as setting_names
from kvjax.utils.fields import share as share
from kvjax.utils.fields import written as written
from kvjax.utils.moved import renamed
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.attention import Partial as Partial
from pallas_kernels.attention import wide as wide
from pallas_kernels.op import Kernels as Kernels
from pallas_kernels.operands import Operand
from pallas_kernels.operands import values as numbers

PyTree = Any


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Attention of one layer. Caches, policies and the engine need nothing else about a model's layers.

    Args:
        width: width of the hidden state.
        kv_heads: heads of keys and values on this device; 0 for a layer without attention.
        groups: query heads per KV head.
        key_width: elements of a query or a key.
        value_width: elements of a value.
        rope: rotation of projected queries and keys; None if there is none, or if the mixer has rotated them.
        scale: factor of the products of queries and keys.
        soft_cap: bound on the logits; None for no bound.
        window: newest tokens that a query attends to, itself included; None for all of them.
        slopes: ALiBi slopes of all devices' query heads, by KV head [kv_heads][groups]; None for no ALiBi.
        local: True if another layer of the model attends further back; budgets apply to the layers that attend
            furthest.
        spread: sharding of the layer over devices.
        normed: True if each head of queries and keys is normalized before it is rotated.
        keys_are_values: True if a token's rotated key is its value, too, so that a slot stores it once (MLA).
        source: index of the earlier layer whose keys and values the layer reads, without any of its own; None for its
            own.
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
    keys_are_values: bool = False
    source: int | None = None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.kv_heads * self.groups

    @property
    def slot_width(self) -> int:
        """Elements that a slot stores of a token's key and value."""
        return self.key_width + (0 if self.keys_are_values else self.value_width)

    @property
    def attends(self) -> bool:
        """True if the layer has attention."""
        return self.kv_heads > 0

    @property
    def stores(self) -> bool:
        """True if the layer has slots of its own, which a budget applies to."""
        return self.attends and self.source is None

    def numbers(self, rows: int) -> Int[Array, "b h"] | None:
        """Return the indices of this device's KV heads in the layer, for each row; None for all of them in order."""
        if self.spread.heads == 1:
            return None
        heads = self.spread.first(self.kv_heads) + jnp.arange(self.kv_heads, dtype=jnp.int32)
        return jnp.broadcast_to(heads, (rows, self.kv_heads))

    @property
    def spec(self) -> AttentionSpec:
        """Arguments of attention operations, with the slopes of this device's heads."""
        slopes = None if self.slopes is None else self.spread.own_heads(jnp.asarray(self.slopes)[None])[0]
        return AttentionSpec(self.scale, self.soft_cap, self.window, slopes)

    def rotated(
        self, queries_and_keys: Sequence[Array], turns: Turns, still: Sequence[Array] = ()
    ) -> tuple[Array, ...]:
        """Rotate queries and keys and return values unchanged; see `kvjax.rope.rotate_heads`."""
        assert self.rope is not None
        if self.normed:  # XLA rotates each head in the pass that normalises it
            rotated = rotate_heads(self.rope, queries_and_keys, turns, implementation="xla")
            return (*rotated, *(rotate_heads(self.rope, (), turns, still) if still else ()))
        return rotate_heads(self.rope, queries_and_keys, turns, still)

    def bounded_by_window(self, end: int | Int[Array, "*b"] | Int[np.ndarray, "*b"]) -> Any:
        """Return whether texts of `end` tokens exceed the layer's window, which then overrides the budget.

        This is False for layers that attend as far back as any other: the budget applies to those.
        """
        return end > (self.window if self.local and self.window is not None else np.iinfo(np.int32).max)


class TokenBatch(struct.PyTreeNode):
    """Tokens that all layers read: a block of text, or the one token of a decode step."""

    token: Int[Array, "b t"]
    position: Int[Array, "b t"]
    """Position in the row's own text; -1 marks padding, which follows the tokens."""
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
    rope_length: Int[Array, " b"] | None = None
    """Length of the row's text that its RoPE frequencies are those of; None if they do not depend on it."""
    embedding: Float[Array, "b t width"] | None = None
    """Hidden states before the first layer, if later layers read them; None otherwise."""
    given: bool = setting(True)
    """True if the tokens are given text (a prompt, a turn), False if the model generated them."""
    replayed: bool = setting(False)
    """True if the tokens are a text that is read again: they attend to what is held, and get no slots."""

    @staticmethod
    def of_text(token: Int[Array, "b t"], lengths: Int[Array, " b"]) -> TokenBatch:
        """Return whole texts, after which nothing is planned; their padding has the positions after the text."""
        position = jnp.broadcast_to(jnp.arange(token.shape[1], dtype=jnp.int32), token.shape)
        nothing = jnp.zeros_like(lengths)
        return TokenBatch(
            token=token,
            position=position,
            prompt_length=lengths,
            read=lengths,
            horizon=nothing,
            end=lengths,
            seed=nothing.astype(jnp.uint32),
            rope_length=lengths,
        )

    @property
    def valid(self) -> Bool[Array, "b t"]:
        """Mask of the tokens that are text and not padding."""
        return self.position >= 0

    @property
    def counts(self) -> Int[Array, " b"]:
        """Number of tokens of each row that are text and not padding."""
        return self.valid.sum(1, dtype=jnp.int32)

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

    def part(self, start: int | Int[Array, ""], size: int) -> Self:
        """Return some successive tokens of each row, as they are read after the tokens before them."""
        read = jnp.minimum(self.read, self.read - self.counts + start + size)
        arrays = self.token, self.position, self.embedding
        cut = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1), arrays)
        token, position, embedding = cut
        return self.replace(token=token, position=position, embedding=embedding, read=read)

    @property
    def is_last(self) -> Bool[Array, "b t"]:
        """Mask of each row's last given token, if it is among these."""
        return self.position == (self.prompt_length - 1)[:, None]

    def at_last(self, hidden: Float[Array, "b t width"], otherwise: Float[Array, "b width"]) -> Float[Array, "b width"]:
        """Return the hidden state of each row's last given token, or `otherwise` if that token is not among these.

        `hidden` are the states of all of these tokens, or of each row's last given one [b 1 width].
        """
        one, is_last = hidden.shape[1] == 1, self.is_last
        newest = hidden[:, 0] if one else jnp.einsum("btw,bt->bw", hidden, is_last.astype(hidden.dtype))
        return jnp.where(is_last.any(1)[:, None], newest, otherwise)

    def turns(self, rope: Rope, dtype: DTypeLike) -> Turns:
        """Return the rotations of the tokens' queries and keys."""
        return turns_of(rope, self.position, dtype, self.rope_length)

    def of_layer(
        self,
        config: LayerConfig,
        layer: int | Int[Array, ""],
        hidden: Float[Array, "b t width"],
        q: Float[Array, "b h g t d"],
        k: Float[Array, "b h t d"],
        v: Float[Array, "b h t e"],
        sink_logits: Float[Array, "h g"] | None = None,
    ) -> LayerTokens:
        """Return the tokens of one layer, from its activations; queries and keys are not rotated yet."""
        head = config.numbers(len(hidden))
        of_layer: dict[str, Any] = dict(hidden=hidden, head=head, layer=layer, sink_logits=sink_logits, config=config)
        return LayerTokens(**vars(self), q=q, k=k, v=v, raw_q=q, raw_k=k, **of_layer)

    def ahead(self, config: LayerConfig, layer: int | Int[Array, ""], dtype: DTypeLike) -> LayerTokens:
        """Return the tokens of a layer before it runs: its activations are zeros of the right shapes."""
        (rows, tokens), heads = self.token.shape, config.kv_heads

        def zeros(*shape: int) -> Array:
            return jnp.zeros((rows, *shape), dtype)

        queries = zeros(heads, config.groups, tokens, config.key_width)
        keys, values = zeros(heads, tokens, config.key_width), zeros(heads, tokens, config.value_width)
        return self.of_layer(config, layer, zeros(tokens, config.width), queries, keys, values)


class LayerTokens(TokenBatch, kw_only=True):
    """Tokens that one layer reads.

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
    config: LayerConfig = struct.field(pytree_node=False)
    """Attention of the layer."""
    head: Int[Array, "b h"] | None = None
    """Indices of these KV heads; None for all of them in order."""
    layer: int | Int[Array, ""] = 0
    """Index of the layer; an array if layers share a program, see `Part.layer`."""
    sink_logits: Float[Array, "h g"] | None = None
    """Logit of each query head's learned sink, in the denominator of the softmax alone; None for a layer without
    sinks, and for a block of pages."""

    @property
    def spread(self) -> Spread:
        """Sharding of the layer over devices."""
        return self.config.spread

    @property
    def last_query(self) -> Float[Array, "b h g d"]:
        """Query of the newest token; arbitrary for a row without new tokens."""
        if self.q.shape[3] == 1:
            return self.q[:, :, :, 0]
        newest = self.position == self.newest[:, None]
        return jnp.einsum("bhgtd,bt->bhgd", self.q, newest.astype(self.q.dtype))

    def part(self, start: int | Int[Array, ""], size: int) -> Self:
        """Return some successive tokens of each row, as they are read after the tokens before them."""
        axes = {"q": 3, "k": 2, "v": 2, "raw_q": 3, "raw_k": 2, "hidden": 1}
        cut = {
            name: jax.lax.dynamic_slice_in_dim(getattr(self, name), start, size, axis) for name, axis in axes.items()
        }
        return super().part(start, size).replace(**cut)

    def rotated(self, turns: Turns | None = None) -> LayerTokens:
        """Return the tokens with rotated queries and keys; `turns` are the rotations, if layers share them."""
        if self.config.rope is None:
            return self
        turns = turns or self.turns(self.config.rope, self.q.dtype)
        if self.config.keys_are_values:
            q, k = self.config.rotated((self.q, self.k), turns)
            return self.replace(q=q, k=k, v=k)
        q, k, v = self.config.rotated((self.q, self.k), turns, (self.v,))
        return self.replace(q=q, k=k, v=v)


class KV(struct.PyTreeNode):
    """Stored keys and values [b h c d], in the format of the codec; `v` is None where keys are values, too."""

    k: Operand
    v: Operand | None

    @property
    def values(self) -> Operand:
        """Stored values."""
        return self.k if self.v is None else self.v


class CodecState(struct.PyTreeNode):
    """State of a codec for the heads of one layer."""

    factor: Float[Array, "b h d"] | None = None
    """Divisors of each channel of stored keys; 0 before any key is stored, None if keys are not quantized."""
    count: Int[Array, "b h"] | None = None
    """Number of live slots; None unless keys are rotated by their order in the cache."""


class Pairs(NamedTuple):
    """Decoded keys, rotated by their original positions, and values."""

    k: Float[Array, "b h m d"]
    v: Float[Array, "b h m e"]


def restored(
    rope: Rope | None, kv: KV, position: Int[Array, "b h m"], state: CodecState | None, dtype: DTypeLike
) -> Pairs:
    """Decode stored pairs at their original positions, by which the keys that are returned are rotated."""
    keys, values = (numbers(x, dtype) for x in (kv.k, kv.values))
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
    def all_positions(self) -> Int[Array, "b h n"]:
        """Positions in all of the layer's slots, of which the view may lack those in other memory."""
        return self.position

    @property
    def live(self) -> Bool[Array, "b h c"]:
        """Mask of the slots that hold a token."""
        return self.position >= 0

    def keys(self, new: LayerTokens) -> Float[Array, "b h c d"]:
        """Return decoded keys, rotated by their original positions; those of empty slots are arbitrary."""
        return self._pairs(new).k

    def values(self, new: LayerTokens) -> Float[Array, "b h c e"]:
        """Return decoded values; those of empty slots are arbitrary."""
        return self._pairs(new).v

    def _pairs(self, new: LayerTokens) -> Pairs:
        return restored(new.config.rope, self.kv, self.position, self.state.codec, new.k.dtype)


def nothing(new: LayerTokens) -> Float[Array, "b h t"]:
    """Return a zero for each new token and KV head, in the dtype of accumulated attention."""
    return jnp.zeros(new.k.shape[:3], wide(new.k.dtype))


__getattr__ = renamed(__name__, {"New": "LayerTokens", "Reading": "TokenBatch"})
