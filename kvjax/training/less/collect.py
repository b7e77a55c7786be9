"""Collection of features on disk, and sampling of the texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.inference.prepare import bind_policy
from kvjax.inference.shapes import empty_state
from kvjax.methods.registry import name_of
from kvjax.model import Model
from kvjax.policies import Plan, Policy
from kvjax.training.less.record import Features, check_mask, record
from kvjax.utils.files import read_json, read_text, written_aside

ROWS = 8
"""Most texts that are read together."""


def check_trainable(policy: Policy, mask: str) -> None:
    """Refuse a policy that kernels cannot be trained for."""
    name = name_of(policy)
    check_mask(policy, mask)
    if policy.plan.sizing.mode == "unbounded":
        raise ValueError(f"policy {name!r} evicts nothing, so kernels cannot learn anything; choose one that evicts.")
    if policy.may_shrink:
        raise ValueError(f"policy {name!r} may evict several tokens in one step; use a plan with constant slots.")
    if policy.residual is not None:
        raise ValueError(f"policy {name!r} already uses kernels; give the policy that it wraps, such as h2o.")
    if policy.selection is not None:
        raise ValueError(f"policy {name!r} reads only some of the tokens that it holds; leave the selection out.")


def collect(
    model: Model,
    policy: Policy,
    budget: int,
    tokens: Int[np.ndarray, "s n"],
    directory: Path,
    *,
    plan: Plan | str | None = None,
    mask: str = "decode",
    seed: int = 0,
    show: Callable[[int], None] = lambda done: None,
) -> Features:
    """Collect features of texts in memory-mapped arrays [L, s, ...]; a new call resumes an interrupted one.

    Args:
        directory: directory of the arrays, about 6 n (heads + KV heads) d floats per text and layer.
        seed: seed of random policies; each text gets its own seed from it.
    """
    check_trainable(policy, mask)
    bound_policy, layers = bind_policy(model, policy, budget, plan), model.config.layer_configs
    if bound_policy.plan.sizing.per_head:
        raise ValueError("kernels cannot learn from heads with slots of their own; use another plan or policy.")
    total, n = tokens.shape
    rows = next(size for size in range(min(ROWS, total), 0, -1) if total % size == 0)
    state = empty_state(model, bound_policy, rows, n, budget)
    layer_heads = zip(layers, state.cache.attending, strict=True)
    if min(int(heads.limit.min()) for layer, heads in layer_heads if not layer.bounded_by_window(n)) >= n:
        raise ValueError(f"a budget of {budget} slots holds texts of {n} tokens whole; use a smaller budget.")
    seeds = jax.random.bits(jax.random.key(seed), (total,), jnp.uint32)

    def of(first: int) -> Features:
        chosen = slice(first, first + rows)
        return record(state.replace(seed=seeds[chosen]), jnp.asarray(tokens[chosen], jnp.int32), mask=mask)[0]

    shapes = jax.eval_shape(lambda: of(0))
    directory.mkdir(parents=True, exist_ok=True)
    progress = directory / "collected.json"
    done = _texts_done(progress) if progress.exists() else 0

    def open_array(path: Any, leaf: Any) -> np.ndarray:
        file = directory / f"{jax.tree_util.keystr(path, simple=True)}.npy"
        if done and file.exists():
            return np.lib.format.open_memmap(file, mode="r+")
        shape = (leaf.shape[0], total, *leaf.shape[2:])
        return np.lib.format.open_memmap(file, mode="w+", dtype=leaf.dtype, shape=shape)

    arrays = jax.tree_util.tree_map_with_path(open_array, shapes)
    for first in range(done, total, rows):
        features = of(first)
        for array, leaf in zip(jax.tree.leaves(arrays), jax.tree.leaves(features), strict=True):
            array[:, first : first + rows] = np.asarray(leaf)
        with written_aside(progress) as aside:
            aside.write_text(json.dumps({"texts": first + rows}))
        show(first + rows)
    return arrays


def _texts_done(file: Path) -> int:
    texts = read_json(file).get("texts")
    if type(texts) is not int or texts < 0:
        raise ValueError(f"{file} must have a number of texts, not {texts!r}; delete its directory to begin again.")
    return texts


def sample_texts(model: Model, files: list[Path], texts: int, length: int, seed: int = 0) -> Int[np.ndarray, "s n"]:
    """Sample passages of `length` tokens from random places of text files, as token ids; the files take turns."""
    contents = [read_text(file) for file in files]
    rng = np.random.default_rng(seed)
    passages = np.zeros((texts, length), np.int32)
    for i in range(texts):
        file, content = files[i % len(files)], contents[i % len(files)]
        characters = 8 * length
        place = rng.random()
        while True:
            # If the passage is too short in tokens, double its characters.
            start = int(place * max(0, len(content) - characters))
            ids = model.tokenizer(content[start : start + characters], verbose=False)["input_ids"]
            if len(ids) >= length:
                passages[i] = ids[:length]
                break
            if characters >= len(content):
                raise ValueError(f"{file} has {len(ids)} tokens, fewer than the {length} of one text; use --length.")
            characters *= 2
    return passages
