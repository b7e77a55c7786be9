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
    first = hidden = [weights.table.rows(token) for token in tokens]
    stored: dict[int, tuple[list[Any], list[Any]]] = {}
    for index, layer in enumerate(weights.layers):
        normed = [_norm(layer.attention_norm, config, x) for x in hidden]
        source = None if config.sources is None else config.sources[index]
        if source is None:
            stored[index] = _keys_and_values(layer, config, index, normed)
        read = _attention(layer, config, index, normed, *stored[index if source is None else source])
        hidden = [x + linear(layer.mixer.output, out) for x, out in zip(hidden, read, strict=True)]
        hidden = [x + mlp(layer.mlp, config, _norm(layer.mlp_norm, config, x)) for x in hidden]
        if config.layer_embeddings is not None:
            embedded = [_embedded(layer.embedding, config, *one) for one in zip(hidden, first, tokens, strict=True)]
            hidden = [x + more for x, more in zip(hidden, embedded, strict=True)]
        if config.layer_scales:
            hidden = [x * layer.scale for x in hidden]
    table = weights.embedding if weights.unembedding is None else weights.unembedding.weight
    scale = 1.0 if config.logit_scale is None else config.logit_scale
    return np.array([_capped(scale * (table @ _norm(weights.norm, config, x)), config.logit_soft_cap) for x in hidden])


def _embedded(embedding: Any, config: ModelConfig, x: Vector, first: Vector, token: int) -> Vector:
    """What a layer adds to a token's hidden state `x` for its own embedding of it; `first` is the model's."""
    sizes = config.layer_embeddings
    assert sizes is not None
    context = _norm(embedding.context_norm, config, linear(embedding.context, first) / math.sqrt(config.width))
    vector = embedding.table.weight[token if token < sizes.vocab_size else 0] * math.sqrt(sizes.width)
    gate = linear(embedding.narrow, x)
    gate = gate / (1 + np.exp(-gate))
    return _norm(embedding.norm, config, linear(embedding.widen, gate * (context + vector) / math.sqrt(2)))


def _keys_and_values(
    layer: Any, config: ModelConfig, index: int, normed: list[Vector]
) -> tuple[list[list[Vector]], list[list[Vector]]]:
    """Keys before RoPE and values of each token, by head."""
    heads = config.kv_heads if config.layer_kv_heads is None else config.layer_kv_heads[index]
    rope = config.rope if config.ropes is None else config.ropes[index]
    bound = math.inf if config.qkv_clip is None else config.qkv_clip
    keys = [np.split(np.clip(linear(layer.mixer.key, x), -bound, bound), heads) for x in normed]
    values = keys
    if config.tied_values is None or not config.tied_values[index]:
        values = [np.split(np.clip(linear(layer.mixer.value, x), -bound, bound), heads) for x in normed]
    if config.value_norms:
        values = [[_normed(config, head) for head in of_token] for of_token in values]
    return _normed_heads(layer.mixer.key_norm, config, rope, keys), values


def _normed_heads(norm: Any, config: ModelConfig, rope: Rope | None, heads: list[list[Vector]]) -> list[list[Vector]]:
    if not config.query_key_norms or (rope is None and not config.query_key_scales):
        return heads
    scale = norm.scale if config.query_key_scales else 1.0
    return [[_normed(config, head) * scale for head in of_token] for of_token in heads]


def _attention(
    layer: Any, config: ModelConfig, index: int, normed: list[Vector], keys: list[Any], values: list[Any]
) -> list[Vector]:
    """What each token reads, its heads one after the other."""
    rope = config.rope if config.ropes is None else config.ropes[index]
    kv_heads = len(keys[0])
    window = config.sliding_window if config.windows is None else config.windows[index]
    scale = 1 / math.sqrt(len(keys[0][0])) if config.attention_scale is None else config.attention_scale
    scale = scale if config.attention_scales is None else config.attention_scales[index]
    bound = math.inf if config.qkv_clip is None else config.qkv_clip
    queries = [np.split(np.clip(linear(layer.mixer.query, x), -bound, bound), config.heads) for x in normed]
    queries = _normed_heads(layer.mixer.query_norm, config, rope, queries)
    growth = config.query_growth
    if growth is not None and (rope is None or not growth.unrotated):
        grown = [1 + growth.slope * math.log(1 + (i + growth.offset) // growth.length) for i in range(len(normed))]
        queries = [[factor * head for head in heads] for factor, heads in zip(grown, queries, strict=True)]
    read = []
    for i in range(len(normed)):
        heads = []
        for head in range(config.heads):
            shared = head * kv_heads // config.heads
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
    assert rope.scaling in ("none", "proportional")
    turned = x.copy()
    half = rope.width // 2
    for pair in range(int(half * rope.fraction)):
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
