"""A model: weights, config, tokenizer and recommended sampling settings, with the plain forward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from kvjax.models.checkpoints.gguf_tokenizer import gguf_tokenizer
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights, forward
from kvjax.models.sharding import program_mesh
from kvjax.models.tokenizer import (
    TextBound,
    TokenClassIds,
    lazy_tokenizer,
    read_tokenizer,
    text_bound,
    token_classes,
    unreadable,
)
from kvjax.utils.autotune import automatic
from kvjax.utils.files import damage_named
from kvjax.utils.modes import on_the_host

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Names of the settings, as in generation_config.json."""
_GGUF = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_GGUF |= {"penalty_repeat": "repetition_penalty"}


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """Sampling settings that apply where a user gives none.

    The values are those of the checkpoint, and are only checked when they apply: users can replace a wrong one.

    Args:
        settings: by name; `do_sample` is False for greedy decoding.
        source: file that they are from, for messages.
    """

    settings: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    source: str = ""

    def replaced(self, settings: Mapping[str, Any]) -> SamplingDefaults:
        """Return the defaults with a user's own settings in place of some; None leaves a setting as it is."""
        new = {name: settings[name] for name in SETTINGS if settings.get(name) is not None}
        base = {name: value for name, value in self.settings.items() if name != "do_sample" or "temperature" not in new}
        return dataclasses.replace(self, settings=MappingProxyType(base | new))


def sampling_defaults(generation: Mapping[str, Any], source: object) -> SamplingDefaults:
    """Return the settings of a generation_config.json; null is the same as no setting."""
    settings = {name: generation[name] for name in ("do_sample", *SETTINGS) if generation.get(name) is not None}
    return SamplingDefaults(MappingProxyType(settings), str(source))


def gguf_sampling_defaults(metadata: Mapping[str, Any], source: object) -> SamplingDefaults:
    """Return the settings in the metadata of a GGUF file."""
    keys = {name: metadata.get(f"general.sampling.{key}") for key, name in _GGUF.items()}
    return sampling_defaults(keys, source)


_forward = jax.jit(forward, static_argnames="config")


@dataclasses.dataclass(frozen=True)
class ModelOrigin:
    """Name and tokenizer of a model, which states keep. Programs do not depend on the tokenizer."""

    name: str
    directory: Path | None
    metadata: Mapping[str, Any] | None = dataclasses.field(compare=False, repr=False)
    tokenizer: Any = dataclasses.field(compare=False, repr=False)
    """Tokenizer of the model; None before it is read."""

    def model(self, weights: Weights, config: ModelConfig, mesh: Mesh | None) -> LanguageModel:
        """Return a model with these weights; `mesh` is a `program_mesh`."""
        model = LanguageModel(weights, config, self.name, self.directory, self.metadata)
        model.mesh = mesh
        if self.tokenizer is not None:
            model.tokenizer = self.tokenizer
        return model


