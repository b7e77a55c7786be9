"""Description of a model family: how its config.json is read, and the sources of its weights."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from kvjax.models.config import ModelConfig


class LoadError(ValueError):
    """Error for a checkpoint that cannot be used, with the reason in one sentence."""


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps"),
)
"""Settings of Llama that nearly every config.json has."""
EXPERTS = ("num_local_experts", "num_experts_per_tok")
Settings = Mapping[str, Any]
Shape = tuple[int, ...]
Tensor = Shaped[np.ndarray, "..."]


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of a leaf of `Weights`: a tensor of the checkpoint, or one tensor for each expert.

    Args:
        name: name of the tensor in the checkpoint; `{layer}` is replaced by the layer's number. A name with `{expert}`
            stands for the tensors of all experts, which are stacked along the leaf's first axis.
        shape: function from the leaf's shape and the config to the tensor's shape; None if the shapes are equal.
        read: function from the tensor and the config to the leaf (a transpose, or a part of a fused tensor); None if
            they are equal.
        alternatives: sources of the same leaf in other layouts, for checkpoints that have their tensors.
        of_layers: True if the tensor has a part for each layer; `read` then takes the layer's number, too, as `layer`.
    """

    name: str
    shape: Callable[[Shape, ModelConfig], Shape] | None = None
    read: Callable[..., Tensor] | None = None
    alternatives: tuple[Source, ...] = ()
    of_layers: bool = False

    def in_layer(self, layer: str | None) -> Source:
        """Return the source with a layer's number in the names of tensors."""
        changes: dict[str, Any] = {"alternatives": tuple(source.in_layer(layer) for source in self.alternatives)}
        if self.of_layers and self.read is not None and layer is not None:
            changes["read"] = functools.partial(self.read, layer=int(layer))
        return dataclasses.replace(self, name=self.name.format(layer=layer, expert="{expert}"), **changes)

    def names(self, leaf: Shape) -> tuple[str, ...]:
        """Return the names of the tensors of a leaf of this shape."""
        if "{expert}" not in self.name:
            return (self.name,)
        return tuple(self.name.format(expert=expert) for expert in range(leaf[0]))


@dataclasses.dataclass(frozen=True)
class Family:
    """A Hugging Face architecture.

    Args:
        config: function that reads its config.json, once that is `complete`.
        sources: source of each leaf of `Weights`; names of layers' leaves have no layer number, unless a source is that
            of one layer alone.
        defaults: values of settings that many a config.json omits, where they are not null or false.
        only: the supported values of some settings; other values are refused.
        variant: function from the config to sources that replace entries of `sources`.
        ignored: patterns of the names of tensors that some checkpoints contain and no model needs.
        aliases: other names of settings that transformers takes, each with the name that is read.
        looked_up: settings that are read from transformers' config class if a config.json omits them (text halves do).
    """

    config: Callable[[Settings], ModelConfig]
    sources: Mapping[str, Source]
    defaults: Settings
    only: Settings = dataclasses.field(default_factory=dict)
    variant: Callable[[ModelConfig], Mapping[str, Source]] = lambda _: {}
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    looked_up: tuple[str, ...] = SIZES

    def complete(self, settings: Settings, model_type: str) -> dict[str, Any]:
        """Return settings under the names that are read, with those that transformers' config of a type would have."""
        aliased = {ours: settings[name] for name, ours in self.aliases.items() if settings.get(name) is not None}
        merged = {**self.defaults, **settings, **aliased}
        omitted = [name for name in self.looked_up if name not in merged]
        if omitted:
            from transformers import CONFIG_MAPPING  # slow to import

            hf_config = CONFIG_MAPPING[model_type]()
            merged |= {name: getattr(hf_config, name) for name in omitted}
        return merged

    @property
    def base(self) -> str:
        """Prefix of tensors' names; checkpoints of the model without its unembedding omit it."""
        return self.sources["embedding"].name.partition(".")[0] + "."

    def source(self, leaf: str) -> Source:
        """Return the source of a leaf such as `layers.3.mixer.query.weight`, which names the layer's tensor."""
        match = re.match(r"layers\.(\d+)\.", leaf)
        source = self.sources.get(leaf) or self.sources["layers." + leaf[match.end() :] if match else leaf]
        return source.in_layer(match and match[1])


def module_sources(layers: str, modules: Mapping[str, str]) -> dict[str, Source]:
    """Return the sources of tables, norms and linear maps, for weights and biases.

    Args:
        layers: the checkpoint's name of the list of layers, such as `transformer.h`.
        modules: from kvjax's name of each module to the checkpoint's; those of a layer begin with `layers.` here, and
            are named within the layer there.
    """
    sources: dict[str, Source] = {}
    for name, stored_name in modules.items():
        module = f"{layers}.{{layer}}.{stored_name}" if name.startswith("layers.") else stored_name
        if name in ("embedding", "positions"):
            sources[name] = Source(f"{module}.weight")
            continue
        sources[f"{name}.{'scale' if name.endswith('norm') else 'weight'}"] = Source(f"{module}.weight")
        sources[f"{name}.bias"] = Source(f"{module}.bias")
    return sources


