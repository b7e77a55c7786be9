"""A decode step in one pass: cases; what is expected of them is what eviction, then decode attention, expect."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.decode_attention import ScoreNoise, Sinks
from pallas_kernels.fused_decode import Hashed, Query, Ranking, Slots, Token, fused_decode
from pallas_kernels.hamming import Hashing
from pallas_kernels.operands import Quantised
from tests.kernel_cases import decode_attention, evict, hamming
from tests.kernels import TPU_WAYS, XLA, Case, normal


def oracle(inputs: dict[str, Any], *, shrinks: bool, pairs: bool, adds: bool, **settings: Any) -> dict[str, Any]:
    """The oracle of eviction, then that of attention."""
    standing = inputs["standing"]
    held = {name: inputs[name] for name in ("k", "v", "buffers")}
    added = dict(zip(held, inputs["added"], strict=True))
    for name in "kv":
        if isinstance(held[name], Quantised):
            added[name] = decode_attention.quantised(np.asarray(added[name]), held[name].bits)
    if standing is None:
        standing = inputs["position"].astype(np.float64)
    elif isinstance(standing, Hashed):
        (planes, *vectors), codes = standing
        queries, keys = (hamming.hashed(np.asarray(planes), np.asarray(x, np.float64)) for x in vectors)
        held["codes"], added["codes"] = codes, tuple(keys[:, :, 0, word] for word in range(keys.shape[3]))
        standing = hamming.nearness(queries, codes)  # type: ignore[arg-type]
    exchanged = {"scores": standing, "buffers": held, "added": added}
    exchanged |= {name: inputs[name] for name in ("position", "new_position", "protection", "keep") if name in inputs}
    found = evict.oracle(exchanged, shrinks=shrinks)
    names = [name for name in found if name.startswith("buffer")]
    held = jax.tree.unflatten(jax.tree.structure(held), [found[name] for name in names])
    asked = {name: inputs[name] for name in ("q", "slopes", "seed", "tau", "first", "sinks") if name in inputs}
    asked |= {"k": held["k"], "v": held["v"], "position": found["position"], "query_position": inputs["new_position"]}
    attended = decode_attention.oracle(asked, **settings)
    taken = jax.tree.unflatten(jax.tree.structure(held), [found.pop(name.replace("buffer", "taken")) for name in names])
    if adds:
        begun = np.where(np.arange(standing.shape[2]) == np.asarray(found["slot"])[..., None], 0, standing)
        attended["scores"] = begun + attended["scores"]
    return found | attended | (left((taken["k"], taken["v"]), inputs["new_position"]) if pairs else {})


def left(pair: Any, new_position: Any) -> dict[str, Any]:
    """What has left, and zeros for rows of padding, of which anything may be said."""
    writes = new_position >= 0
    return {
        f"pair{i}": jnp.where(writes.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0)
        for i, leaf in enumerate(jax.tree.leaves(pair))
    }


def run(
    inputs: dict[str, Any],
    *,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    scores: Any,
    shrinks: bool,
    **options: Any,
) -> dict[str, Any]:
    inputs = dict(inputs)
    spec = AttentionSpec(scale, soft_cap, window, inputs.pop("slopes", None))
    if "seed" in inputs:
        noise = decode_attention.LAYER, scores, inputs.pop("first", None)
        scores = ScoreNoise(inputs.pop("seed"), inputs.pop("tau"), *noise)
    done = fused_decode(
        Slots(*(inputs[name] for name in ("position", "k", "v", "buffers"))),
        Token(inputs["new_position"], *inputs["added"]),
        Ranking(inputs["standing"], inputs["protection"], inputs.get("keep"), shrinks),
        Query(inputs["q"], spec, inputs.get("sinks"), scores),
        **options,
    )
    if options["rounds"]:
        assert done.attended.out.dtype == inputs["q"].dtype
    attended = {name: value for name, value in done.attended._asdict().items() if value is not None}
    held = done.slots._asdict()
    position = held.pop("position")
    if done.codes is not None:
        held["codes"] = done.codes
    leaves = {f"buffer{i}": leaf for i, leaf in enumerate(jax.tree.leaves(held))}
    gone = {} if done.pair is None else left(done.pair, inputs["new_position"])
    return {"slot": done.slot, "left": done.evicted_position, "position": position} | leaves | attended | gone


def case(
    b: int,
    h: int,
    g: int,
    c: int,
    d: int,
    *,
    dtype: str = "float32",
    e: int | None = None,
    live: str = "full",
    bits: int | None = None,
    scores: str | None = None,
    keep: bool = False,
    shrinks: bool = False,
    pairs: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi: bool = False,
    sinks: int = 0,
    first: int = 0,
    adds: bool = False,
    oldest: bool = False,
    hashed: int = 0,
    rounds: bool = False,
    alike: bool = False,
    ways: Any = (XLA, *TPU_WAYS),
) -> Case:
    """Random slots with many equal scores, and a statistic of each kind; `scores` may name a noise.

    `oldest`: nothing tells of slots but their positions. `hashed`: codes of so many bits do. `alike`: sinks and the
    recent window are the same in all heads.
    """
    e = d if e is None else e
    rng = np.random.default_rng(b + h + g + c + d)
    position, new = evict.positions(rng, b, h, c, live)
    both: list[Any] = [normal(rng, (b, h, c + 1, width), dtype) for width in (d, e)]
    added = [pair[:, :, c] for pair in both]
    k, v = (pair[:, :, :c] if bits is None else decode_attention.quantised(pair[:, :, :c], bits) for pair in both)

    def statistics(*slots: int) -> dict[str, Any]:
        words = rng.integers(2**32, size=(b, h, *slots, 3), dtype=np.uint32)
        return {"score": normal(rng, (b, h, *slots), "float32"), "flag": rng.random((b, h, *slots)) < 0.5, "w": words}

    inputs: dict[str, Any] = {
        "standing": None if oldest else rng.integers(0, 4, size=(b, h, c)).astype(np.float32),
        "position": position,
        "new_position": new,
        "k": k,
        "v": v,
        "buffers": statistics(c),
        "added": (*added, statistics()),
        "q": normal(rng, (b, h, g, d), dtype),
        "protection": evict.protection(rng, b, h, c),
    }
    if shrinks:
        lived = np.maximum((position >= 0).sum(-1), 1).astype(np.int32)
        inputs["protection"] = inputs["protection"]._replace(limit=lived)
    if alike:
        inputs["protection"] = inputs["protection"]._replace(sinks=jnp.int32(c // 8), recent=jnp.int32(c // 4))
    if keep:
        inputs["keep"] = rng.random((b, h, c)) < 0.3
    if sinks:
        position[..., sinks:][position[..., sinks:] < sinks] = -1
        position[..., :sinks] = np.arange(sinks)
        gap = rng.integers(0, c, b).astype(np.int32) if alibi else None
        inputs["sinks"] = Sinks(normal(rng, (b, h, g, d), dtype), sinks, gap)  # type: ignore[arg-type]
    if alibi:
        inputs["slopes"] = (2.0 ** -np.arange(1, h * g + 1)).reshape(h, g).astype(np.float32)
    if scores not in (None, "each", "sum"):
        inputs |= {"seed": rng.integers(2**32, size=b, dtype=np.uint32), "first": np.full(b, first, np.int32)}
        inputs["tau"] = rng.uniform(1, 2, size=b).astype(np.float32)
    if hashed:
        planes = rng.standard_normal((h, hashed, d)).astype(np.float32)
        key = normal(rng, (b, h, 1, d), dtype)
        codes = tuple(hamming.words(rng, hashed, -(-hashed // 32), b, h, c))
        inputs["standing"] = Hashed(Hashing(planes, inputs["q"], key), codes)  # type: ignore[arg-type]
    settings: dict[str, Any] = dict(scale=d**-0.5, soft_cap=soft_cap, window=window, scores=scores, shrinks=shrinks)
    settings |= dict(pairs=pairs, adds=adds)
    extra = {
        f"e{e}": e != d,
        f"bits{bits}": bits,
        "keep": keep,
        "shrinks": shrinks,
        "pairs": pairs,
        "cap": soft_cap,
        "window": window,
        "alibi": alibi,
        f"sinks{sinks}": sinks,
        "adds": adds,
        "oldest": oldest,
        f"hashed{hashed}": hashed,
        "rounds": rounds,
        "alike": alike,
    }
    return Case(
        "fused_decode",
        "-".join([f"{b}x{h}x{g}x{c}x{d}", live, *filter(None, [scores]), *(name for name, on in extra.items() if on)]),
        (inputs,),
        lambda inputs, **options: run(inputs, rounds=rounds, **settings, **options),
        lambda inputs: oracle(inputs, **settings),
        ways=ways,
        dtype=dtype,
        rounded=bits is not None,
    )


CASES = (
    case(2, 2, 2, 16, 32, live="ragged", scores="sum"),
    case(2, 8, 1, 256, 128, dtype="bfloat16", scores="gumbel", first=2, ways=(XLA, TPU_WAYS[1])),
    case(1, 1, 8, 64, 128, e=256, scores="each", keep=True, soft_cap=3.0, ways=(XLA, TPU_WAYS[0])),
    case(2, 1, 3, 128, 64, live="ragged", shrinks=True, window=40, alibi=True, ways=(XLA, TPU_WAYS[0])),
    case(3, 2, 1, 128, 64, bits=4, scores="gaussian", ways=(XLA, TPU_WAYS[1])),
    case(1, 2, 1, 32, 128, alibi=True, ways=(XLA, TPU_WAYS[0])),
    case(2, 2, 2, 32, 128, bits=8, live="none", dtype="bfloat16", ways=(XLA, TPU_WAYS[1])),
    case(2, 2, 1, 208, 128, dtype="bfloat16", live="ragged", sinks=4, ways=(XLA, TPU_WAYS[1])),
    case(2, 8, 4, 512, 64, sinks=3, bits=8, scores="sum", pairs=True),
    case(2, 2, 3, 128, 64, sinks=5, soft_cap=3.0, pairs=True, ways=(XLA, TPU_WAYS[0])),
    case(2, 3, 2, 64, 128, live="ragged", scores="sum", pairs=True),
    case(3, 2, 2, 32, 128, live="ragged", scores="sum", adds=True),
    case(2, 8, 4, 512, 64, scores="gumbel", adds=True, dtype="bfloat16", ways=(XLA, TPU_WAYS[1])),
    case(2, 2, 2, 48, 128, live="ragged", oldest=True, keep=True),
    case(2, 3, 2, 48, 128, live="ragged", scores="sum", adds=True, alike=True),
    case(2, 8, 2, 512, 128, oldest=True, shrinks=True, sinks=2, ways=(XLA, TPU_WAYS[0])),
    case(2, 3, 2, 64, 128, hashed=16, live="ragged", keep=True),
    case(2, 8, 4, 512, 64, hashed=40, dtype="bfloat16", pairs=True, scores="sum", ways=(XLA, TPU_WAYS[1])),
    case(1, 2, 1, 32, 128, hashed=8, shrinks=True, bits=8, ways=(XLA, TPU_WAYS[0])),
    case(2, 8, 1, 2048, 128, bits=8, dtype="bfloat16", pairs=True, ways=(TPU_WAYS[0],)),
    case(2, 8, 1, 48, 128, bits=8, live="ragged", scores="sum", adds=True),
    case(2, 2, 2, 208, 128, live="ragged", sinks=4, alibi=True, oldest=True),
    case(2, 16, 1, 48, 128, dtype="bfloat16", live="ragged", scores="sum", adds=True, rounds=True),
    case(1, 2, 4, 48, 128, dtype="bfloat16", oldest=True, rounds=True, ways=(XLA, TPU_WAYS[1])),
    case(131, 1, 1, 16, 32, live="ragged", scores="sum", ways=(XLA, TPU_WAYS[0])),
    case(2, 16, 1, 208, 128, dtype="bfloat16", live="ragged", sinks=4, scores="each", ways=(XLA, TPU_WAYS[1])),
    case(2, 24, 1, 32, 128, bits=8, live="ragged", scores="sum", alibi=True, pairs=True, ways=(XLA, TPU_WAYS[0])),
    case(2, 8, 1, 512, 128, live="ragged", scores="gumbel", adds=True, alibi=True, ways=(XLA, TPU_WAYS[0])),
)
