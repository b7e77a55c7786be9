"""MPT: ALiBi, and no biases in linear maps or norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_NAMES, gpt_config
from kvjax.models.families.family import Family, LoadError, Settings
from kvjax.models.families.settings import check_only, integer, optional_number, positive_number
from kvjax.models.families.sources import fused_in_turn, module_sources
from pallas_kernels.attention import alibi_slopes

_ATTENTION: Mapping[str, Any] = {
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "softmax_scale": None,
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "alibi_bias_max": 8,
}
_ONLY = {"attn_type": ("multihead_attention",), "prefix_lm": (False,), "qk_ln": (False,), "alibi": (True,)}

_NAMES = {
    "width": "d_model",
    "layers": "n_layers",
    "heads": "n_heads",
    "max_positions": "max_seq_len",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation",
    "mlp_width": "mlp_width",
}


def _config(settings: Settings) -> ModelConfig:
    given = settings.get("attn_config") or {}
    if not isinstance(given, dict):
        raise LoadError(f"attn_config must be an object, not {given!r}.")
    attention = {**_ATTENTION, **given}
    check_only("mpt", attention, _ONLY)
    heads, scale = integer(settings, "n_heads"), settings["logit_scale"]
    # The published model code uses logit_scale and alibi_bias_max; the port in transformers ignores both.
    if scale == "inv_sqrt_d_model":
        scale = integer(settings, "d_model") ** -0.5
    elif scale is not None:
        scale = positive_number(settings, "logit_scale")
    return gpt_config(
        {**settings, "activation": "gelu", "mlp_width": None},
        _NAMES,
        norm_bias=False,
        position="alibi",
        slopes=tuple(alibi_slopes(heads, positive_number(attention, "alibi_bias_max")).tolist()),
        qkv_clip=positive_number(attention, "clip_qkv") if attention["clip_qkv"] else None,  # 0 also means no clipping
        attention_scale=optional_number(attention, "softmax_scale"),
        logit_scale=scale,
    )


_MODULES = {
    "embedding": "transformer.wte",
    "norm": "transformer.norm_f",
    "unembedding": "lm_head",
    "layers.attention_norm": "norm_1",
    "layers.output": "attn.out_proj",
    "layers.mlp_norm": "norm_2",
    "layers.mlp.up": "ffn.up_proj",
    "layers.mlp.down": "ffn.down_proj",
}

MPT = Family(
    _config,
    {
        **module_sources("transformer.blocks", _MODULES),
        **fused_in_turn("transformer.blocks.{layer}.attn.Wqkv"),
    },
    {
        "vocab_size": 50368,
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 24,
        "expansion_ratio": 4,
        "max_seq_len": 2048,
        "layer_norm_epsilon": 1e-5,
        "logit_scale": None,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "tie_word_embeddings": True,
    },
    only={
        "expansion_ratio": (4,),
        "no_bias": (True,),
        "norm_type": ("layernorm", "low_precision_layernorm"),
    },
    aliases={LLAMA_NAMES[ours]: _NAMES[ours] for ours in ("width", "layers", "heads")},
)
