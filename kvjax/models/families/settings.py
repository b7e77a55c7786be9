"""Settings of a config.json: numbers, choices, special tokens, RoPE, windows and experts, checked as they are read.

A setting that is missing, has the wrong type or is not supported raises a `LoadError` that names it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.models.config import Mixture, ModelConfig
from kvjax.models.families.family import LoadError, Settings
from kvjax.rope import Rope

ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
    "relu": "relu",
    "relu2": "relu2",
}
_ORIGINAL = "original_max_position_embeddings"
_ROPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": ("factor", _ORIGINAL),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "longrope": ("factor", _ORIGINAL),
    "proportional": (),
}
"""Numbers that each type of RoPE needs besides theta."""
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor"),
    "longrope": ("attention_factor",),
    "proportional": ("factor",),
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def integer(settings: Settings, key: str) -> int:
    """Return a setting that must be an integer above 0."""
    return _above_zero(settings, key, int, "an integer")


def positive_number(settings: Settings, key: str) -> float:
    """Return a setting that must be a finite number above 0."""
    return _above_zero(settings, key, int | float, "a number")


def optional_integer(settings: Settings, key: str) -> int | None:
    """Return a setting that must be an integer above 0, or null."""
    return None if settings.get(key) is None else integer(settings, key)


def optional_number(settings: Settings, key: str) -> float | None:
    """Return a setting that must be a finite number above 0, or null."""
    return None if settings.get(key) is None else float(positive_number(settings, key))


def _above_zero(settings: Settings, key: str, kind: Any, what: str) -> Any:
    value: Any = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
        raise LoadError(f"{key} must be {what} above 0, not {value!r}.")
    return value


def flag(settings: Settings, key: str) -> bool:
    """Return a setting that must be true, false, or null for false."""
    value = settings.get(key)
    if not isinstance(value, bool | None):
        raise LoadError(f"{key} must be true or false, not {value!r}.")
    return bool(value)


def choice(settings: Settings, key: str, choices: Mapping[str, Any]) -> Any:
    """Return the entry of `choices` that a setting names."""
    value = settings.get(key)
    if not isinstance(value, str) or value not in choices:
        raise LoadError(f"{key} {value!r} is not supported; supported are {', '.join(choices)}.")
    return choices[value]


def check_only(name: str, settings: Settings, only: Settings) -> None:
    """Refuse unsupported values of settings, given the supported ones; messages mention the last of those."""
    for key, allowed in only.items():
        if key in settings and settings[key] not in allowed:
            raise LoadError(f"{key}={settings[key]!r} is not supported for {name}; only {allowed[-1]!r} is.")


def head_width(settings: Settings, width: str, heads: str) -> int:
    """Return the width of heads that divide the hidden state, given the names of the settings of both."""
    size, parts = integer(settings, width), integer(settings, heads)
    if size % parts:
        raise LoadError(f"{width} {size} is not a multiple of {heads} {parts}.")
    check_only("this family", settings, {"head_dim": (None, size // parts)})
    return size // parts


def special_token_ids(settings: Settings, key: str) -> tuple[int, ...]:
    """Return the ids of a special token, which a config gives as null, a number or a list."""
    value = settings.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise LoadError(f"{key} must be a token id or a list of them, not {value!r}.")
    return tuple(ids)


def rope_parts(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `rope_scaling` and `rope_parameters`, each empty if it is not set."""
    scaling, parameters = (settings.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    if not isinstance(scaling, dict) or not isinstance(parameters, dict):
        raise LoadError(f"rope_scaling and rope_parameters must be objects, not {scaling!r} and {parameters!r}.")
    if "type" in scaling:
        scaling = {"rope_type": scaling["type"], **scaling}
    return scaling, parameters


def with_default_rope(settings: Settings, rope: Settings) -> Settings:
    """Return the settings with `rope` as `rope_parameters` if they set neither that nor `rope_scaling`."""
    if settings.get("rope_parameters") is not None or settings.get("rope_scaling"):
        return settings
    return {**settings, "rope_parameters": rope}


def given_rope(settings: Settings) -> dict[str, Any]:
    """Return `rope_scaling` if it is set, and `rope_parameters` otherwise, as transformers does.

    The latter must have no theta and no share of the width that `rope_scaling` would replace by a default.
    """
    scaling, parameters = rope_parts(settings)
    for key, default in (("rope_theta", 10_000.0), ("partial_rotary_factor", 1.0)):
        used = settings.get(key, default)
        if scaling and key not in scaling and parameters.get(key, used) != used:
            raise LoadError(
                f"rope_scaling replaces rope_parameters, which has {key}={parameters[key]!r}: add that to rope_scaling."
            )
    return scaling or parameters


def read_rope(settings: Settings, width: int, *, partial: bool = False) -> Rope:
    """Read RoPE from `rope_scaling` (before transformers 5), or else from `rope_parameters`.

    A `rope_theta` and a `partial_rotary_factor` that are not there are read from `settings`.

    Args:
        partial: True if the family may rotate only the fraction `partial_rotary_factor` of the width.
    """
    merged = {"rope_theta": settings.get("rope_theta", 10_000.0)} | given_rope(settings)
    # Models with one RoPE per type of layer nest one object per type.
    nested = [key for key, value in merged.items() if isinstance(value, dict)]
    if nested:
        raise LoadError(f"RoPE settings per type of layer ({', '.join(nested)}) are not supported.")
    partial = partial or merged.get("rope_type") == "proportional"
    share = merged.setdefault("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0) if partial else 1.0)
    if share != 1.0 and not (partial and 0 < positive_number(merged, "partial_rotary_factor") < 1):
        raise LoadError(f"partial_rotary_factor {share!r} is not supported; only {'up to ' if partial else ''}1.0 is.")
    merged["rope_type"] = kind = merged.get("rope_type", merged.get("type", "default"))
    needed = choice(merged, "rope_type", _ROPES)
    longest = settings.get("max_position_embeddings")
    # Some models have the original length outside of their RoPE settings.
    original = settings.get(_ORIGINAL, merged.get(_ORIGINAL, longest))
    merged |= {"max_position_embeddings": longest, _ORIGINAL: original}
    if kind in ("yarn", "longrope") and merged.get("factor") is None:
        merged["factor"] = positive_number(merged, "max_position_embeddings") / positive_number(merged, _ORIGINAL)
    optional = [key for key in _OPTIONAL.get(kind, ()) if merged.get(key) is not None]
    numbers: dict[str, Any] = {key: positive_number(merged, key) for key in (*needed, *optional)}
    for key in ("max_position_embeddings", _ORIGINAL):
        if key in numbers:
            numbers["original_max_positions"] = numbers.pop(key)
    if kind == "proportional":  # pairs that are not rotated have frequency 0
        numbers, share = {"fraction": share, **numbers}, 1.0
    return Rope(
        width=int(width * share),
        theta=float(positive_number(merged, "rope_theta")),
        scaling="none" if kind == "default" else kind,
        **(_extras(kind, merged) | numbers),
    )


def ropes_of_layers(settings: Settings, shape: ModelConfig, theta: float) -> tuple[Rope, ...]:
    """Return the RoPE of each layer: one for layers with a window, and one for all others.

    `rope_parameters` has an object for each type of layer, or is the RoPE of layers without a window. Only that is
    scaled by `rope_scaling`.

    Args:
        settings: settings of the model.
        shape: the config with the windows of layers.
        theta: theta in layers with a window, unless `rope_parameters` has another one.
    """
    scaling, parameters = rope_parts(settings)
    if not set(parameters) <= set(LAYER_TYPES):
        sliding = {"rope_theta": parameters.get("rope_theta", theta)}
        scaling, parameters = {}, {"full_attention": given_rope(settings), "sliding_attention": sliding}
    windows = shape.windows or (None,) * shape.layers
    widths = {window is not None: width for window, width in zip(windows, shape.widths_of_heads, strict=True)}
    ropes: list[Rope] = []
    of_types = zip(LAYER_TYPES, (settings["rope_theta"], theta), (scaling, {}), (False, True), strict=True)
    for kind, default_theta, changes, windowed in of_types:
        layer_rope = parameters.get(kind) or {}
        if not isinstance(layer_rope, dict):
            raise LoadError(f"rope_parameters must have an object for {kind}, not {layer_rope!r}.")
        of_type = {"rope_theta": default_theta, **layer_rope, **changes}
        width = widths.get(windowed, shape.head_width)
        ropes.append(read_rope({**settings, "rope_scaling": None, "rope_parameters": of_type}, width))
    return tuple(ropes[window is not None] for window in windows)


def rotated_in_windows(shape: ModelConfig) -> ModelConfig:
    """Return a config whose layers have RoPE only if they have a window."""
    if shape.windows is None:
        raise LoadError("layer_types without a sliding_attention, and thus without RoPE, is not supported.")
    ropes = tuple(None if window is None else shape.rope for window in shape.windows)
    return dataclasses.replace(shape, rope=None, ropes=ropes)


def _extras(kind: str, settings: Settings) -> dict[str, Any]:
    """Return the settings of `yarn` and `longrope` that are not numbers, or are made of others."""
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            value = settings.get(key)
            if not isinstance(value, list) or not all(isinstance(x, int | float) and x > 0 for x in value):
                raise LoadError(f"{key} must be a list of numbers above 0, not {value!r}.")
        return {f"{which}_factors": tuple(map(float, settings[f"{which}_factor"])) for which in ("short", "long")}
    if kind != "yarn":
        return {}
    extras: dict[str, Any] = {"truncate": flag({"truncate": True, **settings}, "truncate")}
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        extras["attention_factor"] = yarn_growth(settings, "mscale") / yarn_growth(settings, "mscale_all_dim")
    return extras


def yarn_growth(rope: Settings, key: str) -> float:
    r"""Return the factor of YaRN for the lengths of queries and keys, where the setting `key` weighs its logarithm.

    .. math:: 1 + 0.1 \, key \ln factor
    """
    return 1 + 0.1 * positive_number(rope, key) * math.log(max(positive_number(rope, "factor"), 1))


def read_layer_types(settings: Settings, default: Sequence[str], kinds: Sequence[str] = LAYER_TYPES) -> Sequence[str]:
    """Return the type of each layer from `layer_types`, or else the family's default."""
    types = settings.get("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != len(default) or any(kind not in kinds for kind in types):
        raise LoadError(f"layer_types must be {len(default)} of {', '.join(kinds)}, not {types!r}.")
    return types


def read_windows(settings: Settings, default: Sequence[str]) -> tuple[int | None, ...] | None:
    """Return each layer's window by `read_layer_types`; None if no layer has one."""
    types = read_layer_types(settings, default)
    if "sliding_attention" not in types:
        return None
    window = integer(settings, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def periodic_windows(settings: Settings, period: int) -> tuple[int | None, ...] | None:
    """Return each layer's window by `read_windows`, by default in all layers except the last one of every `period`."""
    layers = range(integer(settings, "num_hidden_layers"))
    return read_windows(settings, [LAYER_TYPES[(index + 1) % period > 0] for index in layers])


def layer_numbers(settings: Settings, key: str) -> list[int] | None:
    """Return a setting that must be a list of layers' numbers, or null."""
    value = settings.get(key)
    if value is not None and (not isinstance(value, list) or not all(isinstance(layer, int) for layer in value)):
        raise LoadError(f"{key} must be a list of layers' numbers, not {value!r}.")
    return value


def read_mixture(settings: Settings, width: str = "intermediate_size", **fields: Any) -> Mixture:
    """Return the experts of a model.

    Args:
        settings: settings of the model; `num_local_experts` replaces `num_experts` in configs of transformers 5.
        width: name of the setting of one expert's inner size.
        fields: further fields.
    """
    count = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    experts, used = integer(settings, count), integer(settings, "num_experts_per_tok")
    if used > experts:
        raise LoadError(f"num_experts_per_tok is {used}, but {count} is {experts}.")
    return Mixture(experts, used, integer(settings, width), **fields)
