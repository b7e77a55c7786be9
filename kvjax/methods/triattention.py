"""TriAttention (arXiv 2604.04921): logits of an average query at future distances, from rotary embeddings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float

from kvjax.methods.query_means import QueryMeans, load, pair_norms, ropes_of
from kvjax.methods.register import register_score
from kvjax.policies.rankings import standardized
from kvjax.policies.score import Requirements, Score
from kvjax.rope import Rope, Turns, rotate_by, turns_of
from kvjax.types import New, View, check, derived, directory, setting, wide

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


@register_score("triattention", paper="TriAttention", group="ranked with arrays calibrated on a text", evict_every=128)
@struct.dataclass
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

    When: for long generated texts, after `kvjax calibrate` on similar text. It has not been measured on many models
    yet.

    Args:
        checkpoint: directory written by `kvjax calibrate`; empty for the mean queries of the embedded model.
        distances: number of distances in Delta; the default reaches 2^16.
        keep_prompt: True if tokens of prompts and turns are evicted only if no other token can be.
        means: mean queries of each layer, set by `bind`; after `layer`, those of one layer.
        ropes: RoPE of each layer, as `means`.
    """

    of_heads = ("means",)

    checkpoint: str = directory("")
    distances: int = setting(17)
    keep_prompt: bool = setting(True)
    means: QueryMeans | None = None
    ropes: tuple[Rope, ...] = derived(())

    def __post_init__(self) -> None:
        check(1 <= self.distances <= 24, "distances", self.distances, "a number from 1 to 24")

    @property
    def requires(self) -> Requirements:
        """All keys of a head."""
        return Requirements(whole_heads=True)

    def bind(self, model: LanguageModel) -> TriAttention:
        """Return a copy with the mean queries of a model.

        Raises:
            ValueError: there are no mean queries, they belong to another model, or the model has no RoPE.
        """
        ropes = ropes_of(model)
        means = load(self.checkpoint, model) if self.means is None else self.means
        return dataclasses.replace(self, means=means, ropes=ropes)

    def layer(self, index: int) -> TriAttention:
        """Return a copy with the mean queries of one layer."""
        if self.means is None:
            return self
        means = QueryMeans(self.means.center[index], self.means.norm[index])
        return dataclasses.replace(self, means=means, ropes=self.ropes[index : index + 1])

    def slot(self, new: New, state: object) -> Bool[Array, "b h t"] | None:
        """Return whether new tokens are given text, which stays; None if that makes no difference."""
        return jnp.full(new.k.shape[:3], new.given) if self.keep_prompt else None

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        found = standardized(self._logits(view, new), view.live[:, :, None], new.spread).max(2)
        if not self.keep_prompt:
            return found
        # Above all z-scores, and in their order at every size of a float.
        above = 1e7 * jnp.where(found >= 0, 1 + found, 1 / (1 - found))
        return jnp.where(view.slots.score, above, found)

    def _logits(self, view: View, new: New) -> Float[Array, "b h g c"]:
        assert self.means is not None
        (rope,), keys = self.ropes, view.keys(new).astype(wide(new.k.dtype))
        center, norm = (jnp.asarray(x, keys.dtype) for x in self.means)
        # A cached key is rotated by its position, so that a query at the newest position + delta is at D + delta.
        newest = new.newest - (not new.given)  # a decoded token has no slot yet
        ahead = newest[:, None] + 2 ** jnp.arange(self.distances)
        mean = Turns(*(turn.mean(1)[:, None, None] for turn in turns_of(rope, ahead, keys.dtype, new.end)))
        query = rotate_by(rope, jnp.broadcast_to(center, (len(newest), *center.shape)), mean)
        excess = rope.magnitude * (norm - pair_norms(rope, center))
        norms = pair_norms(rope, keys)
        return jnp.einsum("bhgd,bhcd->bhgc", query, keys) + jnp.einsum("hgf,bhcf->bhgc", excess, norms)
