"""GPT-J: parallel blocks with one norm, interleaved RoPE on a part of each head, an unembedding with a bias."""

from __future__ import annotations

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import GPT_ALIASES, GPT_NAMES, gpt_config
from kvjax.models.families.family import Family, Settings
from kvjax.models.families.settings import integer
from kvjax.models.families.sources import module_sources
from kvjax.rope import Rope


def _config(settings: Settings) -> ModelConfig:
    return gpt_config(
        settings,
        GPT_NAMES,
        parallel=True,
        rope=Rope(integer(settings, "rotary_dim"), interleaved=True),
        shared_norm=True,
        mlp_bias=True,
        unembedding_bias=True,
    )


_MODULES = {
    "embedding": "transformer.wte",
    "norm": "transformer.ln_f",
    "unembedding": "lm_head",
    "layers.attention_norm": "ln_1",
    "layers.query": "attn.q_proj",
    "layers.key": "attn.k_proj",
    "layers.value": "attn.v_proj",
    "layers.output": "attn.out_proj",
    "layers.mlp.up": "mlp.fc_in",
    "layers.mlp.down": "mlp.fc_out",
}

GPTJ = Family(
    _config,
    module_sources("transformer.h", _MODULES),
    {
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "n_inner": None,
        "rotary_dim": 64,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    only={"tie_word_embeddings": (False,)},
    aliases=GPT_ALIASES,
    ignored=(r"transformer\.h\.\d+\.attn\.((masked_)?bias|embed_positions)",),
)
