"""GPT-2 and Cerebras-GPT, GPT-J, and GPT-NeoX and Pythia: layer norms, and MLPs without a gate.

GPT-2 has learned position embeddings, and linear maps stored as [in, out]. GPT-J has parallel blocks with one norm,
interleaved RoPE on a part of each head, and an unembedding with a bias. GPT-NeoX has parallel or sequential blocks with
two norms, and RoPE on a part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import (
    SIZES,
    Family,
    Settings,
    fused_by_head,
    fused_in_turn,
    module_sources,
    transposed,
)
from kvjax.models.families.llama import LLAMA_NAMES, common_fields
from kvjax.models.families.settings import flag, head_width, integer, read_rope
from kvjax.rope import Rope


def gpt_config(settings: Settings, names: Mapping[str, str], **overrides: Any) -> ModelConfig:
    """Return the config of a model with layer normalization, an MLP without a gate, and heads that divide the width.

    Args:
        settings: settings of the model.
        names: the family's names of the settings in `LLAMA_NAMES`. If that of `mlp_width` is None, it is 4 * `width`.
        overrides: further fields of the config; by default `kv_heads` is `heads` and `norm_bias` is True.
    """
    if settings.get(names["mlp_width"]) is None:
        settings = {**settings, names["mlp_width"]: 4 * integer(settings, names["width"])}
    fields = common_fields(settings, names) | {
        "head_width": head_width(settings, names["width"], names["heads"]),
        "norm": "layer",
        "norm_bias": True,
        "gated_mlp": False,
    }
    return ModelConfig(**({"kv_heads": fields["heads"]} | fields | overrides))


_NAMES: Mapping[str, str] = {
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation_function",
    "mlp_width": "n_inner",
}
_ALIASES = {LLAMA_NAMES[ours]: _NAMES[ours] for ours in ("width", "layers", "heads", "max_positions")}
_LOOKED_UP = ("vocab_size", *(name for name in _NAMES.values() if name != "n_inner"))
_DEFAULTS: Settings = {"bos_token_id": 50256, "eos_token_id": 50256}


def _gpt2(settings: Settings) -> ModelConfig:
    scale = head_width(settings, "n_embd", "n_head") ** -0.5 if flag(settings, "scale_attn_weights") else 1.0
    scales = [scale / (layer + 1) for layer in range(integer(settings, "n_layer"))]
    return gpt_config(
        settings,
        _NAMES,
        position="learned",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        attention_scale=scale,
        attention_scales=tuple(scales) if flag(settings, "scale_attn_by_inverse_layer_idx") else None,
    )


_COMMON = {
    "embedding": "transformer.wte",
    "norm": "transformer.ln_f",
    "unembedding": "lm_head",
    "layers.attention_norm": "ln_1",
}
_GPT2 = {**_COMMON, "positions": "transformer.wpe", "layers.mlp_norm": "ln_2"}
_LINEARS = {"layers.mixer.output": "attn.c_proj", "layers.mlp.up": "mlp.c_fc", "layers.mlp.down": "mlp.c_proj"}
_TRANSPOSED = fused_in_turn("transformer.h.{layer}.attn.c_attn") | module_sources("transformer.h", _LINEARS)


def _gptj(settings: Settings) -> ModelConfig:
    return gpt_config(
        settings,
        _NAMES,
        parallel=True,
        rope=Rope(integer(settings, "rotary_dim"), interleaved=True),
        shared_norm=True,
        mlp_bias=True,
        unembedding_bias=True,
    )


_GPTJ = {
    **_COMMON,
    "layers.mixer.query": "attn.q_proj",
    "layers.mixer.key": "attn.k_proj",
    "layers.mixer.value": "attn.v_proj",
    "layers.mixer.output": "attn.out_proj",
    "layers.mlp.up": "mlp.fc_in",
    "layers.mlp.down": "mlp.fc_out",
}


def _gpt_neox(settings: Settings) -> ModelConfig:
    rope_settings = {"partial_rotary_factor": settings["rotary_pct"], "rope_theta": settings["rotary_emb_base"]}
    width = head_width(settings, "hidden_size", "num_attention_heads")
    return gpt_config(
        settings,
        {**LLAMA_NAMES, "norm_eps": "layer_norm_eps"},
        parallel=flag(settings, "use_parallel_residual"),
        rope=read_rope({**settings, **rope_settings}, width, partial=True),
        qkv_bias=flag(settings, "attention_bias"),
        output_bias=flag(settings, "attention_bias"),
        mlp_bias=True,
    )


_GPT_NEOX = {
    "embedding": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "unembedding": "embed_out",
    "layers.attention_norm": "input_layernorm",
    "layers.mixer.output": "attention.dense",
    "layers.mlp_norm": "post_attention_layernorm",
    "layers.mlp.up": "mlp.dense_h_to_4h",
    "layers.mlp.down": "mlp.dense_4h_to_h",
}
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        _gpt2,
        module_sources("transformer.h", _GPT2) | {leaf: transposed(source) for leaf, source in _TRANSPOSED.items()},
        {**_DEFAULTS, "scale_attn_weights": True, "tie_word_embeddings": True},
        only={"add_cross_attention": (False,)},
        aliases=_ALIASES,
        ignored=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
        looked_up=_LOOKED_UP,
    ),
    "gpt_neox": Family(
        _gpt_neox,
        {
            **module_sources("gpt_neox.layers", _GPT_NEOX),
            **fused_by_head("gpt_neox.layers.{layer}.attention.query_key_value"),
        },
        {
            "hidden_act": "gelu",
            "use_parallel_residual": True,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10_000.0,
            "attention_bias": True,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        ignored=(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
        looked_up=("layer_norm_eps", *(name for name in SIZES if name != "rms_norm_eps")),
    ),
    "gptj": Family(
        _gptj,
        module_sources("transformer.h", _GPTJ),
        _DEFAULTS,
        only={"tie_word_embeddings": (False,)},
        aliases=_ALIASES,
        ignored=(r"transformer\.h\.\d+\.attn\.((masked_)?bias|embed_positions)",),
        looked_up=(*_LOOKED_UP, "rotary_dim"),
    ),
}
