"""Result of a decode step over slots, and a ranking of slots by codes."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Int, UInt32

from pallas_kernels.decode_attention.types import Decoded
from pallas_kernels.hamming import Hashing
from pallas_kernels.operands import Operand


class Hashed(NamedTuple):
    """Ranking of slots by packed codes: the farthest from a group's queries is evicted first."""

    hashing: Hashing
    """Inputs for the codes of the queries and of the new token's key."""
    codes: tuple[UInt32[Array, "b h c"], ...]
    """Codes of the slots, 32 bits to a word, a buffer for each word."""


class Stepped(NamedTuple):
    """Attention, and the slots with the new token."""

    attended: Decoded
    slot: Int[Array, "b h"]
    """Slot that the token has taken; c for rows of padding."""
    left: Int[Array, "b h"]
    """Position that the slot held; -1 if it was empty."""
    position: Int[Array, "b h c"]
    k: Operand
    v: Operand
    buffers: Any
    pair: tuple[Operand, Operand] | None = None
    """Key and value that the slot held, [b h ...], if requested; arbitrary for rows of padding.

    Entries of a 16-bit cache may be float32.
    """
    codes: tuple[UInt32[Array, "b h c"], ...] | None = None
    """Hash codes, including the new token's, if slots rank by them."""
