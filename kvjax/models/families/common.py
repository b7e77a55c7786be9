"""Descriptions of model families, and the parts that several families share."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from kvjax.models.config import ModelConfig
from kvjax.rope import Rope


class LoadError(ValueError):
    """Error for a checkpoint that cannot be used, with the reason in one sentence."""


Settings = Mapping[str, Any]
Shape = tuple[int, ...]
Tensor = Shaped[np.ndarray, "out *into"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of a leaf of `Weights`: a tensor of the checkpoint.

    Args:
        name: name of the tensor in the checkpoint; `{layer}` is replaced by the layer's number.
        shape: function from the leaf's shape and the config to the tensor's shape; None if the shapes are equal.
        read: function from the tensor and the config to the leaf (a transpose, or a part of a fused tensor); None if
            they are equal.
    """

    name: str
    shape: Callable[[Shape, ModelConfig], Shape] | None = None
    read: Callable[[Tensor, ModelConfig], Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A Hugging Face architecture.

    Args:
        config: function that reads its config.json, completed by `defaults`.
        sources: source of each leaf of `Weights`; names of layers' leaves have no layer number.
        defaults: values of settings that a config.json omits.
        only: the supported values of some settings; other values are refused.
        variant: function from the config to sources that replace entries of `sources`.
        ignored: patterns of the names of tensors that some checkpoints contain and no model needs.
    """

    config: Callable[[Settings], ModelConfig]
    sources: Mapping[str, Source]
    defaults: Settings
    only: Settings = dataclasses.field(default_factory=dict)
    variant: Callable[[ModelConfig], Mapping[str, Source]] = lambda _: {}
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)

    @property
    def base(self) -> str:
        """Prefix of tensors' names; checkpoints of the model without its unembedding omit it."""
        return self.sources["embedding"].name.partition(".")[0] + "."

    def source(self, leaf: str) -> Source:
        """Return the source of a leaf such as `layers.3.query.weight`, with the layer's number in the tensor's name."""
        match = re.match(r"layers\.(\d+)\.", leaf)
        source = self.sources[leaf if match is None else "layers." + leaf[match.end() :]]
        return dataclasses.replace(source, name=source.name.format(layer=match and match[1]))


def layer_sources(prefix: str, modules: Mapping[str, str]) -> dict[str, Source]:
    """Return the sources of the norms and linear maps of layers, for weights and biases.

    Args:
        prefix: prefix of the layers' names, such as `transformer.h`.
        modules: from kvjax's name of each norm and linear map to the checkpoint's name of it in a layer.
    """
    sources: dict[str, Source] = {}
    for ours, theirs in modules.items():
        scale = "scale" if ours.endswith("norm") else "weight"
        for part, name in ((scale, "weight"), ("bias", "bias")):
            sources[f"layers.{ours}.{part}"] = Source(f"{prefix}.{{layer}}.{theirs}.{name}")
    return sources


def fused_by_head(name: str) -> dict[str, Source]:
    """Return the sources of queries, keys and values in one linear map: for each KV head its queries, key and value.

    Args:
        name: name of the map, with `{layer}` in place of the layer's number.
    """
    slices = {"query": slice(None, -2), "key": slice(-2, -1), "value": slice(-1, None)}

    def read(rows: slice, tensor: Tensor, config: ModelConfig) -> Tensor:
        by_head = tensor.reshape(config.kv_heads, config.groups + 2, config.head_width, *tensor.shape[1:])
        return by_head[:, rows].reshape(-1, *tensor.shape[1:]).copy()  # a view would keep the whole tensor in memory

    return _fused(name, {leaf: functools.partial(read, rows) for leaf, rows in slices.items()})


def fused_in_turn(name: str) -> dict[str, Source]:
    """Return the sources of queries, keys and values in one linear map: all queries, then all keys, then all values.

    Args:
        name: name of the map, with `{layer}` in place of the layer's number.
    """

    def read(index: int, tensor: Tensor, config: ModelConfig) -> Tensor:
        heads = np.cumsum([config.heads, config.kv_heads])
        return np.split(tensor, heads * config.head_width)[index].copy()

    return _fused(name, {leaf: functools.partial(read, i) for i, leaf in enumerate(("query", "key", "value"))})


def _fused(name: str, reads: Mapping[str, Callable[[Tensor, ModelConfig], Tensor]]) -> dict[str, Source]:
    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        return ((config.heads + 2 * config.kv_heads) * config.head_width, *leaf[1:])

    return {
        f"layers.{leaf}.{part}": Source(f"{name}.{part}", shape, read)
        for leaf, read in reads.items()
        for part in ("weight", "bias")
    }


def transposed(source: Source) -> Source:
    """Return the source of a tensor stored as [in, out]."""

    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        return (leaf if source.shape is None else source.shape(leaf, config))[::-1]

    def read(tensor: Tensor, config: ModelConfig) -> Tensor:
        return tensor.T if source.read is None else source.read(tensor.T, config)

    return dataclasses.replace(source, shape=shape, read=read)


ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# The numbers that each type of RoPE needs besides theta: from our names to those of config.json.
_ORIGINAL = {"original_max_positions": "original_max_position_embeddings"}
_ROPES: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor", "original_max_positions": "max_position_embeddings"},
    "yarn": {"factor": "factor", **_ORIGINAL},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        **_ORIGINAL,
    },
    "longrope": {"factor": "factor", **_ORIGINAL},
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def integer(settings: Settings, key: str) -> int:
    """Return a setting that must be an integer above 0; raise `LoadError` otherwise."""
    return _above_zero(settings, key, int, "an integer")


