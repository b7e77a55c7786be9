"""A decode step over slots: the new token replaces the lowest-ranked one, and its queries attend to all of them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple, Self, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import noise
from pallas_kernels.attention import AttentionSpec, static
from pallas_kernels.common import Survey, Unsupported
from pallas_kernels.decode_attention.api import (
    DecodeAttention,
    Decoded,
    ScoreNoise,
    Sinks,
    kind_of,
    refuse_lazy_rope,
    width_limits,
)
from pallas_kernels.decode_attention.kernel_parts import array_and_scale
from pallas_kernels.hamming.api import words_limits
from pallas_kernels.hamming.hashing import Hashing
from pallas_kernels.op import How, Limit, Op, operation, options_of
from pallas_kernels.operands import Operand
from pallas_kernels.ranking import EvictionRules


class Slots(NamedTuple):
    """Contents of the slots."""

    position: Int[Array, "b h c"]
    """Position of the token in each slot, -1 if empty."""
    k: Operand
    """Keys [b h c d]: an array, or codes."""
    v: Operand
    """Values [b h c e]."""
    buffers: Any
    """Other contents, a tree of arrays [b h c ...], without the codes of a `Hashed`."""


class Token(NamedTuple):
    """One new token per row."""

    position: Int[Array, " b"]
    """-1 for a row of padding, which writes and attends to nothing."""
    k: Float[Array, "b h d"]
    """Its key, which is quantized if the slots' are."""
    v: Float[Array, "b h e"]
    buffers: Any
    """Its buffers [b h ...]."""


class Hashed(NamedTuple):
    """Ranking of slots by packed codes: the farthest from a group's queries is evicted first."""

    hashing: Hashing
    """Inputs for the codes of the queries and of the new token's key."""
    codes: tuple[UInt32[Array, "b h c"], ...]
    """Codes of the slots, 32 bits to a word, a buffer for each word."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranking:
    """Choice of the slot that the token takes, as `evict` and `hamming` make it.

    Args:
        importance: numbers for each slot before the step, or codes that rank slots by their distance from the queries'
            codes; None to evict the oldest first.
        protection: sinks, recent window and limit of each head.
        keep: slots that are never evicted, or None.
        shrinks: True if live slots may be beyond the limit, as under policies whose budget decreases.
    """

    importance: Float[Array, "b h c"] | Hashed | None
    protection: EvictionRules
    keep: Bool[Array, "b h c"] | None = None
    shrinks: bool = static(False)


class Query(NamedTuple):
    """Attention of the new token, as `decode_attention` computes it."""

    q: Float[Array, "b h g d"]
    spec: AttentionSpec
    sinks: Sinks | None = None
    scores: str | ScoreNoise | None = None


class FusedResult(NamedTuple):
    """Attention, and the slots with the new token."""

    attended: Decoded
    slot: Int[Array, "b h"]
    """Slot that the token has taken; c for rows of padding."""
    evicted_position: Int[Array, "b h"]
    """Position that the slot held; -1 if it was empty."""
    slots: Slots
    pair: tuple[Operand, Operand] | None = None
    """Key and value that the slot held, [b h ...], if requested; arbitrary for rows of padding.

    Entries of a 16-bit cache may be float32.
    """
    codes: tuple[UInt32[Array, "b h c"], ...] | None = None
    """Hash codes, including the new token's, if slots rank by them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FusedDecode(Op[FusedResult]):
    """Run exactly `evict`, then `decode_attention`, in one pass over keys and values.

    The update is in place if the caller donates the slots and the written parts of the importance.

    Args:
        pairs: True to return the evicted pair.
        adds: True to return the importance with the sums added, starting at 0 for the new token.
        rounds: True to return attention's output in the queries' dtype, if nothing else is merged with it.
        how: see `pallas_kernels.op.How`. `xla` takes everything. `pallas` is for TPU; it takes what both kernels that
            it replaces take, c a multiple of 16 (of 128 where XLA stores slots innermost), and blocks that fit in VMEM.

    Raises:
        ValueError: `scores` is unknown, values are `LazyRope`, or `adds` is set without sums or
            without numbers of float32 in `importance`.
    """

    slots: Slots
    token: Token
    ranking: Ranking
    query: Query
    _: dataclasses.KW_ONLY
    pairs: bool = static(False)
    adds: bool = static(False)
    rounds: bool = static(False)

    name = "fused_decode"
    backends = ("pallas_tpu",)
    in_place = MappingProxyType({"slots": operator.attrgetter("slots")})

    def validate(self) -> Self:
        scores, importance = self.query.scores, self.ranking.importance
        if kind_of(scores) not in (noise.KINDS if isinstance(scores, ScoreNoise) else ("sum", "each", None)):
            raise ValueError(
                f"scores={scores!r} is not None, 'each', 'sum' or a ScoreNoise with a noise of `noise.KINDS`."
            )
        numbers = None if isinstance(importance, Hashed) else importance
        if self.adds and (scores in (None, "each") or numbers is None or numbers.dtype != jnp.float32):
            onto = type(importance).__name__ if numbers is None else numbers.dtype.name
            raise ValueError(
                f"adds=True adds sums to importance in float32, not scores={scores!r} to {onto}; leave it out."
            )
        refuse_lazy_rope(self.slots.v)
        return self

    def attention(self, slots: Slots) -> DecodeAttention:
        """Return the new token's attention to some slots."""
        (position, k, v, _), (q, spec, sinks, scores) = slots, self.query
        return DecodeAttention(q, k, v, position, self.token.position, spec, sinks=sinks, scores=scores)

    def limits(self, backend: str) -> Iterator[Limit]:
        yield from self.attention(self.slots).limits(backend)
        yield from width_limits(self.slots.k, self.slots.v, backend)
        (q, *_, scores), (_, k, v, _), importance = self.query, self.slots, self.ranking.importance
        c, hashed = k.shape[2], importance if isinstance(importance, Hashed) else None
        planes = () if hashed is None else hashed.hashing.planes.shape
        yield len(planes) < 4, f"it hashes by the same planes in all rows, not by {list(planes)} [b h bits d]"
        yield from words_limits(q.shape[2], 0 if hashed is None else len(hashed.codes), c)
        kernel = self.module(backend)
        unit = math.lcm(*(kernel.unit(array_and_scale(x)[0]) for x in (k, v)))
        yield c % unit == 0 and c <= 16384, f"c={c} slots are not a multiple of {unit} up to 16384"
        needed = kernel.block_bytes(q, k, v, scores, planes[-2] if planes else 0)
        available = kernel.VMEM_BYTES * kernel.block_factor()
        yield needed <= available, f"its blocks take {needed} bytes of the chip's memory, not {available}"

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        (sizes, settings), importance = self.attention(self.slots).workload(), self.ranking.importance
        if isinstance(importance, Hashed):
            settings["bits"] = importance.hashing.planes.shape[-2]
        return sizes, settings


fused_decode = operation(FusedDecode)


def one_pass(query: Query, k: Operand, v: Operand, hashed: Hashed | None = None, **how: Unpack[How]) -> bool:
    """Return whether `fused_decode` runs as one kernel for these arguments here; if not, two calls are better."""
    unused: Any = None  # no other argument decides
    step = FusedDecode(Slots(unused, k, v, unused), Token(*[unused] * 4), Ranking(hashed, unused), query)
    options = options_of(**how)
    if isinstance(options.implementation, Survey):
        options = options._replace(implementation="pallas")
    try:
        return step.choose(options) == "pallas"
    except Unsupported:
        return False
