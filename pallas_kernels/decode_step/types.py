"""Inputs and result of a decode step over slots."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.attention import AttentionSpec, static
from pallas_kernels.decode_attention.types import Decoded, Gumbel, Sinks
from pallas_kernels.hamming import Hashing
from pallas_kernels.operands import Operand
from pallas_kernels.ranking import Protection


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
        standing: importance of each slot before the step: numbers, or codes that rank slots by their distance from the
            queries' codes; None to evict the oldest first.
        protection: sinks, recent window and limit of each head.
        keep: slots that are never evicted, or None.
        shrinks: True if live slots may be beyond the limit, as under policies whose budget decreases.
    """

    standing: Float[Array, "b h c"] | Hashed | None
    protection: Protection
    keep: Bool[Array, "b h c"] | None = None
    shrinks: bool = static(False)


class Query(NamedTuple):
    """Attention of the new token, as `decode_attention` computes it."""

    q: Float[Array, "b h g d"]
    spec: AttentionSpec
    sinks: Sinks | None = None
    scores: str | Gumbel | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class StepInputs:
    """Arguments of a decode step; see `api.decode_step`."""

    slots: Slots
    token: Token
    ranking: Ranking
    query: Query
    pairs: bool = False
    adds: bool = False
    rounds: bool = False


class Stepped(NamedTuple):
    """Attention, and the slots with the new token."""

    attended: Decoded
    slot: Int[Array, "b h"]
    """Slot that the token has taken; c for rows of padding."""
    left: Int[Array, "b h"]
    """Position that the slot held; -1 if it was empty."""
    slots: Slots
    pair: tuple[Operand, Operand] | None = None
    """Key and value that the slot held, [b h ...], if requested; arbitrary for rows of padding.

    Entries of a 16-bit cache may be float32.
    """
    codes: tuple[UInt32[Array, "b h c"], ...] | None = None
    """Hash codes, including the new token's, if slots rank by them."""
