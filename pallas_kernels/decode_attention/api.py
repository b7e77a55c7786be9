"""Decode attention: one new token per row over the slots of a bounded cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import noise
from pallas_kernels.attention import AttentionSpec, Partial, merge, share_of_evicted, static
from pallas_kernels.attention import LowRank as LowRank
from pallas_kernels.common import LANES, numbers_of
from pallas_kernels.op import Limit, Op, Options, operation
from pallas_kernels.operands import Encoded, LazyRope, Operand, Quantised, cut

GROUP, MOST_QUERIES = 16, 64
"""Most queries of a KV head that a kernel takes: of one token, and of several tokens without scores."""

WIDEST = 640
"""Largest width of keys and values that the TPU kernel takes: that of latents with a rotated key is 576."""

MOST_SLOTS = 1 << 20
"""Most slots of a head that the kernels have been compiled for."""

Places = tuple[Int[Array, "b h"], Int[Array, "b h c"]]
"""Model positions of the query and the keys, if they are not their positions in the text."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sinks:
    """First tokens that use the query from another place than the rest (StreamingLLM, section 3.2)."""

    q: Float[Array, "b h g d"]
    """Query for the sinks."""
    count: int = static()
    """Number of sinks: they have the positions below it, and are in as many first slots."""
    gap: Int[Array, " b"] | None = None
    """Tokens by which a layer's slopes place the sinks nearer than in the text; None for no change."""

    def slope_positions(self, position: Int[Array, "b h c"]) -> Int[Array, "b h c"]:
        """Return the places that a layer's slopes use for the tokens at these positions."""
        if self.gap is None:
            return position
        sinks = (position < self.count) & (jnp.arange(position.shape[2]) < self.count)
        return position + jnp.where(sinks, self.gap[:, None, None], 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreNoise:
    """Noise and temperature of Keyformer's score increments (equation 9)."""

    seed: UInt32[Array, " b"]
    """Random seed of each row, as in `pallas_kernels.noise.uniform_at`."""
    tau: Float[Array, " b"]
    """Temperature of each row, above 0."""
    layer: int = static(0)
    kind: str = static("gumbel")
    """`gumbel`, `gaussian` with the same mean and deviation, or `none`."""
    first: Int[Array, " b"] | None = None
    """Number of the first KV head here among the layer's; None for the layer's first."""


class Decoded(NamedTuple):
    """Attention of one token per row."""

    out: Float[Array, "b h g e"]
    """Attention over slots and low-rank memory together, at least float32; zeros if both are empty."""
    lse: Float[Array, "b h g"]
    """Logarithm of the sum of exponentials over both."""
    scores: Array | None
    """Probabilities over the slots alone, [b h g c] for `each`, [b h c] for the others; 0 in empty slots."""

    @property
    def partial(self) -> Partial:
        """The attention as `merge` takes it, with an axis of tokens."""
        return Partial(self.out[:, :, :, None], self.lse[..., None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DecodeAttention(Op[Decoded]):
    """Compute softmax attention over slots in one pass over keys and values, with the scores that policies request.

    Args:
        q: queries of one token per row, or of several that see the same slots; the g queries of a group share one KV
            head.
        k: keys [b h c d], in any order: an array, codes, another stored form, or keys that are rotated when read.
        v: values [b h c e] of any width: an array, codes, or another stored form; None if keys are values, too (MLA),
            which `pallas` on TPU then reads once. Codes are never decoded, except for queries of float64. `xla` on CPU
            and TPU, and `pallas` on TPU, split queries and weights into two digits of 8 bits; their error is about 1e-4
            of the largest result.
        position: position of the token in each slot, -1 if empty; slots after the query's position are masked, too.
        query_position: position of each row's token; -1 for a row of padding, which attends to nothing.
        spec: the layer's scale, soft cap, window and slopes.
        places: model positions of the query [b h] and the keys [b h c], if they are not `position`; only slopes use
            them.
        low_rank: low-rank attention to evicted tokens (LESS, equation 3), or None.
        sinks: first tokens that use another query than the rest, or that slopes place nearer, or None.
        scores: probabilities to return: of `each` query head, their `sum` over the group, or a `ScoreNoise` (Keyformer,
            equation 9, summed over the group); None for none.
        how: see `pallas_kernels.op.How`. `xla` takes everything. The others take queries of float32 and bfloat16 and
            arrays of the same dtype, g up to 16 (64 without scores, low rank and sinks), c up to 2^20 and R up to 128.
            They take no rotated keys, no stored form but codes, and no places together with slopes. They take up to 128
            sinks on TPU; on GPU they take sinks only without scores. `pallas` on TPU takes d and e that are multiples
            of 8 up to 640 (of 16 with four bits). `pallas` on GPU takes powers of two from 16 to 256 (from 32 with four
            bits), and less than 2^31 numbers in k and in v. `triton` is for GPU, needs jax-triton, and takes any d and
            e up to 256, but neither gaussian noise nor codes of four bits.

    Raises:
        ValueError: `scores` is unknown, or values are `LazyRope`.
    """

    q: Float[Array, "b h g d"]
    k: Operand
    v: Operand | None
    position: Int[Array, "b h c"]
    query_position: Int[Array, " b"]
    spec: AttentionSpec
    _: dataclasses.KW_ONLY
    places: Places | None = None
    low_rank: LowRank | None = None
    sinks: Sinks | None = None
    scores: str | ScoreNoise | None = None

    name = "decode_attention"
    backends = ("pallas_tpu", "pallas_gpu", "triton")

    @property
    def values(self) -> Operand:
        """Values, which may be the keys."""
        return self.k if self.v is None else self.v

    @property
    def score_noise(self) -> ScoreNoise | None:
        """The requested noise; None for scores without any."""
        return self.scores if isinstance(self.scores, ScoreNoise) else None

    def with_evicted(self, attended: Partial) -> Partial:
        """Merge attention over the slots with that to evicted tokens, if there is one."""
        if self.low_rank is None:
            return attended
        token = self.low_rank._replace(features=self.low_rank.features[:, :, :, None])
        return merge(attended, share_of_evicted(token))

    def validate(self) -> Self:
        if self.score_noise is not None and self.score_noise.kind not in noise.KINDS:
            raise ValueError(f"noise={self.score_noise.kind!r} is not one of {', '.join(noise.KINDS)}.")
        if self.score_noise is None and self.scores not in (None, "each", "sum"):
            raise ValueError(f"scores={self.scores!r} is not None, 'each', 'sum' or a ScoreNoise.")
        refuse_lazy_rope(self.values)
        return self

    def kernel(self, backend: str, options: Options) -> Decoded:
        sinks = self.sinks
        if backend == "pallas_tpu":
            return super().kernel(backend, options)
        if self.v is None:
            return dataclasses.replace(self, v=self.k).kernel(backend, options)
        if sinks is None:
            return super().kernel(backend, options)
        # XLA attends to the sinks. The kernel, which takes one query per head, attends to the other slots.
        first = self.position[:, :, : sinks.count]
        is_sink = first < sinks.count
        without_sinks = self.position.at[:, :, : sinks.count].set(jnp.where(is_sink, -1, first))
        slots = dataclasses.replace(self, position=without_sinks, sinks=None).kernel(backend, options)
        near_k, near_v = (cut(x, 0, first.shape[2], 2) for x in (self.k, self.v))
        sink_position = jnp.where(is_sink, first, -1)
        query_place = jnp.broadcast_to(self.query_position[:, None], sink_position.shape[:2])
        places = query_place, sinks.slope_positions(sink_position)
        near = DecodeAttention(sinks.q, near_k, near_v, sink_position, self.query_position, self.spec, places=places)
        merged = merge(slots.partial, near.reference(options).partial)
        return Decoded(merged.out[:, :, :, 0], merged.lse[..., 0], None)

    def limits(self, backend: str) -> Iterator[Limit]:
        alone = self.scores is None and self.low_rank is None and self.sinks is None
        most = MOST_QUERIES if alone else GROUP
        yield from operand_limits(self.q, self.k, self.values, self.spec, self.places, most)
        c, features = self.k.shape[2], 1 if self.low_rank is None else self.low_rank.features.shape[-1]
        yield c <= MOST_SLOTS, f"c={c} slots are more than {MOST_SLOTS}"
        yield features <= 128, f"R={features} features are more than 128"
        if backend == "pallas_tpu":
            count = 0 if self.sinks is None else self.sinks.count
            yield count <= LANES, f"{count} sinks are more than {LANES}"
        else:
            one = self.sinks is None or self.scores is None
            yield one, "scores of slots where sinks use a separate query"
        if backend.startswith("pallas"):
            yield from width_limits(self.k, self.values, backend, WIDEST)
        if backend == "triton":
            for name, width in (("d", self.k.shape[-1]), ("e", self.values.shape[-1])):
                yield width <= 256, f"{name}={width} is more than 256"
            bits = [x.bits for x in (self.k, self.values) if isinstance(x, Quantised)]
            yield 4 not in bits, "it has no codes of four bits"
            yield kind_of(self.scores) != "gaussian", "it has no gaussian noise"

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        settings = operand_settings(self.q, self.k, self.values, self.spec)
        rank = None if self.low_rank is None else self.low_rank.features.shape[-1]
        settings |= dict(scores=kind_of(self.scores), rank=rank, sinks=self.sinks is not None)
        return dict(b=self.q.shape[0], c=self.k.shape[2]), settings


decode_attention = operation(DecodeAttention)


def refuse_lazy_rope(v: Operand) -> None:
    """Raise an error if values are `LazyRope`, which only keys can be."""
    if isinstance(v, LazyRope):
        raise ValueError("v is LazyRope, but only keys are rotated; give an array or Quantised.")


def operand_settings(q: Array, k: Operand, v: Operand, spec: AttentionSpec) -> dict[str, Any]:
    """Return the settings of attention over slots or pages that distinguish tuning results."""
    _, h, g, d = q.shape
    numbers = dict(dtype=q.dtype.name, keys=numbers_of(k), values=numbers_of(v))
    return dict(h=h, g=g, d=d, e=v.shape[-1], **numbers, **spec.described())


def kind_of(scores: str | ScoreNoise | None) -> str | None:
    """Return the name of the requested scores: of a `ScoreNoise`, its noise."""
    return scores.kind if isinstance(scores, ScoreNoise) else scores


def operand_limits(
    q: Array, k: Operand, v: Operand, spec: AttentionSpec, places: Any, most: int = GROUP
) -> Iterator[Limit]:
    """Yield the limits that all kernels share, for slots or for pages."""
    forms = {type(x.decoder).__name__ for x in (k, v) if isinstance(x, Encoded)}
    yield not forms, f"keys and values are stored by {', '.join(sorted(forms))}, which xla alone decodes"
    yield not isinstance(k, LazyRope), "keys are rotated when they are read (LazyRope)"
    yield spec.slopes is None or places is None, "places that are not positions, together with slopes"
    arrays = [x for x in (q, k, v) if not isinstance(x, Quantised | Encoded | LazyRope)]
    same = q.dtype in (jnp.float32, jnp.bfloat16) and all(x.dtype == q.dtype for x in arrays)
    dtypes = ", ".join(str(x.codes.dtype if isinstance(x, Quantised) else x.dtype) for x in (q, *arrays[1:]))
    yield same, f"{'q, k, v'[: 3 * len(arrays) - 2]} of {dtypes} are not all float32 or all bfloat16"
    yield q.shape[2] <= most, f"g={q.shape[2]} query heads share a KV head, more than {most}"


def width_limits(k: Operand, v: Operand, backend: str, widest: int = 256) -> Iterator[Limit]:
    """Yield the limits of a Pallas kernel on the widths of keys and values; `widest` is that of TPUs."""
    for name, x, operand in (("d", "k", k), ("e", "v", v)):
        width, four = operand.shape[-1], isinstance(operand, Quantised) and operand.bits == 4
        if backend == "pallas_tpu":
            unit = 16 if four else 8
            yield width <= widest and width % unit == 0, f"{name}={width} is not a multiple of {unit} up to {widest}"
        else:
            smallest = 32 if four else 16
            within = smallest <= width <= 256 and width & (width - 1) == 0
            yield within, f"{name}={width} is not a power of two from {smallest} to 256"
            numbers = math.prod(operand.shape)
            yield numbers < 2**31, f"{x} holds {numbers} numbers, more than 32 bits can count"
