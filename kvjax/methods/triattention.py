"""TriAttention (arXiv 2604.04921): logits of an average query at future distances, from rotary embeddings.

`kvjax calibrate` writes the mean queries of a model: a file of arrays for each layer, with the model's fingerprint.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.methods.register import register_score
from kvjax.models.fingerprint import fingerprints
from kvjax.models.model import LanguageModel
from kvjax.policies import Requirements, Score, standardized
from kvjax.rope import Rope, Turns, rotate_by, turns_of
from kvjax.types import LayerTokens, Limit, View, directory, setting, wide
from kvjax.utils.files import check_regular, damage_named, expanded, written_aside

FILE = "queries.safetensors"
SHIPPED = Path(__file__).resolve().parents[1] / "tiny" / "queries"
"""Directory of the embedded model's mean queries."""


class QueryMeans(NamedTuple):
    """Means over the tokens of some texts, for one layer or as tuples over layers."""

    center: tuple[Float[Array, "h g d"], ...] | Float[Array, "h g d"]
    """Mean of the queries before rotation."""
    norm: tuple[Float[Array, "h g f"], ...] | Float[Array, "h g f"]
    """Mean of the norm of each rotated pair of channels."""


def require_ropes(model: LanguageModel) -> None:
    """Refuse a model that has a layer without attention, or without RoPE."""
    if any(layer.rope is None for layer in model.config.layer_configs):
        raise ValueError(
            f"policy triattention needs attention with RoPE in all layers, which {model.name!r} does not have."
        )
    model.config.check_all_store("policy triattention")


def pair_norms(rope: Rope | None, x: Float[Array, "*b d"]) -> Float[Array, "*b f"]:
    """Return the norm of each pair of channels that RoPE rotates."""
    assert rope is not None
    rotary = x[..., : rope.width]
    if rope.interleaved:
        return jnp.hypot(rotary[..., ::2], rotary[..., 1::2])
    return jnp.hypot(*jnp.split(rotary, 2, axis=-1))


