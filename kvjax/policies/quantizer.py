"""How a slot lies in memory: where its key stands in the text or in the cache, and in how many bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.policies.key_scales import channel_factors
from kvjax.rope import Rope, rotate, table, turns_of
from kvjax.types import KV, CodecState, Heads, LayerConfig, New, View, check, setting
from kvjax.utils.suggest import choices
from pallas_kernels import operands
from pallas_kernels.attention import QUERY_BLOCK, wide
from pallas_kernels.decode_attention import Sinks
from pallas_kernels.operands import Operand, Turned
from pallas_kernels.prefill_scores import Joined


class Operands(NamedTuple):
    """Queries, keys and values as attention takes them."""

    q: Float[Array, "b h g t d"]
    k: Operand | Joined
    v: Operand | Joined
    places: tuple[Int[Array, "b h t"], Int[Array, "b h c"]] | None = None
    """Where the model sees queries and keys, where that is not their position."""
    factor: Float[Array, "b h d"] | None = None
    """By which the channels of queries have been multiplied, where keys are codes."""
    sinks: Sinks | None = None
    """The query of a single token as the first tokens see it, where that is another one."""

    @property
    def stored(self) -> tuple[Operand, Operand]:
        """Keys and values, all of which lie in slots, as they do for a written token."""
        assert not isinstance(self.k, Joined) and not isinstance(self.v, Joined)
        return self.k, self.v


@struct.dataclass
class Codec:
    """Translates between pairs as a layer computes them and as slots hold them.

    Args:
        positions: `original`: keys stand where they stood in the text (*Org Pos* in Keyformer, Table 3). `cache`: the
            model sees a key's place among the live slots as its position (StreamingLLM, 3.2; *New Pos*).
        bits: of a stored number, 8 or 4; None for the model's own dtype.
        sliding: the same as `cache` where all that is live beyond `sinks` is the newest tokens without a gap: these are
            as far from the query as in the text, and only the sinks see it from nearer, by a second query.
        sinks: first tokens that never leave, for `sliding`.
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
        """Whether slots have to know their order."""
        return self.positions == "cache" and not self.sliding

    def check_layers(self, layers: Sequence[LayerConfig]) -> None:
        """Refuse a model whose numbers cannot be packed, or whose keys cannot be rotated by their rank.

        Raises:
            ValueError: keys or values of a layer have an odd width and codes have 4 bits; or frequencies of RoPE depend
                on the length of the text, and positions are those in the cache.
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
        """What is known of a layer before anything is read; `shape` holds no tokens."""
        rows, heads, _, width = shape.k.shape
        if not self.ordered and self.bits is None:
            return None
        return CodecState(
            factor=None if self.bits is None else jnp.zeros((rows, heads, width), wide(shape.k.dtype)),
            count=jnp.zeros((rows, heads), jnp.int32) if self.ordered else None,
        )

    def slot(self, new: New) -> Int[Array, "b h t"] | None:
        """Of new tokens their place in the queue, where that matters; it is known once they have a slot."""
        return jnp.zeros(new.k.shape[:3], jnp.int32) if self.ordered else None

    def begin(self, heads: Heads, new: New) -> CodecState | None:
        """What is known once new tokens are, before they are stored."""
        state = heads.state.codec
        if state is None or state.factor is None:
            return state
        # The first text decides; one token alone says nothing of a channel.
        found = jnp.ones_like(state.factor)
        if new.k.shape[2] > 1:
            keys = new.raw_k if self.ordered else new.k
            found = channel_factors(keys, new.valid[:, None])
        unknown = (state.factor == 0) & new.valid.any(1)[:, None, None]
        return state.replace(factor=jnp.where(unknown, found, state.factor))

    def encode(self, new: New, state: CodecState | None) -> KV:
        """Pairs of new tokens as slots hold them."""
        pair = self.numbers(new, state)
        return KV(self._coded(pair.k), self._coded(pair.v))

    def numbers(self, new: New, state: CodecState | None) -> KV:
        """Pairs of new tokens as they are before they become codes, where they do."""
        return KV(self._levelled(new.raw_k if self.ordered else new.k, state), new.v)

    def _coded(self, x: Any) -> Operand:
        return x if self.bits is None else operands.quantise(x, self.bits)

    def _levelled(self, keys: Float[Array, "b h t d"], state: CodecState | None) -> Float[Array, "b h t d"]:
        if self.bits is None:
            return keys
        assert state is not None and state.factor is not None
        # Powers of two, which change no digit of any dtype.
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
        """Queries, keys and values for attention over slots that hold the new tokens already.

        Args:
            config: of the layer.
            view: its slots; those of a block that is being read are the last ones.
            new: the tokens whose queries these are.
            places: more than any head has slots, where `view` is some of a head's slots; None for all of them.
            block: whether they are a block of text.
            room: slots that a head may use, where the new token has yet to take one; None where it has.
        """
        tokens, capacity = new.k.shape[2], view.capacity * new.spread.slots
        if tokens == capacity and places is None:  # a whole text: places are positions, and nothing has been stored yet
            return Operands(new.q, new.k, new.v)
        k, v, q = view.kv.k, view.kv.v, new.q
        if self.ordered:
            order = view.slots.codec
            place = self._places(view, new)
            q = rotate(config.rope, new.raw_q, place[:, :, None])
            if config.rope is not None:
                assert isinstance(k, jax.Array)  # codes are of keys as they are seen
                cos, sin = table(config.rope, places or capacity, k.dtype)
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
        """Unrotated queries of tokens that may have left, as attention takes them beside `given`, and their places.

        Under cache positions a query stands behind the live tokens before it.
        """
        place = jnp.broadcast_to(position[:, None], (*view.limit.shape, position.shape[1]))
        if self.ordered and given.places is not None:
            before = view.live[:, :, None] & (view.position[:, :, None] < position[:, None, :, None])
            place = new.spread.over_slots(before.sum(-1))
        q = rotate(config.rope, raw_q, place[:, :, None], new.end)
        return q if given.factor is None else q * given.factor[:, :, None, None].astype(q.dtype), place

    def _places(self, view: View, new: New) -> Int[Array, "b h t"]:
        """How many live slots hold an earlier position, for each new token."""
        if new.k.shape[2] == 1:  # the newest is the last
            return view.state.codec.count[..., None] - 1
        if new.k.shape[2] <= QUERY_BLOCK:
            live = view.position[:, :, None, :]
            return ((live >= 0) & (live < new.position[:, None, :, None])).sum(-1)
        # A whole prompt against all of its slots would be n x n.
        live = jnp.sort(jnp.where(view.live, view.position, jnp.iinfo(jnp.int32).max), axis=-1)
        return jnp.vectorize(jnp.searchsorted, signature="(c),(t)->(t)")(live, new.position[:, None])

    def settle(self, view: View, new: New) -> View:
        """A layer's slots as attention may read them, after a block has been appended or some slots have left."""
        if self.ordered:
            live = new.spread.all_slots(jnp.where(view.live, view.position, jnp.iinfo(jnp.int32).max))
            order = new.spread.own_slots(jnp.argsort(jnp.argsort(live, axis=-1), axis=-1).astype(jnp.int32))
            known = view.state.codec
            count = new.spread.over_slots(view.live.sum(-1, dtype=jnp.int32))
            # Rows that read nothing do not change, not even where their slots are empty.
            reads = new.valid.any(1)[:, None]
            order = jnp.where(reads[..., None], order, view.slots.codec)
            return _with(view, order, known.replace(count=jnp.where(reads, count, known.count)))
        return view

    def exchanged(self, view: View, new: New, place: Any, left: Int[Array, "b h"]) -> View:
        """A layer's slots in their order, after a token has taken a slot of each head.

        Args:
            view: the slots, the new token in them; `state` is that of before.
            new: one token per row.
            place: of the token that left, from `slots`.
            left: its position; -1 where none did.
        """
        return _with(view, self.requeued(view, new, place, left), self.counted(view.state.codec, new, left))

    def requeued(self, view: View, new: New, place: Int[Array, "b h"], left: Int[Array, "b h"]) -> Int[Array, "b h c"]:
        """The queue without the one that left: those behind it move up, the new one is last. Slotwise."""
        gone = jnp.where(left >= 0, place, jnp.iinfo(jnp.int32).max)[..., None]
        order = view.slots.codec - (view.slots.codec > gone)
        last = view.state.codec.count - (left >= 0)
        arrived = (view.position == new.position[:, None, :1]) & view.live
        moved = jnp.where(arrived, last[..., None], order)
        return jnp.where(new.valid[:, None, :1], moved, view.slots.codec)

    def counted(self, state: CodecState, new: New, left: Int[Array, "b h"], *, arrives: bool = True) -> CodecState:
        """With the live slots counted after a token has left, and another one taken its slot if it `arrives`."""
        assert state.count is not None
        arrived = new.valid[:, :1] & arrives
        return state.replace(count=state.count + arrived - (left >= 0))

    def _nearer_query(self, config: LayerConfig, new: New, gap: Int[Array, "b 1 1"], places: int) -> Sinks | None:
        """A token's query as it stands to the sinks, which the model would see right before the window.

        Its place among what is live is below `places`.
        """
        if config.rope is None and config.slopes is None:
            return None
        near = new.q
        if config.rope is not None:  # turned back by as much as they would be turned on, so that they stay as they are
            turns = turns_of(config.rope, new.position - gap[:, :, 0], new.raw_q.dtype, new.end, places)
            (near,) = config.rotated((new.raw_q,), turns, new.kernels)
        return Sinks(near[:, :, :, 0], self.sinks, None if config.slopes is None else gap[:, 0, 0])

    def _nearer(self, rope: Rope, view: View, new: New, gap: Int[Array, "b 1 1"]) -> Operand:
        """Keys whose sinks stand right before the window, as all queries of a block see them."""
        # Sinks lie first (`best_first`); where they have just been read they may not, but there is no gap.
        count = min(self.sinks, view.capacity)
        first = jax.tree.map(lambda leaf: leaf[:, :, :count], view.kv.k)
        turned = dataclasses.replace(rope, attention_factor=1.0)  # they have been multiplied
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
        """How many tokens between sinks and window are not live: the same ones in all heads."""
        position = view.position[:, :1]
        live = new.spread.over_slots((position >= self.sinks).sum(-1))
        if room is not None:  # the window's oldest token leaves where no slot is empty, unless a sink is out of sight
            full = (position >= 0).sum(-1) >= room[:, :1]
            if window is not None:
                full &= ~((position >= 0) & (position <= new.position[:, None] - window)).any(-1)
            live += (new.position >= self.sinks) & ~(full & (live > 0))
        return jnp.maximum(new.read[:, None] - self.sinks, 0) - live


