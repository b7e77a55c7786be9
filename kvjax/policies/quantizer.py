"""Codecs: the stored form of a slot, in its key's position (original or cache) and its number of bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.policies.key_scales import channel_factors
from kvjax.rope import Rope, cos_sin_table, rotate, turns_of
from kvjax.types import KV, CodecState, Heads, LayerConfig, New, View, check, setting
from kvjax.utils.suggest import choices
from pallas_kernels import operands
from pallas_kernels.attention import QUERY_BLOCK, wide
from pallas_kernels.decode_attention import Sinks
from pallas_kernels.operands import Operand, Turned
from pallas_kernels.prefill_scores import Joined


class Operands(NamedTuple):
    """Inputs of attention: queries, keys and values."""

    q: Float[Array, "b h g t d"]
    k: Operand | Joined
    v: Operand | Joined
    places: tuple[Int[Array, "b h t"], Int[Array, "b h c"]] | None = None
    """Positions of queries and keys for attention, if they differ from the original ones."""
    factor: Float[Array, "b h d"] | None = None
    """Channel factors that the queries have been multiplied by, if keys are quantized."""
    sinks: Sinks | None = None
    """Query of a single token for the sinks, if it differs from the query for the other slots."""

    @property
    def stored(self) -> tuple[Operand, Operand]:
        """Keys and values if all of them are in slots, as in a decode step."""
        assert not isinstance(self.k, Joined) and not isinstance(self.v, Joined)
        return self.k, self.v


@struct.dataclass
class Codec:
    """Conversion of key-value pairs between a layer's numbers and the stored form of a slot.

    Args:
        positions: `original`: a key keeps its position in the text (*Org Pos* in Keyformer, Table 3). `cache`: a key's
            position is its rank among the live slots (StreamingLLM, 3.2; *New Pos*).
        bits: bits of a stored number, 8 or 4; None for the model's own dtype.
        sliding: True for `cache` without stored ranks. All live tokens beyond `sinks` must be the newest ones, without
            a gap, so they are as far from the query as in the text. Only the sinks are nearer, and get a second query.
        sinks: first tokens that are never evicted, for `sliding`.
    """

    positions: str = setting("original")
    bits: int | None = setting(None)
    sliding: bool = setting(False)
    sinks: int = setting(0)

    def __post_init__(self) -> None:
        check(self.positions in ("original", "cache"), "positions", self.positions, "'original' or 'cache'")
        check(self.bits in (None, 8, 4), "bits", self.bits, "8, 4 or None")

    @property
    def ordered(self) -> bool:
        """True if each slot stores its rank among the live slots."""
        return self.positions == "cache" and not self.sliding

    def check_layers(self, layers: Sequence[LayerConfig]) -> None:
        """Refuse a model whose numbers cannot be packed, or whose keys cannot be rotated by their rank.

        Raises:
            ValueError: keys or values of a layer have an odd width and codes have 4 bits; or RoPE frequencies depend on
                the length of the text, and keys are rotated by cache positions.
        """
        by_length = {layer.rope.scaling for layer in layers if layer.rope is not None and layer.rope.by_length}
        if self.ordered and by_length:
            raise ValueError(
                f"positions='cache' rotates keys by their rank, but the frequencies of {min(by_length)} RoPE are those "
                "of the whole text; use positions='original', or a policy that keeps a window, such as streaming."
            )
        for index, layer in enumerate(layers if self.bits == 4 else ()):
            for name, width in (("keys", layer.key_width), ("values", layer.value_width)):
                if width % 2:
                    raise ValueError(
                        f"codec int4 packs numbers in pairs, but {name} of layer {index} have {width}; use int8."
                    )

    def init(self, shape: New) -> CodecState | None:
        """Return the codec's initial state of a layer; `shape` holds no tokens."""
        rows, heads, _, width = shape.k.shape
        if not self.ordered and self.bits is None:
            return None
        return CodecState(
            factor=None if self.bits is None else jnp.zeros((rows, heads, width), wide(shape.k.dtype)),
            count=jnp.zeros((rows, heads), jnp.int32) if self.ordered else None,
        )

    def slot(self, new: New) -> Int[Array, "b h t"] | None:
        """Return placeholders for the ranks of new tokens, set once they have a slot; None if ranks are not stored."""
        return jnp.zeros(new.k.shape[:3], jnp.int32) if self.ordered else None

    def begin(self, heads: Heads, new: New) -> CodecState | None:
        """Return the codec's state with the channel factors set by the first tokens, before these are stored."""
        state = heads.state.codec
        if state is None or state.factor is None:
            return state
        # The first text sets the factors; a single token is too little to estimate them, so they become 1.
        found = jnp.ones_like(state.factor)
        if new.k.shape[2] > 1:
            keys = new.raw_k if self.ordered else new.k
            found = channel_factors(keys, new.valid[:, None])
        unknown = (state.factor == 0) & new.valid.any(1)[:, None, None]
        return state.replace(factor=jnp.where(unknown, found, state.factor))

    def encode(self, new: New, state: CodecState | None) -> KV:
        """Encode the pairs of new tokens in the form that slots store."""
        pair = self.numbers(new, state)
        return KV(self._coded(pair.k), self._coded(pair.v))

    def numbers(self, new: New, state: CodecState | None) -> KV:
        """Return the pairs of new tokens as they are right before quantization, if there is any."""
        return KV(self._levelled(new.raw_k if self.ordered else new.k, state), new.v)

    def _coded(self, x: Any) -> Operand:
        return x if self.bits is None else operands.quantise(x, self.bits)

    def _levelled(self, keys: Float[Array, "b h t d"], state: CodecState | None) -> Float[Array, "b h t d"]:
        if self.bits is None:
            return keys
        assert state is not None and state.factor is not None
        # The factors are powers of two, so this is exact in every dtype.
        return keys * (1 / jnp.where(state.factor > 0, state.factor, 1.0))[:, :, None].astype(keys.dtype)

    def operands(
        self,
        config: LayerConfig,
        view: View,
        new: New,
        *,
        places: int | None = None,
        block: bool = False,
        room: Int[Array, "b h"] | None = None,
    ) -> Operands:
        """Return the inputs of attention over a layer's slots, for the queries of new tokens.

        Args:
            config: configuration of the layer.
            view: the layer's slots; the slots of a block being read are the last ones.
            new: tokens whose queries attend.
            places: upper bound of every head's slots, if `view` holds only some of a head's; None if it holds all.
            block: True if the new tokens are a block of text.
            room: slots that a head may use, if the new token has no slot yet; None if it has one.
        """
        tokens, capacity = new.k.shape[2], view.capacity * new.spread.slots
        if tokens == capacity and places is None:  # a whole text, of which nothing is stored yet: ranks equal positions
            return Operands(new.q, new.k, new.v)
        k, v, q = view.kv.k, view.kv.v, new.q
        if self.ordered:
            order = view.slots.codec
            place = self._places(view, new)
            q = rotate(config.rope, new.raw_q, place[:, :, None])
            if config.rope is not None:
                assert isinstance(k, jax.Array)  # quantized keys are stored rotated
                cos, sin = cos_sin_table(config.rope, places or capacity, k.dtype)
                k = Turned(k, order, cos, sin, config.rope.interleaved)
            return Operands(q, k, v, (place, order))
        seen, sinks = None, None
        if self.sliding and self.sinks:
            gap = self._gap(config.window, view, new, room)[..., None]
            if not block:
                sinks = self._nearer_query(config, new, gap, capacity + self.sinks + 1)
            elif config.slopes is not None:
                first = view.live & (view.position < self.sinks)
                here = jnp.broadcast_to(new.position[:, None], (*view.limit.shape, tokens))
                seen = here, jnp.where(first, view.position + gap, view.position)
            if config.rope is not None and block:
                k = self._nearer(config.rope, view, new, gap)
        if self.bits is None:
            return Operands(q, k, v, seen, sinks=sinks)
        factor = view.state.codec.factor
        if tokens > 1:
            old = capacity - tokens
            first = jax.tree.map(lambda leaf: leaf[:, :, :old], (k, v))
            k, v = Joined(first[0], self._levelled(new.k, view.state.codec)), Joined(first[1], new.v)
        if sinks is not None:
            sinks = dataclasses.replace(sinks, q=sinks.q * factor[:, :, None].astype(q.dtype))
        return Operands(q * factor[:, :, None, None].astype(q.dtype), k, v, seen, factor, sinks)

    def earlier(
        self,
        config: LayerConfig,
        view: View,
        given: Operands,
        new: New,
        raw_q: Float[Array, "b h g a d"],
        position: Int[Array, "b a"],
    ) -> tuple[Float[Array, "b h g a d"], Int[Array, "b h a"]]:
        """Rotate stored queries for attention over the keys of `given`; return them and their positions.

        Their tokens may have been evicted. Under cache positions, a query's position is the number of live tokens
        before it.
        """
        place = jnp.broadcast_to(position[:, None], (*view.limit.shape, position.shape[1]))
        if self.ordered and given.places is not None:
            before = view.live[:, :, None] & (view.position[:, :, None] < position[:, None, :, None])
            place = new.spread.over_slots(before.sum(-1))
        q = rotate(config.rope, raw_q, place[:, :, None], new.end)
        return q if given.factor is None else q * given.factor[:, :, None, None].astype(q.dtype), place

    def _places(self, view: View, new: New) -> Int[Array, "b h t"]:
        """Count the live slots with an earlier position, for each new token."""
        if new.k.shape[2] == 1:  # the newest token has the last rank
            return view.state.codec.count[..., None] - 1
        if new.k.shape[2] <= QUERY_BLOCK:
            live = view.position[:, :, None, :]
            return ((live >= 0) & (live < new.position[:, None, :, None])).sum(-1)
        # Comparing a whole prompt with all of its slots would take n x n memory.
        live = jnp.sort(jnp.where(view.live, view.position, jnp.iinfo(jnp.int32).max), axis=-1)
        return jnp.vectorize(jnp.searchsorted, signature="(c),(t)->(t)")(live, new.position[:, None])

    def settle(self, view: View, new: New) -> View:
        """Update the ranks of a layer's slots after a block is appended or tokens are evicted."""
        if self.ordered:
            live = new.spread.all_slots(jnp.where(view.live, view.position, jnp.iinfo(jnp.int32).max))
            order = new.spread.own_slots(jnp.argsort(jnp.argsort(live, axis=-1), axis=-1).astype(jnp.int32))
            known = view.state.codec
            count = new.spread.over_slots(view.live.sum(-1, dtype=jnp.int32))
            # Rows without new tokens stay unchanged, including their empty slots.
            reads = new.valid.any(1)[:, None]
            order = jnp.where(reads[..., None], order, view.slots.codec)
            return _with(view, order, known.replace(count=jnp.where(reads, count, known.count)))
        return view

    def exchanged(self, view: View, new: New, place: Any, left: Int[Array, "b h"]) -> View:
        """Update the ranks of a layer's slots after a new token has taken a slot in each head.

        Args:
            view: the slots, including the new token; `state` is the state before it.
            new: one token per row.
            place: rank of the evicted token, from `slots`.
            left: its position; -1 if no token was evicted.
        """
        return _with(view, self.requeued(view, new, place, left), self.counted(view.state.codec, new, left))

    def requeued(self, view: View, new: New, place: Int[Array, "b h"], left: Int[Array, "b h"]) -> Int[Array, "b h c"]:
        """Return the ranks without the evicted token: later ones move up, the new token is last; slot by slot."""
        gone = jnp.where(left >= 0, place, jnp.iinfo(jnp.int32).max)[..., None]
        order = view.slots.codec - (view.slots.codec > gone)
        last = view.state.codec.count - (left >= 0)
        arrived = (view.position == new.position[:, None, :1]) & view.live
        moved = jnp.where(arrived, last[..., None], order)
        return jnp.where(new.valid[:, None, :1], moved, view.slots.codec)

    def counted(self, state: CodecState, new: New, left: Int[Array, "b h"], *, arrives: bool = True) -> CodecState:
        """Count the live slots after an eviction; the new token counts if it `arrives`."""
        assert state.count is not None
        arrived = new.valid[:, :1] & arrives
        return state.replace(count=state.count + arrived - (left >= 0))

    def _nearer_query(self, config: LayerConfig, new: New, gap: Int[Array, "b 1 1"], places: int) -> Sinks | None:
        """Return a token's query for the sinks, rotated as if they were right before the window.

        The query's rank among the live tokens is below `places`.
        """
        if config.rope is None and config.slopes is None:
            return None
        near = new.q
        if config.rope is not None:  # rotate the query back, not the sinks forward: stored keys do not change
            turns = turns_of(config.rope, new.position - gap[:, :, 0], new.raw_q.dtype, new.end, places)
            (near,) = config.rotated((new.raw_q,), turns, new.kernels)
        return Sinks(near[:, :, :, 0], self.sinks, None if config.slopes is None else gap[:, 0, 0])

    def _nearer(self, rope: Rope, view: View, new: New, gap: Int[Array, "b 1 1"]) -> Operand:
        """Return the keys with the sinks moved right before the window, for all queries of a block."""
        # Sinks are in the first slots (`best_first`). If they have just been read they may not be, but the gap is 0.
        count = min(self.sinks, view.capacity)
        first = jax.tree.map(lambda leaf: leaf[:, :, :count], view.kv.k)
        turned = dataclasses.replace(rope, attention_factor=1.0)  # the keys are already multiplied by it
        held = view.position[:, :, :count] < self.sinks
        state = view.state.codec
        keys = operands.values(first, new.k.dtype)
        if self.bits is not None:
            keys = operands.values(first, state.factor.dtype) * state.factor[:, :, None]
        near = self._coded(self._levelled(rotate(turned, keys, gap, new.end), state))

        def write(leaf: Array, old: Array, value: Array) -> Array:
            kept = held.reshape(*held.shape, *(1,) * (leaf.ndim - 3))
            return leaf.at[:, :, :count].set(jnp.where(kept, value, old))

        return jax.tree.map(write, view.kv.k, first, near)

    def _gap(self, window: int | None, view: View, new: New, room: Int[Array, "b h"] | None) -> Int[Array, "b 1"]:
        """Count the evicted tokens between sinks and window, which are the same in all heads."""
        position = view.position[:, :1]
        live = new.spread.over_slots((position >= self.sinks).sum(-1))
        if room is not None:  # a full head evicts a sink outside the window, or else the window's oldest token
            full = (position >= 0).sum(-1) >= room[:, :1]
            if window is not None:
                full &= ~((position >= 0) & (position <= new.position[:, None] - window)).any(-1)
            live += (new.position >= self.sinks) & ~(full & (live > 0))
        return jnp.maximum(new.read[:, None] - self.sinks, 0) - live


