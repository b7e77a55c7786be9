"""Leverage of keys (Compactor, Chari and Van Durme 2025): directions that few other keys of the text share."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from kvjax.methods.register import register_score
from kvjax.policies.protection import recent_slots
from kvjax.policies.rankings import standardized
from kvjax.policies.score import UNRANKED, PromptScore
from kvjax.types import New, View, check, number, setting, wide

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


@struct.dataclass
class TextScore(PromptScore):
    """Score computed separately for each prompt, chunk or turn, in z-scores over its tokens.

    The first and newest tokens, which are protected, are not ranked. Cached tokens keep their scores. Tokens that were
    not ranked, such as generated ones, score 0, the mean, from the next turn on.

    Args:
        sinks: number of first tokens of the text that are not ranked.
        recent: newest tokens that are not ranked: a number, or a fraction of the slots.
    """

    sinks: int = setting(0)
    recent: int | float = number(0)

    def _ranked(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return the scores of cached tokens, and z-scores of the new ones."""
        past = new.position[:, None] <= new.newest[:, None, None] - recent_slots(self.recent, view.limit)[..., None]
        counts = new.valid[:, None] & (new.position[:, None] >= self.sinks) & past
        counts = jnp.broadcast_to(counts, new.k.shape[:3])
        before = view.slots.score[..., : view.capacity - counts.shape[-1]]
        held = jnp.where(before == UNRANKED, 0.0, before)
        found = jnp.where(counts, self._of_text(view, new, counts), UNRANKED)
        return jnp.concatenate([held, found.astype(held.dtype)], axis=-1)

    @abc.abstractmethod
    def _of_text(self, view: View, new: New, counts: Bool[Array, "b h t"]) -> Float[Array, "b h t"]:
        """Return the score of new tokens, computed over those in the mask `counts`."""


@register_score("leverage", paper="Compactor, 2025", group="ranked once for each prompt or turn", recent=32)
@struct.dataclass
class Leverage(TextScore):
    r"""Statistical leverage of keys before rotation: keys unlike the others of the text stay.

    .. math:: F(i) = z(x_i^\top (X^\top X + 0.01 I)^{-1} x_i), \quad
        X = (K - \bar K) \Phi, \quad \Phi \sim \mathcal N(0, 1/m)^{d \times m}

    When: to study one half of `compactor` alone. It has not been measured on many models yet. Generated tokens are
    evicted first, except the newest `recent` ones.

    Args:
        sketch: m, width of the projected keys.
        seed: seed of the matrices Phi.
        projections: Phi of each layer, set by `bind`; after `layer`, that of one layer.
    """

    of_heads = ("projections",)

    sketch: int = setting(48)
    seed: int = setting(0)
    projections: tuple[Float[Array, "h d m"], ...] | Float[Array, "h d m"] | None = None

    def __post_init__(self) -> None:
        check(self.sketch >= 1, "sketch", self.sketch, "a number of channels from 1")
        check(0 <= self.seed < 2**32, "seed", self.seed, "a whole number below 2^32")

    def bind(self, model: LanguageModel) -> Leverage:
        """Return a copy with Phi for the layers of a model."""
        shapes = [(layer.kv_heads, layer.key_width, self.sketch) for layer in model.config.layer_configs]
        keys = [jax.random.fold_in(jax.random.key(self.seed), layer) for layer in range(len(shapes))]
        drawn = (jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True))
        return dataclasses.replace(self, projections=tuple(each * self.sketch**-0.5 for each in drawn))

    def _of_text(self, view: View, new: New, counts: Bool[Array, "b h t"]) -> Float[Array, "b h t"]:
        keys, weight = new.raw_k.astype(wide(new.k.dtype)), counts[..., None]
        mean = jnp.where(weight, keys, 0.0).sum(2, keepdims=True) / jnp.maximum(weight.sum(2, keepdims=True), 1)
        x = jnp.einsum("bhtd,hdm->bhtm", jnp.where(weight, keys - mean, 0.0), self.projections)
        gram = jnp.einsum("bhtm,bhtn->bhmn", x, x)
        # Below the rounding of the largest sums, 0.01 would not make a singular matrix positive.
        least = 4 * jnp.finfo(x.dtype).eps * jnp.trace(gram, axis1=2, axis2=3)
        gram += jnp.maximum(0.01, least)[..., None, None] * jnp.eye(self.sketch, dtype=x.dtype)
        solved = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(gram), jnp.swapaxes(x, 2, 3), lower=True)
        return standardized((solved**2).sum(2), counts, new.spread)
