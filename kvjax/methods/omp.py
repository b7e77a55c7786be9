"""Orthogonal matching pursuit (Attention Matching, arXiv 2602.16284): keys that together explain the attention."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from kvjax.methods.attention_matching import (
    finite_max,
    matched_factors,
    products,
    ridge_weight,
    sampled,
    slot_logits,
)
from kvjax.methods.register import register_score
from kvjax.policies.residual import Queries
from kvjax.policies.score import PromptScore, Requirements
from kvjax.types import New, View, check, derived, setting, wide

BOUND = 7.0
"""Largest absolute logarithm of the factors B."""


@register_score("omp", paper="Attention Matching, 2026", group="ranked once for each prompt or turn", recent=32)
@struct.dataclass
class Pursuit(PromptScore):
    r"""Keys that together explain how much attention the queries of the prompt pay, chosen one after another.

    .. math::
        j = \arg\max_{j \notin S} \; \Phi_j^\top (m - \Phi_S B), \quad S \gets S \cup \{j\}, \quad
        B \gets \arg\min_B \lVert \Phi_S B - m \rVert^2, \quad
        \Phi = e^{s q K^\top - \max}, \quad m_q = \sum_j \Phi_{qj}

    with the queries of the text, each over all keys. B is that of `attention_matching`, between e^-7 and e^7, with one
    ridge for all choices.

    When: under `--residual attention_matching --set residual.bound=7`, for a prompt that is compressed once and read
    often. Choosing takes a least squares for every `each` slots. Generated tokens are evicted first, except the
    newest `recent` ones.

    Args:
        queries: most queries of a text that are matched, at even distances.
        each: keys chosen before B is computed again; 1 is the paper's algorithm, more are faster.
        ridge: weight of the changes to B, as a share of the mean square of all keys' columns.
        lines: largest number of slots of each layer, set by `sized`; all tokens are put in order without it.
    """

    against_alibi: ClassVar[str] = "omp matches queries at all distances"

    queries: int = setting(256)
    each: int = setting(4)
    ridge: float = setting(1e-2)
    lines: tuple[int, ...] = derived(())

    def __post_init__(self) -> None:
        check(self.queries >= 1, "queries", self.queries, "a number from 1")
        check(self.each >= 1, "each", self.each, "a number of keys from 1")
        check(self.ridge > 0, "ridge", self.ridge, "a number above 0")

    @property
    def requires(self) -> Requirements:
        """Requirements of an order that depends on all keys of a head."""
        return Requirements(whole_heads=True)

    def sized(self, slots: tuple[int, ...]) -> Pursuit:
        """Return a copy that chooses as many keys as a layer has slots."""
        return dataclasses.replace(self, lines=slots)

    def layer(self, index: int) -> Pursuit:
        """Return a copy with the slots of one layer."""
        return dataclasses.replace(self, lines=self.lines[index : index + 1])

    def _ranked(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return 1 for the key chosen first, less for later ones, and 0 for those that are not chosen."""
        q, counts = sampled(Queries(new.q, new.valid), self.queries, wide(new.k.dtype))
        logits = slot_logits(q, view, new)
        shares = jnp.exp(logits - finite_max(logits)) * counts[..., None]
        most = min(self.lines[0], view.capacity) if self.lines else view.capacity
        return chosen_first(shares, -(-most // self.each), min(self.each, most), self.ridge)


def chosen_first(shares: Float[Array, "b h r c"], rounds: int, each: int, ridge: float) -> Float[Array, "b h c"]:
    """Return the score of each column: 1 for that chosen first, less for later ones, and 0 for all others.

    Args:
        shares: Phi, zero for empty slots.
        rounds: number of choices.
        each: columns chosen at a time.
    """
    (b, h, r, c), kind = shares.shape, shares.dtype
    mass, total, unit = shares.sum(-1), rounds * each, jnp.eye(each, dtype=kind)
    weight = ridge_weight(shares, ridge)[..., None, None] * unit

    def choose(carry: tuple[Array, ...], number: Array) -> tuple[tuple[Array, ...], None]:
        scores, missing, chosen, inverse, sums = carry
        gain = jnp.einsum("bhrc,bhr->bhc", shares, missing, precision="highest")
        _, at = jax.lax.top_k(jnp.where(scores > 0, -jnp.inf, gain), each)
        order = (total - number * each - jnp.arange(each)) / total
        # The last round may find all columns chosen.
        first = jnp.maximum(jnp.take_along_axis(scores, at, -1), order.astype(scores.dtype))
        scores = jnp.put_along_axis(scores, at, first, -1, inplace=False)
        columns = jnp.take_along_axis(shares, at[:, :, None], -1)

        # Cholesky's factor of the products of chosen columns grows by the rows of these, and so does its inverse.
        before = jnp.einsum("bhrn,bhrc->bhnc", columns, chosen, precision="highest")
        among = products(columns)
        rows = jnp.einsum("bhnc,bhsc->bhns", before, inverse, precision="highest")
        corner = among - jnp.einsum("bhnc,bhmc->bhnm", rows, rows, precision="highest") + weight
        corner = jax.lax.linalg.triangular_solve(
            jax.lax.linalg.cholesky(corner), jnp.broadcast_to(unit, corner.shape), left_side=True, lower=True
        )
        rows = -jnp.einsum("bhnm,bhms,bhsc->bhnc", corner, rows, inverse, precision="highest")
        start = number * each
        inverse = jax.lax.dynamic_update_slice_in_dim(inverse, rows, start, -2)
        inverse = jax.lax.dynamic_update_slice(inverse, corner, (0, 0, start, start))
        before, among = jnp.abs(before), jnp.abs(among)
        added = before.sum(-1) + among.sum(-1)
        sums = jax.lax.dynamic_update_slice_in_dim(sums + before.sum(-2), added, start, -1)

        def solve(right: Float[Array, "b h c e"]) -> Float[Array, "b h c e"]:
            half = jnp.einsum("bhsc,bhce->bhse", inverse, right, precision="highest")
            return jnp.einsum("bhsc,bhse->bhce", inverse, half, precision="highest")

        chosen = jax.lax.dynamic_update_slice_in_dim(chosen, columns, start, -1)
        factors = matched_factors(chosen, solve, sums.max(-1), mass, BOUND)
        missing = mass - jnp.einsum("bhrc,bhc->bhr", chosen, factors, precision="highest")
        return (scores, missing, chosen, inverse, sums), None

    scores, chosen, inverse, sums = (jnp.zeros((b, h, *n), kind) for n in ((c,), (r, total), (total, total), (total,)))
    return jax.lax.scan(choose, (scores, mass, chosen, inverse, sums), jnp.arange(rounds))[0][0]
