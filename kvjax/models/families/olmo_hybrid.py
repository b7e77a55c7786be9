"""OLMo Hybrid: OLMo 2 with the gated delta rule in three of four layers, which normalize inputs instead of outputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, Settings, Source, depthwise
from kvjax.models.families.hybrid import (
    BLOCK,
    DELTA_SIZES,
    LAYER_TYPES,
    delta_sources,
    in_delta_layers,
    read_delta_rule,
)
from kvjax.models.families.llama import LLAMA_SOURCES, QUERY_KEY_NORMS, llama_config
from kvjax.models.families.settings import flag, integer, rope_parts

_NORM_EPS = 1e-5
"""Constant of the norms after the rule, which no setting changes."""


def _complete(settings: Settings) -> dict[str, Any]:
    # Sizes of the rule that a config omits follow from those of attention.
    heads, layers = integer(settings, "num_attention_heads"), integer(settings, "num_hidden_layers")
    stated = {name: value for name, value in settings.items() if value is not None}
    complete = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, **stated}
    width = int(0.75 * integer(settings, "hidden_size") / integer(complete, "linear_num_key_heads"))
    complete = {"linear_key_head_dim": width, **complete}
    complete = {"linear_value_head_dim": 2 * complete["linear_key_head_dim"], **complete}
    kinds = [LAYER_TYPES[index % 4 == 3] for index in range(layers)]
    if layers < 4:
        kinds[-1] = LAYER_TYPES[1]
    return {"layer_types": kinds, **complete}


def _config(settings: Settings) -> ModelConfig:
    complete = _complete(settings)
    shape = llama_config(
        {**complete, "rope_parameters": None, "rope_scaling": None},
        query_key_norms=True,
        query_key_norm_over="heads",
        pre_norms=False,
        post_norms=True,
        delta_rule=read_delta_rule(
            complete,
            4,
            write_scale=2.0 if flag(settings, "linear_allow_neg_eigval") else 1.0,
            norm_eps=_NORM_EPS,
        ),
    )
    parameters = rope_parts(settings)[1]
    if parameters.get("rope_theta", shape) is None:  # the published checkpoint has no RoPE
        return dataclasses.replace(shape, position="none", rope=None)
    return dataclasses.replace(shape, rope=llama_config(complete).rope)


def _taps(name: str, leaf: str) -> Source:
    return depthwise(f"{BLOCK}.{name}.weight", alternatives=(delta_sources({})[leaf],))


_MIXER: Mapping[str, Source] = {
    **delta_sources(
        {
            **{"norm.scale": "o_norm.weight", "gate.weight": "g_proj.weight", "output.weight": "o_proj.weight"},
            **{"query.weight": "q_proj.weight", "key.weight": "k_proj.weight", "value.weight": "v_proj.weight"},
            **{"beta": "b_proj.weight", "decay": "a_proj.weight"},
        }
    ),
    **{f"{leaf}_taps": _taps(f"{leaf[0]}_conv1d", f"{leaf}_taps") for leaf in ("query", "key", "value")},
}


def _norm(name: str, alternative: str = "") -> Source:
    also = (Source(f"model.layers.{{layer}}.{alternative}.weight"),) if alternative else ()
    return Source(f"model.layers.{{layer}}.{name}.weight", alternatives=also)


FAMILIES: Mapping[str, Family] = {
    "olmo_hybrid": Family(
        _config,
        {
            **LLAMA_SOURCES,
            **QUERY_KEY_NORMS,
            "layers.attention_norm.scale": _norm("attention_layer_norm", "input_layernorm"),
            "layers.mlp_norm.scale": _norm("feedforward_layer_norm", "post_attention_layernorm"),
            # transformers gives this norm the name of another one when it saves a model.
            "layers.attention_post_norm.scale": _norm("post_attention_layernorm", "feedforward_layer_norm"),
            "layers.mlp_post_norm.scale": _norm("post_feedforward_layernorm"),
        },
        {"hidden_act": "silu", "eos_token_id": 100_257, "linear_allow_neg_eigval": True},
        only={"mlp_bias": (False,)},
        variant=functools.partial(in_delta_layers, _MIXER),
        looked_up=(*SIZES, DELTA_SIZES[-1]),
    ),
}
