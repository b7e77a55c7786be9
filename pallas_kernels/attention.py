"""Attention settings, masks, biases and mergeable partial results, shared by all implementations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

SLOT_BLOCK = 64
"""Minimum slots of one flash-decoding split, if the slots are split at all."""

QUERY_BLOCK = 256
"""Maximum queries of a prompt that attend together."""


def static(default: Any = dataclasses.MISSING) -> Any:
    """Return a dataclass field that is part of a pytree's structure."""
    return dataclasses.field(default=default, metadata={"static": True})


def wide(dtype: Any) -> Any:
    """Return the dtype of softmax, scores and sums: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Settings of a layer's attention beyond softmax(q k) v.

    Args:
        scale: factor on the products of queries and keys; 1 / sqrt(d) in most models.
        soft_cap: bound on the logits, cap tanh(x / cap) (Gemma 2); None for no bound.
        window: newest tokens that a query attends to, itself included; None for all of them.
        slopes: ALiBi slopes, by which a logit falls per token of distance (Press et al., 2022); None without ALiBi.
    """

    scale: float = static()
    soft_cap: float | None = static(None)
    window: int | None = static(None)
    slopes: Float[Array, "h g"] | None = None

    def described(self) -> dict[str, Any]:
        """Return the settings, besides the scale, that programs are compiled for."""
        return dict(window=self.window, soft_cap=self.soft_cap is not None, slopes=self.slopes is not None)

    def capped(self, products: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """Scale the products of queries and keys, then apply the soft cap."""
        x = products * self.scale
        return x if self.soft_cap is None else self.soft_cap * jnp.tanh(x / self.soft_cap)

    def bias(
        self, query_place: Int[Array, "b #h t"], key_place: Int[Array, "b #h c"]
    ) -> Float[Array, "b h g t c"] | None:
        """Return ALiBi's term of the logits, from the model positions of queries and keys; None without slopes."""
        if self.slopes is None:
            return None
        distance = key_place[:, :, None, None, :] - query_place[:, :, None, :, None]
        return self.slopes[..., None, None] * distance

    def mask(self, query_position: Int[Array, "b t"], key_position: Int[Array, "b #h c"]) -> Bool[Array, "b #h t c"]:
        """Return which live keys (position >= 0) are neither after a query nor before its window."""
        queries, keys = query_position[:, None, :, None], key_position[:, :, None, :]
        visible = (keys >= 0) & (keys <= queries)
        return visible if self.window is None else visible & (keys > queries - self.window)


class LowRank(NamedTuple):
    """Low-rank attention to evicted tokens in LESS (equation 3): one more split, whose sum of exponentials is phi z."""

    features: Float[Array, "b h g *t R"]
    """phi(q), non-negative; `decode_attention` has one token per row and no axis t."""
    h: Float[Array, "b h R e"]
    """Sum of psi(k)^T v."""
    z: Float[Array, "b h R"]
    """Sum of psi(k)."""


class Partial(NamedTuple):
    """Attention over a part of the tokens: a monoid under `merge`.

    `out` is normalized within the part; `lse` is the logarithm of the part's sum of exponentials.
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
    replacements: tuple[Bool[Array, "b h g t c"], Float[Array, "b h g t c"]] | None = None,
) -> tuple[Partial, Float[Array, "b h g t c"]]:
    """Compute softmax attention, its log-sum-exp and its probabilities.

    Args:
        q: queries; the g query heads of a group share one KV head.
        mask: True where a query may attend to a key; a query without such keys returns zeros.
        spec: scale and soft cap; its window and slopes are in `mask` and `bias`.
        bias: added to the logits (ALiBi), or None.
        replacements: mask of query-key products to replace, and their replacements; None to replace none.

    Returns:
        The unmerged attention, and the probabilities (free if unused).
    """
    b, h, _, t, d = q.shape
    c = k.shape[-2]
    # A decode step reads the slots in blocks, which XLA runs in parallel on all cores.
    max_block = 2 * SLOT_BLOCK if c > 4 * SLOT_BLOCK else SLOT_BLOCK
    n = c // slot_block(c, SLOT_BLOCK, max_block) if t == 1 else 1
    blocks_k, blocks_v = k.reshape(b, h, n, c // n, d), v.reshape(b, h, n, c // n, v.shape[-1])
    float_type = wide(q.dtype)
    products = jnp.einsum("bhgtd,bhnsd->bhngts", q, blocks_k, preferred_element_type=float_type)

    def weigh(weights: Array) -> Array:
        weights = weights.astype(v.dtype)
        return jnp.einsum("bhngts,bhnsd->bhngtd", weights, blocks_v, preferred_element_type=float_type).sum(2)

    return attend_blocks(products, weigh, mask, spec, bias, replacements)


def attend_blocks(
    products: Float[Array, "b h n g t s"],
    weigh: Callable[[Float[Array, "b h n g t s"]], Float[Array, "b h g t e"]],
    mask: Bool[Array, "b #h t c"],
    spec: AttentionSpec,
    bias: Float[Array, "b h g t c"] | None,
    replacements: tuple[Bool[Array, "b h g t c"], Float[Array, "b h g t c"]] | None,
) -> tuple[Partial, Float[Array, "b h g t c"]]:
    """Run `attend` from the products of queries and n blocks of keys; `weigh` sums the values with weights."""
    b, h, n, g, t, s = products.shape

    def blocks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:-1], n, s), -2, 2)

    if replacements is not None:
        replaced, substitutes = replacements
        products = jnp.where(blocks(replaced), blocks(substitutes), products)
    logits = spec.capped(products)
    if bias is not None:
        logits += blocks(bias).astype(logits.dtype)
    visible = blocks(mask[:, :, None])
    lowest = jnp.finfo(logits.dtype).min
    logits = jnp.where(visible, logits, lowest)
    # Shifts numerators and total equally, so it needs no derivative.
    highest = jax.lax.stop_gradient(jnp.maximum(logits.max((2, 5), keepdims=True), lowest / 2))
    weights = jnp.exp(logits - highest)
    total = weights.sum((2, 5), keepdims=True)
    safe_total = jnp.where(total > 0, total, 1)  # a derivative squares it, and tiny squared is 0
    out = weigh(weights) / safe_total[:, :, 0]
    lse = log_sum(highest, total)[:, :, 0, :, :, 0]
    probs = jnp.moveaxis(weights / safe_total, 2, -2).reshape(b, h, g, t, n * s)
    return Partial(out, lse), probs


def log_sum(top: Float[Array, "*b"], total: Float[Array, "*b"], empty: float = -jnp.inf) -> Float[Array, "*b"]:
    """Return the logarithm of a sum of exponentials that are relative to `top`; `empty` if it is over no tokens."""
    nonempty = total > 0
    return jnp.where(nonempty, top + jnp.log(jnp.where(nonempty, total, 1.0)), empty)


def add_logits(
    top: Float[Array, "*b"], total: Float[Array, "*b"], logits: Float[Array, "*b s"]
) -> tuple[Float[Array, "*b s"], Float[Array, "*b"], Float[Array, "*b"], Float[Array, "*b"]]:
    """Add a block of logits to a running softmax, which has a maximum and a sum of exponentials relative to it.

    Returns:
        The block's exponentials, the factor of earlier ones, and the new maximum and sum.
    """
    highest = jnp.maximum(top, logits.max(-1))
    weights, correction = jnp.exp(logits - highest[..., None]), jnp.exp(top - highest)
    return weights, correction, highest, correction * total + weights.sum(-1)


def positive(total: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return sums of exponentials as divisors: those over no tokens, which are 0, become the smallest number."""
    return jnp.maximum(total, jnp.finfo(total.dtype).tiny)


def slot_block(slots: int, smallest: int, largest: int) -> int:
    """Return the largest block between two sizes, a multiple of 16, that divides the slots; else all slots."""
    sizes = range(largest, smallest - 1, -16)
    return next((size for size in sizes if slots % size == 0), slots)


def merge(a: Partial, b: Partial) -> Partial:
    """Merge attention over two parts, exactly and stably; an empty part has lse = -inf."""
    highest = jnp.maximum(a.lse, b.lse)
    finite = jnp.where(jnp.isfinite(highest), highest, 0.0)
    share_a, share_b = jnp.exp(a.lse - finite), jnp.exp(b.lse - finite)
    total = share_a + share_b
    safe_total = jnp.where(total > 0, total, 1)
    out = (share_a / safe_total)[..., None] * a.out + (share_b / safe_total)[..., None] * b.out
    return Partial(out, jnp.where(total > 0, finite + jnp.log(safe_total), -jnp.inf))


def with_sink(attended: Partial, logits: Float[Array, "h g"] | None) -> Partial:
    """Add a sink's logit to the denominator of each query head's softmax: one more part, whose value is 0."""
    if logits is None:
        return attended
    lse = jnp.broadcast_to(logits[..., None].astype(attended.lse.dtype), attended.lse.shape)
    return merge(attended, Partial(jnp.zeros_like(attended.out), lse))


def share_of_evicted(memory: LowRank | Partial) -> Partial:
    """Return attention over a memory of evicted tokens; a memory whose sum is 0 is an empty part.

    Args:
        memory: the attention itself, or LESS's memory (equation 3), over which it is phi H / phi z, with sum phi z.
    """
    if isinstance(memory, Partial):
        return memory
    phi, h, z = memory
    exact = jax.lax.Precision.HIGHEST  # a TPU would round float32 to bfloat16
    mass = jnp.einsum("bhgtr,bhr->bhgt", phi, z, precision=exact)
    nothing = mass <= 0
    mass = jnp.where(nothing, 1.0, mass)
    out = jnp.einsum("bhgtr,bhrd->bhgtd", phi, h, precision=exact) / mass[..., None]
    return Partial(jnp.where(nothing[..., None], 0.0, out), jnp.where(nothing, -jnp.inf, jnp.log(mass)))


def noisy_numerators(
    probs: Float[Array, "b h g *t c"], zeta: Float[Array, "b h #g *#t c"] | None, tau: Array | float
) -> Float[Array, "b h g *t c"]:
    """Return the numerators of Keyformer's equation 9 from probabilities, with noise zeta and temperature tau.

    They rely on softmax((log p + zeta)/tau) = softmax((x + zeta)/tau).
    """
    nonzero = probs > 0
    x = jnp.where(nonzero, jnp.log(jnp.where(nonzero, probs, 1)), -jnp.inf)  # a derivative of log(0) would be NaN
    return jnp.exp((x if zeta is None else x + zeta) / tau)


def alibi_slopes(heads: int, exponent: float = 8.0) -> Float[np.ndarray, " heads"]:
    """Return slopes 2^(-8i/n) for the next power of two n; even i come first if heads is not a power of two.

    `exponent` replaces the 8, the last slope's exponent.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** (-exponent * np.arange(1, power + 1) / power)
    return slopes if power == heads else np.concatenate([slopes[1::2], slopes[0::2]])[:heads]


def query_block(tokens: int, rows: int) -> int:
    """Return how many queries attend together, so that a block's probabilities stay linear in the prompt."""
    limit = max(16, QUERY_BLOCK // max(1, rows // 4))
    return math.gcd(tokens, power_below(limit))  # a power of two: 12 rows give 85, which shares no factor with 1024


def power_below(x: int) -> int:
    """Return the largest power of two up to x."""
    return 1 << (x.bit_length() - 1)


def pad_to(x: Array, axis: int, size: int, value: int = 0) -> Array:
    """Pad an axis at its end to a size."""
    widths = [(0, size - x.shape[i] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def split_queries(x: Array, axis: int, block: int) -> Array:
    """Split queries into blocks along a new leading axis, for `jax.lax.scan`."""
    axis %= x.ndim
    blocks = x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(blocks, axis, 0)


def join_queries(blocks: Array, axis: int) -> Array:
    """Invert `split_queries`; `axis` counts in the joined array."""
    axis %= blocks.ndim - 1
    x = jnp.moveaxis(blocks, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