@dataclasses.dataclass(eq=False, repr=False)
class LanguageModel:
    """Model weights with their config and tokenizer.

    Args:
        weights: pytree of arrays of one dtype, except the 8-bit weights of linear maps.
        config: the model's configuration.
        name: name passed to `load`, used in messages and reports.
        directory: directory of the tokenizer files; None for a model without any.
        metadata: metadata of the GGUF file, which contains the tokenizer; None for a model from another source.
        mesh: mesh that the weights are sharded over, see `load`; None for the default device.
        sampling_defaults: sampling settings that apply where a user gives none; None for kvjax's own.
    """

    weights: Weights
    config: ModelConfig
    name: str = "unnamed"
    directory: Path | None = None
    metadata: Mapping[str, Any] | None = None
    mesh: Mesh | None = None
    """Once the model is made, the same devices with the axis names of programs and states, see `program_mesh`."""
    sampling_defaults: SamplingDefaults = dataclasses.field(default_factory=SamplingDefaults)

    def __post_init__(self) -> None:
        self.directory = None if self.directory is None else Path(self.directory)
        self.mesh = None if self.mesh is None else program_mesh(self.config, self.mesh)
        self.sampling_defaults = self.sampling_defaults or SamplingDefaults()

    def __repr__(self) -> str:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.weights))
        return f"{type(self).__name__}({self.name!r}, {parameters / 1e6:.1f}M parameters, {self.weights.dtype})"

    @property
    def origin(self) -> ModelOrigin:
        """Name and tokenizer of the model, for its states."""
        return ModelOrigin(self.name, self.directory, self.metadata, vars(self).get("tokenizer"))

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Transformers tokenizer of the model; raises ValueError if it is missing, damaged or of another model."""
        names = ("tokenizer.json", "tokenizer.model", "vocab.json")
        place = self.directory
        if self.metadata is None and (place is None or not any((place / name).exists() for name in names)):
            where = "it has no directory" if place is None else f"{place} holds none of {names}"
            raise ValueError(f"Model {self.name!r} has no tokenizer: {where}; pass token ids instead of text.")
        place = place or self.name
        with damage_named(unreadable(place)):
            if self.metadata:
                tokenizer = lazy_tokenizer(*gguf_tokenizer(self.metadata), place)
            else:
                tokenizer = read_tokenizer(Path(place))
        if tokenizer.vocab_size > self.config.vocab_size:
            raise ValueError(
                f"the tokenizer in {place} has {tokenizer.vocab_size} tokens, the model {self.config.vocab_size}: "
                "they do not belong together."
            )
        return tokenizer

    @functools.cached_property
    def automatic(self) -> str:
        """Implementation of every operation where none is chosen; it keeps benchmark results as long as the model."""
        return automatic()

    @functools.cached_property
    def token_classes(self) -> TokenClassIds:
        """Special tokens and punctuation of the tokenizer; raises ValueError for a model without one."""
        return token_classes(self.tokenizer)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the tokens of a text, without encoding it; 0 for tokenizers without one."""
        return 0 if self._text_bound is None else self._text_bound.least_tokens(text)

    @functools.cached_property
    def _text_bound(self) -> TextBound | None:
        return text_bound(self.tokenizer)

    @on_the_host
    def logits(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Float[Array, "b t vocab"]:
        """Compute next-token logits at every position with full causal attention.

        Args:
            tokens: ids [b, t] in [0, vocab_size), padded on the right; or a list of lists of unequal lengths.
            lengths: real tokens in each row [b], in [1, t]; None for no padding. Logits of padding are meaningless.

        Raises:
            TypeError: if called inside jit or vmap, or if `tokens` is a list of anything but rows.
            ValueError: if a shape, a length or an id is wrong.

        Example:
            >>> kvjax.load("tiny").logits([[5, 17, 42]]).shape
            (1, 3, 2048)
        """
        # Check on the host: inside a program, an id outside the table would silently read another row.
        if isinstance(tokens, Tracer) or isinstance(lengths, Tracer):
            raise TypeError(
                "Model.logits checks ids on the host and cannot be traced; call it outside of jit and vmap."
            )
        if isinstance(tokens, (list, tuple)) and len({np.shape(row) for row in tokens}) > 1:
            tokens, counted = rows_of(tokens)
            lengths = counted if lengths is None else lengths
        ids = np.asarray(tokens)
        if ids.ndim != 2 or 0 in ids.shape or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"tokens must be integers of shape [b, t], not {ids.dtype} of shape {list(ids.shape)}.")
        rows, width = ids.shape
        real = np.full(rows, width) if lengths is None else np.asarray(lengths)
        if real.shape != (rows,) or not np.issubdtype(real.dtype, np.integer) or real.min() < 1 or real.max() > width:
            raise ValueError(f"lengths must be {rows} integers from 1 to {width}, one per row, not {real.tolist()}.")
        ids = np.where(np.arange(width) < real[:, None], ids, 0)
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"Token id {wrong} is outside the vocabulary of {self.config.vocab_size} tokens.")
        self.config.check_bound(width)
        return _forward(self.weights, self.config, jnp.asarray(ids, jnp.int32), jnp.asarray(real, jnp.int32))


def rows_of(tokens: Any) -> tuple[Int[np.ndarray, "b n"], Int[np.ndarray, " b"]]:
    """Return token ids padded on the right with zeros, and the length of each row.

    Args:
        tokens: an array [b, n], or a list of lists of unequal lengths.

    Raises:
        TypeError: if `tokens` is a list of anything but rows.
        ValueError: if `tokens` is an array of another shape.
    """
    if isinstance(tokens, (list, tuple)):
        for row in tokens:
            is_text = isinstance(row, (str, dict))
            if is_text or np.ndim(row) != 1:
                remedy = "give a list for each row, as [[5, 17, 42]]"
                remedy = "for texts there is model.generate" if is_text else remedy
                raise TypeError(f"tokens are rows of ids [b, n], not a list of {row!r}; {remedy}.")
        lengths = np.array([len(row) for row in tokens], np.int64)
        width = max((len(row) for row in tokens), default=0)
        filled = [[*row, *[0] * (width - len(row))] for row in tokens]
        return (np.array(filled).reshape(-1, width) if width else np.zeros((len(tokens), 0), np.int64)), lengths
    array = np.asarray(tokens)
    if array.ndim != 2:
        raise ValueError(f"tokens are rows of ids [b, n], not {type(tokens).__name__} of shape {list(array.shape)}.")
    return array, np.full(len(array), array.shape[1])