def positive_number(settings: Settings, key: str) -> float:
    """Return a setting that must be a number above 0; raise `LoadError` otherwise."""
    return _above_zero(settings, key, int | float, "a number")


def _above_zero(settings: Settings, key: str, kind: Any, what: str) -> Any:
    value: Any = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
        raise LoadError(f"{key} must be {what} above 0, not {value!r}.")
    return value


def choice(settings: Settings, key: str, choices: Mapping[str, Any]) -> Any:
    """Return the entry of `choices` that a setting names; raise `LoadError` if there is none."""
    value = settings.get(key)
    if not isinstance(value, str) or value not in choices:
        raise LoadError(f"{key} {value!r} is not supported; supported are {', '.join(choices)}.")
    return choices[value]


def check_only(name: str, settings: Settings, only: Settings) -> None:
    """Refuse unsupported values of settings.

    Args:
        name: name of the family.
        settings: settings of a model.
        only: the supported values of each setting; messages mention the last one.

    Raises:
        LoadError: if a value is not supported; the message names the setting.
    """
    for key, allowed in only.items():
        if settings.get(key) not in allowed:
            raise LoadError(f"{key}={settings[key]!r} is not supported for {name}; only {allowed[-1]!r} is.")


def head_width(settings: Settings, width: str, heads: str) -> int:
    """Return the width of heads that divide the hidden state, given the names of the settings of both."""
    size, parts = integer(settings, width), integer(settings, heads)
    if size % parts:
        raise LoadError(f"{width} {size} is not a multiple of {heads} {parts}.")
    return size // parts


def special_token_ids(settings: Settings, key: str) -> tuple[int, ...]:
    """Return the ids of a special token, which a config gives as null, a number or a list."""
    value = settings.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise LoadError(f"{key} must be a token id or a list of them, not {value!r}.")
    return tuple(ids)


