"""What attention is made of, whoever computes it: its settings, its mask and biases, and parts that merge."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

SLOT_BLOCK = 64
"""Slots of one flash-decoding split at least, where they are cut into splits."""

QUERY_BLOCK = 256
"""Queries of a prompt that attend at once, at most."""


def wide(dtype: Any) -> Any:
    """The dtype in which softmax, scores and sums are computed: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["slopes"], meta_fields=["scale", "soft_cap", "window"]
)
@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention does besides softmax(q k) v.

    Args:
        scale: of the products of queries and keys; 1 / sqrt(d) in most models.
        soft_cap: bound on the logits, cap tanh(x / cap) (Gemma 2); None for none.
        window: newest tokens that a query sees, itself included; None for all of them.
        slopes: ALiBi's, by which a logit falls for each token of distance (Press et al., 2022); None for none.
    """

    scale: float
    soft_cap: float | None = None
    window: int | None = None
    slopes: Float[Array, "h g"] | None = None

    def described(self) -> dict[str, Any]:
        """What of this programs are compiled for, besides the scale."""
        return dict(window=self.window, soft_cap=self.soft_cap is not None, slopes=self.slopes is not None)

    def capped(self, products: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Products of queries and keys, scaled and bounded."""
        x = products * self.scale
        return x if self.soft_cap is None else self.soft_cap * jnp.tanh(x / self.soft_cap)

    def bias(
        self, query_place: Int[Array, "b #h t"], key_place: Int[Array, "b #h c"]
    ) -> Float[Array, "b h g t c"] | None:
        """What is added to the logits for the distance between the places of queries and keys; None for nothing."""
        if self.slopes is None:
            return None
        distance = key_place[:, :, None, None, :] - query_place[:, :, None, :, None]
        return self.slopes[..., None, None] * distance

    def mask(self, query_position: Int[Array, "b t"], key_position: Int[Array, "b #h c"]) -> Bool[Array, "b #h t c"]:
        """Which live keys (position >= 0) are neither after a query nor before its window."""
        return causal_mask(query_position, key_position, self.window)


class LowRank(NamedTuple):
    """Evicted tokens' share of the attention in LESS (equation 3): one more split of mass phi z."""

    features: Float[Array, "b h g *t R"]
    """phi(q), not negative; of one token per row, without t, for `decode_attention`."""
    h: Float[Array, "b h R e"]
    """Sum of psi(k)^T v."""
    z: Float[Array, "b h R"]
    """Sum of psi(k)."""


class Partial(NamedTuple):
    """Attention over a part of the tokens: a monoid under `merge`.

    `out` is normalised within the part; `lse` is the logarithm of the part's sum of exponentials.
    """

    out: Float[Array, "b h g t d"]
    lse: Float[Array, "b h g t"]


def attend(
    q: Float[Array, "b h g t d"],
    k: Float[Array, "b h c d"],
    v: Float[Array, "b h c e"],
    mask: Bool[Array, "b #h t c"],
    spec: AttentionSpec,
    bias: Float[Array, "b h g t c"] | None = None,
    others: tuple[Bool[Array, "b h g t c"], Float[Array, "b h g t c"]] | None = None,
) -> tuple[Partial, Float[Array, "b h g t c"]]:
    """Softmax attention with its log-sum-exp and, for those who ask, its probabilities.

    Args:
        q: queries; the g query heads of a group share one KV head.
        k: keys.
        v: values, of any width.
        mask: True where a query may see a key; a query that sees none returns zeros.
        spec: scale and soft cap; its window and slopes are in `mask` and `bias`.
        bias: added to the logits (ALiBi), or None.
        others: where products of queries and keys are other ones, and these; None for nowhere.

    Returns:
        The unmerged attention, and the probabilities (free when they are not used).
    """
    b, h, g, t, d = q.shape
    c = k.shape[-2]
    # A decode step reads the slots in blocks: XLA runs them side by side on every core.
    most = 2 * SLOT_BLOCK if c > 4 * SLOT_BLOCK else SLOT_BLOCK
    n = c // slot_block(c, SLOT_BLOCK, most) if t == 1 else 1
    blocks_k, blocks_v = k.reshape(b, h, n, c // n, d), v.reshape(b, h, n, c // n, v.shape[-1])
    float_type = wide(q.dtype)

    def blocks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:-1], n, c // n), -2, 2)

    products = jnp.einsum("bhgtd,bhnsd->bhngts", q, blocks_k, preferred_element_type=float_type)
    if others is not None:
        elsewhere, found = others
        products = jnp.where(blocks(elsewhere), blocks(found), products)
    logits = spec.capped(products)
    if bias is not None:
        logits += blocks(bias)
    visible = blocks(mask[:, :, None])
    lowest = jnp.finfo(float_type).min
    logits = jnp.where(visible, logits, lowest)
    # Shifts numerators and total alike: no derivative goes through it.
    highest = jax.lax.stop_gradient(jnp.maximum(logits.max((2, 5), keepdims=True), lowest / 2))
    weights = jnp.exp(logits - highest)
    total = weights.sum((2, 5), keepdims=True)
    safe_total = jnp.where(total > 0, total, 1)  # tiny, squared by a derivative, would be 0
    out = jnp.einsum("bhngts,bhnsd->bhngtd", weights.astype(v.dtype), blocks_v, preferred_element_type=float_type)
    out = out.sum(2) / safe_total[:, :, 0]
    lse = jnp.where(total > 0, highest + jnp.log(safe_total), -jnp.inf)[:, :, 0, :, :, 0]
    probs = jnp.moveaxis(weights / safe_total, 2, -2).reshape(b, h, g, t, c)
    return Partial(out, lse), probs


