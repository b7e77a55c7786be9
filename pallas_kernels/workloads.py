"""Workloads of the kernels at any sizes, to benchmark them and to compile them for absent chips."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.benchmark import Program
from pallas_kernels.decode_attention import LowRank, ScoreNoise, Sinks, decode_attention
from pallas_kernels.evict import evict
from pallas_kernels.evict.api import Evict
from pallas_kernels.fused_decode import Hashed, Query, Ranking, Slots, Token, fused_decode
from pallas_kernels.fused_decode.api import FusedDecode
from pallas_kernels.hamming import Hashing, hamming
from pallas_kernels.less_memory import phi, psi
from pallas_kernels.operands import Quantised
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_attention import QueryTokens, prefill_attention
from pallas_kernels.ranking import EvictionRules
from pallas_kernels.rope import rope

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Workload(Program):
    """An operation at one size, with the figures that reports need."""

    forms: tuple[str, ...] = ("tpu", "gpu")
    """Platforms for which the operation has a Pallas kernel."""
    traffic: int | None = None
    """Bytes that must be read and written; None for all inputs and results, each once."""

    @property
    def bytes(self) -> int:
        """Bytes that must be read and written."""
        if self.traffic is not None:
            return self.traffic
        results = jax.eval_shape(functools.partial(self.run, implementation="xla", platform="cpu"), **self.shapes)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.shapes, results)))


def operand(shape: tuple[int, ...], dtype: DTypeLike, bits: int | None) -> Any:
    """Return the shapes of keys or values, or of their codes if `bits` is given."""
    if bits is None:
        return Shape(shape, dtype)
    *slots, width = shape
    codes = Shape(shape, jnp.int8) if bits == 8 else Shape((*slots, width // 2), jnp.uint8)
    return Quantised(codes, Shape(tuple(slots), jnp.float32))  # type: ignore[arg-type]


class Setup(NamedTuple):
    """Sizes and settings of a workload's attention."""

    b: int
    h: int
    g: int
    c: int
    """Slots, or tokens of a prompt."""
    d: int
    dtype: Any
    e: int | None = None
    """Width of values; None for that of keys."""
    bits: int | None = None
    """Bits of codes; None for numbers."""
    scores: str | None = None
    noisy: bool = False
    """Whether to return Keyformer's increments instead of `scores`."""
    slopes: bool = False
    window: int | None = None
    soft_cap: float | None = None
    shared: bool = False
    """Whether keys are values, too."""

    @property
    def width(self) -> int:
        """Width of values."""
        return self.d if self.e is None else self.e

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of queries, keys, values, positions, slopes and noise, with the settings of attention."""
        b, h, g, c, d, dtype = self[:6]
        values = None if self.shared else operand((b, h, c, self.width), dtype, self.bits)
        slopes: Any = Shape((h, g), jnp.float32) if self.slopes else None
        noise: Any = Shape((b,), jnp.uint32), Shape((b,), jnp.float32)
        return {
            "q": Shape((b, h, g, d), dtype),
            "k": operand((b, h, c, d), dtype, self.bits),
            "v": values,
            "position": Shape((b, h, c), jnp.int32),
            "spec": AttentionSpec(d**-0.5, self.soft_cap, self.window, slopes),
        } | ({"scores": ScoreNoise(*noise)} if self.noisy else {})


def decode_workload(label: str, sizes: Setup, *, rank: int = 0) -> Workload:
    """Return a `decode_attention` workload; `rank` adds LESS's low-rank attention."""
    b, h, g = sizes[:3]
    shapes = sizes.shapes() | {"query_position": Shape((b,), jnp.int32)}
    if rank:
        share = ((b, h, g, rank), (b, h, rank, sizes.width), (b, h, rank))
        shapes["low_rank"] = LowRank(*(operand(size, jnp.float32, None) for size in share))
    return Workload("decode_attention", label, functools.partial(decode_attention, scores=sizes.scores), shapes)


