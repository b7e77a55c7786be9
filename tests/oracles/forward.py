"""A literal forward without a cache in float64 NumPy: one text, one token, one head at a time.

Beside what Llama has it knows what layers may differ in, and reads all of it from the model's settings themselves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvjax.models import ModelConfig, Rope
from tests.oracles.decoder import beside_sink, linear, mlp, slope, softmax

Vector = Float[np.ndarray, " n"]


def forward(weights: Any, config: ModelConfig, tokens: Int[np.ndarray, " t"]) -> Float[np.ndarray, "t vocab"]:
    """Logits of every position.

    Args:
        weights: kvjax weights of a gated model with RMS norms, maybe with experts, with NumPy float64 leaves.
        config: the model's shape; its activation is SiLU.
        tokens: ids of one text.
    """
    hidden = [weights.table.rows(token) for token in tokens]
    for index, layer in enumerate(weights.layers):
        read = _attention(layer, config, index, [_norm(layer.attention_norm, config, x) for x in hidden])
        hidden = [x + linear(layer.mixer.output, out) for x, out in zip(hidden, read, strict=True)]
        hidden = [x + mlp(layer.mlp, config, _norm(layer.mlp_norm, config, x)) for x in hidden]
    table = weights.embedding if weights.unembedding is None else weights.unembedding.weight
    scale = 1.0 if config.logit_scale is None else config.logit_scale
    return np.array([_capped(scale * (table @ _norm(weights.norm, config, x)), config.logit_soft_cap) for x in hidden])


def _attention(layer: Any, config: ModelConfig, index: int, normed: list[Vector]) -> list[Vector]:
    """What each token reads, its heads one after the other."""
    rope = config.rope if config.ropes is None else config.ropes[index]
    window = config.sliding_window if config.windows is None else config.windows[index]
    scale = 1 / math.sqrt(config.head_width) if config.attention_scale is None else config.attention_scale
    scale = scale if config.attention_scales is None else config.attention_scales[index]
    bound = math.inf if config.qkv_clip is None else config.qkv_clip
    queries = [np.split(np.clip(linear(layer.mixer.query, x), -bound, bound), config.heads) for x in normed]
    keys = [np.split(np.clip(linear(layer.mixer.key, x), -bound, bound), config.kv_heads) for x in normed]
    values = [np.split(np.clip(linear(layer.mixer.value, x), -bound, bound), config.kv_heads) for x in normed]
    if config.query_key_norms and rope is not None:
        assert not config.query_key_scales
        queries, keys = ([[_normed(config, head) for head in heads] for heads in each] for each in (queries, keys))
    growth = config.query_growth
    if growth is not None and (rope is None or not growth.unrotated):
        grown = [1 + growth.slope * math.log(1 + (i + growth.offset) // growth.length) for i in range(len(normed))]
        queries = [[factor * head for head in heads] for factor, heads in zip(grown, queries, strict=True)]
    read = []
    for i in range(len(normed)):
        heads = []
        for head in range(config.heads):
            shared = head * config.kv_heads // config.heads
            query = _rotated(rope, queries[i][head], i)
            seen = [j for j in range(i + 1) if window is None or i - j < window]
            logits = [_capped(scale * (query @ _rotated(rope, keys[j][shared], j)), config.soft_cap) for j in seen]
            if config.position == "alibi":
                steep = slope(head, config.heads) if config.slopes is None else config.slopes[head]
                logits = [x - steep * (i - j) for x, j in zip(logits, seen, strict=True)]
            out = softmax(np.array(logits)) @ np.array([values[j][shared] for j in seen])
            heads.append(out * beside_sink(layer, head, np.exp(logits).sum()))
        read.append(np.concatenate(heads))
    return read


def _rotated(rope: Rope | None, x: Vector, position: int) -> Vector:
    if rope is None:
        return x
    assert rope.scaling == "none"
    turned = x.copy()
    half = rope.width // 2
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, half + pair)
        angle = position * rope.theta ** (-2 * pair / rope.width)
        turned[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
        turned[second] = x[second] * math.cos(angle) + x[first] * math.sin(angle)
    return turned


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _norm(norm: Any, config: ModelConfig, x: Vector) -> Vector:
    return _normed(config, x) * norm.scale


def _normed(config: ModelConfig, x: Vector) -> Vector:
    return x / np.sqrt(np.mean(x * x) + config.norm_eps)