def _shapes(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's mean queries by their names in a file."""
    config, shapes = model.config, dict[str, tuple[int, ...]]()
    for layer, shape in enumerate(config.layer_configs):
        assert shape.rope is not None
        heads = shape.kv_heads, shape.groups
        shapes |= {f"center.{layer}": (*heads, shape.key_width), f"norm.{layer}": (*heads, shape.rope.width // 2)}
    return shapes


def save(directory: Path, means: QueryMeans, model: LanguageModel, tokens: int) -> None:
    """Write mean queries of a model, over a number of tokens."""
    from safetensors.numpy import save_file

    arrays = {
        f"{name}.{layer}": np.asarray(array, np.float32)
        for name, layers in means._asdict().items()
        for layer, array in enumerate(layers)
    }
    metadata = {"model": model.name, "fingerprint": fingerprints(model)[0], "tokens": str(tokens)}
    directory.mkdir(parents=True, exist_ok=True)
    with written_aside(directory / FILE) as aside:
        save_file(arrays, aside, metadata=metadata)


def load(checkpoint: str, model: LanguageModel) -> QueryMeans:
    """Read the mean queries of a model.

    Args:
        checkpoint: directory written by `save`; empty for the mean queries of the embedded model.

    Raises:
        ValueError: there are no mean queries, they are damaged, or they belong to another model.
    """
    from safetensors import safe_open

    file = (expanded(checkpoint) if checkpoint else SHIPPED) / FILE
    remedy = "run kvjax calibrate for this model and give checkpoint=DIR"
    if not file.exists():
        raise ValueError(f"{file.parent} holds no mean queries of a model; {remedy}.")
    check_regular(file)
    with damage_named(f"{file} is damaged ({{reason}}); {remedy}."), safe_open(file, framework="numpy") as stored:
        meta = stored.metadata() or {}
        arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is no mapping
    model_fingerprints = fingerprints(model)
    if meta.get("fingerprint") not in model_fingerprints and not checkpoint:
        raise ValueError(f"no mean queries are shipped for model {model.name!r}; {remedy}.")
    if meta.get("fingerprint") not in model_fingerprints:
        raise ValueError(
            f"the mean queries in {file.parent} are those of model {meta.get('model')!r} ({meta.get('fingerprint')}), "
            f"not of {model.name!r} ({model_fingerprints[0]}); {remedy}."
        )
    for name, shape in _shapes(model).items():
        array = arrays.get(name)
        if array is None or array.shape != shape or array.dtype != np.float32 or not np.isfinite(array).all():
            raise ValueError(f"{file} is damaged: {name} has no numbers of shape {list(shape)}; {remedy}.")
    means = [
        tuple(jnp.asarray(arrays[f"{name}.{layer}"]) for layer in range(model.config.layers))
        for name in QueryMeans._fields
    ]
    return QueryMeans(*means)


@register_score("triattention", paper="TriAttention", group="ranked with arrays calibrated on a text", evict_every=128)
class TriAttention(Score):
    r"""Keys with the highest logits of the model's average query at future distances.

    .. math::
        s_g(i) = \frac 1 {|\Delta|} \sum_{\delta \in \Delta} \sum_f c^2 |Q_{gf}| |k_{if}|
            \cos((D_i + \delta) \omega_f + \arg(Q_{gf} \bar k_{if}))
            + \sum_f c^2 (m_{gf} - |Q_{gf}|) |k_{if}|

        F(i) = \max_g \frac{s_g(i) - \mathrm{mean}_j \, s_g(j)}{\mathrm{std}_j \, s_g(j)}, \quad
        \Delta = \{1, 2, 4, \ldots\}

    f are the pairs of channels that RoPE rotates, k the keys before rotation, D their distances from the newest token
    and c RoPE's own scaling. Q is the mean of query head g before rotation and m the mean of its norm, both in complex
    numbers. Channels without rotation add their product with the mean query. Mean and standard deviation are over the
    cached tokens of the head; in the authors' code, over those that are not kept as the prompt.

    A prompt that fills the budget leaves no slot to generated tokens: each eviction takes all of them. Such a prompt is
    ranked by F; the authors' code keeps its first tokens. Use `keep_prompt=False` for prompts of about the budget or
    more.

    When: for long generated texts, after `kvjax calibrate` on similar text. It has not been measured on many models
    yet.

    Args:
        checkpoint: directory written by `kvjax calibrate`; empty for the mean queries of the embedded model.
        distances: number of distances in Delta; the default reaches 2^16.
        keep_prompt: True if tokens of prompts and turns are evicted only if no other token can be.
        means: mean queries of each layer, set by `bind`; after `layer`, those of one layer.
    """

    of_heads = ("means",)

    checkpoint: str = directory("")
    distances: int = setting(17, Limit(lambda number: 1 <= number <= 24, "a number from 1 to 24"))
    keep_prompt: bool = setting(True)
    means: QueryMeans | None = None

    @property
    def requires(self) -> Requirements:
        return Requirements(whole_heads=True)

    def bind(self, model: LanguageModel) -> TriAttention:
        require_ropes(model)
        return self if self.means is not None else self.replace(means=load(self.checkpoint, model))

    def layer(self, index: int) -> TriAttention:
        if self.means is None:
            return self
        return self.replace(means=QueryMeans(self.means.center[index], self.means.norm[index]))

    def init_slot(self, new: LayerTokens, state: object) -> Bool[Array, "b h t"] | None:
        """Return whether new tokens are given text, which stays; None if that makes no difference."""
        return jnp.full(new.k.shape[:3], new.given) if self.keep_prompt else None

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        scores = standardized(self._logits(view, new), view.live[:, :, None], new.spread).max(2)
        if not self.keep_prompt:
            return scores
        # Above all z-scores, and in their order at every size of a float.
        above = 1e7 * jnp.where(scores >= 0, 1 + scores, 1 / (1 - scores))
        return jnp.where(view.slots.score, above, scores)

    def _logits(self, view: View, new: LayerTokens) -> Float[Array, "b h g c"]:
        rope, keys = new.config.rope, view.keys(new).astype(wide(new.k.dtype))
        assert self.means is not None and rope is not None
        center, norm = (jnp.asarray(x, keys.dtype) for x in self.means)
        # A cached key is rotated by its position, so that a query at the newest position + delta is at D + delta.
        newest = new.newest - (not new.given)  # a decoded token has no slot yet
        ahead = newest[:, None] + 2 ** jnp.arange(self.distances)
        mean = Turns(*(turn.mean(1)[:, None, None] for turn in turns_of(rope, ahead, keys.dtype, new.rope_length)))
        query = rotate_by(rope, jnp.broadcast_to(center, (len(newest), *center.shape)), mean)
        excess = rope.magnitude * (norm - pair_norms(rope, center))
        norms = pair_norms(rope, keys)
        return jnp.einsum("bhgd,bhcd->bhgc", query, keys) + jnp.einsum("hgf,bhcf->bhgc", excess, norms)
