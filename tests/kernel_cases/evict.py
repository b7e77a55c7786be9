"""Eviction: cases, and the operation slot by slot."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels.evict import evict
from pallas_kernels.ranking import EvictionRules
from tests.kernels import TPU_WAYS, XLA, Case, normal


def victim(inputs: dict[str, Any], scores: np.ndarray, row: int, head: int, shrinks: bool = False) -> int:
    """Expired, then empty, then lowest, then protected, then sinks; the oldest of equals."""
    position, newest = inputs["position"][row, head], inputs["new_position"][row]
    sinks, recent, limit = (bound[row, head] if np.ndim(bound) else bound for bound in inputs["protection"])
    keep = inputs["keep"][row, head] if "keep" in inputs else np.zeros(len(position), bool)
    order = []
    for slot, at in enumerate(position):
        usable = at >= 0 or (position >= 0).sum() < limit if shrinks else slot < limit
        score = scores[row, head, slot]
        protected = at < sinks or at > newest - recent or keep[slot]
        if at < 0:
            score = np.finfo(np.float32).min
        elif protected and score > -np.inf:
            score = np.inf
        if usable:
            order.append((score, 0 <= at < sinks and score > -np.inf, at, slot))
    return min(order)[-1]


def oracle(inputs: dict[str, Any], *, shrinks: bool) -> dict[str, Any]:
    """One head after another, each written by assignment."""
    position, new = inputs["position"].copy(), inputs["new_position"]
    leaves = [leaf.copy() for leaf in jax.tree.leaves(inputs["buffers"])]
    b, h, c = position.shape
    slots, left = np.full((b, h), c), np.full((b, h), -1)
    taken = [np.zeros((b, h, *leaf.shape[3:]), leaf.dtype) for leaf in leaves]
    for row, head in np.ndindex(b, h):
        slot = victim(inputs, inputs["scores"], row, head, shrinks)
        for old, leaf in zip(taken, leaves, strict=True):
            old[row, head] = leaf[row, head, slot]
        if new[row] >= 0:
            slots[row, head], left[row, head] = slot, position[row, head, slot]
            position[row, head, slot] = new[row]
            for leaf, value in zip(leaves, jax.tree.leaves(inputs["added"]), strict=True):
                leaf[row, head, slot] = value[row, head]
    return named(slots, left, taken, position, leaves)


def named(slot: Any, left: Any, taken: Any, position: Any, buffers: Any) -> dict[str, Any]:
    found = {"slot": slot, "left": left, "position": position}
    for name, tree in (("taken", taken), ("buffer", buffers)):
        found |= {f"{name}{i}": leaf for i, leaf in enumerate(jax.tree.leaves(tree))}
    return found


def run(inputs: dict[str, Any], *, shrinks: bool, **options: Any) -> dict[str, Any]:
    inputs = dict(inputs)
    arrays = [inputs.pop(name) for name in ("scores", "position", "new_position", "buffers", "added")]
    return named(*evict(*arrays, **inputs, shrinks=shrinks, **options))


def protection(rng: np.random.Generator, b: int, h: int, c: int) -> EvictionRules:
    """Few or many tokens protected, at least one slot to use."""
    most = [c // 3 + 1, c // 3 + 1, c]
    sinks, recent, limit = (rng.integers(i == 2, n + 1, size=(b, h)).astype(np.int32) for i, n in enumerate(most))
    return EvictionRules(sinks, recent, limit)  # type: ignore[arg-type]


def positions(rng: np.random.Generator, b: int, h: int, c: int, live: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions in no order and each row's new one; the last of several rows is padding."""
    new = rng.integers(c, 2 * c, size=b).astype(np.int32)
    position = np.stack([[rng.permutation(end)[:c] for _ in range(h)] for end in new]).astype(np.int32)
    share = {"full": 0.0, "ragged": 0.1, "one": 1 - 1 / c, "none": 1.0}[live]
    position[rng.random(position.shape) < share] = -1
    if b > 1:
        new[-1] = -1
    return position, new


def case(
    b: int,
    h: int,
    c: int,
    d: int,
    *,
    dtype: str = "float32",
    live: str = "full",
    shrinks: bool = False,
    keep: bool = False,
    codes: str | None = None,
    words: int | None = None,
) -> Case:
    """Random slots with many equal scores, keys, values and three statistics.

    Keys and values are `codes` of 8 bits with scales where these are given; `words` is the width of a fourth statistic.
    """
    rng = np.random.default_rng(b + h + c + d)
    position, new = positions(rng, b, h, c, live)
    scores = rng.integers(0, 4, size=(b, h, c)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.02] = -np.inf

    def tree(*slots: int) -> dict[str, Any]:
        shape = (b, h, *slots)
        if codes is None:
            pair = [normal(rng, (*shape, d), dtype) for _ in range(2)]
        else:
            low, high = np.iinfo(codes).min, np.iinfo(codes).max
            pair = [rng.integers(low, high, (*shape, d), codes, endpoint=True) for _ in range(2)]
            pair += [normal(rng, shape, "float32") for _ in range(2)]
        made = {"pair": pair, "statistic": normal(rng, shape, "float32"), "flag": rng.random(shape) < 0.5}
        made["word"] = rng.integers(2**32, size=shape, dtype=np.uint32)
        return made if words is None else made | {"words": rng.integers(2**32, size=(*shape, words), dtype=np.uint32)}

    inputs: dict[str, Any] = {
        "scores": scores,
        "position": position,
        "new_position": new,
        "buffers": tree(c),
        "added": tree(),
        "protection": protection(rng, b, h, c),
    }
    if shrinks:
        lived = np.maximum((position >= 0).sum(-1), 1).astype(np.int32)
        inputs["protection"] = inputs["protection"]._replace(limit=lived)
    if keep:
        inputs["keep"] = rng.random((b, h, c)) < 0.3
    named_settings = {"shrinks": shrinks, "keep": keep, codes: codes, f"{words}-words": words}
    told = "".join(f"-{name}" for name, wanted in named_settings.items() if wanted)
    return Case(
        "evict",
        f"{b}x{h}x{c}x{d}-{live}{told}",
        (inputs,),
        lambda inputs, **options: run(inputs, shrinks=shrinks, **options),
        lambda inputs: oracle(inputs, shrinks=shrinks),
        ways=(XLA, *TPU_WAYS) if c % 16 == 0 else (XLA,),
        dtype=dtype,
    )


CASES = (
    case(2, 2, 48, 64),
    case(3, 8, 32, 128, dtype="bfloat16", live="ragged"),
    case(1, 3, 16, 64, live="none"),
    case(1, 2, 32, 64, live="one", dtype="bfloat16"),
    case(2, 3, 64, 64, live="ragged", shrinks=True),
    case(1, 2, 33, 64, keep=True),
    case(2, 3, 48, 64, keep=True),
    case(2, 2, 64, 64, codes="int8", live="ragged", keep=True),
    case(1, 8, 32, 128, codes="uint8"),
    case(2, 3, 48, 64, words=3, live="ragged"),
    case(2, 8, 48, 64, codes="int8", live="ragged"),
)
