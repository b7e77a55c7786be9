"""Gemma 4 (text): Gemma 3 with wider heads in layers without a window, norms of values, and a factor of each layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.models.config import LayerEmbeddings, Mixture, ModelConfig
from kvjax.models.families.family import (
    SIZES,
    Family,
    LoadError,
    Settings,
    Shape,
    Source,
    Tensor,
    fused_experts,
    module_sources,
)
from kvjax.models.families.gemma import POST_NORMS
from kvjax.models.families.llama import LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import (
    LAYER_TYPES,
    flag,
    integer,
    optional_integer,
    optional_number,
    read_layer_types,
    read_windows,
    ropes_of_layers,
)

_FULL, _SLIDING = LAYER_TYPES
_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _layer_types(settings: Settings) -> list[str]:
    """Return the type of each layer, by default with a window in five of six; the last layer has none."""
    layers = integer(settings, "num_hidden_layers")
    *others, _ = read_layer_types(settings, [LAYER_TYPES[(index + 1) % 6 > 0] for index in range(layers)])
    return [*others, _FULL]


def _of_layers(settings: Settings, types: list[str], key: str) -> tuple[int, ...]:
    """Return a size of each layer: `key`, unless `per_layer_config` or a setting of layers without a window has more.

    transformers writes `per_layer_config`; other config.json have `global_head_dim` and `num_global_key_value_heads`.
    """
    sizes, of_layers = [integer(settings, key)] * len(types), settings.get("per_layer_config")
    if of_layers is None:
        names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        tied = flag(settings, "attention_k_eq_v")
        whole = optional_integer(settings, names[key]) if key == "head_dim" or tied else None
        return tuple(whole or size if kind == _FULL else size for kind, size in zip(types, sizes, strict=True))
    if not isinstance(of_layers, dict) or not all(isinstance(layer, dict) for layer in of_layers.values()):
        raise LoadError(f"per_layer_config must have an object for some layers, not {of_layers!r}.")
    for name, layer in of_layers.items():
        if not name.isdecimal() or int(name) >= len(types):
            raise LoadError(f"per_layer_config has {name!r}, which is the number of none of {len(types)} layers.")
        if layer.get(key) is not None:
            sizes[int(name)] = integer(layer, key)
    return tuple(sizes)


def _mixture(settings: Settings) -> Mixture | None:
    if not flag(settings, "enable_moe_block"):
        return None
    count, used = integer(settings, "num_experts"), integer(settings, "top_k_experts")
    return Mixture(count, used, integer(settings, "moe_intermediate_size"), beside_mlp=True)


def sources_of(settings: Settings, types: Sequence[str]) -> tuple[int | None, ...]:
    """Return the layer whose keys and values each layer reads; None for its own.

    The last `num_kv_shared_layers` read the last layer before them of their own type.
    """
    shared = settings.get("num_kv_shared_layers") or 0
    own = len(types) - (integer(settings, "num_kv_shared_layers") if shared else 0)
    last = {kind: index for index, kind in enumerate(types[: max(own, 0)])}
    if not set(types) <= set(last):
        raise LoadError(
            f"num_kv_shared_layers {shared} of {len(types)} layers leaves no layer of type "
            f"{min(set(types) - set(last))} with keys and values of its own."
        )
    return tuple(None if index < own else last[kind] for index, kind in enumerate(types))


def _mlp_widths(settings: Settings, sources: Sequence[int | None]) -> tuple[int, ...]:
    width, double = integer(settings, "intermediate_size"), flag(settings, "use_double_wide_mlp")
    return tuple(width * (1 + (double and source is not None)) for source in sources)


def read_layer_embeddings(settings: Settings) -> LayerEmbeddings | None:
    """Return the sizes of the embeddings that each layer adds; None for a model without them."""
    width = settings.get("hidden_size_per_layer_input")
    if width in (None, 0):
        return None
    return LayerEmbeddings(
        integer(settings, "hidden_size_per_layer_input"), integer(settings, "vocab_size_per_layer_input")
    )


def _gemma4(settings: Settings) -> ModelConfig:
    types = _layer_types(settings)
    plain: dict[str, Any] = {**settings, "rope_parameters": None, "hidden_act": settings["hidden_activation"]}
    tied, sources = flag(settings, "attention_k_eq_v"), sources_of(settings, types)
    shape = llama_config(
        plain,
        embedding_scale=integer(settings, "hidden_size") ** 0.5,
        attention_scale=1.0,
        windows=read_windows({**settings, "layer_types": types}, types),
        head_widths=_of_layers(settings, types, "head_dim"),
        layer_kv_heads=_of_layers(settings, types, "num_key_value_heads"),
        tied_values=tuple(tied and kind == _FULL for kind in types),
        mixture=_mixture(settings),
        layer_embeddings=read_layer_embeddings(settings),
        sources=sources,
        mlp_widths=_mlp_widths(settings, sources),
        post_norms=True,
        query_key_norms=True,
        value_norms=True,
        layer_scales=True,
        logit_soft_cap=optional_number(settings, "final_logit_softcapping"),
    )
    parameters = settings.get("rope_parameters") or _ROPES
    return dataclasses.replace(
        shape, ropes=ropes_of_layers({**settings, "rope_parameters": parameters}, shape, 10_000.0)
    )


def _variant(config: ModelConfig) -> Mapping[str, Source]:
    return {} if config.mixture is None else _EXPERTS


def _columns_of_layer(tensor: Tensor, config: ModelConfig, layer: int) -> Tensor:
    return tensor.reshape(len(tensor), config.layers, -1)[:, layer].copy()  # a view would keep the whole tensor


def _rows_of_layer(tensor: Tensor, config: ModelConfig, layer: int) -> Tensor:
    return tensor.reshape(config.layers, -1, *tensor.shape[1:])[layer].copy()


def _columns(leaf: Shape, config: ModelConfig) -> Shape:
    return leaf[0], config.layers * leaf[1]


def _rows(leaf: Shape, config: ModelConfig) -> Shape:
    return config.layers * leaf[0], *leaf[1:]


_LAYER, _MLP = "model.layers.{layer}", "layers.mlp"
_EXPERTS: Mapping[str, Source] = {
    **module_sources(
        "model.layers",
        {
            f"{_MLP}.dense_norm": "pre_feedforward_layernorm",
            f"{_MLP}.dense_post_norm": "post_feedforward_layernorm_1",
            f"{_MLP}.experts_norm": "pre_feedforward_layernorm_2",
            f"{_MLP}.experts_post_norm": "post_feedforward_layernorm_2",
            **{f"{_MLP}.dense.{leaf}": f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")},
        },
    ),
    f"{_MLP}.router_scale": Source(f"{_LAYER}.router.scale"),
    f"{_MLP}.experts.router": Source(f"{_LAYER}.router.proj.weight"),
    f"{_MLP}.expert_scales": Source(f"{_LAYER}.router.per_expert_scale"),
    **{f"{_MLP}.experts.experts.{leaf}.weight": source for leaf, source in fused_experts(_LAYER).items()},
}
LAYER_EMBEDDINGS: Mapping[str, Source] = {
    "layers.embedding.table.weight": Source(
        "model.embed_tokens_per_layer.weight", _columns, _columns_of_layer, of_layers=True
    ),
    "layers.embedding.context.weight": Source(
        "model.per_layer_model_projection.weight", _rows, _rows_of_layer, of_layers=True
    ),
    "layers.embedding.context_norm.scale": Source("model.per_layer_projection_norm.weight"),
    "layers.embedding.narrow.weight": Source(f"{_LAYER}.per_layer_input_gate.weight"),
    "layers.embedding.widen.weight": Source(f"{_LAYER}.per_layer_projection.weight"),
    "layers.embedding.norm.scale": Source(f"{_LAYER}.post_per_layer_input_norm.weight"),
}
"""Sources of the embeddings of each layer; two tensors have a part for each."""
IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")
"""Patterns of tensors that no model needs, such as keys and values of layers that read those of others."""
FAMILIES: Mapping[str, Family] = {
    "gemma4_text": Family(
        _gemma4,
        {
            **LLAMA_SOURCES,
            **module_sources("model.layers", POST_NORMS),
            **QUERY_KEY_NORMS,
            **LAYER_EMBEDDINGS,
            "layers.scale": Source(f"{_LAYER}.layer_scalar"),
        },
        {
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": 256,
            "global_head_dim": 512,
            "num_key_value_heads": 4,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "rope_theta": 1_000_000.0,
        },
        {
            "use_bidirectional_attention": (None, "vision"),  # without an image, all tokens are causal
        },
        variant=_variant,
        ignored=IGNORED,
        looked_up=(*SIZES, "sliding_window"),
    ),
}
