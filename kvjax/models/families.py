"""One entry per model family: how its Hugging Face config and tensor names become ours."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvjax.models.config import ModelConfig, Rope


class LoadError(ValueError):
    """A checkpoint that cannot be used, and why, in one sentence."""


Settings = Mapping[str, Any]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a leaf of `Weights` comes from.

    Args:
        name: of the tensor in the checkpoint; `{layer}` stands for the layer's number.
        shape: from the leaf's shape and the config, the tensor's shape; None if they are the same.
        read: from the tensor and the config, the leaf (a transpose, part of a fused tensor); None if the same.
    """

    name: str
    shape: Callable[[Shape, ModelConfig], Shape] | None = None
    read: Callable[[np.ndarray, ModelConfig], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A Hugging Face architecture.

    Args:
        config: reads its config.json, completed by `defaults`.
        sources: for each leaf of `Weights` (layers without their number), its tensor.
        defaults: what its config means by a setting that is not there.
        only: settings of which kvjax knows these values alone.
        ignored: patterns of tensors that some checkpoints hold and no model needs.
    """

    config: Callable[[Settings], ModelConfig]
    sources: Mapping[str, Source]
    defaults: Settings
    only: Settings = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)

    def source(self, leaf: str) -> Source:
        """The source of a leaf such as `layers.3.query.weight`, its tensor's name complete."""
        match = re.match(r"layers\.(\d+)\.", leaf)
        source = self.sources[leaf if match is None else "layers." + leaf[match.end() :]]
        return dataclasses.replace(source, name=source.name.format(layer=match and match[1]))


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# For each type of RoPE: our name for it, and which settings it has beside theta.
_ROPES = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_positions": "original_max_position_embeddings",
        },
    ),
}


def _number(settings: Settings, key: str, kind: type[int] | type[float] = int) -> Any:
    """A positive number, or one clear sentence."""
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | kind) or value <= 0:
        what = "an integer" if kind is int else "a number"
        raise LoadError(f"{key} must be {what} above 0, not {value!r}.")
    return value


def _choice(settings: Settings, key: str, choices: Mapping[str, Any]) -> Any:
    value = settings.get(key)
    if not isinstance(value, str) or value not in choices:
        raise LoadError(f"{key} {value!r} is not supported; supported are {', '.join(choices)}.")
    return choices[value]


def token_ids(settings: Settings, key: str) -> tuple[int, ...]:
    """The ids of a special token that a config may give as nothing, a number or a list."""
    value = settings.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise LoadError(f"{key} must be a token id or a list of them, not {value!r}.")
    return tuple(ids)


def read_rope(settings: Settings, width: int) -> Rope:
    """RoPE of `width` dimensions from `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling` (before)."""
    parts = [settings.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, dict) for part in parts):
        raise LoadError(f"rope_scaling and rope_parameters must be objects, not {parts[0]!r} and {parts[1]!r}.")
    merged = {"rope_theta": settings.get("rope_theta", 10_000.0)} | parts[0] | parts[1]
    # Models that give each type of layer its own RoPE nest one object per type.
    nested = [key for key, value in merged.items() if isinstance(value, dict)]
    if nested:
        raise LoadError(f"RoPE settings per type of layer ({', '.join(nested)}) are not supported.")
    if merged.get("partial_rotary_factor", 1.0) != 1.0:
        raise LoadError(f"partial_rotary_factor {merged['partial_rotary_factor']!r} is not supported; only 1.0 is.")
    merged["rope_type"] = merged.get("rope_type", merged.get("type", "default"))
    scaling, fields = _choice(merged, "rope_type", _ROPES)
    extra = {field: _number(merged, key, float) for field, key in fields.items()}
    return Rope(width=width, theta=float(_number(merged, "rope_theta", float)), scaling=scaling, **extra)


def _llama_config(settings: Settings) -> ModelConfig:
    width, heads = _number(settings, "hidden_size"), _number(settings, "num_attention_heads")
    if settings.get("head_dim") is None and width % heads:
        raise LoadError(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}, and there is no head_dim."
        )
    head_width = width // heads if settings.get("head_dim") is None else _number(settings, "head_dim")
    kv_heads = heads if settings.get("num_key_value_heads") is None else _number(settings, "num_key_value_heads")
    window = settings.get("sliding_window")
    return ModelConfig(
        vocab_size=_number(settings, "vocab_size"),
        width=width,
        layers=_number(settings, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=_number(settings, "intermediate_size"),
        max_positions=_number(settings, "max_position_embeddings"),
        norm_eps=_number(settings, "rms_norm_eps", float),
        activation=_choice(settings, "hidden_act", _ACTIVATIONS),
        rope=read_rope(settings, head_width),
        qkv_bias=bool(settings["attention_bias"]),
        output_bias=bool(settings.get("output_bias", settings["attention_bias"])),
        mlp_bias=bool(settings["mlp_bias"]),
        tied=bool(settings["tie_word_embeddings"]),
        sliding_window=None if window is None else _number(settings, "sliding_window"),
        bos=next(iter(token_ids(settings, "bos_token_id")), None),
        eos=token_ids(settings, "eos_token_id"),
    )


_LLAMA_LINEARS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_LLAMA_SOURCES = {
    "embedding": Source("model.embed_tokens.weight"),
    "layers.attention_norm.scale": Source("model.layers.{layer}.input_layernorm.weight"),
    "layers.mlp_norm.scale": Source("model.layers.{layer}.post_attention_layernorm.weight"),
    "norm.scale": Source("model.norm.weight"),
    "unembedding.weight": Source("lm_head.weight"),
} | {
    f"layers.{ours}.{part}": Source(f"model.layers.{{layer}}.{theirs}.{part}")
    for ours, theirs in _LLAMA_LINEARS.items()
    for part in ("weight", "bias")
}
_LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        # Llama has no sliding window, whatever its config says.
        lambda settings: _llama_config({**settings, "sliding_window": None}),
        _LLAMA_SOURCES,
        _LLAMA_DEFAULTS | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "mistral": Family(
        _llama_config,
        _LLAMA_SOURCES,
        _LLAMA_DEFAULTS
        | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
        | {"bos_token_id": 1, "eos_token_id": 2},
        only={"attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "qwen2": Family(
        lambda settings: _llama_config({**settings, "attention_bias": True, "sliding_window": None}),
        _LLAMA_SOURCES,
        _LLAMA_DEFAULTS | {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "output_bias": False},
        only={"use_sliding_window": (None, False), "mlp_bias": (False,)},
    ),
}


def read_config(settings: Settings) -> tuple[Family, ModelConfig]:
    """The family and the shape of the model that a Hugging Face config.json describes.

    Raises:
        LoadError: for an unknown architecture or a setting that kvjax does not support.
    """
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise LoadError(f"Architecture (model_type) {name!r} is not supported; supported are {', '.join(FAMILIES)}.")
    if settings.get("quantization_config"):
        raise LoadError("quantization_config is not supported: give the checkpoint with its weights in floating point.")
    family = FAMILIES[name]
    settings = {**family.defaults, **settings}
    for key, allowed in family.only.items():
        if settings.get(key) not in allowed:
            raise LoadError(f"{key}={settings[key]!r} is not supported for {name}; only {allowed[-1]!r} is.")
    try:
        return family, family.config(settings)
    except LoadError:
        raise
    except ValueError as error:
        raise LoadError(str(error)) from None
