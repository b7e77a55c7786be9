"""Rank of attention residuals compared with attention itself (LESS, Figure 3)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments import lowrank_oracle
from experiments.claims import Claim
from experiments.less.axes import log_scale
from experiments.runs import Runs
from kvjax.evaluation.figures import legend_beside, new_figure, plot_lines
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.types import LayerConfig
from kvjax.utils.markdown import markdown_table

RANKS = (0, 1, 4, 8)


@functools.partial(jax.jit, static_argnames=("config", "keep"))
def _splits(weights: Weights, config: ModelConfig, tokens: Int[Array, "b n"], keep: int) -> tuple[Array, Array]:
    made: list[tuple[Array, Array]] = []

    def attention(q: Array, k: Array, v: Array, position: Array, shape: LayerConfig) -> Array:
        split = lowrank_oracle.top_k(q, k, v, position, keep, shape)
        # Only queries that see more than `keep` keys have a residual.
        made.append((split.full[..., keep:, :], split.residual[..., keep:, :]))
        return split.full

    lowrank_oracle.read(weights, config, tokens, attention)
    outputs, residuals = zip(*made, strict=True)
    return jnp.stack(outputs), jnp.stack(residuals)


def singular_values(
    weights: Weights, config: ModelConfig, tokens: Int[Array, "b n"], keep: int
) -> tuple[Float[np.ndarray, "layers d"], Float[np.ndarray, "layers d"]]:
    """Return relative singular values of attention outputs and of top-k residuals, as means over texts and heads.

    Args:
        weights: weights of the model, which runs with full attention.
        config: shape of the model.
        tokens: texts without padding.
        keep: keys per query that the sparse policy keeps.
    """

    def relative(matrix: Array) -> np.ndarray:
        wide = np.asarray(matrix, np.float64)
        squares = np.linalg.eigvalsh(np.swapaxes(wide, -1, -2) @ wide)[..., ::-1]
        values = np.sqrt(np.maximum(squares, 0))
        return (values / np.maximum(values[..., :1], np.finfo(np.float64).tiny)).mean((1, 2, 3))

    outputs, residuals = _splits(weights, config, tokens, keep)
    return relative(outputs), relative(residuals)


@functools.partial(jax.jit, static_argnames=("config", "keep", "rank"))
def nats(
    weights: Weights, config: ModelConfig, tokens: Int[Array, "b n"], *, keep: int, rank: int
) -> Float[Array, "b m"]:
    """Return nats of every token but the first, with top-k attention plus the best residual of a rank."""
    logits = lowrank_oracle.logits(weights, config, tokens, keep=keep, rank=rank)[:, :-1]
    likelihood = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(likelihood, tokens[:, 1:, None], axis=-1)[..., 0]


def residuals(
    runs: Runs, budgets: dict[str, int], rows: int, figure: Callable[[str, Any], str]
) -> tuple[list[Claim], str]:
    """Return claims and text of the report. Top-k keeps an eighth of the text, as in the paper, or a budget."""
    model, n = runs.model, runs.passages.tokens.shape[1]
    chosen = np.concatenate([runs.passages.tokens[where][:rows] for where in runs.passages.rows.values()])
    eighth = n // 8

    def each(f: Callable[[Array], Any]) -> Any:
        # Passage by passage: n x n attention of all heads is large.
        made = [jax.tree.map(np.asarray, f(jnp.asarray(row[None]))) for row in chosen]
        return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0).round(6).tolist(), *made)

    settings = runs.settings(rows=len(chosen))
    curves = runs.keep(
        f"rank: singular values, top-{eighth}",
        settings,
        lambda: each(lambda tokens: singular_values(model.weights, model.config, tokens, keep=eighth)),
    )
    body, claims = "", []
    drawn, right = None, None
    what = f"top-{eighth}: singular values relative to the largest are lower in residuals than in attention outputs"
    if curves is None:
        claims.append(Claim(what, None))
    else:
        of_attention, of_residual = (np.asarray(curve) for curve in curves)
        layers = list(zip(of_attention.mean(1), of_residual.mean(1), strict=True))
        numbers = "; ".join(f"layer {i}: {r:.3f} against {a:.3f}" for i, (a, r) in enumerate(layers))
        lower = [r < a for a, r in layers]
        claims.append(Claim(f"{what}, in every layer", all(lower), f"in {sum(lower)} of {len(lower)}: {numbers}"))
        drawn, (left, right) = new_figure(2)
        curves_of = {"attention output": of_attention.mean(0), f"residual of top-{eighth}": of_residual.mean(0)}
        for label, values in curves_of.items():
            left.plot(range(1, len(values) + 1), values, label=label)
        left.set(xlabel="index", ylabel="relative singular value")
        log_scale(left)
        legend_beside(left)
    beyond = sorted(budgets.values())

    def oracle(keep: int, rank: int) -> list[float] | None:
        # Means over the predictions made after more than each budget's tokens.
        def make() -> list[float]:
            made = np.asarray(each(lambda x: nats(model.weights, model.config, x, keep=keep, rank=rank)[0]))
            return [round(float(made[slots:].mean()), 6) for slots in beyond]

        return runs.keep(f"rank: nats, top-{keep}, rank {rank}", {**settings, "beyond": beyond}, make)

    table_rows, lines = [], []
    everything = oracle(n, 0)
    for label, keep in budgets.items():
        made = [oracle(keep, r) for r in RANKS]
        at = beyond.index(keep)
        found = [None if values is None else values[at] for values in made]
        exact = None if everything is None else everything[at]
        table_rows.append([label, *found, exact])
        what = f"top-k at {label}: rank 4 closes at least half of the gap to all keys"
        above = [value - exact for value in found if value is not None and exact is not None]
        if len(above) < len(RANKS):
            claims.append(Claim(what, None))
            continue
        lines.append((label, above))
        left, gap = above[RANKS.index(4)], above[0]
        claims.append(Claim(what, left <= gap / 2, f"{left:.4f} of {gap:.4f} nats are left"))
    body += "\n" + markdown_table(["top-k", *(f"rank {r}" for r in RANKS), "all keys"], table_rows)
    body += (
        f"\nNats per token beyond k, {len(chosen)} passages. The best approximation of a rank is made of a whole "
        "text's residual at once, per head: a bound that no cache can reach.\n"
    )
    if drawn is not None and right is not None:
        plot_lines(right, {f"top-k at {label}": (RANKS, values) for label, values in lines})
        right.set(xlabel="rank of the residual", ylabel="nats above all keys")
        legend_beside(right)
        body += figure("rank", drawn)
    return claims, body
