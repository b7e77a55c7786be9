"""CurDKV (Sengupta et al. 2025, arXiv 2509.15038): keys and values with large norms among their neighbors."""

from __future__ import annotations

import jax.numpy as jnp
from jax.lax import erf_inv
from jaxtyping import Array, Float, Int

from kvjax.methods.neighbors import in_text_order
from kvjax.methods.register import register_score
from kvjax.policies import Requirements, Score, coarse
from kvjax.types import LayerTokens, View, at_least, setting, wide
from pallas_kernels.noise import uniform_at


@register_score("cur", paper="CurDKV, 3.2", group="ranked by keys, values or chance, without attention", sinks=4)
class LeverageProduct(Score):
    r"""Tokens whose keys and values have large norms compared with those of their neighbors.

    .. math:: F(i) = \frac{\lVert k_i \rVert^2}{\sum_{j \in N(i)} \lVert k_j \rVert^2}
        \cdot \frac{\lVert v_i \rVert^2}{\sum_{j \in N(i)} \lVert v_j \rVert^2}

    The fractions approximate leverages. The cached tokens of a head form groups N of consecutive tokens, beginning with
    the first. With `projections` the norms are those of k G and v G, with a Gaussian matrix G for each row, layer and
    head; kvpress draws one for all heads of a layer.

    F is rounded to 15 significant bits, which kvpress does not do: equal tokens tie in spite of rounding errors, and of
    tokens that tie the oldest is evicted first. kvpress compresses a prompt and evicts nothing afterwards. Here F also
    evicts while the model writes, the newest tokens included unless `recent` protects them.

    When: if attention probabilities are not available, with `recent`. It has not been measured on many models yet.

    Args:
        neighbors: number of tokens in a group.
        projections: columns of G, 20 in the paper's random form; None for the norms themselves.
    """

    neighbors: int = setting(16, at_least(1, "a number of tokens"))
    projections: int | None = setting(None, at_least(1, "a number of columns"))

    @property
    def requires(self) -> Requirements:
        return Requirements(whole_heads=True)

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        position = new.spread.all_slots(view.position)
        shares = [self._share(x, view, position, new) for x in (view.keys(new), view.values(new))]
        return coarse(new.spread.own_slots(shares[0] * shares[1]))

    def _share(
        self, x: Float[Array, "b h c d"], view: View, position: Int[Array, "b h all"], new: LayerTokens
    ) -> Float[Array, "b h all"]:
        x = x if self.projections is None else projected(x, self.projections, new)
        norms = jnp.where(view.live, (x.astype(wide(x.dtype)) ** 2).sum(-1), 0.0)
        return in_text_order(self._in_groups, new.spread.all_slots(norms), position)

    def _in_groups(self, norms: Float[Array, "b h c"]) -> Float[Array, "b h c"]:
        *heads, slots = norms.shape
        groups = jnp.pad(norms, ((0, 0), (0, 0), (0, -slots % self.neighbors)))
        groups = groups.reshape(*heads, -1, self.neighbors)
        total = groups.sum(-1, keepdims=True)
        shares = groups / jnp.where(total > 0, total, 1.0)
        return shares.reshape(*heads, -1)[..., :slots]


def projected(
    x: Float[Array, "b h c d"], columns: int, new: LayerTokens, draw: Int[Array, "b 1"] | None = None
) -> Float[Array, "b h c m"]:
    """Multiply keys or values by a standard Gaussian matrix [d, columns], one for each row, layer, head and `draw`."""
    rows, heads, _, width = x.shape
    index = jnp.broadcast_to(jnp.arange(width * columns), (rows, heads, width * columns))
    uniform = uniform_at(new.seed, new.layer, index, draw, new.head).astype(wide(x.dtype))
    gaussian = erf_inv(2 * uniform - 1).reshape(rows, heads, width, columns) * 2**0.5
    return jnp.einsum("bhcd,bhdm->bhcm", x.astype(gaussian.dtype), gaussian)
