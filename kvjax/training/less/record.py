"""Training features of LESS kernels: queries, their attention after eviction, and the evicted pairs, kept on disk."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.cache.attention import with_evicted, with_replayed, without_replayed
from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.cache.pending import Pending, sum_over_layers
from kvjax.cache.slots import Slots
from kvjax.cache.stats import stats_from_probs
from kvjax.inference.prepare import bind_policy
from kvjax.inference.shapes import empty_state
from kvjax.inference.state import State
from kvjax.methods.last_queries import WindowAttention
from kvjax.methods.lightkv import LastQueries
from kvjax.methods.registry import name_of
from kvjax.model import Model
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights, begin, block, layers_of
from kvjax.policies import Plan, Policy
from kvjax.rope import rotate
from kvjax.types import LayerConfig, LayerTokens, TokenBatch, wide
from kvjax.utils.files import read_json, read_text, written_aside
from pallas_kernels.attention import Partial, with_sink
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.operands import values
from pallas_kernels.prefill_attention import prefill_attention

MASKS = ("decode", "full-softmax")
"""Kinds of attention probabilities that a policy sees in training, see `record`."""


def check_mask(policy: Policy, mask: str) -> None:
    """Refuse a mask that is unknown or does not fit the policy."""
    name = name_of(policy)
    if mask not in MASKS:
        raise ValueError(f"mask={mask!r} is not one of {', '.join(MASKS)}.")
    if mask == "full-softmax" and isinstance(policy.score, LastQueries | WindowAttention):
        raise ValueError(
            f"mask='full-softmax' needs the attention of each query at its own step, but policy {name!r} recomputes "
            "it over the cached tokens; set mask=decode, or window=running for lightkv."
        )
    if mask == "full-softmax" and policy.codec.positions != "original":
        raise ValueError(
            f"mask='full-softmax' needs the logits of the full cache, but policy {name!r} has cache positions; "
            "set positions=original or mask=decode."
        )


class Features(struct.PyTreeNode):
    """Training inputs of one layer's kernels for whole texts; arrays stacked over layers have a leading axis L.

    A decode step evicts at most one pair per head, before the step's attention. Each pair is stored at the step of its
    eviction, so for any policy the memory is causal linear attention over the evicted pairs.
    """

    q: Float[Array, "b h g n d"]
    """Queries, rotated by original positions."""
    k: Float[Array, "b h n d"]
    """Evicted keys, rotated by original positions; zeros if the step evicts none."""
    v: Float[Array, "b h n d"]
    """Evicted values."""
    leaving: Float[Array, "b h n"]
    """1 if the step evicts a pair, else 0."""
    sparse: Float[Array, "b h g n d"]
    """Attention over the pairs that the policy kept."""
    lse: Float[Array, "b h g n"]
    """Log-sum-exp of the attention over the kept pairs."""
    full: Float[Array, "b h g n d"]
    """Attention over all pairs, before the output projection."""


class Replayed(struct.PyTreeNode):
    """Result of one replayed step in one layer."""

    k: Float[Array, "b h 1 d"]
    """Evicted key; arbitrary if there is none."""
    v: Float[Array, "b h 1 e"]
    """Evicted value; arbitrary if there is none."""
    evicted_position: Int[Array, "b h"]
    """Position of the evicted pair, -1 for none."""
    partial: Partial
    """Attention over the kept pairs, the residual's memory and the sink."""
    probs: Float[Array, "b h g 1 c"] | None
    """Attention probabilities of the kept pairs that the policy sees."""


@functools.partial(jax.jit, static_argnames="mask")
def record(state: State, tokens: Int[Array, "b n"], *, mask: str = "decode") -> tuple[Features, Int[Array, "L b h n"]]:
    """Run the frozen model over texts, and replay eviction on its queries, keys and values token by token.

    Args:
        state: from `empty_state`, with the policy that evicts.
        mask: with `decode` the policy sees the probabilities of decoding; with `full-softmax` the same slots'
            probabilities in the full softmax, as in the code published with LESS.

    Returns:
        Features, stacked over layers, and the position evicted at each step, -1 for none.
    """
    cache = state.cache
    rows, n = tokens.shape
    reading = cache.reading(tokens, jnp.broadcast_to(jnp.arange(n), tokens.shape), jnp.full(rows, n))
    texts, attended = read_full(state.weights, state.config, reading)
    policies = [state.policy.layer(layer) for layer in range(state.config.layers)]

    def step(layers: tuple[Slots, ...], t: Int[Array, ""]) -> tuple[tuple[Slots, ...], tuple[Replayed, ...]]:
        after, pending, steps = list[Slots](), list[Pending](), list[Replayed]()
        for policy, slots, text, full in zip(policies, layers, texts, attended, strict=True):
            lse = jax.lax.dynamic_slice_in_dim(full.lse, t, 1, axis=3)
            slots, stats, replayed = replay(policy, mask, slots, text.part(t, 1).rotated(), lse)
            after.append(slots)
            pending.append(stats)
            steps.append(replayed.replace(probs=None))
        updates = zip(policies, after, sum_over_layers(pending), strict=True)
        return tuple(slots.updated(policy, stats) for policy, slots, stats in updates), tuple(steps)

    _, steps = jax.lax.scan(step, cache.slots, jnp.arange(n))
    features, evicted = [], []
    for text, full, replayed in zip(texts, attended, steps, strict=True):
        position = jnp.moveaxis(replayed.evicted_position, 0, -1)
        k, v = (jnp.where(position[..., None] >= 0, join_steps(x, 2), 0) for x in (replayed.k, replayed.v))
        q, leaving = rotate(text.config.rope, text.q, jnp.arange(n), n), position >= 0
        sparse, lse = (join_steps(x, 3) for x in (replayed.partial.out, replayed.partial.lse))
        out = with_sink(full, text.sink_logits).out
        features.append(Features(q, k, v, leaving.astype(lse.dtype), sparse, lse, out))
        evicted.append(position)
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers).astype(wide(layers[0].dtype)), *features)
    return stacked, jnp.stack(evicted)


