"""Compactor (Chari and Van Durme 2025): the leverage of keys, and attention without a causal mask."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.methods.register import register_score
from kvjax.models.model import LanguageModel
from kvjax.policies import UNRANKED, PromptScore, recent_slots, standardized
from kvjax.types import SEED, LayerTokens, View, at_least, number, setting, wide


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

    def _ranked(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        """Return the scores of cached tokens, and z-scores of the new ones."""
        past = new.position[:, None] <= new.newest[:, None, None] - recent_slots(self.recent, view.limit)[..., None]
        counts = new.valid[:, None] & (new.position[:, None] >= self.sinks) & past
        counts = jnp.broadcast_to(counts, new.k.shape[:3])
        before = view.slots.score[..., : view.capacity - counts.shape[-1]]
        cached = jnp.where(before == UNRANKED, 0.0, before)
        scores = jnp.where(counts, self._of_text(view, new, counts), UNRANKED)
        return jnp.concatenate([cached, scores.astype(cached.dtype)], axis=-1)

    @abc.abstractmethod
    def _of_text(self, view: View, new: LayerTokens, counts: Bool[Array, "b h t"]) -> Float[Array, "b h t"]:
        """Return the score of new tokens, computed over those in the mask `counts`."""


@register_score("leverage", paper="Compactor, 2025", group="ranked once for each prompt or turn", recent=32)
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

    sketch: int = setting(48, at_least(1, "a number of channels"))
    seed: int = setting(0, SEED)
    projections: tuple[Float[Array, "h d m"], ...] | Float[Array, "h d m"] | None = None

    def bind(self, model: LanguageModel) -> Leverage:
        shapes = [(layer.kv_heads, layer.key_width, self.sketch) for layer in model.config.layer_configs]
        keys = [jax.random.fold_in(jax.random.key(self.seed), layer) for layer in range(len(shapes))]
        normals = (jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True))
        return self.replace(projections=tuple(x * self.sketch**-0.5 for x in normals))

    def _of_text(self, view: View, new: LayerTokens, counts: Bool[Array, "b h t"]) -> Float[Array, "b h t"]:
        keys, weight = new.raw_k.astype(wide(new.k.dtype)), counts[..., None]
        mean = jnp.where(weight, keys, 0.0).sum(2, keepdims=True) / jnp.maximum(weight.sum(2, keepdims=True), 1)
        x = jnp.einsum("bhtd,hdm->bhtm", jnp.where(weight, keys - mean, 0.0), self.projections)
        gram = jnp.einsum("bhtm,bhtn->bhmn", x, x)
        # Below the rounding of the largest sums, 0.01 would not make a singular matrix positive.
        rounding = 4 * jnp.finfo(x.dtype).eps * jnp.trace(gram, axis1=2, axis2=3)
        gram += jnp.maximum(0.01, rounding)[..., None, None] * jnp.eye(self.sketch, dtype=x.dtype)
        solved = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(gram), jnp.swapaxes(x, 2, 3), lower=True)
        return standardized((solved**2).sum(2), counts, new.spread)


@register_score("noncausal", paper="Compactor, 2025", group="ranked once for each prompt or turn", recent=32)
class NonCausal(TextScore):
    r"""Attention of all queries of a chunk, times the norm of the value, pooled over neighbors.

    .. math:: F(i) = z(\mathrm{pool}_{|j - i| \le 1} \, \lVert v_j \rVert \, \frac 1 G \sum_g \sum_{t \in p} a_{gt}(j))

    with the softmax over the keys of a chunk p, before and after the query.

    When: to study one half of `compactor` alone. It has not been measured on many models yet. Generated tokens are
    evicted first, except the newest `recent` ones.

    Args:
        chunk: tokens of a chunk.
    """

    chunk: int = setting(256, at_least(1, "a number of tokens"))

    def _of_text(self, view: View, new: LayerTokens, counts: Bool[Array, "b h t"]) -> Float[Array, "b h t"]:
        return noncausal_attention(new, counts, self.sinks, self.chunk)


def noncausal_attention(new: LayerTokens, counts: Bool[Array, "b h t"], sinks: int, size: int) -> Float[Array, "b h t"]:
    """Return z-scores of the attention between the tokens in `counts`, in chunks of `size` tokens after the sinks."""
    kind, tokens = wide(new.k.dtype), counts.shape[-1]
    chunks = -(-tokens // size)
    first = jnp.clip(sinks - new.position[:, :1], 0, tokens)
    at = first + jnp.arange(chunks * size)
    inside, at = at < tokens, jnp.minimum(at, tokens - 1)

    def chunked(x: Float[Array, "b *h t d"]) -> Float[Array, "p b *h l d"]:
        x = jnp.take_along_axis(x, at.reshape(len(at), *(1,) * (x.ndim - 3), -1, 1), axis=-2)
        return jnp.moveaxis(x.reshape(*x.shape[:-2], chunks, size, x.shape[-1]), -3, 0)

    def attention(operands: tuple[Array, Array, Array]) -> Float[Array, "b h l"]:
        q, k, real = operands
        logits = new.config.scale * jnp.einsum("bhgqd,bhkd->bhgqk", q.astype(kind), k.astype(kind))
        shares = jax.nn.softmax(jnp.where(real[:, :, None, None, :, 0], logits, -jnp.inf), axis=-1)
        return jnp.where(real[:, :, None], shares, 0.0).sum(3).mean(2)

    real = chunked(counts[..., None]) & jnp.moveaxis(inside.reshape(-1, 1, chunks, size, 1), 2, 0)
    summed = jnp.moveaxis(jax.lax.map(attention, (chunked(new.q), chunked(new.k), real)), 0, 2)
    back = jnp.maximum(jnp.arange(tokens) - first, 0)
    summed = jnp.take_along_axis(summed.reshape(*counts.shape[:2], -1), back[:, None], axis=2)
    paid = jnp.where(counts, summed * jnp.linalg.norm(new.v.astype(kind), axis=-1), 0.0)
    paid = jnp.pad(paid, ((0, 0), (0, 0), (1, 1)))
    return standardized((paid[..., :-2] + paid[..., 1:-1] + paid[..., 2:]) / 3, counts, new.spread)


@register_score("compactor", paper="Compactor, 2025", group="ranked once for each prompt or turn", sinks=8, recent=32)
class Compacted(Leverage):
    r"""Weighted sum of the leverage of keys and of attention without a causal mask, both in z-scores.

    .. math:: F(i) = \lambda \, \mathrm{leverage}(i) + \mathrm{noncausal}(i)

    When: if a prompt is compressed before the question is known. It has not been measured on many models yet. The paper
    keeps the last 4 tokens and evicts nothing after the prompt. Here generated tokens are evicted first, except the
    newest `recent` ones.

    Args:
        chunk: number of tokens in a chunk of non-causal attention.
        blending: lambda; None for the fraction of the text's tokens that are evicted.
    """

    chunk: int = setting(256, at_least(1, "a number of tokens"))
    blending: float | None = setting(None)

    def _of_text(self, view: View, new: LayerTokens, counts: Bool[Array, "b h t"]) -> Float[Array, "b h t"]:
        share: Any = self.blending
        if share is None:
            tokens = jnp.maximum(view.live.sum(-1), 1)
            share = jnp.maximum(1 - view.limit / tokens, 0.0)[..., None]
        return share * super()._of_text(view, new, counts) + noncausal_attention(new, counts, self.sinks, self.chunk)
