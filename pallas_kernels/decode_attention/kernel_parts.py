"""Code that kernels share: masks of slots, Keyformer's logits, and products with codes on TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Num, Shaped, UInt32

from pallas_kernels import noise
from pallas_kernels.common import LANES, SUBLANES, chip, slots_lie_along_lanes
from pallas_kernels.decode_attention.api import ScoreNoise
from pallas_kernels.operands import Encoded, LazyRope, Operand, Quantised
from pallas_kernels.quantised import digits, halves, join_digits

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Logit of a masked slot, and on GPU the log-sum-exp of no slots."""


def array_and_scale(operand: Operand) -> tuple[Array, Array | None]:
    """Return stored keys or values: an array and None, or codes and the scale of each slot."""
    if isinstance(operand, Quantised):
        return operand.codes, operand.scale
    assert not isinstance(operand, Encoded | LazyRope)  # limits of every kernel
    return operand, None


def channels_of(operand: Operand) -> int:
    """Return the axis of channels in a TPU's blocks of keys or values [heads, ., .]: 1 if XLA stores slots innermost.

    The swap of axes is free there, and without it XLA would copy the cache at every step.
    """
    return 1 if slots_lie_along_lanes(*array_and_scale(operand)[0].shape[2:]) else 2


def visible_slots(position: Int[Array, "*#b"], query: Int[Array, "*#b"], window: int | None) -> Bool[Array, "*b"]:
    """Return which slots the query at a position attends to."""
    visible = (position >= 0) & (position <= query)
    return visible if window is None else visible & (position > query - window)


def noisy_logits(
    logits: Float[Array, "*b g s"],
    visible: Bool[Array, "*b g s"],
    score_noise: ScoreNoise,
    seed: UInt32[Array, "*b #s"] | UInt32[Array, ""],
    tau: Float[Array, ""],
    head: UInt32[Array, "*b #s"] | UInt32[Array, ""],
    position: Int[Array, "*b s"],
    lay: Callable[[Array], Array] = lambda noise: jnp.expand_dims(noise, -2),
) -> Float[Array, "*b g s"]:
    """Return the logits of Keyformer's equation 9, with noise and divided by tau; `lay` aligns noise with them."""
    if score_noise.kind != "none":
        bits = noise.hashed_bits(seed, score_noise.layer, head, position.astype(jnp.uint32))
        logits += lay(noise.KINDS[score_noise.kind](noise.uniform(bits)))
    return jnp.where(visible, logits / tau, LOWEST)


def multiplies_integers(interpret: Any) -> bool:
    """Return whether the matrix unit of the target TPU takes integers, as interpreters do."""
    if interpret is not False:
        return True
    tpu = chip()
    return tpu is not None and tpu.is_matmul_supported(jnp.int8, jnp.int8)


def matmul(a: Array, b: Array, over: tuple[int, int]) -> Num[Array, "*n g s"]:
    """Multiply matrices, or those of each head [n . .], contracting axes `over[0]` of a and `over[1]` of b."""
    # Keeps the matrix unit from rounding float32 to bfloat16.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dtype = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    heads = ((0,), (0,)) if a.ndim == 3 else ((), ())
    axes = ((over[0],), (over[1],)), heads
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=dtype)


def block_products(
    q: Float[Array, "_ _ d"],
    k: Array,
    scale: Float[Array, "n s"] | None,
    channels: int,
    integers: bool,
    *,
    several_heads: bool = False,
) -> Float[Array, "_ _ s"]:
    """Multiply queries by a block of keys, or of codes with their scales; axis `channels` of k, 1 or 2, is contracted.

    A chip that multiplies no `integers` takes bfloat16, in which bytes are exact. If `several_heads`, a block of q
    holds single rows of several heads, as `multiply_heads` takes them.
    """
    rows, unit = (q, None) if scale is None else digits(q.astype(jnp.float32))
    if not several_heads:
        rows = jnp.broadcast_to(rows, (k.shape[0], *rows.shape[1:]))
    if scale is None or unit is None:
        filled = _filled(k, 3 - channels)
        return multiply_heads(
            lambda rows: matmul(rows, filled, (2, channels))[..., : k.shape[3 - channels]], rows, len(k)
        )
    codes, step = _bytes(k, channels)
    products = multiply_heads(lambda rows: _dot_codes(rows, codes, channels, integers), rows, len(k))
    return join_digits(products, unit * step) * per_query_row(scale, len(products))


