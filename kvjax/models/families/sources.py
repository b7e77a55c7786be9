"""Sources of weights: layers by their names, fused queries, keys and values, and transposed matrices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import Shape, Source, Tensor


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
