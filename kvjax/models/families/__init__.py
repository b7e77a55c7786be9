"""Model families, one file each: conversion of Hugging Face configs and tensor names to those of kvjax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families import (
    apertus,
    cohere,
    falcon,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt,
    gpt_oss,
    granite,
    hunyuan,
    latent,
    lfm2,
    llama,
    llama4,
    mistral,
    mpt,
    nanochat,
    olmo,
    olmo_hybrid,
    qwen,
    qwen_hybrid,
)
from kvjax.models.families.family import Family as Family
from kvjax.models.families.family import LoadError as LoadError
from kvjax.models.families.family import Settings as Settings
from kvjax.models.families.quantization import read_quantization
from kvjax.models.families.settings import check_only, flag
from kvjax.models.families.settings import special_token_ids as special_token_ids

FAMILIES: Mapping[str, Family] = {
    model_type: family
    for module in (
        *(llama, llama4, mistral, qwen, qwen_hybrid, olmo, olmo_hybrid, granite, gpt_oss, gemma, gemma3n, gemma4),
        *(glm, cohere, latent, lfm2, apertus, hunyuan, nanochat, falcon, gpt, mpt),
    )
    for model_type, family in module.FAMILIES.items()
}
"""Family of each `model_type`."""


@dataclasses.dataclass(frozen=True)
class TextHalf:
    """Text half of a multimodal `model_type`, unless its `text_config` names another family.

    Args:
        family: `model_type` of the family.
        config: the type of config in transformers whose values stand for omitted settings; None for the family's.
        defaults: values of settings that `text_config` omits, where they differ from the family's.
        tied: value of `tie_word_embeddings` if neither the model nor its text half has it.
        either_ties: True if embeddings are tied where the model or its text half sets `tie_word_embeddings`. Otherwise
            the model's setting replaces that of the text half.
        flat: True if some configs have the settings of the text half outside of `text_config`, and none of that.
    """

    family: str
    config: str | None = None
    defaults: Settings = dataclasses.field(default_factory=dict)
    tied: bool = False
    either_ties: bool = False
    flat: bool = False


_QWEN2_VL = TextHalf(
    "qwen2",
    "qwen2_vl_text",
    {"rope_theta": 1_000_000.0, "max_window_layers": 80, "bos_token_id": 151_643, "eos_token_id": 151_645},
    either_ties=True,
    flat=True,
)
TEXT_HALVES: Mapping[str, TextHalf] = {
    "gemma3": TextHalf("gemma3_text", tied=True),
    "gemma3n": TextHalf("gemma3n_text", tied=True),
    "gemma4": TextHalf("gemma4_text", tied=True),
    "llama4": TextHalf("llama4_text"),
    "mistral3": TextHalf("mistral", tied=True),
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen3_5": TextHalf("qwen3_5_text"),
    "qwen3_5_moe": TextHalf("qwen3_5_moe_text"),
    "qwen3_vl": TextHalf("qwen3", "qwen3_vl_text", {"rope_theta": 500_000.0}),
    "llava": TextHalf("llama", either_ties=True),
}
"""Text half of each multimodal `model_type`."""


_REASONS: Mapping[str, tuple[str, ...]] = {
    "most of its layers have a recurrent state instead of keys and values": (
        *(
            "granitemoehybrid",
            "falcon_h1",
            "nemotron_h",
            "jamba",
            "bamba",
            "zamba2",
            "recurrent_gemma",
            "mamba",
            "mamba2",
        ),
    ),
    "its layers store a latent vector instead of keys and values": ("longcat_flash",),
}
"""Why kvjax does not read some well-known architectures, with the `model_type` of each."""


def text_half(settings: Settings) -> Settings:
    """Return the settings of a multimodal model's text half, and those of any other model unchanged."""
    kind, inner = settings.get("model_type"), settings.get("text_config")
    if not isinstance(kind, str) or kind not in TEXT_HALVES:
        return settings
    half = TEXT_HALVES[kind]
    if inner is None and half.flat:
        inner = {name: value for name, value in settings.items() if name != "vision_config"}
    if not isinstance(inner, dict):
        raise LoadError(f"text_config must be an object with the settings of the text half of {kind}, not {inner!r}.")
    name = inner.get("model_type")
    text = {name: settings[name] for name in _OUTER if settings.get(name) is not None} | inner
    if name in (None, kind, f"{kind}_text") and name not in FAMILIES:
        text = FAMILIES[half.family].complete({**half.defaults, **text}, half.config or half.family)
        text |= {"model_type": half.family}
    key = "tie_word_embeddings"
    flags = [flag(part, key) for part in (settings, inner) if part.get(key) is not None] or [half.tied]
    text[key] = any(flags) if half.either_ties else flags[0]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), dict):
            # A text has one position per token; an image has three.
            rope = {
                name: value for name, value in text[key].items() if name not in ("mrope_section", "mrope_interleaved")
            }
            text[key] = rope | ({"rope_type": "default"} if rope.get("rope_type", rope.get("type")) == "mrope" else {})
    return text


_OUTER = ("bos_token_id", "eos_token_id", "quantization_config")
"""Settings of a multimodal model that apply to its text half unless `text_config` has them."""


LAYERS, MOST_LAYERS = ("num_hidden_layers", "n_layer", "n_layers"), 10_000
"""Names of the number of layers, and its largest value: lists are made of it before any weight is read."""


def read_model_config(settings: Settings) -> tuple[Family, ModelConfig]:
    """Return the family and the config of the model that a Hugging Face config.json describes."""
    settings = text_half(settings)
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        bare = name.removesuffix("_text") if isinstance(name, str) else name
        reasons = (f": {reason}" for reason, names in _REASONS.items() if bare in names)
        reason = next(reasons, f"; supported are {', '.join(FAMILIES)}")
        raise LoadError(f"Architecture (model_type) {name!r} is not supported{reason}.")
    read_quantization(settings)
    family = FAMILIES[name]
    settings = family.complete(settings, name)
    for key in LAYERS:
        if isinstance(layers := settings.get(key), int) and layers > MOST_LAYERS:
            raise LoadError(f"{key} must be at most {MOST_LAYERS}, not {layers}.")
    check_only(name, settings, {"is_causal": (None, True), **family.only})
    try:
        config = family.config(settings)
        return dataclasses.replace(family, sources={**family.sources, **family.variant(config)}), config
    except ValueError as error:
        raise LoadError(str(error)) from None
