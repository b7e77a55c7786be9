"""Workloads of each operation: its arguments at given sizes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.decode_attention import Gumbel, LowRank, Sinks, decode_attention
from pallas_kernels.decode_step import Hashed, Query, Ranking, Slots, Token, decode_step
from pallas_kernels.evict import evict
from pallas_kernels.hamming import Hashing, hamming
from pallas_kernels.less_kernels import phi, psi
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


class Sizes(NamedTuple):
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

    @property
    def width(self) -> int:
        """Width of values."""
        return self.d if self.e is None else self.e

    def shapes(self) -> dict[str, Any]:
        """Return the shapes of queries, keys, values, positions, noise and slopes."""
        b, h, g, c, d, dtype = self[:6]
        found: dict[str, Any] = {
            "q": Shape((b, h, g, d), dtype),
            "k": operand((b, h, c, d), dtype, self.bits),
            "v": operand((b, h, c, self.width), dtype, self.bits),
            "position": Shape((b, h, c), jnp.int32),
        }
        if self.noisy:
            found |= {"seed": Shape((b,), jnp.uint32), "tau": Shape((b,), jnp.float32)}
        return found | ({"slopes": Shape((h, g), jnp.float32)} if self.slopes else {})

    def settings(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Take noise and slopes out of the arrays, and return the arguments `spec` and `scores`."""
        spec = AttentionSpec(self.d**-0.5, self.soft_cap, self.window, arrays.pop("slopes", None))
        return dict(spec=spec, scores=Gumbel(arrays.pop("seed"), arrays.pop("tau")) if self.noisy else self.scores)


def decode(label: str, sizes: Sizes, *, rank: int = 0) -> Program:
    """Return a `decode_attention` workload; `rank` adds LESS's low-rank attention."""

    def run(low_rank: tuple[Array, Array, Array] | None = None, **arrays: Any) -> Any:
        share = None if low_rank is None else LowRank(*low_rank)
        return decode_attention(low_rank=share, **sizes.settings(arrays), **arrays)

    b, h, g = sizes[:3]
    shapes = sizes.shapes() | {"query_position": Shape((b,), jnp.int32)}
    if rank:
        share = ((b, h, g, rank), (b, h, rank, sizes.width), (b, h, rank))
        shapes["low_rank"] = tuple(Shape(size, jnp.float32) for size in share)
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
    sizes: Sizes,
    *extra: str,
    cached: int = 0,
    rows: int | None = None,
    readers: int = 1,
    **settings: Any,
) -> Program:
    """Return a `prefill_scores` workload.

    `extra` names optional arrays, and `cached` keys come before the prompt's. `readers` divide the prompt's queries
    equally.
    """
    b, h, g, n, d, dtype = sizes[:6]
    c, own = cached + n, n // readers

    def run(slopes: Any = None, token: Any = None, **arrays: Any) -> Any:
        share = None if token is None else Own(token, n)
        spec = AttentionSpec(d**-0.5, sizes.soft_cap, sizes.window, slopes)
        return prefill_scores(**arrays, spec=spec, own=share, **settings)

    shapes = {
        "q": Shape((b, h, g, own, d), dtype),
        "k": Shape((b, h, c, d), dtype),
        "v": Shape((b, h, c, sizes.width), dtype),
        "query_position": Shape((b, own), jnp.int32),
        "key_position": Shape((b, h, c), jnp.int32),
    }
    if readers > 1:
        shapes["token"] = Shape((own,), jnp.int32)
    weights = (b, 1, own) if rows is None else (b, 1, rows, own)
    optional = {"noise": (b, h, c), "weights": weights, "slopes": (h, g)}
    wanted = (*extra, *(["slopes"] if sizes.slopes else []))
    shapes |= {name: Shape(optional[name], jnp.float32) for name in wanted}
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


def _choice(b: int, h: int, c: int, keep: bool) -> dict[str, Any]:
    """Return the shapes of positions and protections, by which operations choose a slot for a token."""
    protection = Protection(*(Shape((b, h), jnp.int32) for _ in range(3)))  # type: ignore[arg-type]
    shapes: dict[str, Any] = {"position": Shape((b, h, c), jnp.int32), "new_position": Shape((b,), jnp.int32)}
    return shapes | {"protection": protection} | ({"keep": Shape((b, h, c), jnp.bool_)} if keep else {})


