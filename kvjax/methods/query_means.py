"""Mean queries of a model, from `kvjax calibrate`: a file of arrays for each layer, with the model's fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.rope import Rope
from kvjax.utils.files import expanded, written_aside

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel

FILE = "queries.safetensors"
SHIPPED = Path(__file__).resolve().parents[1] / "tiny" / "queries"
"""Directory of the embedded model's mean queries."""


class QueryMeans(NamedTuple):
    """Means over the tokens of some texts, for one layer or as tuples over layers."""

    center: tuple[Float[Array, "h g d"], ...] | Float[Array, "h g d"]
    """Mean of the queries before rotation."""
    norm: tuple[Float[Array, "h g f"], ...] | Float[Array, "h g f"]
    """Mean of the norm of each rotated pair of channels."""


def ropes_of(model: LanguageModel) -> tuple[Rope, ...]:
    """Return the RoPE of each layer of a model.

    Raises:
        ValueError: a layer has no RoPE.
    """
    ropes = [layer.rope for layer in model.config.layer_configs]
    found = tuple(rope for rope in ropes if rope is not None)
    if len(found) < len(ropes):
        raise ValueError(f"policy triattention needs RoPE in all layers, which {model.name!r} does not have.")
    return found


def pair_norms(rope: Rope, x: Float[Array, "*b d"]) -> Float[Array, "*b f"]:
    """Return the norm of each pair of channels that RoPE rotates."""
    turned = x[..., : rope.width]
    if rope.interleaved:
        return jnp.hypot(turned[..., ::2], turned[..., 1::2])
    return jnp.hypot(*jnp.split(turned, 2, axis=-1))


def save(directory: Path, means: QueryMeans, model: LanguageModel, tokens: int) -> None:
    """Write mean queries of a model.

    Args:
        tokens: number of tokens over which the means were taken.
    """
    from safetensors.numpy import save_file

    from kvjax.methods.less.checkpoint import fingerprint

    arrays = {
        f"{name}.{layer}": np.asarray(array, np.float32)
        for name, layers in means._asdict().items()
        for layer, array in enumerate(layers)
    }
    told = {"model": model.name, "fingerprint": fingerprint(model), "tokens": str(tokens)}
    directory.mkdir(parents=True, exist_ok=True)
    with written_aside(directory / FILE) as aside:
        save_file(arrays, aside, metadata=told)


def load(checkpoint: str, model: LanguageModel) -> QueryMeans:
    """Read the mean queries of a model.

    Args:
        checkpoint: directory written by `save`; empty for the mean queries of the embedded model.

    Raises:
        ValueError: there are no mean queries, they are damaged, or they belong to another model.
    """
    from safetensors import SafetensorError, safe_open

    from kvjax.methods.less.checkpoint import fingerprint

    file = (expanded(checkpoint) if checkpoint else SHIPPED) / FILE
    remedy = "run kvjax calibrate for this model and give checkpoint=DIR"
    if not file.is_file():
        raise ValueError(f"{file.parent} holds no mean queries of a model; {remedy}.")
    try:
        with safe_open(file, framework="numpy") as stored:
            told = stored.metadata() or {}
            arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); {remedy}.") from error
    mine = fingerprint(model)
    if told.get("fingerprint") != mine and not checkpoint:
        raise ValueError(f"no mean queries are shipped for model {model.name!r}; {remedy}.")
    if told.get("fingerprint") != mine:
        raise ValueError(
            f"the mean queries in {file.parent} are those of model {told.get('model')!r} ({told.get('fingerprint')}), "
            f"not of {model.name!r} ({mine}); {remedy}."
        )
    found = [
        tuple(jnp.asarray(arrays[f"{name}.{layer}"]) for layer in range(model.config.layers))
        for name in QueryMeans._fields
    ]
    return QueryMeans(*found)
