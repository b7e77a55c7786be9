"""What a decode step over slots gives back."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Int, UInt32

from pallas_kernels.decode_attention.types import Decoded
from pallas_kernels.hamming import Hashing
from pallas_kernels.operands import Operand


class Hashed(NamedTuple):
    """How much slots matter, where the farthest from a group's queries by their packed codes leaves first."""

    hashing: Hashing
    """What the codes of the queries and of the new token's key are made of."""
    codes: tuple[UInt32[Array, "b h c"], ...]
    """Of the slots, 32 bits to a word, a buffer for each word."""


class Stepped(NamedTuple):
    """Attention, and the slots with the new token in them."""

    attended: Decoded
    slot: Int[Array, "b h"]
    """The one that the token has taken; c for rows of padding."""
    left: Int[Array, "b h"]
    """The position that it held; -1 for none."""
    position: Int[Array, "b h c"]
    k: Operand
    v: Operand
    buffers: Any
    pair: tuple[Operand, Operand] | None = None
    """The key and value that the slot held, [b h ...], if they were asked for; anything for rows of padding.

    What the cache holds in 16 bits may come in float32.
    """
    codes: tuple[UInt32[Array, "b h c"], ...] | None = None
    """Of a `Hashed` standing, the new token's among them."""
