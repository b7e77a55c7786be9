"""Architectures of GGUF files: metadata as the settings of a config.json, and changes of tensors that are undone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from kvjax.models.families import LoadError
from kvjax.models.families.settings import LAYER_TYPES
from kvjax.rope import Rope, rope_frequencies

Settings = dict[str, Any]
Array = Shaped[np.ndarray, "*shape"]
Restore = Callable[[Array, Settings], Array]
_BY_LAYER = ("attention.sliding_window_pattern",)
"""Metadata that may differ from layer to layer."""


@dataclasses.dataclass(frozen=True)
class Header:
    """Header of a file.

    `used_keys` has the names of the metadata that have been read; other metadata may change what the model computes.
    """

    name: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    factors: Mapping[str, Float[np.ndarray, " half"]]
    """Tensors that contain factors of RoPE's wavelengths."""
    used_keys: set[str] = dataclasses.field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the architecture's metadata of a name; a list of equal values becomes one value."""
        self.used_keys.add(key)
        value = self.metadata.get(f"{self.name}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]  # one value for each layer
        if isinstance(value, list) and key not in _BY_LAYER:
            raise LoadError(
                f"metadata {self.name}.{key} differs from layer to layer ({value}), which is not supported."
            )
        return value


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Conversion of a GGUF architecture to a Hugging Face one.

    Args:
        model_type: the `model_type` of the family.
        adapt: function from the common settings and the header to the further settings of this architecture.
        restore: functions that undo the format's changes to tensors, by the stem of the tensor's name.
        factors: the tensors with factors of RoPE's wavelengths that `adapt` reads; a file has all of them or none.
    """

    model_type: str
    adapt: Callable[[Settings, Header], Settings] = lambda settings, header: {}
    restore: Mapping[str, Restore] = dataclasses.field(default_factory=dict)
    factors: tuple[str, ...] = ()


def _unpermuted(heads: str) -> Restore:
    """Make a `Restore` for Llama's queries or keys; GGUF puts the rotated pairs of a head side by side."""

    def restore(tensor: Array, settings: Settings) -> Array:
        paired = tensor.reshape(settings[heads], -1, 2, *tensor.shape[1:])
        return paired.swapaxes(1, 2).reshape(tensor.shape)

    return restore


def _by_kv_head(tensor: Array, settings: Settings) -> Array:
    """Restore the order of fused queries, keys and values: by kind in GGUF, by KV head in GPT-NeoX and Falcon."""
    kv_heads, width = settings["num_key_value_heads"], settings["head_dim"]
    split = np.cumsum([settings["num_attention_heads"] * width, kv_heads * width])
    parts = [part.reshape(kv_heads, -1, *tensor.shape[1:]) for part in np.split(tensor, split)]
    return np.concatenate(parts, 1).reshape(tensor.shape)


def _experts(header: Header) -> Settings:
    return {"num_local_experts": header.get("expert_count"), "num_experts_per_tok": header.get("expert_used_count")}


def _llama(settings: Settings, header: Header) -> Settings:
    rope = _scaled(settings, header)
    if header.get("expert_count"):
        return {"model_type": "mixtral", "sliding_window": None, **_experts(header), **rope}
    return rope


def _scaled(settings: Settings, header: Header) -> Settings:
    return {"rope_parameters": settings["rope_parameters"] | _llama3_rope(settings, header)}


def _llama3_rope(settings: Settings, header: Header) -> Settings:
    """Recover the settings of Llama 3's RoPE; GGUF stores only the resulting factor of each frequency."""
    if not header.factors:
        return {}
    factors, theta = header.factors["rope_freqs"], settings["rope_parameters"]["rope_theta"]
    rope = Rope(2 * len(factors), theta, scaling="llama3", factor=float(factors.max()))
    expected = rope_frequencies(dataclasses.replace(rope, scaling="none")) / rope_frequencies(rope)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise LoadError("the factors in rope_freqs.weight are not those of Llama 3, and no others are supported.")
    numbers = {name: getattr(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return {"rope_type": "llama3", "original_max_position_embeddings": rope.original_max_positions, **numbers}


def _phi3(settings: Settings, header: Header) -> Settings:
    original = header.get("rope.scaling.original_context_length", settings["max_position_embeddings"])
    rope = {**settings["rope_parameters"], "original_max_position_embeddings": original}
    if original <= 0:
        raise LoadError(f"metadata {header.name}.rope.scaling.original_context_length must be above 0, not {original}.")
    if header.factors and (factor := header.get("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = factor
    if header.factors:
        lists = {f"{kind}_factor": header.factors[f"rope_factors_{kind}"].tolist() for kind in ("long", "short")}
        rope |= {"rope_type": "longrope", "factor": settings["max_position_embeddings"] / original, **lists}
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


def _gemma3(settings: Settings, header: Header) -> Settings:
    pattern = header.get("attention.sliding_window_pattern", 6)
    every_sixth = [layer % 6 != 5 for layer in range(settings["num_hidden_layers"])]
    if pattern != 6 and pattern != every_sixth:
        raise LoadError(
            f"metadata {header.name}.attention.sliding_window_pattern is {pattern}; supported is a window in all "
            "layers but every sixth."
        )
    largest = settings["num_hidden_layers"] == 62  # only the 27B scales by hidden_size / heads
    ropes = {
        "full_attention": settings["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": header.get("rope.freq_base_swa", 10_000.0)},
    }
    return {
        "rope_parameters": ropes,
        "query_pre_attn_scalar": (
            settings["hidden_size"] // settings["num_attention_heads"] if largest else settings["head_dim"]
        ),
        "final_logit_softcapping": header.get("final_logit_softcapping"),
    }


def _qwen3_moe(settings: Settings, header: Header) -> Settings:
    # As in llama.cpp, weights of experts sum to 1 unless the file says otherwise.
    return {
        **_experts(header),
        "moe_intermediate_size": header.get("expert_feed_forward_length", settings["intermediate_size"]),
        "norm_topk_prob": header.get("expert_weights_norm", True),
    }


def _gpt_oss(settings: Settings, header: Header) -> Settings:
    # The model rotates with YaRN's bounds as they are; the file does not say so.
    return {
        **_experts(header),
        "intermediate_size": header.get("expert_feed_forward_length", settings["intermediate_size"]),
        "rope_parameters": settings["rope_parameters"] | {"truncate": False},
    }


def _olmo2(settings: Settings, header: Header) -> Settings:
    if settings.get("sliding_window") is not None:
        raise LoadError("a file of OLMo 3 (attention.sliding_window) is not supported; give its safetensors.")
    return {}


def _windows(settings: Settings, header: Header) -> Settings:
    """Return the types of layers: by the file's pattern, or else with a window in all layers except every fourth."""
    layers, pattern = settings["num_hidden_layers"], header.get("attention.sliding_window_pattern", 4)
    if settings.get("sliding_window") is None:
        return {"sliding_window": None}
    if isinstance(pattern, bool):  # all layers are equal
        pattern = [pattern] * layers
    elif not isinstance(pattern, list):
        pattern = [(layer + 1) % pattern > 0 for layer in range(layers)]
    return {"layer_types": [LAYER_TYPES[bool(has_window)] for has_window in pattern]}


def _glm4(settings: Settings, header: Header) -> Settings:
    # Without a number of dimensions, RoPE rotates all of them; a config.json without it means half of them.
    return {"rope_parameters": {"partial_rotary_factor": 1.0, **settings["rope_parameters"]}}


def _granite(settings: Settings, header: Header) -> Settings:
    return {
        "attention_multiplier": header.get("attention.scale") or settings["head_dim"] ** -0.5,
        "embedding_multiplier": header.get("embedding_scale") or 1.0,
        "residual_multiplier": header.get("residual_scale") or 1.0,
        "logits_scaling": header.get("logit_scale") or 1.0,
    }


def _falcon(settings: Settings, header: Header) -> Settings:
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    return {
        "new_decoder_architecture": kv_heads not in (1, heads),
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in header.shapes else 1,
        "ffn_hidden_size": settings["intermediate_size"],
        "layer_norm_epsilon": settings["layer_norm_eps"],
        "bias": settings["attention_bias"],
    }


_PAIRED = {"attn_q": _unpermuted("num_attention_heads"), "attn_k": _unpermuted("num_key_value_heads")}
_GEMMA_NORMS = ("attn", "attn_q", "attn_k", "post_attention", "ffn", "post_ffw", "output")
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _llama, _PAIRED, ("rope_freqs",)),
    "smollm3": Architecture("smollm3", restore=_PAIRED),
    "granite": Architecture("granite", _granite, _PAIRED),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "olmoe": Architecture(
        "olmoe",
        lambda _, header: {**_experts(header), "clip_qkv": header.get("attention.clamp_kqv") or None},
    ),
    "arcee": Architecture("arcee", _scaled, _PAIRED, ("rope_freqs",)),
    "cohere2": Architecture(
        "cohere2",
        lambda settings, header: {**_windows(settings, header), "logit_scale": header.get("logit_scale") or 1.0},
    ),
    "ernie4_5": Architecture("ernie4_5", lambda settings, _: {"use_bias": settings["attention_bias"]}),
    "exaone4": Architecture(
        "exaone4",
        lambda settings, header: {**_windows(settings, header), **_scaled(settings, header)},
        factors=("rope_freqs",),
    ),
    "glm4": Architecture("glm4", _glm4),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "seed_oss": Architecture("seed_oss"),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss),
    "olmo2": Architecture("olmo2", _olmo2),
    "gemma3": Architecture(
        "gemma3_text",
        _gemma3,
        # GGUF adds to the norms' weights the 1 that the model adds.
        {f"{norm}_norm": lambda tensor, settings: tensor - 1 for norm in _GEMMA_NORMS},
    ),
    "phi3": Architecture("phi3", _phi3, factors=("rope_factors_long", "rope_factors_short")),
    "falcon": Architecture("falcon", _falcon, {"attn_qkv": _by_kv_head}),
    "gptneox": Architecture(
        "gpt_neox",
        lambda settings, header: {"use_parallel_residual": header.get("use_parallel_residual", True)},
        {"attn_qkv": _by_kv_head},
    ),
}
"""Architecture of each `general.architecture`."""


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
    "rope.scaling.yarn_ext_factor": (-1, 1),
    **dict.fromkeys(
        (
            *("attention.clamp_kqv", "attention.max_alibi_bias", "attn_logit_softcapping", "final_logit_softcapping"),
            *("expert_chunk_feed_forward_length", "expert_count", "expert_feed_forward_length", "expert_shared_count"),
            *("expert_shared_feed_forward_length", "expert_used_count", "leading_dense_block_count"),
            *("nextn_predict_layers", "pooling_type", "rope.scaling.yarn_log_multiplier"),
        ),
        (0,),
    ),
    **dict.fromkeys(("embedding_scale", "expert_gating_func", "residual_scale", "rope.scaling.yarn_attn_factor"), (1,)),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count", "expert_weights_scale", "logit_scale"), (0, 1)),
    **dict.fromkeys(("interleave_moe_layer_step", "moe_every_n_layers"), (0, 1)),
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