def _with(view: View, order: Int[Array, "b h c"], state: CodecState) -> View:
    return view.replace(slots=view.slots.replace(codec=order), state=view.state.replace(codec=state))


def plain(positions: str = "original") -> Codec:
    r"""Keys and values in the model's own dtype.

    .. math:: \hat k_i = k_i, \quad \hat v_i = v_i

    From: the reference.

    When: if 8-bit codes are refused, as with `positions="cache"` under most scores; otherwise use `int8`.
    """
    return Codec(positions)


def int8(positions: str = "original") -> Codec:
    r"""8-bit codes with one scale for each key and each value.

    .. math:: \hat x_i = s \, \mathrm{round}(x_i / s), \quad s = \max_i |x_i| / 127

    Each key channel is first divided by a factor, and queries are multiplied by it. The factor is a power of two,
    estimated from the prompt. Attention reads the codes directly.

    From: symmetric rounding, not from a paper.

    When: before using fewer slots. It loses nothing measurable, at 28% of the bytes of float32 slots and about 55% of
    16-bit ones (SmolLM2; `h2o` with half of the slots has a perplexity of 13.25, and of 13.22 in floats).
    """
    return Codec(positions, 8)


def int4(positions: str = "original") -> Codec:
    r"""4-bit codes, two to a byte, with one scale for each key and each value.

    .. math:: \hat x_i = s \, \mathrm{round}(x_i / s), \quad s = \max_i |x_i| / 7

    All else is as in `int8`.

    From: symmetric rounding, not from a paper.

    When: rarely. It loses more than fewer slots would: a perplexity of 16.7 in 8% of the full cache's bytes, where
    8-bit codes with a quarter of the slots reach 14.9 in 7% (SmolLM2 on WikiText-2).
    """
    return Codec(positions, 4)


CODECS: dict[str, Callable[[str], Codec]] = {"plain": plain, "int8": int8, "int4": int4}


def codec(name: str, positions: str = "original") -> Codec:
    """Return a codec by name.

    Args:
        name: a key of `CODECS`.
        positions: `original` or `cache`.

    Raises:
        ValueError: there is no such codec.
    """
    if name not in CODECS:
        raise ValueError(f"there is no codec {name!r}; {choices(name, CODECS)}")
    return CODECS[name](positions)
