"""Workloads of each operation: its arguments at given sizes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.attention import AttentionSpec, Partial
from pallas_kernels.decode_attention import Gumbel, LowRank, Sinks, decode_attention
from pallas_kernels.decode_step import Hashed, decode_step
from pallas_kernels.evict import evict
from pallas_kernels.hamming import Hashing, hamming
from pallas_kernels.less_kernels import phi, psi, remember
from pallas_kernels.operands import Quantised
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.prefill_scores import Own, prefill_scores
from pallas_kernels.programs.program import Program, Shape
from pallas_kernels.ranking import Protection
from pallas_kernels.rotate import rotate


def operand(shape: tuple[int, ...], dtype: DTypeLike, bits: int | None) -> Any:
    """Return the shapes of keys or values, or of their codes if `bits` is given."""
    if bits is None:
        return Shape(shape, dtype)
    *slots, width = shape
    codes = Shape(shape, jnp.int8) if bits == 8 else Shape((*slots, width // 2), jnp.uint8)
    return Quantised(codes, Shape(tuple(slots), jnp.float32))  # type: ignore[arg-type]


def decode(
    label: str,
    b: int,
    h: int,
    g: int,
    c: int,
    d: int,
    dtype: DTypeLike,
    *,
    e: int | None = None,
    bits: int | None = None,
    scores: str | None = None,
    rank: int = 0,
    noisy: bool = False,
    slopes: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Program:
    """Return a `decode_attention` workload; `noisy` adds Keyformer's increments, `rank` LESS's low-rank attention."""
    e = d if e is None else e

    def run(
        seed: Array | None = None,
        tau: Array | None = None,
        low_rank: tuple[Array, Array, Array] | None = None,
        slopes: Array | None = None,
        **arrays: Any,
    ) -> Any:
        share = None if low_rank is None else LowRank(*low_rank)
        wanted = scores if seed is None or tau is None else Gumbel(seed, tau)
        spec = AttentionSpec(d**-0.5, soft_cap, window, slopes)
        return decode_attention(**arrays, spec=spec, low_rank=share, scores=wanted)

    shapes: dict[str, Any] = {
        "q": Shape((b, h, g, d), dtype),
        "k": operand((b, h, c, d), dtype, bits),
        "v": operand((b, h, c, e), dtype, bits),
        "position": Shape((b, h, c), jnp.int32),
        "query_position": Shape((b,), jnp.int32),
    }
    if noisy:
        shapes |= {"seed": Shape((b,), jnp.uint32), "tau": Shape((b,), jnp.float32)}
    if slopes:
        shapes["slopes"] = Shape((h, g), jnp.float32)
    if rank:
        sizes = ((b, h, g, rank), (b, h, rank, e), (b, h, rank))
        shapes["low_rank"] = tuple(Shape(size, jnp.float32) for size in sizes)
    return Program("decode_attention", label, run, shapes)


def paged(
    label: str, b: int, h: int, g: int, pages: int, size: int, d: int, dtype: DTypeLike, *, bits: int | None = None
) -> Program:
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
    return Program("paged_attention", label, run, shapes)


def prefill(
    label: str,
    b: int,
    h: int,
    g: int,
    n: int,
    d: int,
    dtype: DTypeLike,
    *extra: str,
    cached: int = 0,
    rows: int | None = None,
    e: int | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    readers: int = 1,
    **settings: Any,
) -> Program:
    """Return a `prefill_scores` workload.

    `extra` names optional arrays, `cached` keys come before the prompt's, and values are `e` wide. `readers` divide the
    prompt's queries equally.
    """
    c, own = cached + n, n // readers

    def run(slopes: Any = None, token: Any = None, **arrays: Any) -> Any:
        share = None if token is None else Own(token, n)
        return prefill_scores(**arrays, spec=AttentionSpec(d**-0.5, soft_cap, window, slopes), own=share, **settings)

    shapes = {
        "q": Shape((b, h, g, own, d), dtype),
        "k": Shape((b, h, c, d), dtype),
        "v": Shape((b, h, c, e or d), dtype),
        "query_position": Shape((b, own), jnp.int32),
        "key_position": Shape((b, h, c), jnp.int32),
    }
    if readers > 1:
        shapes["token"] = Shape((own,), jnp.int32)
    weights = (b, 1, own) if rows is None else (b, 1, rows, own)
    optional = {"noise": (b, h, c), "weights": weights, "slopes": (h, g)}
    shapes |= {name: Shape(optional[name], jnp.float32) for name in extra}
    return Program("prefill_scores", label, run, shapes)


def features(
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
) -> Program:
    """Return a workload of `phi` or `psi` of `less_kernels`."""
    heads = (h, g) if which == "phi" else (h,)

    def weight(*shape: int) -> Shape:
        return Shape((*heads, *shape), jnp.float32)

    shapes = {"first": weight(d, hidden), "second": weight(hidden, rank)}
    if which == "phi":
        return Program("less_kernels", f"phi, {label}", phi, {"q": Shape((b, h, g, t, d), dtype), **shapes}, ("tpu",))
    shapes |= {"third": weight(rank, rank), "outer_scale": weight(rank), "residual_scale": weight(rank)}
    return Program("less_kernels", f"psi, {label}", psi, {"k": Shape((b, h, t, d), dtype), **shapes}, ("tpu",))


def remembering(label: str, b: int, h: int, g: int, d: int, dtype: DTypeLike, *, hidden: int = 512) -> Program:
    """Return a workload of `remember` of `less_kernels`, in place, with weights in `dtype`."""
    rank, single = 8, jnp.float32
    pair = Shape((b, h, d), single), Shape((b, h, d), single), Shape((b, h), jnp.int32)
    scales = {name: Shape((h, rank), single) for name in ("outer_scale", "residual_scale")}
    shapes = {
        "memory": (Shape((b, h, rank, d), single), Shape((b, h, rank), single)),
        "evicted": pair,
        "q": Shape((b, h, g, d), dtype),
        "attended": Partial(Shape((b, h, g, d), single), Shape((b, h, g), single)),  # type: ignore[arg-type]
        "of_phi": {"first": Shape((h, g, d, hidden), dtype), "second": Shape((h, g, hidden, rank), dtype)},
        "of_psi": scales
        | {"first": Shape((h, d, hidden), dtype), "second": Shape((h, hidden, rank), dtype)}
        | {"third": Shape((h, rank, rank), single)},
    }
    label = f"remember, {label}"
    return Program(
        "less_kernels", label, remember, shapes, ("tpu",), ("memory",), lambda found: {"memory": (found.h, found.z)}
    )


def eviction(
    label: str, b: int, h: int, c: int, d: int, dtype: DTypeLike, *, words: int = 0, keep: bool = False
) -> Program:
    """Return an in-place `evict` workload: a pair, its accumulated score, and `words` a slot; integers have scales."""

    def run(sinks: Array, recent: Array, limit: Array, **arrays: Any) -> Any:
        return evict(**arrays, scores=arrays["buffers"]["stats"], protection=Protection(sinks, recent, limit))

    def held(*slots: int) -> dict[str, Shape]:
        pairs = {name: Shape((b, h, *slots, d), dtype) for name in "kv"}
        if jnp.issubdtype(dtype, jnp.integer):
            pairs |= {f"{name}_scale": Shape((b, h, *slots), jnp.float32) for name in "kv"}
        if words:
            pairs["hashes"] = Shape((b, h, *slots, *(words,) * (words > 1)), jnp.uint32)
        return pairs | {"stats": Shape((b, h, *slots), jnp.float32)}

    shapes: dict[str, Any] = {name: Shape((b, h), jnp.int32) for name in Protection._fields}
    shapes |= {"position": Shape((b, h, c), jnp.int32), "new_position": Shape((b,), jnp.int32)}
    shapes |= {"buffers": held(c), "added": held()}
    if keep:
        shapes["keep"] = Shape((b, h, c), jnp.bool_)
    pairs = 2 * b * h * d * jnp.dtype(dtype).itemsize
    return Program(
        "evict",
        label,
        run,
        shapes,
        forms=("tpu",),
        donated=("position", "buffers"),
        again=lambda results: {"position": results[3], "buffers": results[4]},
        traffic=8 * b * h * c + 3 * pairs,  # scores and positions; the evicted pair, the new pair, and its input
    )


def stepping(
    label: str,
    b: int,
    h: int,
    g: int,
    c: int,
    d: int,
    dtype: DTypeLike,
    *,
    e: int | None = None,
    bits: int | None = None,
    scores: str | None = None,
    noisy: bool = False,
    slopes: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    keep: bool = False,
    apart: int = 0,
    pairs: bool = False,
    adds: bool = False,
    hashed: int = 0,
) -> Program:
    """Return an in-place `decode_step` workload with an accumulated score; `noisy` adds Keyformer's increments.

    The first `apart` tokens use a separate query, and slopes place them nearer. `pairs` returns the evicted pairs.
    Requested scores are returned, or the kernel `adds` them to the score. If none are requested, the oldest token is
    evicted first. With codes of `hashed` bits, the farthest token by codes is evicted first, and there is no score.
    """

    def run(
        sinks: Array,
        recent: Array,
        limit: Array,
        seed: Array | None = None,
        tau: Array | None = None,
        slopes: Array | None = None,
        near: Array | None = None,
        **arrays: Any,
    ) -> Any:
        standing, (*pair, _) = arrays["buffers"] if asks else None, arrays["added"]
        if words:
            planes, keys = arrays.pop("planes"), arrays.pop("hashed_key")
            standing = Hashed(Hashing(planes, arrays["q"], keys[:, :, None]), arrays["buffers"])
        if adds or words:
            arrays |= {"buffers": None, "added": (*pair, None)}
        asked: dict[str, Any] = dict(standing=standing, protection=Protection(sinks, recent, limit))
        asked |= dict(spec=AttentionSpec(d**-0.5, soft_cap, window, slopes))
        gap = None if slopes is None else arrays["new_position"]
        asked |= dict(sinks=None if near is None else Sinks(near, apart, gap))
        wanted = scores if seed is None or tau is None else Gumbel(seed, tau)
        done = decode_step(**arrays, **asked, scores=wanted, pairs=pairs, adds=adds)
        if adds:
            return done._replace(buffers=done.attended.scores)
        return done._replace(buffers=done.codes) if words else done

    asks = scores is not None or noisy
    e, words = d if e is None else e, -(-hashed // 32)
    shapes: dict[str, Any] = {name: Shape((b, h), jnp.int32) for name in Protection._fields}
    shapes |= {"position": Shape((b, h, c), jnp.int32), "new_position": Shape((b,), jnp.int32)}
    shapes |= {"k": operand((b, h, c, d), dtype, bits), "v": operand((b, h, c, e), dtype, bits)}

    def held(*slots: int) -> Any:
        of_words = (Shape((b, h, *slots), jnp.uint32),) * words
        return of_words or Shape((b, h, *slots), jnp.float32)

    new = (Shape((b, h, d), dtype), Shape((b, h, e), dtype), held())
    shapes |= {"q": Shape((b, h, g, d), dtype), "buffers": held(c), "added": new}
    if words:
        shapes |= {"planes": Shape((h, hashed, d), jnp.float32), "hashed_key": Shape((b, h, d), dtype)}
    if noisy:
        shapes |= {"seed": Shape((b,), jnp.uint32), "tau": Shape((b,), jnp.float32)}
    if slopes:
        shapes["slopes"] = Shape((h, g), jnp.float32)
    if keep:
        shapes["keep"] = Shape((b, h, c), jnp.bool_)
    if apart:
        shapes["near"] = Shape((b, h, g, d), dtype)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((shapes["k"], shapes["v"])))
    # Positions, and scores or words, before and after; requested scores.
    rows = 4 * b * h * c * (2 + 2 * max(words, 1) + (asks and not adds))
    return Program(
        "decode_step",
        label,
        run,
        shapes,
        forms=("tpu",),
        donated=("position", "k", "v", "buffers"),
        again=lambda found: {name: getattr(found, name) for name in ("position", "k", "v", "buffers")},
        traffic=stored + rows,
    )


def hashes(label: str, b: int, h: int, g: int, c: int, bits: int, *, keep: bool = False) -> Program:
    """Return a `hamming` workload."""

    def run(sinks: Array, recent: Array, limit: Array, **arrays: Any) -> Array:
        return hamming(**arrays, protection=Protection(sinks, recent, limit))

    shapes: dict[str, Any] = {name: Shape((b, h), jnp.int32) for name in Protection._fields}
    shapes |= {"position": Shape((b, h, c), jnp.int32), "new_position": Shape((b,), jnp.int32)}
    words = -(-bits // 32)
    shapes |= {"query": Shape((b, h, g, words), jnp.uint32), "codes": (Shape((b, h, c), jnp.uint32),) * words}
    if keep:
        shapes["keep"] = Shape((b, h, c), jnp.bool_)
    return Program("hamming", label, run, shapes, forms=("tpu",))


def rotating(label: str, b: int, h: int, g: int, d: int, dtype: DTypeLike) -> Program:
    """Return a `rotate` workload: queries, keys and values, all in the layout of the projections."""

    def run(q: Array, k: Array, v: Array, cos: Array, sin: Array, **how: Any) -> tuple[Array, ...]:
        q, k, v = (x.reshape(b, -1, d) for x in (q, k, v))
        return rotate((q, k), cos, sin, (v,), **how)

    shapes = {name: Shape((b, heads * d), dtype) for name, heads in (("q", h * g), ("k", h), ("v", h))}
    shapes |= {name: Shape((b, d), jnp.float32) for name in ("cos", "sin")}
    return Program("rotate", label, run, shapes, ("tpu",))
