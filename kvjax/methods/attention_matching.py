"""Attention Matching (arXiv 2602.16284): a bias and new values for the slots that stay of a text.

`omp` chooses these slots by orthogonal matching pursuit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.methods.register import register_part, register_score
from kvjax.policies.residual import Queries, Rewritten, SlotResidual
from kvjax.policies.score import PromptScore, Requirements
from kvjax.types import LayerTokens, Limit, View, above_zero, at_least, derived, setting, wide

STEPS = 2
"""Projected steps after least squares."""
Solve = Callable[[Float[Array, "b h c e"]], Float[Array, "b h c e"]]
BOUND = 7.0
"""Largest absolute logarithm of the factors B of `omp`."""


@register_part("attention_matching")
class Matching(SlotResidual):
    r"""Slots that stay of a text get a bias b and new values, such that queries find the mass and the output of all.

    .. math::
        B = \arg\min_{e^{-u} \le B \le e^u} \lVert M B - m \rVert^2, \quad M = e^{s q C^\top - \max}, \quad
        b = \log B, \qquad
        V' = \arg\min \lVert \mathrm{softmax}(s q C^\top + b) V' - \mathrm{softmax}(s q K^\top) V \rVert^2

    with the keys C that the policy keeps of all keys K, the mass m of all, and a bound u of biases, 3 as in the paper.
    (For `omp` the paper takes 7, and drops keys whose bias would be below -7; here theirs is -7.) B is clipped least
    squares, then two projected steps. A ridge keeps B near 1 and V' near the kept values where few queries tell. The
    queries are those of the text, each over all keys, since later queries see all of them; `kvjax.compress` takes those
    of a given text. What is evicted while the model writes is dropped. Layers with a window of their own keep their
    slots as they are.

    From: Attention Matching, arXiv 2602.16284.

    When: for a prompt that is compressed once and read often, with small budgets. Over `h2o` with 5% of the bytes 4.200
    nats become 4.166 on books and 3.042 become 3.017 on stories; with 20% there is nothing left to gain. LESS's trained
    kernels reach 4.105 and 2.968 (embedded model, after prompts of 512 tokens).

    Args:
        queries: most queries of a text that are matched, at even distances.
        ridge: weight of the changes to B and to values, as a share of the mean square of a slot's column.
        bound: largest absolute bias that one compression adds.
    """

    against_alibi: ClassVar[str] = "attention_matching matches queries at all distances"

    queries: int = setting(256, at_least(1, "a number"))
    ridge: float = setting(1e-2, above_zero("a number"))
    bound: float = setting(3.0, Limit(lambda x: 0 < x < 30, "a number above 0 and below 30"))

    def rewrite(self, before: View, after: View, queries: Queries, new: LayerTokens) -> Rewritten | None:
        """Return values and biases of the slots that stay, fitted to the attention over the slots before eviction."""
        if new.spread.slots > 1:
            raise ValueError("attention_matching fits all slots of a head together; use a mesh without slots.")
        spec = new.config.spec
        if spec.window is not None:
            return None
        kind = wide(new.k.dtype)
        q, counts = sampled(queries, self.queries, kind)

        logits, logits_after = (slot_logits(q, view, new) for view in (before, after))
        highest = finite_max(logits)
        shares, shares_after = (jnp.exp(x - highest) * counts[..., None] for x in (logits, logits_after))
        mass = shares.sum(-1)
        gram = products(shares_after)
        solve = solver(gram, ridge_weight(shares_after, self.ridge))
        factors = matched_factors(shares_after, solve, jnp.abs(gram).sum(-1).max(-1), mass, self.bound)
        values, old = (jnp.where(view.live[..., None], view.values(new), 0).astype(kind) for view in (before, after))
        output = jnp.einsum("bhrc,bhce->bhre", shares, values, precision="highest") / _safe(mass)[..., None]
        weights = shares_after * factors[:, :, None]
        weights = weights / _safe(weights.sum(-1))[..., None]
        missing = output - jnp.einsum("bhrc,bhce->bhre", weights, old, precision="highest")
        solve = solver(products(weights), ridge_weight(weights, self.ridge))
        change = solve(jnp.einsum("bhrc,bhre->bhce", weights, missing, precision="highest"))
        fewer = (after.live.sum(-1) < before.live.sum(-1))[..., None]
        changed = fewer & after.live
        bias = after.slots.residual + jnp.where(changed, jnp.log(factors), 0)
        return Rewritten(jnp.where(changed[..., None], old + change, after.values(new)).astype(new.v.dtype), bias)


@register_score("omp", paper="Attention Matching, 2026", group="ranked once for each prompt or turn", recent=32)
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

    queries: int = setting(256, at_least(1, "a number"))
    each: int = setting(4, at_least(1, "a number of keys"))
    ridge: float = setting(1e-2, above_zero("a number"))
    lines: tuple[int, ...] = derived(())

    @property
    def requires(self) -> Requirements:
        return Requirements(whole_heads=True)

    def sized(self, slots: tuple[int, ...]) -> Pursuit:
        return self.replace(lines=slots)

    def layer(self, index: int) -> Pursuit:
        return self.replace(lines=self.lines[index : index + 1])

    def _ranked(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        """Return 1 for the key chosen first, less for later ones, and 0 for those that are not chosen."""
        q, counts = sampled(Queries(new.q, new.valid), self.queries, wide(new.k.dtype))
        logits = slot_logits(q, view, new)
        shares = jnp.exp(logits - finite_max(logits)) * counts[..., None]
        count = min(self.lines[0], view.capacity) if self.lines else view.capacity
        return chosen_first(shares, -(-count // self.each), min(self.each, count), self.ridge)


def chosen_first(shares: Float[Array, "b h r c"], rounds: int, per_round: int, ridge: float) -> Float[Array, "b h c"]:
    """Return the score of each column: 1 for that chosen first, less for later ones, and 0 for all others.

    Args:
        shares: Phi, zero for empty slots.
        rounds: number of choices.
        per_round: columns chosen at a time.
    """
    (b, h, r, c), kind = shares.shape, shares.dtype
    mass, total = shares.sum(-1), rounds * per_round
    weight = ridge_weight(shares, ridge)[..., None, None] * jnp.eye(per_round, dtype=kind)

    def choose(carry: tuple[Array, ...], number: Array) -> tuple[tuple[Array, ...], None]:
        scores, missing, chosen, inverse, sums = carry
        gain = jnp.einsum("bhrc,bhr->bhc", shares, missing, precision="highest")
        _, at = jax.lax.top_k(jnp.where(scores > 0, -jnp.inf, gain), per_round)
        order = (total - number * per_round - jnp.arange(per_round)) / total
        # The last round may find all columns chosen.
        first = jnp.maximum(jnp.take_along_axis(scores, at, -1), order.astype(scores.dtype))
        scores = jnp.put_along_axis(scores, at, first, -1, inplace=False)
        columns = jnp.take_along_axis(shares, at[:, :, None], -1)

        before, among = jnp.einsum("bhrn,bhrc->bhnc", columns, chosen, precision="highest"), products(columns)
        start = number * per_round
        inverse = with_rows(inverse, before, among + weight, start)
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


def with_rows(
    inverse: Float[Array, "b h c c"], before: Float[Array, "b h n c"], among: Float[Array, "b h n n"], start: Array
) -> Float[Array, "b h c c"]:
    """Return the inverse of Cholesky's factor of products of columns, with the rows of n more columns.

    Args:
        inverse: of the columns before, zero from row `start` on.
        before: products of the new columns with those before, zero from `start` on.
        among: products of the new columns with each other, and the ridge's weight.
        start: row of the first new column.
    """
    rows = jnp.einsum("bhnc,bhsc->bhns", before, inverse, precision="highest")
    corner = jax.lax.linalg.cholesky(among - jnp.einsum("bhnc,bhmc->bhnm", rows, rows, precision="highest"))
    unit = jnp.broadcast_to(jnp.eye(corner.shape[-1], dtype=corner.dtype), corner.shape)
    corner = jax.lax.linalg.triangular_solve(corner, unit, left_side=True, lower=True)
    rows = -jnp.einsum("bhnm,bhms,bhsc->bhnc", corner, rows, inverse, precision="highest")
    inverse = jax.lax.dynamic_update_slice_in_dim(inverse, rows, start, -2)
    return jax.lax.dynamic_update_slice(inverse, corner, (0, 0, start, start))


def slot_logits(q: Float[Array, "b h r d"], view: View, new: LayerTokens) -> Float[Array, "b h r c"]:
    """Return the logits of queries at every slot, with its bias and at any position; -inf for empty slots."""
    logits = jnp.einsum("bhrd,bhcd->bhrc", q, view.keys(new).astype(q.dtype), precision="highest")
    logits, bias = new.config.spec.capped(logits), view.slots.residual
    return jnp.where(view.live[:, :, None], logits if bias is None else logits + bias[:, :, None], -jnp.inf)


def finite_max(logits: Float[Array, "b h r c"]) -> Float[Array, "b h r 1"]:
    """Return the largest logit of each query, which is subtracted before exponentials; finite without live slots."""
    return jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(logits.dtype).min)


def matched_factors(
    columns: Float[Array, "b h r c"],
    solve: Solve,
    steepest: Float[Array, "b h"],
    mass: Float[Array, "b h r"],
    log_limit: float,
) -> Float[Array, "b h c"]:
    """Return B: least squares of the mass, clipped, then projected steps of the gradient.

    Args:
        columns: M, zero for empty slots.
        solve: of the products of M's columns with each other, see `solver`.
        steepest: largest sum of the absolute products of a column with all columns.
        mass: of all keys, for each query.
        log_limit: largest absolute logarithm of B.
    """
    box = math.exp(-log_limit), math.exp(log_limit)
    right = jnp.einsum("bhrc,bhr->bhc", columns, mass - columns.sum(-1), precision="highest")
    factors = jnp.clip(1 + solve(right[..., None])[..., 0], *box)
    step = 1 / _safe(steepest)[..., None]
    for _ in range(STEPS):
        error = jnp.einsum("bhrc,bhc->bhr", columns, factors, precision="highest") - mass
        slope = jnp.einsum("bhrc,bhr->bhc", columns, error, precision="highest")
        factors = jnp.clip(factors - step * slope, *box)
    return factors


def products(columns: Float[Array, "b h r c"]) -> Float[Array, "b h c c"]:
    """Return the products of all pairs of columns."""
    return jnp.einsum("bhrc,bhrs->bhcs", columns, columns, precision="highest")


def ridge_weight(columns: Float[Array, "b h r c"], ridge: float) -> Float[Array, "b h"]:
    """Return the ridge times the mean square of the columns that are not zero."""
    squares = jnp.square(columns).sum(-2)
    weight = ridge * squares.sum(-1) / jnp.maximum((squares > 0).sum(-1), 1)
    return jnp.where(weight > 0, weight, 1)


def solver(gram: Float[Array, "b h c c"], weight: Float[Array, "b h"]) -> Solve:
    """Return a function that solves (gram + weight) x = right; x is 0 where a row of `gram` and of `right` is."""
    ridge = weight[..., None, None] * jnp.eye(gram.shape[-1], dtype=gram.dtype)
    return functools.partial(jax.scipy.linalg.cho_solve, jax.scipy.linalg.cho_factor(gram + ridge, lower=True))


def sampled(queries: Queries, limit: int, kind: DTypeLike) -> tuple[Float[Array, "b h r d"], Float[Array, "b h r"]]:
    """Return at most so many queries of each head, at even distances and in groups, and 1 for each that counts."""
    b, h, g, t, d = queries.q.shape
    count = queries.valid.sum(1, dtype=jnp.int32)[:, None]
    index: Int[Array, "b m"] = jnp.broadcast_to(jnp.arange(min(t, limit), dtype=jnp.int32), (b, min(t, limit)))
    spread = (2 * index + 1) * count // (2 * min(t, limit))
    at = jnp.where(count >= limit, spread, index)
    counts = jnp.broadcast_to((index < count)[:, None, None], (b, h, g, index.shape[1])).astype(kind)
    q = jnp.take_along_axis(queries.q, at[:, None, None, :, None], 3).astype(kind)
    return q.reshape(b, h, -1, d), counts.reshape(b, h, -1)


def _safe(x: Array) -> Array:
    return jnp.where(x > 0, x, 1)
