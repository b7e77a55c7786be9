"""MPT: ALiBi, and no biases in linear maps or norms."""

from __future__ import annotations

from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import Family, LoadError, Settings, fused_in_turn, module_sources
from kvjax.models.families.gpt import gpt_config
from kvjax.models.families.llama import LLAMA_NAMES
from kvjax.models.families.settings import check_only, integer, optional_number, positive_number
from pallas_kernels.attention import alibi_slopes

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
    attn_config = settings.get("attn_config") or {}
    if not isinstance(attn_config, dict):
        raise LoadError(f"attn_config must be an object, not {attn_config!r}.")
    attention = {"alibi_bias_max": 8, **attn_config}
    check_only("mpt", attention, _ONLY)
    heads, scale = integer(settings, "n_heads"), settings.get("logit_scale")
    clips = bool(attention.get("clip_qkv"))  # 0 means no clipping, as null does
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
        qkv_clip=positive_number(attention, "clip_qkv") if clips else None,
        attention_scale=optional_number(attention, "softmax_scale"),
        logit_scale=scale,
    )


_MODULES = {
    "embedding": "transformer.wte",
    "norm": "transformer.norm_f",
    "unembedding": "lm_head",
    "layers.attention_norm": "norm_1",
    "layers.mixer.output": "attn.out_proj",
    "layers.mlp_norm": "norm_2",
    "layers.mlp.up": "ffn.up_proj",
    "layers.mlp.down": "ffn.down_proj",
}

FAMILIES: Mapping[str, Family] = {
    "mpt": Family(
        _config,
        {
            **module_sources("transformer.blocks", _MODULES),
            **fused_in_turn("transformer.blocks.{layer}.attn.Wqkv"),
        },
        {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        only={
            "expansion_ratio": (4,),
            "no_bias": (True,),
            "norm_type": ("layernorm", "low_precision_layernorm"),
        },
        aliases={LLAMA_NAMES[ours]: _NAMES[ours] for ours in ("width", "layers", "heads")},
        looked_up=("vocab_size", "d_model", "n_layers", "n_heads", "max_seq_len"),
    )
}
