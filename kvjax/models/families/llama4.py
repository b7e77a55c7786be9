"""Llama 4: a mixture of experts, layers without RoPE, and attention within chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvjax.models.config import Mixture, ModelConfig, QueryGrowth
from kvjax.models.families.family import EXPERTS, SIZES, Family, LoadError, Settings, Source, fused_experts, transposed
from kvjax.models.families.llama import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config, rotated_layers
from kvjax.models.families.settings import flag, integer, layer_numbers, positive_number, read_layer_types, read_mixture

_LAYER_TYPES = ("full_attention", "chunked_attention")
"""By default, layers with RoPE attend within chunks."""


def _config(settings: Settings) -> ModelConfig:
    settings = {**settings, "no_rope_layers": settings.get("no_rope_layers") or None}
    shape = llama_config(settings)
    assert shape.rope is not None
    rotated = rotated_layers(settings)
    has_chunks = settings["attention_chunk_size"] is not None
    types = read_layer_types(settings, [_LAYER_TYPES[has_chunks and has_rope] for has_rope in rotated], _LAYER_TYPES)
    normed, chunked = flag(settings, "use_qk_norm"), "chunked_attention" in types
    if normed and shape.rope.magnitude != 1:
        raise LoadError(f"rope_type {shape.rope.scaling!r} is not supported for llama4 with use_qk_norm=True.")
    rope = dataclasses.replace(shape.rope, interleaved=True)
    longest = integer(settings, "attention_chunk_size") if chunked else shape.max_positions
    return dataclasses.replace(
        shape,
        mlp_width=integer(settings, "intermediate_size_mlp"),
        max_positions=min(shape.max_positions, longest),
        chunked=chunked,
        rope=None,
        ropes=tuple(rope if has_rope else None for has_rope in rotated),
        query_key_norms=normed,
        query_key_scales=not normed,
        query_growth=_growth(settings),
        mixture=_mixture(settings, shape.layers),
    )


def _growth(settings: Settings) -> QueryGrowth | None:
    key = "attn_temperature_tuning"
    if settings[key] != 4 and not flag(settings, key):  # 4 stands for true in many configs of the models
        return None
    slope, length = positive_number(settings, "attn_scale"), integer(settings, "floor_scale")
    return QueryGrowth(slope, length, offset=1, unrotated=True)


def _mixture(settings: Settings, layers: int) -> Mixture | None:
    moe, step = layer_numbers(settings, "moe_layers"), integer(settings, "interleave_moe_layer_step")
    dense = tuple(layer for layer in range(layers) if (layer not in moe if moe is not None else (layer + 1) % step))
    if len(dense) == layers:
        return None
    return read_mixture(
        settings,
        renormalised=False,
        dense_layers=dense,
        probability="sigmoid",
        weighted_inputs=True,
        shared_width=integer(settings, "intermediate_size"),
    )


def _sources() -> Mapping[str, Source]:
    block = "model.layers.{layer}.feed_forward"
    sources = {"layers.mlp.router": Source(f"{block}.router.weight")}
    for leaf, fused in fused_experts(block).items():
        weight = f"{leaf}_proj.weight"
        split = Source(f"{block}.experts.{{expert}}.{weight}")  # as quantized checkpoints have them
        sources[f"layers.mlp.experts.{leaf}.weight"] = dataclasses.replace(transposed(fused), alternatives=(split,))
        sources[f"layers.mlp.shared.{leaf}.weight"] = Source(f"{block}.shared_expert.{weight}")
        sources[f"layers.mlp.{leaf}.weight"] = Source(f"{block}.{weight}")
    return {**LLAMA_SOURCES, **sources}


FAMILIES: Mapping[str, Family] = {
    "llama4_text": Family(
        _config,
        _sources(),
        {**LLAMA_DEFAULTS, "rope_theta": 500_000.0},
        only={"mlp_bias": (False,)},
        looked_up=(
            *(*SIZES, *EXPERTS, "num_key_value_heads", "head_dim", "intermediate_size_mlp", "use_qk_norm"),
            *("interleave_moe_layer_step", "no_rope_layer_interval", "attention_chunk_size"),
            *("attn_temperature_tuning", "floor_scale", "attn_scale"),
        ),
    )
}
