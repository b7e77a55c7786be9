"""Falcon 7B, 11B, 40B and RW: one KV head, groups of them (`new_decoder_architecture`), or ALiBi, maybe biases."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import Family, LoadError, Settings, Source, fused_by_head, module_sources
from kvjax.models.families.gpt import gpt_config
from kvjax.models.families.llama import LLAMA_NAMES
from kvjax.models.families.settings import flag, head_width, integer, optional_integer, read_rope
from pallas_kernels.attention import alibi_slopes

_NAMES = {
    **LLAMA_NAMES,
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation",
    "mlp_width": "ffn_hidden_size",
}


def _config(settings: Settings) -> ModelConfig:
    width = head_width(settings, "hidden_size", "num_attention_heads")
    heads = integer(settings, "num_attention_heads")
    grouped, alibi, bias = (flag(settings, key) for key in ("new_decoder_architecture", "alibi", "bias"))
    parallel, norms = flag(settings, "parallel_attn"), settings.get("num_ln_in_parallel_attn")
    if norms not in ((None, 1, 2) if grouped else (None, 1)) or (grouped and not parallel):
        raise LoadError(
            f"parallel_attn={parallel} and num_ln_in_parallel_attn={norms!r} are not supported with "
            f"new_decoder_architecture={grouped}; only parallel_attn=True and 1 or 2 norms are where it is True, and "
            "1 norm where it is False."
        )
    kv_heads = heads
    if grouped:
        kv_heads = optional_integer(settings, "num_kv_heads") or heads
    elif flag(settings, "multi_query"):
        kv_heads = 1
    # Falcon scales the sum of products and biases, and keeps slopes in bfloat16. transformers also rounds the bias of
    # each position to bfloat16, which makes it depend on more than the distance; kvjax does not.
    slopes = tuple((np.asarray(alibi_slopes(heads), jnp.bfloat16).astype(float) * width**-0.5).tolist())
    return gpt_config(
        settings,
        _NAMES,
        kv_heads=kv_heads,
        parallel=parallel,
        position="alibi" if alibi else "rope",
        rope=None if alibi else read_rope(settings, width),
        slopes=slopes if alibi else None,
        shared_norm=parallel and not (grouped and norms != 1),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def _variant(config: ModelConfig) -> Mapping[str, Source]:
    two = config.parallel and not config.shared_norm
    norms = {"layers.attention_norm": "ln_attn", "layers.mlp_norm": "ln_mlp"}
    return module_sources("transformer.h", norms) if two else {}


_MODULES = {
    "embedding": "transformer.word_embeddings",
    "norm": "transformer.ln_f",
    "unembedding": "lm_head",
    "layers.attention_norm": "input_layernorm",
    "layers.mixer.output": "self_attention.dense",
    "layers.mlp_norm": "post_attention_layernorm",
    "layers.mlp.up": "mlp.dense_h_to_4h",
    "layers.mlp.down": "mlp.dense_4h_to_h",
}

FAMILIES: Mapping[str, Family] = {
    "falcon": Family(
        _config,
        {
            **module_sources("transformer.h", _MODULES),
            **fused_by_head("transformer.h.{layer}.self_attention.query_key_value"),
        },
        {
            "activation": "gelu",
            "multi_query": True,
            "parallel_attn": True,
            "tie_word_embeddings": True,
            "bos_token_id": 11,
            "eos_token_id": 11,
        },
        only={"apply_residual_connection_post_layernorm": (None, False)},
        variant=_variant,
        looked_up=(
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
            "layer_norm_epsilon",
        ),
    )
}