def paged_workload(
    label: str, b: int, h: int, g: int, pages: int, size: int, d: int, dtype: DTypeLike, *, bits: int | None = None
) -> Workload:
    """Return a `paged_attention` workload over a pool whose pages all belong to one layer."""
    shapes: dict[str, Any] = {
        "q": Shape((b, h, g, d), dtype),
        "k": operand((pages, size, d), dtype, bits),
        "v": operand((pages, size, d), dtype, bits),
        "position": Shape((pages, size), jnp.int32),
        "owner": Shape((pages,), jnp.int32),
        "pages": Shape((2,), jnp.int32),
        "query_position": Shape((b,), jnp.int32),
    }
    run = functools.partial(paged_attention, spec=AttentionSpec(d**-0.5))
    return Workload("paged_attention", label, run, shapes)


def prefill_workload(
    label: str,
    sizes: Setup,
    *extra: str,
    cached: int = 0,
    rows: int | None = None,
    readers: int = 1,
    **settings: Any,
) -> Workload:
    """Return a `prefill_attention` workload.

    `extra` names optional arrays, and `cached` keys come before the prompt's. `readers` divide the prompt's queries
    equally.
    """
    b, h, g, n, d, dtype = sizes[:6]
    c, queries = cached + n, n // readers
    keys = sizes._replace(c=c).shapes()
    shapes = {name: keys[name] for name in ("k", "v", "spec")} | {
        "q": Shape((b, h, g, queries, d), dtype),
        "query_position": Shape((b, queries), jnp.int32),
        "key_position": Shape((b, h, c), jnp.int32),
    }
    if readers > 1:
        shapes["query_tokens"] = QueryTokens(Shape((queries,), jnp.int32), n)  # type: ignore[arg-type]
    weights = (b, 1, queries) if rows is None else (b, 1, rows, queries)
    optional = {"noise": (b, h, c), "weights": weights}
    shapes |= {name: Shape(optional[name], jnp.float32) for name in extra}
    return Workload("prefill_attention", label, functools.partial(prefill_attention, **settings), shapes)


def feature_workload(
    which: str,
    label: str,
    b: int,
    h: int,
    g: int,
    t: int,
    d: int,
    dtype: DTypeLike,
    *,
    hidden: int = 512,
    rank: int = 8,
) -> Workload:
    """Return a workload of `phi` or `psi` of `less_memory`."""
    heads = (h, g) if which == "phi" else (h,)

    def weight(*shape: int) -> Shape:
        return Shape((*heads, *shape), jnp.float32)

    shapes = {"first": weight(d, hidden), "second": weight(hidden, rank)}
    if which == "phi":
        run, shapes = phi, {"q": Shape((b, h, g, t, d), dtype), **shapes}
    else:
        run, shapes = psi, {"k": Shape((b, h, t, d), dtype), **shapes}
        shapes |= {"third": weight(rank, rank), "outer_scale": weight(rank), "residual_scale": weight(rank)}
    return Workload("less_memory", f"{which}, {label}", run, shapes, forms=("tpu",))


def _choice(b: int, h: int, c: int, keep: bool) -> dict[str, Any]:
    """Return the shapes of positions and protections, by which operations choose a slot for a token."""
    protection = EvictionRules(*(Shape((b, h), jnp.int32) for _ in range(3)))  # type: ignore[arg-type]
    shapes: dict[str, Any] = {"position": Shape((b, h, c), jnp.int32), "new_position": Shape((b,), jnp.int32)}
    return shapes | {"protection": protection} | ({"keep": Shape((b, h, c), jnp.bool_)} if keep else {})


def evict_workload(
    label: str, b: int, h: int, c: int, d: int, dtype: DTypeLike, *, words: int = 0, keep: bool = False
) -> Workload:
    """Return an in-place `evict` workload: a pair, its accumulated score, and `words` a slot; integers have scales."""

    def run(**arrays: Any) -> Any:
        return evict(**arrays, scores=arrays["buffers"]["stats"])

    def contents(*slots: int) -> dict[str, Shape]:
        pairs = {name: Shape((b, h, *slots, d), dtype) for name in "kv"}
        if jnp.issubdtype(dtype, jnp.integer):
            pairs |= {f"{name}_scale": Shape((b, h, *slots), jnp.float32) for name in "kv"}
        if words:
            pairs["hashes"] = Shape((b, h, *slots, *(words,) * (words > 1)), jnp.uint32)
        return pairs | {"stats": Shape((b, h, *slots), jnp.float32)}

    shapes = _choice(b, h, c, keep) | {"buffers": contents(c), "added": contents()}
    pairs = 2 * b * h * d * jnp.dtype(dtype).itemsize
    return Workload(
        "evict",
        label,
        run,
        shapes,
        Evict.in_place,
        forms=("tpu",),
        traffic=8 * b * h * c + 3 * pairs,  # scores and positions; the evicted pair, the new pair, and its input
    )