def read_rope(settings: Settings, width: int, *, partial: bool = False) -> Rope:
    """Read RoPE from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (earlier versions).

    Args:
        settings: settings of the model.
        width: width of its heads.
        partial: True if the family may rotate only the fraction `partial_rotary_factor` of the width.

    Raises:
        LoadError: if a setting is missing, has the wrong type, or is not supported.
    """
    parts = [settings.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, dict) for part in parts):
        raise LoadError(f"rope_scaling and rope_parameters must be objects, not {parts[0]!r} and {parts[1]!r}.")
    merged: dict[str, Any] = {"rope_theta": settings.get("rope_theta", 10_000.0)} | parts[0] | parts[1]
    # Models with one RoPE per type of layer nest one object per type.
    nested = [key for key, value in merged.items() if isinstance(value, dict)]
    if nested:
        raise LoadError(f"RoPE settings per type of layer ({', '.join(nested)}) are not supported.")
    share = merged.setdefault("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0) if partial else 1.0)
    if share != 1.0 and not (partial and 0 < positive_number(merged, "partial_rotary_factor") < 1):
        raise LoadError(f"partial_rotary_factor {share!r} is not supported; only {'up to ' if partial else ''}1.0 is.")
    merged["rope_type"] = kind = merged.get("rope_type", merged.get("type", "default"))
    fields = choice(merged, "rope_type", _ROPES)
    original = "original_max_position_embeddings"  # some models have it outside of their RoPE settings
    longest = settings.get("max_position_embeddings")
    merged |= {"max_position_embeddings": longest, original: settings.get(original, merged.get(original, longest))}
    if kind == "longrope" and merged.get("factor") is None:
        merged["factor"] = positive_number(merged, "max_position_embeddings") / positive_number(merged, original)
    numbers: dict[str, Any] = {field: positive_number(merged, key) for field, key in fields.items()}
    return Rope(
        width=int(width * share),
        theta=float(positive_number(merged, "rope_theta")),
        scaling="none" if kind == "default" else kind,
        **numbers,
        **_extras(kind, merged),
    )


def _extras(kind: str, settings: Settings) -> dict[str, Any]:
    """Return the optional settings of `yarn` and the further settings of `longrope`."""
    extras: dict[str, Any] = {}
    if kind == "longrope":
        extras = {f"{which}_factors": _numbers(settings, f"{which}_factor") for which in ("short", "long")}
    if kind == "yarn":
        extras = {
            key: positive_number(settings, key) for key in ("beta_fast", "beta_slow") if settings.get(key) is not None
        }
        extras["truncate"] = bool(settings.get("truncate", True))
        if settings.get("mscale") and settings.get("mscale_all_dim"):
            grown = math.log(max(positive_number(settings, "factor"), 1))
            above, below = (1 + 0.1 * positive_number(settings, key) * grown for key in ("mscale", "mscale_all_dim"))
            extras["attention_factor"] = above / below
    if kind in ("yarn", "longrope") and settings.get("attention_factor") is not None:
        extras["attention_factor"] = float(positive_number(settings, "attention_factor"))
    return extras


def _numbers(settings: Settings, key: str) -> tuple[float, ...]:
    value = settings.get(key)
    if not isinstance(value, list) or not all(isinstance(x, int | float) and x > 0 for x in value):
        raise LoadError(f"{key} must be a list of numbers above 0, not {value!r}.")
    return tuple(map(float, value))


def read_windows(settings: Settings, default: Sequence[str]) -> tuple[int | None, ...] | None:
    """Return each layer's window from `layer_types`, or else from the family's default; None if no layer has one.

    Raises:
        LoadError: if a type is not supported, or the number of types is not that of layers.
    """
    layers, given = integer(settings, "num_hidden_layers"), settings.get("layer_types")
    types = list(default) if given is None else given
    if not isinstance(types, list) or len(types) != layers or any(kind not in LAYER_TYPES for kind in types):
        raise LoadError(f"layer_types must be {layers} of {', '.join(LAYER_TYPES)}, not {types!r}.")
    if "sliding_attention" not in types:
        return None
    window = integer(settings, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def upper_windows(settings: Settings) -> tuple[int | None, ...] | None:
    """Return the windows of Qwen: with `use_sliding_window`, layers from `max_window_layers` on have one."""
    if not settings["use_sliding_window"] or settings["sliding_window"] is None:
        return None
    layers, first = integer(settings, "num_hidden_layers"), settings["max_window_layers"]
    if not isinstance(first, int) or first < 0:
        raise LoadError(f"max_window_layers must be an integer from 0, not {first!r}.")
    return read_windows(settings, [LAYER_TYPES[index >= first] for index in range(layers)])


def llama_config(settings: Settings, *, partial: bool = False) -> ModelConfig:
    """Return the config of a model like Llama; `partial` as in `read_rope`."""
    width, heads = integer(settings, "hidden_size"), integer(settings, "num_attention_heads")
    if settings.get("head_dim") is None and width % heads:
        raise LoadError(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}, and there is no head_dim."
        )
    head_width = width // heads if settings.get("head_dim") is None else integer(settings, "head_dim")
    kv_heads = heads if settings.get("num_key_value_heads") is None else integer(settings, "num_key_value_heads")
    window = settings.get("sliding_window")
    return ModelConfig(
        vocab_size=integer(settings, "vocab_size"),
        width=width,
        layers=integer(settings, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=integer(settings, "intermediate_size"),
        max_positions=integer(settings, "max_position_embeddings"),
        norm_eps=positive_number(settings, "rms_norm_eps"),
        activation=choice(settings, "hidden_act", ACTIVATIONS),
        rope=read_rope(settings, head_width, partial=partial),
        qkv_bias=bool(settings["attention_bias"]),
        output_bias=bool(settings.get("output_bias", settings["attention_bias"])),
        mlp_bias=bool(settings["mlp_bias"]),
        tied=bool(settings["tie_word_embeddings"]),
        sliding_window=None if window is None else integer(settings, "sliding_window"),
        bos=next(iter(special_token_ids(settings, "bos_token_id")), None),
        eos=special_token_ids(settings, "eos_token_id"),
    )


def gpt_config(settings: Settings, names: Mapping[str, str], **others: Any) -> ModelConfig:
    """Return the config of a model with layer normalisation, an MLP without a gate, and heads that divide the width.

    Args:
        settings: settings of the model.
        names: the family's name of each of `width`, `layers`, `heads`, `max_positions`, `norm_eps`, `activation` and
            `mlp_width`. If the setting of `mlp_width` is None, it is 4 * `width`.
        others: further fields of the config; by default `kv_heads` is `heads` and `norm_bias` is True.
    """
    readers = {"norm_eps": positive_number, "activation": functools.partial(choice, choices=ACTIVATIONS)}
    if settings[names["mlp_width"]] is None:
        settings = {**settings, names["mlp_width"]: 4 * integer(settings, names["width"])}
    fields = {ours: readers.get(ours, integer)(settings, theirs) for ours, theirs in names.items()}
    fields |= {
        "vocab_size": integer(settings, "vocab_size"),
        "kv_heads": fields["heads"],
        "head_width": head_width(settings, names["width"], names["heads"]),
        "norm": "layer",
        "norm_bias": True,
        "gated_mlp": False,
        "tied": bool(settings["tie_word_embeddings"]),
        "bos": next(iter(special_token_ids(settings, "bos_token_id")), None),
        "eos": special_token_ids(settings, "eos_token_id"),
    }
    return ModelConfig(**(fields | others))


GPT_NAMES: Mapping[str, str] = {
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation_function",
    "mlp_width": "n_inner",
}
"""Names of settings in GPT-2 and GPT-J, for `gpt_config`."""
_LLAMA_LINEARS: Mapping[str, str] = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
LLAMA_SOURCES: Mapping[str, Source] = {
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
LLAMA_DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
