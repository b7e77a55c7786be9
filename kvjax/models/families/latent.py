"""DeepSeek V2 and V3, GLM-4.7 Flash, Youtu-LLM and MiniCPM3: Llama with multi-head latent attention."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax.models.config import Latent, Mixture, ModelConfig
from kvjax.models.families.family import (
    EXPERTS,
    SIZES,
    Family,
    LoadError,
    Settings,
    Shape,
    Source,
    Tensor,
    expert_sources,
    module_sources,
)
from kvjax.models.families.llama import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.settings import (
    choice,
    flag,
    given_rope,
    integer,
    optional_integer,
    optional_number,
    positive_number,
    read_mixture,
    yarn_growth,
)


def _config(settings: Settings, *, interleaved: bool, **fields: Any) -> ModelConfig:
    rotated, plain = integer(settings, "qk_rope_head_dim"), integer(settings, "qk_nope_head_dim")
    of_rope = {**settings, "head_dim": rotated, "num_key_value_heads": None}
    shape = llama_config(of_rope, interleaved=interleaved, **fields)
    values = optional_integer(settings, "v_head_dim") or shape.width // shape.heads
    rank, query_rank = integer(settings, "kv_lora_rank"), optional_integer(settings, "q_lora_rank")
    widths = Latent(rank, plain, values, rotated, query_rank)
    return dataclasses.replace(
        shape,
        kv_heads=1,
        head_width=widths.slot_width,
        latent=widths,
        attention_scale=(plain + rotated) ** -0.5 * _growth(settings) ** 2,
    )


def _growth(settings: Settings) -> float:
    """Return the factor by which scaled RoPE lengthens queries and keys, also the parts that it does not rotate."""
    rope = given_rope(settings)
    if not rope.get("mscale_all_dim") or rope.get("rope_type", rope.get("type", "default")) == "default":
        return 1.0
    return yarn_growth(rope, "mscale_all_dim")


def _interleaving(settings: Settings, **fields: Any) -> ModelConfig:
    return _config(settings, interleaved=flag(settings, "rope_interleave"), **fields)


def _dense_first(settings: Settings) -> tuple[int, ...]:
    count = settings["first_k_dense_replace"]
    if not isinstance(count, int) or count < 0:
        raise LoadError(f"first_k_dense_replace must be an integer of at least 0, not {count!r}.")
    return tuple(range(min(count, integer(settings, "num_hidden_layers"))))


def _mixture(settings: Settings, dense_layers: tuple[int, ...], **fields: Any) -> Mixture | None:
    if len(dense_layers) == integer(settings, "num_hidden_layers"):
        return None
    width, shared = integer(settings, "moe_intermediate_size"), optional_integer(settings, "n_shared_experts")
    return read_mixture(
        settings,
        "moe_intermediate_size",
        dense_layers=dense_layers,
        shared_width=None if shared is None else shared * width,
        scale=positive_number(settings, "routed_scaling_factor"),
        **fields,
    )


def _deepseek_v2(settings: Settings) -> ModelConfig:
    limited = choice(settings, "topk_method", {"greedy": False, "group_limited_greedy": True})
    groups = {name: integer(settings, key) if limited else 1 for name, key in _GROUPS.items()}
    mixture = _mixture(settings, _dense_first(settings), renormalised=False, **groups)
    return _config(settings, interleaved=True, mixture=mixture)


_GROUPS = {"groups": "n_group", "used_groups": "topk_group"}


def _by_sigmoid(settings: Settings, dense_layers: tuple[int, ...]) -> ModelConfig:
    mixture = _mixture(
        settings,
        dense_layers,
        renormalised=flag(settings, "norm_topk_prob"),
        probability="sigmoid",
        selection_bias=True,
        best_of_group=2,
        **{name: integer(settings, key) for name, key in _GROUPS.items()},
    )
    return _interleaving(settings, mixture=mixture)


def _deepseek_v3(settings: Settings) -> ModelConfig:
    return _by_sigmoid(settings, _dense_first(settings))


def _glm4_moe_lite(settings: Settings) -> ModelConfig:
    layers, kinds = integer(settings, "num_hidden_layers"), settings.get("mlp_layer_types")
    kinds = ["dense", *["sparse"] * (layers - 1)] if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise LoadError(f"mlp_layer_types must be {layers} of dense, sparse, not {kinds!r}.")
    return _by_sigmoid(settings, tuple(layer for layer, kind in enumerate(kinds) if kind == "dense"))


def _minicpm3(settings: Settings) -> ModelConfig:
    shape = _config(settings, interleaved=False, embedding_scale=positive_number(settings, "scale_emb"))
    depth, base = optional_number(settings, "scale_depth"), optional_integer(settings, "dim_model_base")
    return dataclasses.replace(
        shape,
        residual_scale=None if depth is None else depth / math.sqrt(shape.layers),
        logit_scale=None if base is None else base / shape.width,
    )


def _up_projections(name: str) -> Mapping[str, Source]:
    """Return the sources of keys' and values' up-projections: for each head, rows of keys, then rows of values."""

    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        assert config.latent is not None
        return (config.heads * (config.latent.key_width + config.latent.value_width), leaf[-1])

    def read(part: int, tensor: Tensor, config: ModelConfig) -> Tensor:
        assert config.latent is not None
        by_head = tensor.reshape(config.heads, -1, tensor.shape[-1])
        return np.split(by_head, [config.latent.key_width], axis=1)[part].copy()

    return {
        f"layers.mixer.{leaf}.weight": Source(name, shape, functools.partial(read, part))
        for part, leaf in enumerate(("key_up", "value_up"))
    }


_LAYERS, _MLP = "model.layers", "model.layers.{layer}.mlp"
_SOURCES: Mapping[str, Source] = {
    **LLAMA_SOURCES,
    **module_sources(
        _LAYERS,
        {
            "layers.mixer.query_down": "self_attn.q_a_proj",
            "layers.mixer.query_norm": "self_attn.q_a_layernorm",
            "layers.mixer.query": "self_attn.q_b_proj",
            "layers.mixer.latent": "self_attn.kv_a_proj_with_mqa",
            "layers.mixer.latent_norm": "self_attn.kv_a_layernorm",
        },
    ),
    **_up_projections(f"{_LAYERS}.{{layer}}.self_attn.kv_b_proj.weight"),
}
_WITH_EXPERTS: Mapping[str, Source] = {
    **_SOURCES,
    **expert_sources(_MLP),
    "layers.mlp.selection_bias": Source(f"{_MLP}.gate.e_score_correction_bias"),
    **{
        f"layers.mlp.shared.{leaf}.weight": Source(f"{_MLP}.shared_experts.{leaf}_proj.weight")
        for leaf in ("gate", "up", "down")
    },
}


def _variant(config: ModelConfig) -> Mapping[str, Source]:
    """Return the source of queries that have no latent of their own."""
    assert config.latent is not None
    whole = {} if config.latent.query_width else {"layers.mixer.query": "self_attn.q_proj"}
    return module_sources(_LAYERS, whole)


_WIDTHS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_ROUTING = (
    *("moe_intermediate_size", "n_shared_experts", "routed_scaling_factor", "norm_topk_prob"),
    *_GROUPS.values(),
)
_family = functools.partial(Family, variant=_variant)
FAMILIES: Mapping[str, Family] = {
    "youtu": _family(
        _interleaving,
        _SOURCES,
        {
            **LLAMA_DEFAULTS,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
            "tie_word_embeddings": True,
            "rope_interleave": True,
        },
        looked_up=(*SIZES, *_WIDTHS),
    ),
    "minicpm3": _family(
        _minicpm3,
        _SOURCES,
        {**LLAMA_DEFAULTS, "tie_word_embeddings": True},
        looked_up=(*SIZES, *_WIDTHS, "scale_emb", "scale_depth", "dim_model_base"),
    ),
    "deepseek_v2": _family(
        _deepseek_v2,
        _WITH_EXPERTS,
        LLAMA_DEFAULTS,
        only={"norm_topk_prob": (None, False)},
        aliases={"n_routed_experts": "num_experts"},
        looked_up=(*SIZES, *_WIDTHS, *_ROUTING, "num_experts", "first_k_dense_replace", "topk_method"),
    ),
    "deepseek_v3": _family(
        _deepseek_v3,
        _WITH_EXPERTS,
        {**LLAMA_DEFAULTS, "bos_token_id": 0, "eos_token_id": 1, "rope_interleave": True},
        ignored=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.61\..*"),  # which predicts a second token
        aliases={"n_routed_experts": "num_local_experts"},
        looked_up=(*SIZES, *_WIDTHS, *_ROUTING, *EXPERTS, "first_k_dense_replace"),
    ),
    "glm4_moe_lite": _family(
        _glm4_moe_lite,
        _WITH_EXPERTS,
        {**LLAMA_DEFAULTS, "bos_token_id": 0, "eos_token_id": 1, "rope_interleave": True},
        ignored=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.47\..*"),
        aliases={"n_routed_experts": "num_local_experts", "head_dim": "qk_rope_head_dim"},
        looked_up=(*SIZES, *_WIDTHS, *_ROUTING, *EXPERTS),
    ),
}