def fused_workload(
    label: str,
    sizes: Setup,
    *,
    keep: bool = False,
    sink_count: int = 0,
    pairs: bool = False,
    adds: bool = False,
    hashed: int = 0,
) -> Workload:
    """Return an in-place `fused_decode` workload with an accumulated score.

    The first `sink_count` tokens use a separate query, and slopes place them nearer. `pairs` returns the evicted pairs.
    Requested scores are returned, or the kernel `adds` them to the score. If none are requested, the oldest token is
    evicted first. With codes of `hashed` bits, the farthest token by codes is evicted first, and there is no score.
    """
    scored, words = sizes.scores is not None or sizes.noisy, -(-hashed // 32)

    def run(
        slots: Slots,
        token: Token,
        protection: EvictionRules,
        q: Array,
        spec: AttentionSpec,
        keep: Array | None = None,
        sinks: Sinks | None = None,
        scores: Any = sizes.scores,
        planes: Any = None,
        key: Any = None,
        **how: Any,
    ) -> Any:
        importance = slots.buffers if scored else None
        if words:
            importance = Hashed(Hashing(planes, q, key[:, :, None]), slots.buffers)
        if adds or words:
            slots, token = slots._replace(buffers=None), token._replace(buffers=None)
        ranking, query = Ranking(importance, protection, keep), Query(q, spec, sinks, scores)
        done = fused_decode(slots, token, ranking, query, pairs=pairs, adds=adds, **how)
        buffers = done.attended.scores if adds else done.codes if words else done.slots.buffers
        return done._replace(slots=done.slots._replace(buffers=buffers))

    b, h, _, c, d, dtype = sizes[:6]
    shapes = sizes.shapes() | _choice(b, h, c, keep)

    def contents(*slots: int) -> Any:
        of_words = (Shape((b, h, *slots), jnp.uint32),) * words
        return of_words or Shape((b, h, *slots), jnp.float32)

    k, v, position, newest = (shapes.pop(name) for name in ("k", "v", "position", "new_position"))
    new_k, new_v = (operand((b, h, width), dtype, None) for width in (d, sizes.width))
    shapes |= {"slots": Slots(position, k, v, contents(c)), "token": Token(newest, new_k, new_v, contents())}
    if words:
        shapes |= {"planes": Shape((h, hashed, d), jnp.float32), "key": Shape((b, h, d), dtype)}
    if sink_count:
        shapes["sinks"] = Sinks(shapes["q"], sink_count, newest if sizes.slopes else None)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((k, v)))
    # Positions, and scores or words, before and after; requested scores.
    rows = 4 * b * h * c * (2 + 2 * max(words, 1) + (scored and not adds))
    return Workload(
        "fused_decode",
        label,
        run,
        shapes,
        FusedDecode.in_place,
        forms=("tpu",),
        traffic=stored + rows,
    )


def hamming_workload(label: str, b: int, h: int, g: int, c: int, bits: int, *, keep: bool = False) -> Workload:
    """Return a `hamming` workload."""
    words = -(-bits // 32)
    shapes = _choice(b, h, c, keep)
    shapes |= {"query": Shape((b, h, g, words), jnp.uint32), "codes": (Shape((b, h, c), jnp.uint32),) * words}
    return Workload("hamming", label, hamming, shapes, forms=("tpu",))


def rope_workload(label: str, b: int, h: int, g: int, d: int, dtype: DTypeLike) -> Workload:
    """Return a `rope` workload: queries, keys and values, all in the layout of the projections."""

    def run(q: Array, k: Array, v: Array, cos: Array, sin: Array, **how: Any) -> tuple[Array, ...]:
        q, k, v = (x.reshape(b, -1, d) for x in (q, k, v))
        return rope((q, k), cos, sin, (v,), **how)

    shapes = {name: Shape((b, heads * d), dtype) for name, heads in (("q", h * g), ("k", h), ("v", h))}
    shapes |= {name: Shape((b, d), jnp.float32) for name in ("cos", "sin")}
    return Workload("rope", label, run, shapes, forms=("tpu",))
