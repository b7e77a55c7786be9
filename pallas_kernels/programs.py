"""Workloads of the kernels at sizes of real models: compiled for absent chips, lowered to CUDA, and benchmarked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
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
from pallas_kernels.ranking import Protection
from pallas_kernels.rotate import rotate

Shape = jax.ShapeDtypeStruct
IMPLEMENTATIONS = ("xla", "pallas", "triton", "mosaic")

H100 = AbstractMesh((1,), ("one",), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu"))
"""Device that kernels are lowered for if there is no GPU to ask."""


@dataclasses.dataclass(frozen=True)
class Program:
    """An operation at one size."""

    op: str
    label: str
    run: Callable[..., Any]
    """Function of `shapes` by name, and of `implementation` and `platform`."""
    shapes: dict[str, Any]
    forms: tuple[str, ...] = ("tpu", "gpu")
    """Platforms for which the operation has a Pallas kernel."""
    donated: tuple[str, ...] = ()
    """Inputs whose memory the results reuse; a call makes them invalid."""
    again: Callable[[Any], dict[str, Any]] = lambda results: {}
    """Function from the last call's results to the next call's donated inputs."""
    traffic: int | None = None
    """Bytes that must be read and written; None for all inputs and results, each once."""

    def __str__(self) -> str:
        return f"{self.op} {self.label}"

    def jit(self, implementation: str, platform: str | None = None) -> Any:
        """Return the compiled function of `shapes` by name; a call raises `Unsupported` if it cannot run."""
        run = functools.partial(self.run, implementation=implementation, platform=platform)
        return jax.jit(run, donate_argnames=self.donated)

    def lower(self, implementation: str, platform: str, shapes: dict[str, Any] | None = None) -> jax.stages.Lowered:
        """Lower the program for a `platform` (`tpu`, `cuda`), which need not be present.

        Raises:
            Unsupported: the implementation cannot run these shapes there.
        """
        traced = self.trace(implementation, platform, shapes)
        with _of(platform):
            return traced.lower(lowering_platforms=(platform,))

    def trace(self, implementation: str, platform: str, shapes: dict[str, Any] | None = None) -> Any:
        """Trace the program for a `platform` without lowering it; its `jaxpr` holds the kernels.

        Raises:
            Unsupported: the implementation cannot run these shapes there.
        """
        with _of(platform):
            return self.jit(implementation, platform).trace(**(self.shapes if shapes is None else shapes))

    def arrays(self) -> dict[str, Any]:
        """Return random inputs: every slot is live, and queries come after all slots."""
        rng = np.random.default_rng(0)

        def fill(path: tuple[Any, ...], shape: Shape) -> jax.Array:
            # The argument's name, and its field's name if it has fields.
            name, field = (str(getattr(key, "key", getattr(key, "name", ""))) for key in (path[0], path[-1]))
            if shape.dtype in (jnp.int8, jnp.uint8):
                info = jnp.iinfo(shape.dtype)
                return jnp.asarray(rng.integers(info.min + 1, info.max, size=shape.shape, dtype=shape.dtype))
            if jnp.issubdtype(shape.dtype, jnp.floating):
                key = jax.random.key(int(rng.integers(2**31)))
                made = jax.random.normal(key, shape.shape, shape.dtype)
                if field == "scale":  # decoded numbers are around one
                    return (jnp.abs(made) + 1) / (8 if getattr(self.shapes[name], "bits", 8) == 4 else 128)
                if (name == "layers" or field in ("first", "second", "third")) and made.ndim > 2:  # linear maps
                    return made * made.shape[-2] ** -0.5
                if name == "q":  # attention that peaks at a few slots shows errors best
                    return 3 * made
                return jnp.abs(made) + 1 if field == "tau" or name in ("weights", "low_rank", "memory") else made
            if shape.dtype == jnp.uint32:
                return jnp.asarray(rng.integers(2**32, size=shape.shape, dtype=np.uint32))
            if shape.dtype == jnp.bool_:  # slots to keep: one in eight
                return jnp.asarray(rng.random(shape.shape) < 1 / 8)
            if name in ("owner", "pages"):  # each head's pages are adjacent, and all pages are used
                pages = self.shapes["position"].shape[0]
                heads = math.prod(self.shapes["q"].shape[:2])
                return jnp.asarray([0, pages], jnp.int32) if name == "pages" else jnp.arange(pages) * heads // pages
            if name in ("position", "key_position"):
                return jnp.broadcast_to(jnp.arange(shape.shape[-1], dtype=shape.dtype), shape.shape)
            if "key_position" in self.shapes and name != "places":
                # A prompt's queries are its newest tokens; one of several readers has its first tokens.
                keys, queries = self.shapes["key_position"].shape[-1], self.shapes["q"].shape[3]
                first = 0 if {"own", "token"} & self.shapes.keys() else keys - queries
                return jnp.broadcast_to(first + jnp.arange(queries, dtype=shape.dtype), shape.shape)
            if name in ("places", "scores"):  # places, which matter only with slopes; numbers of layers and heads
                return jnp.zeros(shape.shape, shape.dtype)
            # Queries come after every slot. A head may use all of its slots; half of them are recent tokens.
            share = {"sinks": 0, "recent": 2}.get(field, 1)
            return jnp.full(shape.shape, share and self.shapes["position"].shape[-1] // share, shape.dtype)

        return jax.tree_util.tree_map_with_path(fill, self.shapes)

    @property
    def bytes(self) -> int:
        """Bytes that must be read and written."""
        if self.traffic is not None:
            return self.traffic
        results = jax.eval_shape(functools.partial(self.run, implementation="xla", platform="cpu"), **self.shapes)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((self.shapes, results)))


def _of(platform: str) -> contextlib.AbstractContextManager[Any]:
    return use_abstract_mesh(H100) if platform == "cuda" else contextlib.nullcontext()


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


def programs() -> Iterator[Program]:
    """Yield workloads of every operation at sizes of real models, and at odd sizes."""
    half, whole = jnp.bfloat16, jnp.float32
    yield decode("8 heads x 4, 4096 slots, d 128, bfloat16", 32, 8, 4, 4096, 128, half)
    yield decode("the same with Gumbel scores and rank 8", 32, 8, 4, 4096, 128, half, rank=8, noisy=True)
    yield decode("the same with every probability", 32, 8, 4, 4096, 128, half, scores="each")
    yield decode("multi-head, 256 slots, rank 8", 64, 32, 1, 256, 128, half, rank=8, scores="sum")
    yield decode("multi-query x 16, 65536 slots, d 256", 1, 1, 16, 65536, 256, half, scores="sum")
    yield decode("float32, d 64, ALiBi, window", 2, 4, 4, 1024, 64, whole, slopes=True, scores="each", window=512)
    yield decode("embedded model, 64 slots", 1, 2, 2, 64, 32, whole, scores="sum")
    for bits in (8, 4):
        yield decode(f"8 heads x 4, 4096 slots, d 128, {bits} bits", 32, 8, 4, 4096, 128, half, bits=bits)
        yield decode(f"multi-head, 256 slots, {bits} bits", 64, 32, 1, 256, 128, half, bits=bits, scores="sum")
        yield decode(f"float32, 1000 slots, d 64, {bits} bits", 2, 4, 4, 1000, 64, whole, bits=bits, noisy=True)
    yield decode("4096 slots, d 256 and e 64, soft cap", 8, 8, 4, 4096, 256, half, e=64, soft_cap=50.0)
    yield paged("8 heads x 4, 16384 pages of 32, d 128, bfloat16", 32, 8, 4, 16384, 32, 128, half)
    yield paged("32 heads x 1, 28672 pages of 16, d 128, bfloat16", 64, 32, 1, 28672, 16, 128, half)
    yield paged("float32, d 64, 100 pages of 16", 2, 4, 2, 100, 16, 64, whole)
    yield paged("8 heads x 4, 16384 pages of 32, d 128, 8 bits", 32, 8, 4, 16384, 32, 128, half, bits=8)
    yield paged("8 heads x 4, 4096 pages of 32, d 256, 4 bits", 32, 8, 4, 4096, 32, 256, half, bits=4)
    yield eviction("8 heads, 4096 slots, d 128, bfloat16", 32, 8, 4096, 128, half)
    yield eviction("32 heads, 256 slots, d 128, bfloat16", 64, 32, 256, 128, half)
    yield eviction("float32, 16384 slots, d 256", 1, 1, 16384, 256, whole)
    yield eviction("int8, 8 heads, 4096 slots, d 128", 32, 8, 4096, 128, jnp.int8)
    yield eviction("int4, 8 heads, 4096 slots, d 256, hashes", 32, 8, 4096, 128, jnp.uint8, words=1, keep=True)
    yield eviction("4 words a slot, 8 heads, 4096 slots, d 128, bfloat16", 32, 8, 4096, 128, half, words=4)
    yield stepping("8 heads x 4, 4096 slots, d 128, bfloat16", 32, 8, 4, 4096, 128, half, scores="sum")
    yield stepping("8 heads x 8, 1008 slots, d 128, bfloat16", 32, 8, 8, 1008, 128, half, keep=True, soft_cap=50.0)
    yield stepping("multi-head, 256 slots, d 128, bfloat16", 64, 32, 1, 256, 128, half, scores="sum")
    yield stepping("the same with Gumbel scores", 64, 32, 1, 256, 128, half, noisy=True)
    yield stepping("multi-head, 208 slots, 4 sinks, d 128, bfloat16", 64, 32, 1, 208, 128, half, apart=4)
    yield stepping("the same with ALiBi", 64, 32, 1, 208, 128, half, apart=4, slopes=True)
    yield stepping(
        "multi-head, 208 slots, pairs that leave, bfloat16", 64, 32, 1, 208, 128, half, scores="sum", pairs=True
    )
    yield stepping("the same without pairs, in the scores", 64, 32, 1, 208, 128, half, scores="sum", adds=True)
    yield stepping("8 heads x 4, 4096 slots, Gumbel, in the scores", 32, 8, 4, 4096, 128, half, noisy=True, adds=True)
    yield stepping("multi-head, 208 slots, hashes, bfloat16", 64, 32, 1, 208, 128, half, hashed=16)
    yield stepping("8 heads x 4, 4096 slots, hashes of 2 words", 32, 8, 4, 4096, 128, half, hashed=64)
    yield stepping("float32, d 64, ALiBi, window", 2, 4, 4, 1024, 64, whole, slopes=True, scores="each", window=512)
    yield stepping("8 heads x 4, 4096 slots, d 128, 8 bits", 32, 8, 4, 4096, 128, half, bits=8, scores="sum")
    yield stepping(
        "multi-head, 208 slots, 8 bits, in the scores", 64, 32, 1, 208, 128, half, bits=8, scores="sum", adds=True
    )
    yield stepping("4096 slots, d 256 and e 128, 4 bits", 32, 8, 2, 4096, 256, half, e=128, bits=4, noisy=True)
    yield stepping("embedded model, 16 slots", 1, 2, 2, 16, 32, whole, scores="sum")
    yield hashes("8 heads x 4, 4096 slots, 16 bits", 32, 8, 4, 4096, 16)
    yield hashes("the same, 64 bits", 32, 8, 4, 4096, 64, keep=True)
    yield prefill("8 heads x 4, 8192 tokens, d 128, bfloat16", 1, 8, 4, 8192, 128, half)
    yield prefill("the same without scores", 1, 8, 4, 8192, 128, half, scores=False)
    yield prefill("the same with Gumbel scores at temperature 2", 1, 8, 4, 8192, 128, half, "noise", tau=2.0)
    yield prefill("512 tokens after 1024 slots, weights", 2, 4, 1, 512, 64, half, "weights", cached=1024, window=256)
    yield prefill("float32, d 256, 1000 tokens", 1, 1, 4, 1000, 256, whole, "noise")
    yield prefill("multi-head, ALiBi, 2048 tokens", 1, 32, 1, 2048, 128, half, "slopes")
    yield prefill("8 rows of weights, soft cap", 1, 8, 4, 4096, 128, half, "weights", rows=8, soft_cap=50.0)
    yield prefill("16 rows of weights, values of 64", 1, 4, 4, 2048, 128, half, "weights", "noise", rows=16, e=64)
    yield prefill("a quarter of 8192 tokens, window", 1, 8, 4, 8192, 128, half, readers=4, window=1024)
    yield prefill("float32, 128 tokens after 262144 slots", 1, 1, 1, 128, 64, whole, "noise", cached=1 << 18, tau=2.0)
    yield prefill("embedded model, 48 tokens", 1, 2, 2, 48, 32, whole)
    yield rotating("64 rows, 32 heads, d 128, bfloat16", 64, 32, 1, 128, half)
    yield rotating("32 rows, 8 heads x 4, d 128, bfloat16", 32, 8, 4, 128, half)
    yield rotating("8 rows, 8 heads x 2, d 128, float32", 8, 8, 2, 128, whole)
    yield features("phi", "one token of 64 rows, 32 heads, d 128", 64, 32, 1, 1, 128, half)
    yield features("psi", "one token of 64 rows, 32 heads, d 128", 64, 32, 1, 1, 128, half)
    yield remembering("64 rows, 32 heads, d 128", 64, 32, 1, 128, half)
    yield remembering("32 rows, 8 heads x 4, d 128", 32, 8, 4, 128, half)
    yield remembering("one row, 8 heads x 2, d 128", 1, 8, 2, 128, half)
    yield remembering("float32, one row, 8 heads x 2, d 64", 1, 8, 2, 64, whole, hidden=256)
    yield features("phi", "4096 tokens, 8 heads x 4, d 128", 1, 8, 4, 4096, 128, half)
    yield features("psi", "4096 tokens, 8 heads, d 128", 1, 8, 4, 4096, 128, half)
    yield features("psi", "float32, d 256, hidden 2048", 1, 1, 1, 100, 256, whole, hidden=2048, rank=16)
