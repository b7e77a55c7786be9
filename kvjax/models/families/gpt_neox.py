"""GPT-NeoX and Pythia: parallel or sequential blocks with two norms, RoPE on a part of each head."""

from __future__ import annotations

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_NAMES, gpt_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.settings import flag, head_width, read_rope
from kvjax.models.families.sources import fused_by_head, module_sources


def _config(settings: Settings) -> ModelConfig:
    named = {"partial_rotary_factor": settings["rotary_pct"], "rope_theta": settings["rotary_emb_base"]}
    width = head_width(settings, "hidden_size", "num_attention_heads")
    return gpt_config(
        settings,
        {**LLAMA_NAMES, "norm_eps": "layer_norm_eps"},
        parallel=flag(settings, "use_parallel_residual"),
        rope=read_rope({**settings, **named}, width, partial=True),
        qkv_bias=flag(settings, "attention_bias"),
        output_bias=flag(settings, "attention_bias"),
        mlp_bias=True,
    )


_MODULES = {
    "embedding": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "unembedding": "embed_out",
    "layers.attention_norm": "input_layernorm",
    "layers.output": "attention.dense",
    "layers.mlp_norm": "post_attention_layernorm",
    "layers.mlp.up": "mlp.dense_h_to_4h",
    "layers.mlp.down": "mlp.dense_4h_to_h",
}

GPT_NEOX = Family(
    _config,
    {
        **module_sources("gpt_neox.layers", _MODULES),
        **fused_by_head("gpt_neox.layers.{layer}.attention.query_key_value"),
    },
    {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10_000.0,
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    ignored=(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),
)
