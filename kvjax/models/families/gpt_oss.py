"""gpt-oss: a learned logit in the denominator of the softmax, and a mixture of experts with biases."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.families.common import LLAMA_DEFAULTS, LLAMA_SOURCES, llama_config
from kvjax.models.families.family import Family, Settings, Shape, Source
from kvjax.models.families.mixture import read_mixture, stored_in_out
from kvjax.models.families.settings import LAYER_TYPES, integer, positive_number, read_windows, with_default_rope

_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _config(settings: Settings) -> ModelConfig:
    settings = with_default_rope(settings, _ROPE)
    types = [LAYER_TYPES[layer % 2 == 0] for layer in range(integer(settings, "num_hidden_layers"))]
    mixture = read_mixture(settings, "intermediate_size", renormalised=True)
    return dataclasses.replace(
        llama_config(settings),
        sliding_window=None,
        windows=read_windows(settings, types),
        sinks=True,
        mixture=dataclasses.replace(mixture, router_bias=True),
        mlp_bias=True,
        clamped_swiglu=(positive_number(settings, "swiglu_alpha"), positive_number(settings, "swiglu_limit")),
    )


def _every_other(first: int, name: str) -> Source:
    """Return the source of outputs 0, 2, ... or 1, 3, ... of a tensor, in which gates and up projections alternate."""

    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        return (leaf[0], 2 * leaf[1], *leaf[2:])

    def read(tensor: np.ndarray, config: ModelConfig) -> np.ndarray:
        return tensor[:, first::2].copy()  # a view would keep the whole tensor in memory

    return Source(name, shape, read)


def _or(source: Source, name: str) -> Source:
    """Return a source that is also found under another name, in the layout of the leaf (GGUF)."""
    return dataclasses.replace(source, others=(Source(name),))


_SINKS = "model.layers.{layer}.self_attn.sinks"
_MLP = "model.layers.{layer}.mlp"
_EXPERTS = f"{_MLP}.experts"
_GATE, _UP, _DOWN = f"{_EXPERTS}.gate_proj", f"{_EXPERTS}.up_proj", f"{_EXPERTS}.down_proj"
_GATE_UP = f"{_EXPERTS}.gate_up_proj"

GPT_OSS = Family(
    _config,
    {
        **LLAMA_SOURCES,
        "layers.sink_logits": _or(Source(_SINKS), f"{_SINKS}.weight"),
        "layers.mlp.router": Source(f"{_MLP}.router.weight"),
        "layers.mlp.router_bias": Source(f"{_MLP}.router.bias"),
        "layers.mlp.experts.gate.weight": _or(stored_in_out(_every_other(0, _GATE_UP)), f"{_GATE}.weight"),
        "layers.mlp.experts.gate.bias": _or(_every_other(0, f"{_GATE_UP}_bias"), f"{_GATE}.bias"),
        "layers.mlp.experts.up.weight": _or(stored_in_out(_every_other(1, _GATE_UP)), f"{_UP}.weight"),
        "layers.mlp.experts.up.bias": _or(_every_other(1, f"{_GATE_UP}_bias"), f"{_UP}.bias"),
        "layers.mlp.experts.down.weight": _or(stored_in_out(Source(_DOWN)), f"{_DOWN}.weight"),
        "layers.mlp.experts.down.bias": _or(Source(f"{_DOWN}_bias"), f"{_DOWN}.bias"),
    },
    {
        **LLAMA_DEFAULTS,
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "max_position_embeddings": 131_072,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    only={"mlp_bias": (False,), "hidden_act": ("silu",)},
)
