"""GPT-2 and Cerebras-GPT: learned position embeddings, linear maps stored as [in, out]."""

from __future__ import annotations

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import GPT_ALIASES, GPT_NAMES, gpt_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.settings import flag, head_width, integer
from kvjax.models.families.sources import fused_in_turn, module_sources, transposed


def _config(settings: Settings) -> ModelConfig:
    scale = head_width(settings, "n_embd", "n_head") ** -0.5 if flag(settings, "scale_attn_weights") else 1.0
    scales = [scale / (layer + 1) for layer in range(integer(settings, "n_layer"))]
    return gpt_config(
        settings,
        GPT_NAMES,
        position="learned",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_scale=scale,
        attention_scales=tuple(scales) if flag(settings, "scale_attn_by_inverse_layer_idx") else None,
    )


_MODULES = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "unembedding": "lm_head",
    "layers.attention_norm": "ln_1",
    "layers.mlp_norm": "ln_2",
}
_LINEARS = {"layers.output": "attn.c_proj", "layers.mlp.up": "mlp.c_fc", "layers.mlp.down": "mlp.c_proj"}
_TRANSPOSED = fused_in_turn("transformer.h.{layer}.attn.c_attn") | module_sources("transformer.h", _LINEARS)

GPT2 = Family(
    _config,
    module_sources("transformer.h", _MODULES) | {leaf: transposed(source) for leaf, source in _TRANSPOSED.items()},
    {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    only={"add_cross_attention": (False,)},
    aliases=GPT_ALIASES,
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
)
