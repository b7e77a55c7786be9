"""Settings that families with the gated delta rule in most layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models.config import DeltaRule, ModelConfig
from kvjax.models.families.family import Settings, Shape, Source, Tensor
from kvjax.models.families.settings import integer, read_layer_types

BLOCK = "model.layers.{layer}.linear_attn"
"""Name of the mixer in checkpoints."""
LAYER_TYPES = ("linear_attention", "full_attention")
DELTA_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
"""Settings of the gated delta rule."""


def read_delta_rule(settings: Settings, period: int, **fields: Any) -> DeltaRule | None:
    """Return the layers with the gated delta rule; None if there are none.

    Args:
        settings: settings of the model.
        period: number of layers of which the last one has attention, unless `layer_types` says otherwise.
        fields: further fields.
    """
    layers = range(integer(settings, "num_hidden_layers"))
    types = read_layer_types(settings, [LAYER_TYPES[(index + 1) % period == 0] for index in layers], LAYER_TYPES)
    sizes = ("key_heads", "value_heads", "key_width", "value_width", "taps")
    shape = {size: integer(settings, name) for size, name in zip(sizes, DELTA_SIZES, strict=True)}
    numbers = tuple(index for index, kind in enumerate(types) if kind == LAYER_TYPES[0])
    return DeltaRule(numbers, **shape, **fields) if numbers else None


def _rows(config: ModelConfig) -> tuple[int, int]:
    # Features of all queries (or keys), and of all values.
    rule = config.delta_rule
    assert rule is not None
    return rule.key_heads * rule.key_width, rule.value_heads * rule.value_width


def rows_in_turn(name: str, leaf: str) -> Source:
    """Return the source of queries, keys or values in one tensor: all queries, then all keys, then all values.

    The tensor has an axis more than the leaf if that is of taps.
    """
    place, taps = ("query", "key", "value").index(leaf.partition("_")[0]), leaf.endswith("taps")

    def shape(part: Shape, config: ModelConfig) -> Shape:
        keys, values = _rows(config)
        return (2 * keys + values, *((1,) if taps else ()), *part[1:])

    def read(tensor: Tensor, config: ModelConfig) -> Tensor:
        keys, values = _rows(config)
        part = tensor[place * keys :][: keys if place < 2 else values]
        return (part[:, 0] if taps else part).copy()  # a view would keep the whole tensor in memory

    return Source(name, shape, read)


def delta_sources(names: Mapping[str, str]) -> dict[str, Source]:
    """Return sources of leaves of a mixer with the gated delta rule, by the leaves' names in the mixer.

    Args:
        names: from a leaf to the tensor in the block that equals it, of leaves whose tensors differ between families.
    """
    common = {"decay_bias": "dt_bias", "log_rate": "A_log"}
    return {
        **{leaf: Source(f"{BLOCK}.{name}") for leaf, name in (common | dict(names)).items()},
        **{leaf: rows_in_turn(f"{BLOCK}.conv1d.weight", leaf) for leaf in ("query_taps", "key_taps", "value_taps")},
    }


def in_delta_layers(sources: Mapping[str, Source], config: ModelConfig) -> dict[str, Source]:
    """Return the sources of the mixer in each layer with the gated delta rule, given those of one."""
    layers = () if config.delta_rule is None else config.delta_rule.layers
    return {f"layers.{layer}.mixer.{leaf}": source for layer in layers for leaf, source in sources.items()}
