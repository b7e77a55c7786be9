"""Splits of decode attention over GPU programs, and the merge of their parts in XLA."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.attention import log_sum
from pallas_kernels.decode_attention.api import Decoded, ScoreNoise
from pallas_kernels.decode_attention.kernel_parts import LOWEST

ROWS = 16
"""Rows of the smallest matrix product."""
PROGRAMS = 512
"""Programs that keep a large GPU busy: short batches get more splits."""

STEP = 16_384
"""Bytes of keys, in the queries' dtype, that a program of four warps multiplies in one step without spilling."""

WIDEST = 512
"""Maximum bytes of a query's channels that are multiplied at a time, for the same reason."""


def rows_of(groups: int) -> int:
    """Return the rows of a program's matrix products; the queries of a group are the first of them."""
    return max(ROWS, pl.next_power_of_2(groups))


def slots_per_step(width: int) -> int:
    """Return the slots of one step of a program's loop; keys or values are `width` bytes wide in the queries' dtype."""
    return min(64, max(16, STEP // pl.next_power_of_2(width)))


def tile(heads: int, c: int, width: int) -> tuple[int, int]:
    """Return the slots of one step of a program's loop, and the number of splits; `width` is as in `slots_per_step`."""
    block = min(max(16, pl.next_power_of_2(c)), slots_per_step(width))
    max_splits = min(max(1, PROGRAMS // heads), max(1, c // 256))
    return block, pl.cdiv(c, split_of(c, max_splits, block))


def split_of(c: Any, splits: int, block: int) -> Any:
    """Return the slots of a split; the last one may have fewer."""
    return pl.cdiv(pl.cdiv(c, splits), block) * block


def channels(width: int, dtype: DTypeLike, halved: bool = False) -> tuple[slice, ...]:
    """Split channels of queries and keys to multiply a part at a time: wide float32 spills unless it is in halves."""
    fits = not halved and width * jnp.dtype(dtype).itemsize <= WIDEST
    size = width if fits else width // 2
    return tuple(slice(start, start + size) for start in range(0, width, size))


class SplitOutputs(NamedTuple):
    """Attention to each part of a head's tokens; the first parts are splits of its slots."""

    out: Any
    """[b h parts rows e]"""
    lse: Any
    """[b h parts rows]"""
    logits: Any = None
    """Logits of all splits [b h g c], if scores are requested; of pages [P g s]."""
    noisy_lse: Any = None
    """`lse` of the logits with noise at a temperature, if those are requested."""


def merge_splits(parts: SplitOutputs, g: int, splits: int, scores: str | ScoreNoise | None) -> Decoded:
    """Merge all parts of a kernel's results, of which the first `splits` are splits, into one result."""
    out, lse = merge_attention(parts, g)
    if scores is None:
        return Decoded(out, lse, None)
    _, of_slots = _shares((parts.lse if parts.noisy_lse is None else parts.noisy_lse)[:, :, :splits, :g])
    finite = jnp.where(jnp.isfinite(of_slots), of_slots, 0.0)
    probs = jnp.exp(parts.logits - finite[..., None])
    return Decoded(out, lse, probs if scores == "each" else probs.sum(2))


def merge_attention(parts: SplitOutputs, g: int) -> tuple[Array, Array]:
    """Merge the attention [b h g e] and log-sum-exp [b h g] of all parts."""
    share, lse = _shares(parts.lse[..., :g])
    return jnp.einsum("bhsg,bhsgd->bhgd", share, parts.out[..., :g, :]), lse


def _shares(lse: Array) -> Any:
    # Weights of the parts, and the logarithm of their sum. Empty parts have LOWEST, so no NaN can arise.
    highest = lse.max(2, keepdims=True)
    share = jnp.where(lse > LOWEST, jnp.exp(lse - highest), 0.0)
    total = share.sum(2, keepdims=True)
    return share / jnp.where(total > 0, total, 1.0), log_sum(highest, total)[:, :, 0]
