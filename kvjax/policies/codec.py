"""Codec: the storage format of a layer's keys and values, and the positions by which keys are rotated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.base import Part
from kvjax.policies.quantizer import CODECS, LEAST_TOKENS, Int4, Int8, Plain, Quantizer, SymmetricQuantizer
from kvjax.rope import Rope, cos_sin_table, rotate, turns_of
from kvjax.types import KV, CodecState, Heads, LayerConfig, LayerTokens, View, check, setting
from kvjax.utils.fields import one_of
from pallas_kernels import operands
from pallas_kernels.attention import QUERY_BLOCK
from pallas_kernels.decode_attention import Places, Sinks
from pallas_kernels.operands import Encoded, LazyRope, Operand, Quantised, SplitKV

AnyHeads = TypeVar("AnyHeads", bound=Heads)
AnyView = TypeVar("AnyView", bound=View)


class Operands(NamedTuple):
    """Inputs of attention: queries, keys and values."""

    q: Float[Array, "b h g t d"]
    k: Operand | SplitKV
    v: Operand | SplitKV
    places: tuple[Array, Array] | None = None
    """Positions of queries and keys for attention, if they differ from the original ones; or `with_bias`."""
    factor: Float[Array, "b h d"] | None = None
    """Channel factors that the queries have been multiplied by, if keys are quantized."""
    sinks: Sinks | None = None
    """Query of a single token for the sinks, if it differs from the query for the other slots."""

    @property
    def token_places(self) -> Places | None:
        """`places` of a single query, without its axis of tokens."""
        return None if self.places is None else (self.places[0][..., 0], self.places[1])

    @property
    def stored(self) -> tuple[Operand, Operand]:
        """Keys and values if all of them are in slots, as in a decode step."""
        assert not isinstance(self.k, SplitKV) and not isinstance(self.v, SplitKV)
        return self.k, self.v

    @property
    def stored_once(self) -> tuple[Operand, Operand | None]:
        """Keys and values as `stored`, with None for values that are the keys."""
        k, v = self.stored
        return k, None if v is k else v

    def with_bias(self, new: LayerTokens, bias: Float[Array, "b h c"] | None) -> tuple[LayerTokens, Operands]:
        """Return tokens of a layer that adds a bias per slot to the logits of a model without ALiBi, and its inputs.

        A bias per slot is ALiBi whose slopes are 1 and whose places are the biases.
        """
        if bias is None:
            return new, self
        config = new.config
        assert config.slopes is None and self.places is None
        slopes = ((1.0,) * config.groups,) * (config.kv_heads * config.spread.heads)
        rows, heads, _, tokens, _ = self.q.shape
        queries = jnp.zeros((rows, heads, tokens), bias.dtype)
        return new.replace(config=dataclasses.replace(config, slopes=slopes)), self._replace(places=(queries, bias))


class Codec(Part, interface=True, init=False):
    """Conversion of key-value pairs between floating-point arrays and the stored form of slots.

    Args:
        positions: `original`: a key keeps its position in the text (*Org Pos* in Keyformer, Table 3). `cache`: a key's
            position is its rank among the live slots (StreamingLLM, 3.2; *New Pos*).
        quantizer: storage format of keys and values.
        sliding: True for `cache` without stored ranks. All live tokens beyond `sinks` must be the newest ones, without
            a gap, so their distance to the query is the one in the text. Only the sinks are nearer; a second rotation
            of the query attends to them.
        sinks: number of first tokens, which are never evicted, for `sliding`.
        bits: 8 and 4 are short for `quantizer=Int8()` and `Int4()`.
    """

    positions: str = setting("original", one_of("original", "cache"))
    quantizer: Quantizer = setting(Plain())
    sliding: bool = setting(False)
    sinks: int = setting(0)

    def __init__(
        self,
        positions: str = "original",
        bits: int | None = None,
        sliding: bool = False,
        sinks: int = 0,
        *,
        quantizer: Quantizer | None = None,
    ) -> None:
        if quantizer is None:
            of_bits: dict[int | None, type[Quantizer]] = {None: Plain, 8: Int8, 4: Int4}
            check(bits in of_bits, "bits", bits, "8, 4 or None")
            quantizer = of_bits[bits]()
        elif bits is not None:
            raise ValueError(f"bits={bits!r} is not None beside quantizer={quantizer}.")
        if not isinstance(quantizer, Quantizer):
            raise TypeError(f"quantizer={quantizer!r} is no instance of Quantizer; kvjax.policy takes names.")
        if jax.tree.leaves(quantizer):
            raise TypeError(f"{quantizer} has settings that are traced; declare them with kvjax.types.setting.")
        values = dict(positions=positions, quantizer=quantizer, sliding=sliding, sinks=sinks)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def bits(self) -> int | None:
        """Bits of an integer code; None if the quantizer stores no integers."""
        return self.quantizer.bits if isinstance(self.quantizer, SymmetricQuantizer) else None

    @property
    def quantized(self) -> bool:
        """True if slots do not store keys and values in the model's own dtype."""
        return type(self.quantizer).encode is not Plain.encode

    @property
    def name(self) -> str:
        """Registered name of the quantizer, or else its class."""
        kind = type(self.quantizer)
        return next((name for name, registered in CODECS.items() if registered is kind), kind.__name__)

    @property
    def encoded_by_kernels(self) -> bool:
        """True if the kernel that replaces a slot can also encode the new pair."""
        return not self.quantized or type(self.quantizer).encode is SymmetricQuantizer.encode

    @property
    def ordered(self) -> bool:
        """True if each slot stores its rank among the live slots."""
        return self.positions == "cache" and not self.sliding

    def check_layers(self, layers: Sequence[LayerConfig]) -> None:
        """Refuse a model whose RoPE frequencies depend on the length of the text, if keys are rotated by their rank."""
        by_length = {layer.rope.scaling for layer in layers if layer.rope is not None and layer.rope.by_length}
        if self.ordered and by_length:
            raise ValueError(
                f"positions='cache' rotates keys by their rank, but the frequencies of {min(by_length)} RoPE are those "
                "of the whole text; use positions='original', or a policy that keeps a window, such as streaming."
            )
        if self.ordered and any(layer.keys_are_values for layer in layers):
            raise ValueError(
                "positions='cache' stores keys before their rotation, but latent attention stores rotated ones as its "
                "values, too; use positions='original', or a policy that keeps a window, such as streaming."
            )

    def init_head(self, shape: LayerTokens) -> CodecState | None:
        scales = jax.eval_shape(self.quantizer.init_scales, shape.k, shape.valid[:, None])
        if shape.config.keys_are_values:
            scales = None  # which would have to multiply outputs, too
        if not self.ordered and scales is None:
            return None
        return CodecState(
            factor=None if scales is None else jnp.zeros(scales.shape, scales.dtype),
            count=jnp.zeros(shape.k.shape[:2], jnp.int32) if self.ordered else None,
        )

    def init_slot(self, new: LayerTokens, state: Any) -> Int[Array, "b h t"] | None:
        """Return placeholders for the ranks of new tokens, set once they have a slot; None if ranks are not stored."""
        return jnp.zeros(new.k.shape[:3], jnp.int32) if self.ordered else None

    def begin(self, heads: AnyHeads, new: LayerTokens) -> AnyHeads:
        """Return heads with channel factors in the codec's state, which the first text sets before it is stored.

        They are 1 after a text of fewer than `LEAST_TOKENS` tokens.
        """
        state = heads.state.codec
        if state is None or state.factor is None:
            return heads
        factor: Any = jnp.ones_like(state.factor)
        if new.k.shape[2] >= LEAST_TOKENS:
            scales: Any = self.quantizer.init_scales(new.raw_k if self.ordered else new.k, new.valid[:, None])
            factor = jnp.where((new.valid.sum(1) >= LEAST_TOKENS)[:, None, None], scales, factor)
        unknown = (state.factor == 0) & new.valid.any(1)[:, None, None]
        updated = state.replace(factor=jnp.where(unknown, factor, state.factor))
        return heads.replace(state=heads.state.replace(codec=updated))

    def encode(self, new: LayerTokens, state: CodecState | None) -> KV:
        """Encode the pairs of new tokens in the form that slots store."""
        pair = self.numbers(new, state)
        return KV(self.stored(pair.k), None if pair.v is None else self.stored(pair.v))

    def numbers(self, new: LayerTokens, state: CodecState | None) -> KV:
        """Return the pairs of new tokens as the quantizer receives them."""
        keys = self._levelled(new.raw_k if self.ordered else new.k, state)
        return KV(keys, None if new.config.keys_are_values else new.v)

    def stored(self, x: Any) -> Operand:
        """Encode keys or values in the form that slots store."""
        if not self.quantized:
            return x
        encoded = self.quantizer.encode(x)
        return encoded if isinstance(encoded, Quantised) else Encoded(encoded, self.quantizer)

    def _levelled(self, keys: Float[Array, "b h t d"], state: CodecState | None) -> Float[Array, "b h t d"]:
        if state is None or state.factor is None:
            return keys
        # The factors are powers of two, so this is exact in every dtype.
        return keys * (1 / jnp.where(state.factor > 0, state.factor, 1.0))[:, :, None].astype(keys.dtype)

    def operands(
        self,
        view: View,
        new: LayerTokens,
        *,
        places: int | None = None,
        block: bool = False,
        room: Int[Array, "b h"] | None = None,
    ) -> Operands:
        """Return the inputs of attention over a layer's slots, for the queries of new tokens.

        Args:
            places: upper bound of every head's slots, if `view` holds only some of a head's; None if it holds all.
            block: True if the new tokens are a block of text.
            room: slots that a head may use, if the new token has no slot yet; None if it has one.
        """
        config, tokens, capacity = new.config, new.k.shape[2], view.capacity * new.spread.slots
        if block and tokens == capacity:  # a whole text, of which nothing is stored yet: ranks equal positions
            return Operands(new.q, new.k, new.v)
        k, v, q = view.kv.k, view.kv.values, new.q
        if self.ordered:
            order = view.slots.codec
            place = self._places(view, new)
            q = rotate(config.rope, new.raw_q, place[:, :, None])
            if config.rope is not None:
                assert isinstance(k, jax.Array)  # quantized keys are stored rotated
                cos, sin = cos_sin_table(config.rope, places or capacity, k.dtype)
                k = LazyRope(k, order, cos, sin, config.rope.interleaved)
            return Operands(q, k, v, (place, order))
        place_pair, sinks = None, None
        if self.sliding and self.sinks:
            gap = self._gap(config.window, view, new, room)[..., None]
            if not block:
                sinks = self._nearer_query(new, gap, capacity + self.sinks + 1)
            elif config.slopes is not None:
                first = view.live & (view.position < self.sinks)
                query_place = jnp.broadcast_to(new.position[:, None], (*view.limit.shape, tokens))
                place_pair = query_place, jnp.where(first, view.position + gap, view.position)
            if config.rope is not None and block:
                k = self._nearer(config.rope, view, new, gap)
        if not self.quantized:
            return Operands(q, k, v, place_pair, sinks=sinks)
        if tokens > 1:
            old = capacity - tokens
            first = jax.tree.map(lambda leaf: leaf[:, :, :old], (k, v))
            k, v = SplitKV(first[0], self._levelled(new.k, view.state.codec)), SplitKV(first[1], new.v)
        factor = None if view.state.codec is None else view.state.codec.factor
        if factor is None:
            return Operands(q, k, v, place_pair, sinks=sinks)
        if sinks is not None:
            sinks = dataclasses.replace(sinks, q=sinks.q * factor[:, :, None].astype(q.dtype))
        return Operands(q * factor[:, :, None, None].astype(q.dtype), k, v, place_pair, factor, sinks)

    def earlier(
        self,
        view: View,
        operands: Operands,
        new: LayerTokens,
        raw_q: Float[Array, "b h g a d"],
        position: Int[Array, "b a"],
    ) -> tuple[Float[Array, "b h g a d"], Int[Array, "b h a"]]:
        """Rotate stored queries for attention over the keys of `operands`; return them and their positions.

        Their tokens may have been evicted. Under cache positions, a query's position is the number of live tokens
        before it.
        """
        place = jnp.broadcast_to(position[:, None], (*view.limit.shape, position.shape[1]))
        if self.ordered and operands.places is not None:
            before = view.live[:, :, None] & (view.position[:, :, None] < position[:, None, :, None])
            place = new.spread.over_slots(before.sum(-1))
        q = rotate(new.config.rope, raw_q, place[:, :, None], new.rope_length)
        return q if operands.factor is None else q * operands.factor[:, :, None, None].astype(q.dtype), place

    def _places(self, view: View, new: LayerTokens) -> Int[Array, "b h t"]:
        """Count the live slots with an earlier position, for each new token."""
        if new.k.shape[2] == 1:  # the newest token has the last rank
            return view.state.codec.count[..., None] - 1
        if new.k.shape[2] <= QUERY_BLOCK:
            live = view.position[:, :, None, :]
            return ((live >= 0) & (live < new.position[:, None, :, None])).sum(-1)
        # Comparing a whole prompt with all of its slots would take n x n memory.
        live = jnp.sort(jnp.where(view.live, view.position, jnp.iinfo(jnp.int32).max), axis=-1)
        return jnp.vectorize(jnp.searchsorted, signature="(c),(t)->(t)")(live, new.position[:, None])

    def settle(self, view: AnyView, new: LayerTokens) -> AnyView:
        """Update the ranks of a layer's slots after a block is appended or tokens are evicted."""
        if self.ordered:
            live = new.spread.all_slots(jnp.where(view.live, view.position, jnp.iinfo(jnp.int32).max))
            order = new.spread.own_slots(jnp.argsort(jnp.argsort(live, axis=-1), axis=-1).astype(jnp.int32))
            state = view.state.codec
            count = new.spread.over_slots(view.live.sum(-1, dtype=jnp.int32))
            # Rows without new tokens stay unchanged, including their empty slots.
            reads = new.valid.any(1)[:, None]
            order = jnp.where(reads[..., None], order, view.slots.codec)
            return _with(view, order, state.replace(count=jnp.where(reads, count, state.count)))
        return view

    def rerank(self, view: AnyView, new: LayerTokens, place: Any, evicted_position: Int[Array, "b h"]) -> AnyView:
        """Update the ranks of a layer's slots, whose state is that before a new token took a slot in each head.

        The evicted token had rank `place` and position `evicted_position`, which is -1 if no token was evicted.
        """
        state = self.count_after(view.state.codec, new, evicted_position)
        return _with(view, self.order_after(view, new, place, evicted_position), state)

    def order_after(
        self, view: View, new: LayerTokens, place: Int[Array, "b h"], evicted_position: Int[Array, "b h"]
    ) -> Int[Array, "b h c"]:
        """Return the ranks without the evicted token: later ones move up, the new token is last; slot by slot."""
        evicted_rank = jnp.where(evicted_position >= 0, place, jnp.iinfo(jnp.int32).max)[..., None]
        order = view.slots.codec - (view.slots.codec > evicted_rank)
        last = view.state.codec.count - (evicted_position >= 0)
        is_new = (view.position == new.position[:, None, :1]) & view.live
        order = jnp.where(is_new, last[..., None], order)
        return jnp.where(new.valid[:, None, :1], order, view.slots.codec)

    def count_after(
        self, state: CodecState, new: LayerTokens, evicted_position: Int[Array, "b h"], *, arrives: bool = True
    ) -> CodecState:
        """Count the live slots after an eviction; the new token counts if it `arrives`."""
        assert state.count is not None
        is_new = new.valid[:, :1] & arrives
        return state.replace(count=state.count + is_new - (evicted_position >= 0))

    def _nearer_query(self, new: LayerTokens, gap: Int[Array, "b 1 1"], places: int) -> Sinks | None:
        """Return a token's query for the sinks, rotated as if they were right before the window.

        The query's rank among the live tokens is below `places`.
        """
        config, near = new.config, new.q
        if config.rope is None and config.slopes is None:
            return None
        if config.rope is not None:  # rotate the query back, not the sinks forward: stored keys do not change
            turns = turns_of(config.rope, new.position - gap[:, :, 0], new.raw_q.dtype, new.rope_length, places)
            (near,) = config.rotated((new.raw_q,), turns)
        return Sinks(near[:, :, :, 0], self.sinks, None if config.slopes is None else gap[:, 0, 0])

    def _nearer(self, rope: Rope, view: View, new: LayerTokens, gap: Int[Array, "b 1 1"]) -> Operand:
        """Return the keys with the sinks moved right before the window, for all queries of a block."""
        # Sinks are in the first slots (`best_first`). If they have just been read they may not be, but the gap is 0.
        count = min(self.sinks, view.capacity)
        first = jax.tree.map(lambda leaf: leaf[:, :, :count], view.kv.k)
        unscaled = dataclasses.replace(rope, attention_factor=1.0)  # the keys are already multiplied by it
        is_sink = view.position[:, :, :count] < self.sinks
        state = view.state.codec
        if state is None or state.factor is None:
            keys = operands.values(first, new.k.dtype)
        else:
            keys = operands.values(first, state.factor.dtype) * state.factor[:, :, None]
        near = self.stored(self._levelled(rotate(unscaled, keys, gap, new.rope_length), state))

        def write(leaf: Array, old: Array, value: Array) -> Array:
            mask = is_sink.reshape(*is_sink.shape, *(1,) * (leaf.ndim - 3))
            return leaf.at[:, :, :count].set(jnp.where(mask, value, old))

        return jax.tree.map(write, view.kv.k, first, near)

    def _gap(
        self, window: int | None, view: View, new: LayerTokens, room: Int[Array, "b h"] | None
    ) -> Int[Array, "b 1"]:
        """Count the evicted tokens between sinks and window, which are the same in all heads."""
        position = view.position[:, :1]
        live = new.spread.over_slots((position >= self.sinks).sum(-1))
        if room is not None:  # a full head evicts a sink outside the window, or else the window's oldest token
            full = (position >= 0).sum(-1) >= room[:, :1]
            if window is not None:
                full &= ~((position >= 0) & (position <= new.position[:, None] - window)).any(-1)
            live += (new.position >= self.sinks) & ~(full & (live > 0))
        return jnp.maximum(new.read[:, None] - self.sinks, 0) - live


def _with(view: AnyView, order: Int[Array, "b h c"], state: CodecState) -> AnyView:
    return view.replace(slots=view.slots.replace(codec=order), state=view.state.replace(codec=state))