def eviction(
    label: str, b: int, h: int, c: int, d: int, dtype: DTypeLike, *, words: int = 0, keep: bool = False
) -> Program:
    """Return an in-place `evict` workload: a pair, its accumulated score, and `words` a slot; integers have scales."""

    def run(**arrays: Any) -> Any:
        return evict(**arrays, scores=arrays["buffers"]["stats"])

    def held(*slots: int) -> dict[str, Shape]:
        pairs = {name: Shape((b, h, *slots, d), dtype) for name in "kv"}
        if jnp.issubdtype(dtype, jnp.integer):
            pairs |= {f"{name}_scale": Shape((b, h, *slots), jnp.float32) for name in "kv"}
        if words:
            pairs["hashes"] = Shape((b, h, *slots, *(words,) * (words > 1)), jnp.uint32)
        return pairs | {"stats": Shape((b, h, *slots), jnp.float32)}

    shapes = _choice(b, h, c, keep) | {"buffers": held(c), "added": held()}
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
    sizes: Sizes,
    *,
    keep: bool = False,
    apart: int = 0,
    pairs: bool = False,
    adds: bool = False,
    hashed: int = 0,
) -> Program:
    """Return an in-place `decode_step` workload with an accumulated score.

    The first `apart` tokens use a separate query, and slopes place them nearer. `pairs` returns the evicted pairs.
    Requested scores are returned, or the kernel `adds` them to the score. If none are requested, the oldest token is
    evicted first. With codes of `hashed` bits, the farthest token by codes is evicted first, and there is no score.
    """
    asks, words = sizes.scores is not None or sizes.noisy, -(-hashed // 32)

    def run(
        protection: Protection,
        implementation: str,
        platform: str | None = None,
        keep: Array | None = None,
        **arrays: Any,
    ) -> Any:
        asked, q, new_position = sizes.settings(arrays), arrays["q"], arrays["new_position"]
        buffers, (new_k, new_v, added) = arrays["buffers"], arrays["added"]
        standing = buffers if asks else None
        if words:
            standing = Hashed(Hashing(arrays["planes"], q, arrays["hashed_key"][:, :, None]), buffers)
        if adds or words:
            buffers = added = None
        if "near" in arrays:
            asked["sinks"] = Sinks(arrays["near"], apart, new_position if sizes.slopes else None)
        done = decode_step(
            Slots(arrays["position"], arrays["k"], arrays["v"], buffers),
            Token(new_position, new_k, new_v, added),
            Ranking(standing, protection, keep),
            Query(q, **asked),
            pairs=pairs,
            adds=adds,
            implementation=implementation,
            platform=platform,
        )
        held = done.attended.scores if adds else done.codes if words else done.slots.buffers
        return done._replace(slots=done.slots._replace(buffers=held))

    b, h, g, c, d, dtype = sizes[:6]
    shapes = sizes.shapes() | _choice(b, h, c, keep)

    def held(*slots: int) -> Any:
        of_words = (Shape((b, h, *slots), jnp.uint32),) * words
        return of_words or Shape((b, h, *slots), jnp.float32)

    shapes |= {"buffers": held(c), "added": (Shape((b, h, d), dtype), Shape((b, h, sizes.width), dtype), held())}
    if words:
        shapes |= {"planes": Shape((h, hashed, d), jnp.float32), "hashed_key": Shape((b, h, d), dtype)}
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
        again=lambda found: found.slots._asdict(),
        traffic=stored + rows,
    )


def hashes(label: str, b: int, h: int, g: int, c: int, bits: int, *, keep: bool = False) -> Program:
    """Return a `hamming` workload."""
    words = -(-bits // 32)
    shapes = _choice(b, h, c, keep)
    shapes |= {"query": Shape((b, h, g, words), jnp.uint32), "codes": (Shape((b, h, c), jnp.uint32),) * words}
    return Program("hamming", label, hamming, shapes, forms=("tpu",))


def rotating(label: str, b: int, h: int, g: int, d: int, dtype: DTypeLike) -> Program:
    """Return a `rotate` workload: queries, keys and values, all in the layout of the projections."""

    def run(q: Array, k: Array, v: Array, cos: Array, sin: Array, **how: Any) -> tuple[Array, ...]:
        q, k, v = (x.reshape(b, -1, d) for x in (q, k, v))
        return rotate((q, k), cos, sin, (v,), **how)

    shapes = {name: Shape((b, heads * d), dtype) for name, heads in (("q", h * g), ("k", h), ("v", h))}
    shapes |= {name: Shape((b, d), jnp.float32) for name in ("cos", "sin")}
    return Program("rotate", label, run, shapes, ("tpu",))
