"""gpt-oss: a learned logit in the denominator of the softmax, and a mixture of experts with biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import (
    EXPERTS,
    SIZES,
    Family,
    Settings,
    Source,
    fused_experts,
    gates_and_ups,
    transposed,
)
from kvjax.models.families.llama import LLAMA_SOURCES, llama_config
from kvjax.models.families.settings import periodic_windows, positive_number, read_mixture, with_default_rope

_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _config(settings: Settings) -> ModelConfig:
    settings = with_default_rope(settings, _ROPE)
    return llama_config(
        settings,
        windows=periodic_windows(settings, 2),
        sinks=True,
        mixture=read_mixture(settings, router_bias=True),
        mlp_bias=True,
        clamped_swiglu=(positive_number(settings, "swiglu_alpha"), positive_number(settings, "swiglu_limit")),
    )


def _or(source: Source, *names: str) -> Source:
    """Return a source that is also found under other names, in the layout of the leaf (GGUF)."""
    return dataclasses.replace(source, alternatives=tuple(map(Source, names)))


def _experts() -> Mapping[str, Source]:
    """Return the sources of experts: in one tensor, one for each map (GGUF), and one or two for each expert.

    Tools that quantize or train the linear maps of experts store them one by one: llm-compressor and GPTQModel with a
    gate and an up projection for each, Unsloth with both in one map.
    """
    sources: dict[str, Source] = {}
    for part, end in (("weight", ""), ("bias", "_bias")):
        of_each = gates_and_ups(f"{_MLP}.experts.gate_up_projs.{{expert}}.{part}", axis=0, alternating=True)
        of_each["down"] = Source(f"{_MLP}.experts.down_projs.{{expert}}.{part}")
        for leaf, fused in fused_experts(_MLP, end, alternating=True).items():
            stored = transposed(fused) if part == "weight" else fused
            source = _or(stored, f"{_MLP}.experts.{{expert}}.{leaf}_proj.{part}", f"{_MLP}.experts.{leaf}_proj.{part}")
            alternatives = (of_each[leaf], *source.alternatives)
            sources[f"layers.mlp.experts.{leaf}.{part}"] = dataclasses.replace(source, alternatives=alternatives)
    return sources


_SINKS, _MLP = "model.layers.{layer}.self_attn.sinks", "model.layers.{layer}.mlp"

FAMILIES: Mapping[str, Family] = {
    "gpt_oss": Family(
        _config,
        {
            **LLAMA_SOURCES,
            "layers.mixer.sink_logits": _or(Source(_SINKS), f"{_SINKS}.weight"),
            "layers.mlp.router": _or(Source(f"{_MLP}.router.weight"), f"{_MLP}.router.linear.weight"),
            "layers.mlp.router_bias": _or(Source(f"{_MLP}.router.bias"), f"{_MLP}.router.linear.bias"),
            **_experts(),
        },
        {
            "hidden_act": "silu",
            "rope_theta": 150_000.0,
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        only={"mlp_bias": (False,), "hidden_act": ("silu",)},
        aliases={"num_experts": "num_local_experts"},
        looked_up=(*SIZES, "num_key_value_heads", "head_dim", "sliding_window", *EXPERTS),
    )
}