def slot_block(slots: int, least: int, most: int) -> int:
    """The largest block of slots from `least` to `most`, a multiple of 16, that divides them; or all of them."""
    sizes = range(most, least - 1, -16)
    return next((size for size in sizes if slots % size == 0), slots)


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two parts, exact and stable; a part that saw nothing has lse = -inf."""
    highest = jnp.maximum(a.lse, b.lse)
    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)
    share_a, share_b = jnp.exp(a.lse - finite), jnp.exp(b.lse - finite)
    total = share_a + share_b
    safe_total = jnp.where(total > 0, total, 1)
    out = (share_a / safe_total)[..., None] * a.out + (share_b / safe_total)[..., None] * b.out
    return Partial(out, jnp.where(total > 0, finite + jnp.log(safe_total), -jnp.inf))


def share_of_evicted(memory: LowRank) -> Partial:
    """Attention over what LESS remembers (equation 3): phi H / phi z, of mass phi z; nothing where that is 0."""
    phi, h, z = memory
    exact = jax.lax.Precision.HIGHEST  # a TPU would round float32 to bfloat16
    mass = jnp.einsum("bhgtr,bhr->bhgt", phi, z, precision=exact)
    nothing = mass <= 0
    mass = jnp.where(nothing, 1.0, mass)
    out = jnp.einsum("bhgtr,bhrd->bhgtd", phi, h, precision=exact) / mass[..., None]
    return Partial(jnp.where(nothing[..., None], 0.0, out), jnp.where(nothing, -jnp.inf, jnp.log(mass)))


def tempered(
    probs: Float[Array, "b h g *t c"], zeta: Float[Array, "b h #g *t c"] | None, tau: Array | float
) -> Float[Array, "b h g *t c"]:
    """Numerators of Keyformer's equation 9 from probabilities: softmax((log p + zeta)/tau) = softmax((x + zeta)/tau).

    Args:
        probs: softmax of logits x.
        zeta: noise, or None.
        tau: temperature above 0, that broadcasts against `probs`.
    """
    some = probs > 0
    x = jnp.where(some, jnp.log(jnp.where(some, probs, 1)), -jnp.inf)  # a derivative of log(0) would be NaN
    return jnp.exp((x if zeta is None else x + zeta) / tau)


def causal_mask(
    query_position: Int[Array, "b t"], key_position: Int[Array, "b #h c"], window: int | None
) -> Bool[Array, "b #h t c"]:
    """Which live keys (position >= 0) are not after a query, nor before the model's sliding window."""
    queries, keys = query_position[:, None, :, None], key_position[:, :, None, :]
    visible = (keys >= 0) & (keys <= queries)
    return visible if window is None else visible & (keys > queries - window)


def alibi_slopes(heads: int, exponent: float = 8.0) -> Float[np.ndarray, " heads"]:
    """Geometric slopes 2^(-8i/n) for the next power of two n, even i first when heads is not a power of two.

    Args:
        heads: query heads of a layer.
        exponent: in place of the 8, of the last slope.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-exponent * np.arange(1, power + 1) / power)
    return slopes if power == heads else np.concatenate([slopes[1::2], slopes[0::2]])[:heads]


def query_block(tokens: int, rows: int) -> int:
    """Queries that attend at once, so that a block's probabilities stay linear in the prompt."""
    most = max(16, QUERY_BLOCK // max(1, rows // 4))
    return math.gcd(tokens, power_below(most))  # a power of two, or 12 rows would share no factor with 1024


def power_below(x: int) -> int:
    """The largest power of two up to a number."""
    return 1 << (x.bit_length() - 1)


def split_queries(x: Array, axis: int, block: int) -> Array:
    """Queries in blocks along a new leading axis, for `jax.lax.scan`."""
    axis %= x.ndim
    blocks = x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(blocks, axis, 0)


def join_queries(blocks: Array, axis: int) -> Array:
    """The inverse of `split_queries`; `axis` counts in the joined array."""
    axis %= blocks.ndim - 1
    moved = jnp.moveaxis(blocks, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
