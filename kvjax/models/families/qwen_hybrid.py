"""Qwen3-Next and Qwen3.5 (text): Qwen3 with the gated delta rule in three of four layers.

The other layers have attention with a gate on its output, and RoPE on a quarter of each head. Norms multiply by
1 + weight. Qwen3-Next and Qwen3.5 MoE have a mixture of experts, with one that every token uses by a gate.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import Mixture, ModelConfig
from kvjax.models.families.family import SIZES, Family, Settings, Shape, Source, Tensor, expert_sources
from kvjax.models.families.hybrid import (
    BLOCK,
    DELTA_SIZES,
    delta_sources,
    in_delta_layers,
    read_delta_rule,
    rows_in_turn,
)
from kvjax.models.families.llama import LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import flag, integer, layer_numbers, positive_number, read_mixture


def _config(settings: Settings, **fields: Any) -> ModelConfig:
    period = integer({"full_attention_interval": 4, **settings}, "full_attention_interval")
    return llama_config(
        settings,
        partial=True,
        norm_offset=True,
        query_key_norms=True,
        output_gate="feature",
        delta_rule=read_delta_rule(settings, period, norm_eps=positive_number(settings, "rms_norm_eps")),
        **fields,
    )


def _mixture(settings: Settings, **fields: Any) -> Mixture:
    shared = integer(settings, "shared_expert_intermediate_size")
    return read_mixture(settings, "moe_intermediate_size", shared_width=shared, shared_gate=True, **fields)


def _qwen3_next(settings: Settings) -> ModelConfig:
    step, only = integer(settings, "decoder_sparse_step"), layer_numbers(settings, "mlp_only_layers") or []
    layers = range(integer(settings, "num_hidden_layers"))
    dense = tuple(layer for layer in layers if layer in only or (layer + 1) % step)
    return _config(
        settings, mixture=_mixture(settings, renormalised=flag(settings, "norm_topk_prob"), dense_layers=dense)
    )


def _qwen3_5_moe(settings: Settings) -> ModelConfig:
    mixture = _mixture(settings)
    return _config({**settings, "intermediate_size": mixture.width}, mixture=mixture)  # no layer has another MLP


def _with_gates(part: str) -> dict[str, Source]:
    # Queries and gates of attention in one tensor: for each head its query, then its gate.
    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        return (2 * leaf[0], *leaf[1:])

    def read(half: int, tensor: Tensor, config: ModelConfig) -> Tensor:
        halves = tensor.reshape(config.heads, 2, config.head_width, *tensor.shape[1:])
        return halves[:, half].reshape(-1, *tensor.shape[1:]).copy()

    name = f"model.layers.{{layer}}.self_attn.q_proj.{part}"
    return {
        f"layers.mixer.{leaf}.{part}": Source(name, shape, functools.partial(read, half))
        for half, leaf in enumerate(("query", "gate"))
    }


def _by_key_head(name: str, leaf: str) -> Source:
    # One of several maps in one tensor: for each key head its query, key, values and gates, or its beta and decay.
    def parts(config: ModelConfig) -> dict[str, int]:
        rule = config.delta_rule
        assert rule is not None
        values = rule.groups * rule.value_width
        if leaf in ("beta", "decay"):
            return {"beta": rule.groups, "decay": rule.groups}
        return {"query": rule.key_width, "key": rule.key_width, "value": values, "gate": values}

    def shape(part: Shape, config: ModelConfig) -> Shape:
        assert config.delta_rule is not None
        return (config.delta_rule.key_heads * sum(parts(config).values()), *part[1:])

    def read(tensor: Tensor, config: ModelConfig) -> Tensor:
        assert config.delta_rule is not None
        sizes = parts(config)
        start = sum(list(sizes.values())[: list(sizes).index(leaf)])
        by_head = tensor.reshape(config.delta_rule.key_heads, -1, *tensor.shape[1:])
        return by_head[:, start : start + sizes[leaf]].reshape(-1, *tensor.shape[1:]).copy()

    return Source(f"{BLOCK}.{name}.weight", shape, read)


_SHARED: Mapping[str, Source] = {
    **LLAMA_SOURCES,
    **QUERY_KEY_NORMS,
    **_with_gates("weight"),
    **_with_gates("bias"),
}
_MIXER = {"norm.scale": "norm.weight", "output.weight": "out_proj.weight"}
_MIXER_NEXT: Mapping[str, Source] = {
    **delta_sources(_MIXER),
    **{f"{leaf}.weight": _by_key_head("in_proj_qkvz", leaf) for leaf in ("query", "key", "value", "gate")},
    **{leaf: _by_key_head("in_proj_ba", leaf) for leaf in ("beta", "decay")},
}
_MIXER_3_5: Mapping[str, Source] = {
    **delta_sources(
        _MIXER | {"gate.weight": "in_proj_z.weight", "beta": "in_proj_b.weight", "decay": "in_proj_a.weight"}
    ),
    **{f"{leaf}.weight": rows_in_turn(f"{BLOCK}.in_proj_qkv.weight", leaf) for leaf in ("query", "key", "value")},
}
_MLP = "model.layers.{layer}.mlp"
_EXPERTS: Mapping[str, Source] = {
    **expert_sources(_MLP),
    **{
        f"layers.mlp.shared.{leaf}.weight": Source(f"{_MLP}.shared_expert.{leaf}_proj.weight")
        for leaf in ("gate", "up", "down")
    },
    "layers.mlp.shared_gate": Source(f"{_MLP}.shared_expert_gate.weight"),
}
_DEFAULTS: Settings = {"hidden_act": "silu", "partial_rotary_factor": 0.25}
_ONLY: Settings = {"mlp_bias": (False,)}
_IGNORED = (r".*\.rotary_emb\.inv_freq", r"(model\.)?mtp\..*")
"""Tensors that no model needs: those of heads that predict several tokens are not read."""
_LOOKED_UP = (*SIZES, "num_key_value_heads", "head_dim", *DELTA_SIZES)
_LOOKED_UP_EXPERTS = (
    *("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok"),
)


def _without(name: str) -> tuple[str, ...]:
    return tuple(setting for setting in _LOOKED_UP if setting != name)


FAMILIES: Mapping[str, Family] = {
    "qwen3_next": Family(
        _qwen3_next,
        {**_SHARED, **_EXPERTS},
        {**_DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": True},
        _ONLY,
        functools.partial(in_delta_layers, _MIXER_NEXT),
        _IGNORED,
        looked_up=(*_LOOKED_UP, *_LOOKED_UP_EXPERTS),
    ),
    "qwen3_5_text": Family(
        _config,
        _SHARED,
        _DEFAULTS,
        _ONLY,
        functools.partial(in_delta_layers, _MIXER_3_5),
        _IGNORED,
        looked_up=_LOOKED_UP,
    ),
    "qwen3_5_moe_text": Family(
        _qwen3_5_moe,
        {**_SHARED, **_EXPERTS},
        _DEFAULTS,
        _ONLY,
        functools.partial(in_delta_layers, _MIXER_3_5),
        _IGNORED,
        looked_up=(*_without("intermediate_size"), *_LOOKED_UP_EXPERTS),
    ),
}