def fused_by_head(name: str) -> dict[str, Source]:
    """Return the sources of queries, keys and values in one linear map: for each KV head its queries, key and value."""
    slices = {"query": slice(None, -2), "key": slice(-2, -1), "value": slice(-1, None)}

    def read(rows: slice, tensor: Tensor, config: ModelConfig) -> Tensor:
        by_head = tensor.reshape(config.kv_heads, config.groups + 2, config.head_width, *tensor.shape[1:])
        return by_head[:, rows].reshape(-1, *tensor.shape[1:]).copy()  # a view would keep the whole tensor in memory

    return _fused(name, {leaf: functools.partial(read, rows) for leaf, rows in slices.items()})


def fused_in_turn(name: str) -> dict[str, Source]:
    """Return the sources of queries, keys and values in one linear map: all queries, then all keys, then all values."""

    def read(index: int, tensor: Tensor, config: ModelConfig) -> Tensor:
        heads = np.cumsum([config.heads, config.kv_heads])
        return np.split(tensor, heads * config.head_width)[index].copy()

    return _fused(name, {leaf: functools.partial(read, i) for i, leaf in enumerate(("query", "key", "value"))})


def _fused(name: str, reads: Mapping[str, Callable[[Tensor, ModelConfig], Tensor]]) -> dict[str, Source]:
    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        return ((config.heads + 2 * config.kv_heads) * config.head_width, *leaf[1:])

    return {
        f"layers.mixer.{leaf}.{part}": Source(f"{name}.{part}", shape, read)
        for leaf, read in reads.items()
        for part in ("weight", "bias")
    }


def gates_and_ups(name: str, *, axis: int, alternating: bool = False) -> dict[str, Source]:
    """Return the sources of gates and up projections in one tensor: all gates first, or gates and ups in turn.

    Args:
        axis: axis of their outputs; an axis 0 before it is that of experts.
        alternating: True if outputs 0, 2, ... are those of gates.
    """

    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        return (*leaf[:axis], 2 * leaf[axis], *leaf[axis + 1 :])

    def read(half: int, tensor: Tensor, config: ModelConfig) -> Tensor:
        pairs = (-1, 2) if alternating else (2, -1)
        parted = tensor.reshape(*tensor.shape[:axis], *pairs, *tensor.shape[axis + 1 :])
        return parted.take(half, axis + alternating)  # a copy: a view would keep the whole tensor in memory

    return {leaf: Source(name, shape, functools.partial(read, half)) for half, leaf in enumerate(("gate", "up"))}


def depthwise(name: str, alternatives: tuple[Source, ...] = ()) -> Source:
    """Return the source of the taps [channels, taps] of a convolution, stored with an axis of one input channel."""

    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        return (leaf[0], 1, leaf[1])

    def read(tensor: Tensor, config: ModelConfig) -> Tensor:
        return tensor[:, 0].copy()

    return Source(name, shape, read, alternatives)


def transposed(source: Source) -> Source:
    """Return the source of maps stored as [in, out], or [expert, in, out]; biases stay as they are."""

    def shape(leaf: Shape, config: ModelConfig) -> Shape:
        sizes = leaf if source.shape is None else source.shape(leaf, config)
        return (*sizes[:-2], *sizes[-2:][::-1])

    def read(tensor: Tensor, config: ModelConfig) -> Tensor:
        swapped = tensor.swapaxes(-1, -2) if tensor.ndim > 1 else tensor
        return swapped.copy() if source.read is None else source.read(swapped, config)

    return dataclasses.replace(source, shape=shape, read=read)


def expert_sources(block: str, maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, Source]:
    """Return the sources of the router and of all experts.

    Three layouts are known: one tensor for each map of each expert, all experts' gates and up projections in one
    tensor (transformers 5 in memory), and one tensor for each map (GGUF).

    Args:
        maps: names of an expert's gate, up and down projection.
    """
    fused = fused_experts(block)
    sources = {
        f"layers.mlp.experts.{leaf}.weight": Source(
            f"{block}.experts.{{expert}}.{stored_name}.weight",
            alternatives=(fused[leaf], Source(f"{block}.experts.{stored_name}.weight")),
        )
        for leaf, stored_name in zip(fused, maps, strict=True)
    }
    return {"layers.mlp.router": Source(f"{block}.gate.weight"), **sources}


def fused_experts(block: str, end: str = "", *, alternating: bool = False) -> dict[str, Source]:
    """Return the sources of gate, up and down of all experts, of which gate and up are in one tensor.

    Args:
        end: end of the tensors' names.
        alternating: as in `gates_and_ups`.
    """
    fused = gates_and_ups(f"{block}.experts.gate_up_proj{end}", axis=1, alternating=alternating)
    return {**fused, "down": Source(f"{block}.experts.down_proj{end}")}