def _with(view: View, order: Int[Array, "b h c"], state: CodecState) -> View:
    return view.replace(slots=view.slots.replace(codec=order), state=view.state.replace(codec=state))


def plain(positions: str = "original") -> Codec:
    r"""Numbers in the model's own dtype.

    .. math:: \hat k_i = k_i, \quad \hat v_i = v_i

    From: the reference.

    When: where codes of 8 bits are refused, as with `positions="cache"` under most scores; otherwise take these.
    """
    return Codec(positions)


def int8(positions: str = "original") -> Codec:
    r"""Codes of 8 bits, with one scale for each key and each value.

    .. math:: \hat x_i = s \, \mathrm{round}(x_i / s), \quad s = \max_i |x_i| / 127

    Keys are first divided by a factor for each channel, a power of two that the prompt decides and that queries are
    multiplied by. Attention reads the codes themselves.

    From: symmetric rounding, no paper's recipe.

    When: before fewer slots: nothing lost that could be measured, for 28% of the bytes of float32 slots and about 55%
    of 16-bit ones (SmolLM2; `h2o` with half of the slots has 13.25 in perplexity, in floats 13.22).
    """
    return Codec(positions, 8)


def int4(positions: str = "original") -> Codec:
    r"""Codes of 4 bits, two to a byte, with one scale for each key and each value.

    .. math:: \hat x_i = s \, \mathrm{round}(x_i / s), \quad s = \max_i |x_i| / 7

    Otherwise as `int8`.

    From: symmetric rounding, no paper's recipe.

    When: rarely. It loses more than fewer slots would: 16.7 in perplexity in 8% of the full cache's bytes, where
    codes of 8 bits with a quarter of the slots have 14.9 in 7% (SmolLM2 on WikiText-2).
    """
    return Codec(positions, 4)


CODECS: dict[str, Callable[[str], Codec]] = {"plain": plain, "int8": int8, "int4": int4}


def codec(name: str, positions: str = "original") -> Codec:
    """A codec by name.

    Args:
        name: a key of `CODECS`.
        positions: `original` or `cache`.

    Raises:
        ValueError: there is no such codec.
    """
    if name not in CODECS:
        raise ValueError(f"there is no codec {name!r}; {choices(name, CODECS)}")
    return CODECS[name](positions)
