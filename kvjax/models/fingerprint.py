"""Fingerprints of models, to recognize what was made for them: hashes of their shape and some of their weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from kvjax.models.config import (
    DeltaRule,
    Latent,
    LayerEmbeddings,
    Mixture,
    ModelConfig,
    QueryGrowth,
    ShortConvolution,
    Streams,
)
from kvjax.models.decoder import RoundedFrom, Weights
from kvjax.models.integers import signed
from kvjax.models.model import LanguageModel
from kvjax.models.weights import leaf_name, require_weights
from kvjax.rope import Rope

_ALWAYS = {
    *("norm", "norm_eps", "norm_bias", "shared_norm", "activation", "gated_mlp", "parallel", "tied", "sliding_window"),
    *("qkv_bias", "output_bias", "mlp_bias", "unembedding_bias", "renormalised", "dense_layers", "offset", "unrotated"),
    *("position", "position_offset", "rope", "theta", "interleaved", "scaling", "factor", "original_max_positions"),
    *("low_freq_factor", "high_freq_factor"),
}
"""Settings with defaults that enter every fingerprint; all others enter it only if they differ from their defaults.

Older kernels thus keep their fingerprint when models or RoPE get new settings.
"""

_EMBEDDINGS = 64
"""Rows of the embedding that enter a fingerprint."""


def fingerprint(model: LanguageModel) -> str:
    """Hash a model's shape and some of its weights to 16 hex digits, the same in every floating-point dtype.

    Weights of 8-bit integers have a fingerprint of their own; see `fingerprints`.

    Raises:
        ValueError: the model has no weights, only their shapes.
    """
    require_weights(model.weights, "comparing a model with what was made for it")
    leaves = {leaf_name(path): leaf for path, leaf in jax.tree.leaves_with_path(model.weights)}
    rows = jnp.arange(min(_EMBEDDINGS, model.config.vocab_size))
    samples = [model.weights.table.rows(rows), *(leaves[name] for name in _sampled(leaves))]
    return _hashed(model.config, (np.asarray(signed(sample).astype(jnp.bfloat16)) for sample in samples))


def fingerprints(model: LanguageModel) -> tuple[str, ...]:
    """Return the fingerprints that a model recognizes as its own, first the one for what is made for it now.

    Weights of 8-bit integers that were rounded at loading first have that of the weights in floating point.
    """
    current, source = fingerprint(model), model.weights.rounded_from
    return (current,) if source is None or source.shape != _shape(model.config) else (source.fingerprint, current)


def rounded_from(
    config: ModelConfig, weights: Weights, rows: Callable[[str], Iterator[Shaped[np.ndarray, "*rows in"]]]
) -> RoundedFrom:
    """Return the shape and fingerprint of a model whose weights are rounded while they are read.

    Args:
        weights: weights, or their shapes.
        rows: function from a leaf's name to blocks of its rows in floating point.
    """

    def samples() -> Iterator[np.ndarray]:
        table, missing = "unembedding.weight" if weights.embedding is None else "embedding", _EMBEDDINGS
        for block in rows(table):
            yield (first := block[:missing])
            missing -= len(first)
            if not missing:
                break
        for name in _sampled(leaf_name(path) for path, _ in jax.tree.leaves_with_path(weights)):
            yield from rows(name)

    return RoundedFrom(_shape(config), _hashed(config, (block.astype(jnp.bfloat16) for block in samples())))


def _sampled(names: Iterable[str]) -> list[str]:
    # The weights that enter a fingerprint after the embeddings.
    names = list(names)
    last = max(int(match[1]) for match in map(re.compile(r"layers\.(\d+)\.").match, names) if match)
    ups = [name for name in names if name.startswith(f"layers.{last}.mlp.") and name.endswith("up.weight")]
    of_mixers = (
        [f"layers.0.mixer.{leaf}.weight" for leaf in ("key", "latent", "contract")],
        [f"layers.{last}.mixer.{leaf}.weight" for leaf in ("query", "expand")],
    )
    return [*(name for leaves in of_mixers for name in [leaf for leaf in leaves if leaf in names][:1]), *ups]


def _hashed(config: ModelConfig, samples: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256(_shape(config).encode())
    for sample in samples:
        digest.update(sample.tobytes())
    return digest.hexdigest()[:16]


def _shape(config: ModelConfig) -> str:
    # Ids that begin and end texts do not affect attention.
    return json.dumps(_unusual(dataclasses.replace(config, bos=None, eos=())), sort_keys=True)


def _unusual(value: Any) -> Any:
    # The settings that enter a fingerprint, in JSON types.
    if isinstance(value, tuple):
        return [_unusual(item) for item in value]
    kinds = (
        ModelConfig | DeltaRule | ShortConvolution | Rope | Mixture | QueryGrowth | Latent | LayerEmbeddings | Streams
    )
    if not isinstance(value, kinds):
        return value
    settings = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: _unusual(item) for field, item in settings if field.name in _ALWAYS or item != field.default}