def block_weighted_sum(
    weights: Float[Array, "_ _ s"], v: Array, scale: Float[Array, "n s"] | None, channels: int, integers: bool
) -> Float[Array, "_ _ e"]:
    """Sum a block of values with non-negative weights; arguments are as in `block_products`."""
    slots = 3 - channels
    if scale is None:
        filled = _filled(v, slots)
        unseen = filled.shape[slots] - weights.shape[2]
        weights = jnp.pad(weights.astype(v.dtype), ((0, 0), (0, 0), (0, unseen)))
        return multiply_heads(lambda rows: matmul(rows, filled, (2, slots)), weights, len(v))
    rows, unit = digits(weights * per_query_row(scale, len(weights)))
    codes, step = _bytes(v, channels)
    return join_digits(multiply_heads(lambda rows: _dot_codes(rows, codes, slots, integers), rows, len(v)), unit * step)


def per_query_row(x: Shaped[Array, "h s"], blocks: int) -> Shaped[Array, "n #rows s"]:
    """Broadcast numbers per KV head and slot to the rows of the heads' queries, which fill `blocks` blocks."""
    return x[:, None] if len(x) == blocks else x.reshape(blocks, -1, x.shape[1])


def multiply_heads(multiply: Callable[[Array], Array], rows: Array, heads: int) -> Array:
    """Multiply rows by their KV heads' operands, also if a block holds single rows of several heads.

    Such a block is multiplied by the operand of each of its heads, which costs as much as one row. Each row then keeps
    its own head's product.
    """
    blocks, together = len(rows), heads // len(rows)
    if together == 1:
        return multiply(rows)
    products = multiply(jnp.repeat(rows, together, axis=0))
    head_of_row = jax.lax.broadcasted_iota(jnp.int32, products.shape[1:], 0) % together
    selected = [products[block * together] for block in range(blocks)]
    for i in range(1, together):
        selected = [
            jnp.where(head_of_row == i, products[block * together + i], row) for block, row in enumerate(selected)
        ]
    return jnp.stack(selected)


def _filled(x: Float[Array, "n ..."], slots: int) -> Float[Array, "n ..."]:
    """Append some of a block's slots to it again, if half of the matrix unit's columns would be idle otherwise.

    The compiler fills a unit of 256 columns in half as many steps if the block has 256 slots and no padding of zeros.
    """
    count, tpu = x.shape[slots], chip()
    missing = -count % (2 * LANES)
    columns = 2 * LANES if tpu is None else tpu.mxu_column_size  # interpreters assume the widest
    whole_tiles = x.dtype == jnp.bfloat16 and slots == 1 and count % (2 * SUBLANES) == 0
    if not whole_tiles or not 0 < missing <= LANES < count or columns == LANES:
        return x
    return jnp.concatenate([x, jax.lax.slice_in_dim(x, 0, missing, axis=slots)], slots)


def _bytes(codes: Integer[Array, "n ..."], channels: int) -> tuple[Int[Array, "n ..."], float]:
    """Return the codes of all channels as int8, and the factor to multiply them with."""
    if codes.dtype == jnp.int8:
        return codes, 1.0
    if codes.shape[1] % (4 * SUBLANES):
        return jnp.concatenate(halves(codes), channels), 1.0
    from jax.experimental.pallas import tpu as pltpu

    # A TPU does not compute with bytes, but four of them are a word. Four bits with the highest one flipped are the
    # upper half of a byte that is sixteen times their code.
    words = pltpu.bitcast(codes, jnp.int32) ^ np.uint32(0x88888888).astype(np.int32)
    upper = np.uint32(0xF0F0F0F0).astype(np.int32)
    parts = [pltpu.bitcast(half & upper, jnp.int8) for half in (words << 4, words)]
    return jnp.concatenate(parts, channels), 1 / 16


def _dot_codes(rows: Array, codes: Array, axis: int, integers: bool) -> Array:
    if not integers:
        rows, codes = rows.astype(jnp.bfloat16), codes.astype(jnp.bfloat16)
    return matmul(rows, codes, (2, axis))
