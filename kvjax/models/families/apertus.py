"""Apertus: Llama with norms of queries and keys, and an MLP without a gate whose activation has parameters."""

from __future__ import annotations

from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import Family, Settings, Shape, Source, Tensor, module_sources
from kvjax.models.families.llama import LLAMA_DEFAULTS, LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import with_default_rope

_ROPE: Settings = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _config(settings: Settings) -> ModelConfig:
    # The activation is not among those that families share, which have no parameters.
    shared = {**with_default_rope(settings, _ROPE), "hidden_act": "silu"}
    return llama_config(shared, activation="xielu", gated_mlp=False, query_key_norms=True)


def _scalar(name: str) -> Source:
    """Return the source of a parameter that checkpoints store without axes."""

    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        return ()

    def read(tensor: Tensor, config: ModelConfig) -> Tensor:
        return tensor.reshape(1)

    return Source(name, shape, read)


_NORMS = {"layers.attention_norm": "attention_layernorm", "layers.mlp_norm": "feedforward_layernorm"}
_ACTIVATION = "model.layers.{layer}.mlp.act_fn"

FAMILIES: Mapping[str, Family] = {
    "apertus": Family(
        _config,
        {
            **LLAMA_SOURCES,
            **QUERY_KEY_NORMS,
            **module_sources("model.layers", _NORMS),
            **{f"layers.mlp.activation.{name}": Source(f"{_ACTIVATION}.{name}") for name in ("alpha_p", "alpha_n")},
            **{f"layers.mlp.activation.{name}": _scalar(f"{_ACTIVATION}.{name}") for name in ("beta", "eps")},
        },
        {**LLAMA_DEFAULTS, "hidden_act": "xielu", "rope_theta": 12_000_000.0},
        {"hidden_act": ("xielu",), "mlp_bias": (False,)},
    ),
}
