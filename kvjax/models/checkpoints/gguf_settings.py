"""Metadata of GGUF files as the settings of a Hugging Face config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvjax.models.checkpoints.gguf_architectures import ARCHITECTURES, Header, Settings
from kvjax.models.families import LoadError

_NEEDED: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_KNOWN: Mapping[str, str] = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window",
}
_DESCRIBES = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
"""Metadata without effect on the model."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (1,),
    "expert_chunk_feed_forward_length": (0,),
    "expert_count": (0,),
    "expert_feed_forward_length": (0,),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Unsupported metadata, with the values that have no effect."""


def _check_keys(header: Header, head_width: int) -> None:
    """Refuse metadata of the architecture that nothing has read and that may change what the model computes."""
    for name in ("attention.key_length", "attention.value_length"):
        if header.get(name, head_width) != head_width:
            raise LoadError(
                f"metadata {header.name}.{name} is {header.get(name)}, but the tensors' heads have {head_width}."
            )
    for key, value in header.metadata.items():
        name = key.removeprefix(f"{header.name}.")
        if name == key or name in header.used_keys or name in _DESCRIBES or value in _NEUTRAL.get(name, ()):
            continue
        raise LoadError(f"metadata {key} ({value!r}) is not supported.")


def config_settings(header: Header) -> Settings:
    """Return the settings that a Hugging Face config.json would have."""
    architecture = ARCHITECTURES[header.name]
    settings: Settings = {"model_type": architecture.model_type}
    for key, setting in {**_NEEDED, **_KNOWN}.items():
        value = header.get(key)
        if value is None and key in _NEEDED:
            raise LoadError(f"metadata {header.name}.{key} is missing.")
        if key in _NEEDED and (not isinstance(value, int) or value <= 0):
            raise LoadError(f"metadata {header.name}.{key} must be an integer above 0, not {value!r}.")
        if value is not None:
            settings[setting] = None if (setting, value) == ("sliding_window", 0) else value
    if settings["num_hidden_layers"] > len(header.shapes):
        raise LoadError(
            f"metadata {header.name}.block_count is {settings['num_hidden_layers']}, but the file has only "
            f"{len(header.shapes)} tensors: it is damaged; copy or download it again."
        )
    heads = settings["num_attention_heads"]
    settings.setdefault("num_key_value_heads", heads)
    queries = header.shapes.get("blk.0.attn_q.weight")
    width = (settings["hidden_size"] if not queries else queries[0]) // heads
    if width < 1 or not header.shapes["token_embd.weight"]:
        raise LoadError(f"the shapes of token_embd.weight or blk.0.attn_q.weight do not fit {heads} heads.")
    factors = architecture.factors
    if header.factors and sorted(header.factors) != sorted(factors):
        supported = f"supported are {' and '.join(factors)}" if factors else "give the model's safetensors"
        raise LoadError(
            f"the factors of RoPE in {' and '.join(header.factors)} are not supported for {header.name}; {supported}."
        )
    ids = {role: header.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "eot", "eom")}
    vocabulary = header.shapes["token_embd.weight"][0]
    ids = {role: token for role, token in ids.items() if role in ("bos", "eos") or 0 <= (token or 0) < vocabulary}
    settings |= {
        "vocab_size": vocabulary,
        "head_dim": width,
        "rope_parameters": _rope(header, width),
        "tie_word_embeddings": "output.weight" not in header.shapes,
        "attention_bias": any(f"blk.0.{name}.bias" in header.shapes for name in ("attn_q", "attn_qkv")),
        "mlp_bias": "blk.0.ffn_up.bias" in header.shapes,
        "bos_token_id": ids.pop("bos"),
        "eos_token_id": sorted({token for token in ids.values() if token is not None}),
    }
    settings |= architecture.adapt(settings, header)
    _check_keys(header, width)
    return settings


def _rope(header: Header, head_width: int) -> Settings:
    """Return the settings of RoPE; as in llama.cpp, a factor without a type means linear scaling."""
    width, factor = header.get("rope.dimension_count", head_width), header.get("rope.scaling.factor")
    of_2023 = header.get("rope.scale_linear")
    factor = of_2023 if factor is None else factor
    kind = header.get("rope.scaling.type", "none" if factor in (None, 0, 1) else "linear")
    rope: Settings = {"rope_type": "default", "rope_theta": header.get("rope.freq_base", 10_000.0)}
    original = header.get("rope.scaling.original_context_length")
    betas = {name: header.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    if width != head_width:
        rope["partial_rotary_factor"] = width / head_width
    if kind != "none":
        factor = 1.0 if factor in (None, 0) else factor
        rope |= {"rope_type": kind, "factor": factor}
        rope |= {} if original is None else {"original_max_position_embeddings": original}
    multiplier = header.get("rope.scaling.attn_factor", 1.0)
    if kind == "yarn" and rope["factor"] > 0:
        rope |= {name: value for name, value in betas.items() if value is not None}
        if multiplier != 1:
            rope["attention_factor"] = multiplier * (1 + 0.1 * math.log(rope["factor"]))
    elif multiplier != 1 and kind != "longrope" and not header.factors:
        raise LoadError(
            f"metadata {header.name}.rope.scaling.attn_factor ({multiplier}) is supported only for yarn and longrope."
        )
    return rope
