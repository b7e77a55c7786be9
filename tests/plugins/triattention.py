"""TriAttention: the attention that a key will get from an average query, by trigonometry of rotary embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

import kvjax
from kvjax.types import Heads, LayerConfig, New, PyTree, View, check, setting, wide

Stacked = Float[Array, "layers h g n"] | tuple[Float[Array, "h g n"], ...]


@struct.dataclass
class TriAttention(kvjax.Score):
    r"""Logits of a calibrated mean query at some distances ahead, and the norms that the mean does not explain.

    .. math::
        s_g(i) = \frac 1 {|\Delta|} \sum_{\delta \in \Delta} \sum_f |Q_{gf}| |k_{if}|
            \cos((D_i + \delta) \omega_f + \arg(Q_{gf} \bar k_{if}))
            + \sum_f (m_{gf} - |Q_{gf}|) |k_{if}|

        F(i) = \max_g \frac{s_g(i) - \mathrm{mean}_j \, s_g(j)}{\mathrm{std}_j \, s_g(j)}, \quad
        \Delta = \{1, 2, 4, \ldots\}

    f are the pairs of channels that RoPE rotates, k the keys before rotation and D their distances from the newest
    token. Q is the mean of query head g before rotation and m the mean of its norm, both in complex numbers, and both
    from `calibrated`. Mean and standard deviation are those of the tokens that the head holds.

    Args:
        center: Q of each layer, its channels in the order of a query's.
        norm: m of each layer.
        distances: number of distances in Delta, up to 2^16 by default.
        keep_prompt: True if tokens of the prompt are never evicted; the budget must then hold it.
    """

    paper = "TriAttention, arXiv 2604.04921"
    of_heads = ("center", "norm")

    center: Stacked | Float[Array, "h g d"]
    norm: Stacked | Float[Array, "h g f"]
    distances: int = setting(17)
    keep_prompt: bool = setting(True)

    def __post_init__(self) -> None:
        check(self.distances >= 1, "distances", self.distances, "a number from 1")

    @property
    def requires(self) -> kvjax.Requirements:
        """Whole heads in one buffer: `score` would see pages one by one, each with a mean of its own."""
        return kvjax.Requirements(whole_heads=True)

    def bind(self, model: Any) -> TriAttention:
        """Return a copy with one array for each layer.

        Raises:
            ValueError: the arrays are those of another model, or the model's RoPE is of another kind.
        """
        layers = model.config.layer_configs
        wanted = [(layer.kv_heads, layer.groups, layer.key_width) for layer in layers]
        found = [jnp.shape(center) for center in self.center]
        if found != wanted:
            raise ValueError(f"center has queries {found} [h g d], not {wanted}; calibrate for this model.")
        for layer in layers:
            frequencies(layer)
        return dataclasses.replace(self, center=tuple(self.center), norm=tuple(self.norm))

    def layer(self, index: int) -> TriAttention:
        """Return a copy with the arrays of one layer."""
        return dataclasses.replace(self, center=self.center[index], norm=self.norm[index])

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return F."""
        keys = view.keys(new).astype(wide(new.k.dtype))
        center, norm = jnp.asarray(self.center), jnp.asarray(self.norm)
        # A cached key is rotated by its position, so a query at position p + D sees it under the angle D.
        newest = new.newest - (not new.given)  # a decoded token has no slot yet
        ahead = newest[:, None] + 2 ** jnp.arange(self.distances)
        query = turned(center, ahead[..., None] * jnp.asarray(frequencies(new.config), keys.dtype)).mean(1)
        excess = norm - norms(center)
        scores = jnp.einsum("bhgd,bhcd->bhgc", query, keys) + jnp.einsum("hgf,bhcf->bhgc", excess, norms(keys))
        found = standardized(scores, view.live[:, :, None], new).max(2)
        if not self.keep_prompt:
            return found
        return jnp.where(view.position < new.prompt_length[:, None, None], jnp.inf, found)


def frequencies(config: LayerConfig | None) -> Float[Array, " f"]:
    """Return the radians per position of each pair of channels.

    Raises:
        ValueError: RoPE scales its frequencies, rotates only some channels or pairs neighbors.
    """
    rope, width = (None, 0) if config is None else (config.rope, config.key_width)
    if rope is None or rope.scaling != "none" or rope.interleaved or rope.width != width:
        raise ValueError(f"TriAttention needs RoPE of all channels in halves, without scaling, not {rope!r}.")
    return rope.theta ** (-jnp.arange(0, rope.width, 2) / rope.width)


def norms(x: Float[Array, "*b d"]) -> Float[Array, "*b f"]:
    """Return the norm of each pair of channels."""
    return jnp.hypot(*jnp.split(x, 2, axis=-1))


def turned(x: Float[Array, "h g d"], angle: Float[Array, "b m f"]) -> Float[Array, "b m h g d"]:
    """Return vectors with their pairs of channels rotated by angles."""
    one, other = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle)[:, :, None, None], jnp.sin(angle)[:, :, None, None]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


def standardized(x: Float[Array, "b h g c"], live: Array, new: New) -> Float[Array, "b h g c"]:
    """Return z-scores over the tokens that each head holds."""
    count = new.spread.over_slots(live.sum(-1, keepdims=True))

    def mean(x: Array) -> Array:
        return new.spread.over_slots(jnp.where(live, x, 0.0).sum(-1, keepdims=True)) / jnp.maximum(count, 1)

    centered = x - mean(x)
    return centered / jnp.maximum(jnp.sqrt(mean(centered**2)), 1e-6)


@struct.dataclass
class QueryMeans(kvjax.Score):
    """Score of a calibration: any ranking will do, and heads sum queries before rotation, and their norms."""

    def init(self, shape: New) -> tuple[Float[Array, "b h g d"], Float[Array, "b h g f"]]:
        """Return zeros."""
        query = jnp.zeros((*shape.q.shape[:3], shape.q.shape[-1]), wide(shape.q.dtype))
        return query, norms(query)

    def advance(self, heads: Heads, new: New) -> PyTree:
        """Return the sums with the new queries added."""
        query, norm = heads.state.score
        raw = jnp.where(new.valid[:, None, None, :, None], new.raw_q.astype(query.dtype), 0.0)
        return query + raw.sum(3), norm + norms(raw).sum(3)

    def score(self, view: View, new: New) -> kvjax.OldestFirst:
        """Return the order of the text."""
        return kvjax.OldestFirst()


def calibrated(model: kvjax.Model, texts: Sequence[Sequence[int]], **settings: Any) -> TriAttention:
    """Return the score with mean queries of a model over some texts.

    Args:
        model: from `kvjax.load`.
        texts: token ids; the paper takes about 32,000 of plain text.
        settings: of the score.
    """
    state, _ = kvjax.prefill(model, kvjax.Policy(QueryMeans()), texts, budget=1)
    tokens = sum(map(len, texts))
    sums = [parts.score for parts in state.storage.states()]
    center, norm = (jnp.stack([layer[i].sum(0) / tokens for layer in sums]) for i in range(2))
    return TriAttention(center, norm, **settings)


def triattention(score: TriAttention, *, every: int = 128, sinks: int = 0, recent: int | float = 0) -> kvjax.Policy:
    """Return the policy TriAttention.

    Args:
        score: from `calibrated`.
        every: tokens from one eviction to the next.
        sinks: first tokens of the text that are never evicted.
        recent: newest tokens that are never evicted.
    """
    return kvjax.Policy(score, kvjax.Protection(sinks, recent), evict_every=every)
