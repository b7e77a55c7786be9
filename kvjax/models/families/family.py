"""Description of a model family: how its config.json is read, and where its weights come from."""

from __future__ import annotations

import dataclasses
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
    """

    name: str
    shape: Callable[[Shape, ModelConfig], Shape] | None = None
    read: Callable[[Tensor, ModelConfig], Tensor] | None = None
    alternatives: tuple[Source, ...] = ()

    def in_layer(self, layer: str | None) -> Source:
        """Return the source with a layer's number in the names of tensors."""
        sources = tuple(source.in_layer(layer) for source in self.alternatives)
        return dataclasses.replace(self, name=self.name.format(layer=layer, expert="{expert}"), alternatives=sources)

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
        sources: source of each leaf of `Weights`; names of layers' leaves have no layer number.
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
        source = self.sources[leaf if match is None else "layers." + leaf[match.end() :]]
        return source.in_layer(match and match[1])