def by_steps(x: Array, axis: int) -> Float[Array, "n ..."]:
    """Split an array over tokens into steps of one token each."""
    return jnp.expand_dims(jnp.moveaxis(x, axis, 0), axis + 1)


def join_steps(x: Float[Array, "n ..."], axis: int) -> Array:
    """Join the steps of an array over one token each; the inverse of `by_steps`."""
    return jnp.moveaxis(jnp.squeeze(x, axis + 1), 0, axis)


def replay(
    policy: Policy, mask: str, slots: Slots, new: LayerTokens, full_lse: Float[Array, "b h g 1"]
) -> tuple[Slots, Pending, Replayed]:
    """Replay one layer of a decode step on given queries, keys and values; `full_lse` is that of the full text."""
    slots, evicted = slots.write(policy, new, pairs=True)
    operands = policy.codec.operands(slots, new)
    dtype = operands.q.dtype
    attended = decode_attention(
        operands.q[:, :, :, 0],
        values(operands.k, dtype),  # codes are read without rounding queries
        values(operands.v, dtype),
        slots.position,
        new.position[:, 0],
        new.config.spec,
        places=operands.token_places,
        sinks=operands.sinks,
        scores="each",
        implementation="xla",
    )
    assert attended.scores is not None
    partial, probs = attended.partial, attended.scores[:, :, :, None]
    if mask == "full-softmax":  # the same logits, normalized over the whole text
        probs = probs * jnp.exp(partial.lse - full_lse)[..., None]
    partial = with_evicted(partial, slots.memory_of_evicted(policy, new))
    partial = with_sink(partial, new.sink_logits)
    requests = policy.score.attention_stats(slots, new)
    stats = stats_from_probs(without_replayed(requests), probs, operands.v, slots.position, new)
    pending = Pending(requests, with_replayed(requests, stats, policy.codec, operands, slots, new), new)
    return slots, pending, Replayed(evicted.k, evicted.v, evicted.position[..., 0], partial, probs)


class FullText(LayerCache):
    """Attention of whole texts to all of their tokens, of which the tokens and the result are kept."""

    new: LayerTokens | None = None
    """The tokens, which are not rotated yet."""
    partial: Partial | None = None

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "b h g n d"],
        k: Float[Array, "b h n d"],
        v: Float[Array, "b h n e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "b h g n e"], FullText]:
        partial = attend_fully(tokens.shape, q, k, v, tokens.reading.position)
        new = tokens.attending(q, k, v, sink_logits)
        return with_sink(partial, sink_logits).out, FullText(new=new, partial=partial)


def read_full(weights: Weights, config: ModelConfig, reading: TokenBatch) -> tuple[list[LayerTokens], list[Partial]]:
    """Run the model with full attention; return each layer's tokens, not rotated yet, and their attention to all."""
    texts: list[LayerTokens] = []
    attended: list[Partial] = []
    reading, x = begin(weights, config, reading)
    for layer in layers_of(weights, config):
        x, text = block(layer, FullText(), reading, x)
        texts.append(text.new)
        attended.append(text.partial)
    return texts, attended


def attend_fully(
    shape: LayerConfig,
    q: Float[Array, "b h g n d"],
    k: Float[Array, "b h n d"],
    v: Float[Array, "b h n e"],
    positions: Int[Array, "b n"],
) -> Partial:
    """Attend from whole texts to all of their tokens; queries and keys are those before rotation."""
    q, k = (rotate(shape.rope, x, positions[0], positions.shape[1]) for x in (q, k))
    slot_positions = jnp.broadcast_to(positions[:, None], k.shape[:3])
    attended = prefill_attention(q, k, v, positions, slot_positions, shape.spec, scores=False)
    return Partial(attended.out, attended.lse)


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
    model.config.check_all_store("training of LESS")
    bound_policy, layers = bind_policy(model, policy, budget, plan), model.config.layer_configs
    if not all(layer.attends for layer in layers):
        raise ValueError(f"kernels are trained for attention in all layers, which {model.name!r} does not have.")
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
    done = read_json(progress).get("texts") if progress.exists() else 0
    if type(done) is not int or done < 0:
        raise ValueError(f"{progress} must have a number of texts, not {done!r}; delete its directory to begin again.")

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
