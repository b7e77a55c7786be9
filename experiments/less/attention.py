"""Attention itself: distances of rows to the full model's, and the rank of residuals. Claims 5 and 7."""

from __future__ import annotations

import numpy as np

from experiments.claims import Claim, Section
from experiments.less.low_rank import residuals
from experiments.less.measurements import Less
from kvjax.evaluation.fidelity import fidelity
from kvjax.evaluation.figures import legend_beside, new_figure, plot_lines
from kvjax.policies.policy import Policy
from kvjax.utils.markdown import markdown_table

MATRIX_ROWS = 4
"""Passages of each text for n x n attention, or for two models in parallel."""


def hellinger(less: Less) -> Section:
    """Report claim 5, Figure 6."""
    runs, claims, rows, curves = less.runs, [], [], {}
    chosen = np.concatenate([runs.passages.tokens[where][:MATRIX_ROWS] for where in runs.passages.rows.values()])

    def layers(label: str, policy: Policy, slots: int, **identity: str) -> list[float] | None:
        settings = runs.settings(slots=slots, rows=len(chosen), label=label, **identity)
        return runs.keep(
            f"hellinger: {label}, {slots} slots",
            settings,
            lambda: [
                round(float(x), 6)
                for x in fidelity(runs.model, policy, chosen, slots).hellinger[:, slots:].mean((0, 1))
            ],
        )

    for share, slots in less.budgets.items():
        kernels = less.shelf.nearest("h2o", slots)
        bare = layers("h2o", less.shelf.base("h2o"), slots)
        if kernels is None:
            claims.append(Claim(f"{share}: LESS < h2o in every layer", None))
            continue
        ours = layers(f"less {kernels.name}", kernels.over(less.shelf.base("h2o")), slots, kernels=kernels.digest)
        if bare is None or ours is None:
            claims.append(Claim(f"{share}: LESS < h2o in every layer", None))
            continue
        lower = [o < b for o, b in zip(ours, bare, strict=True)]
        claims.append(Claim(f"{share}: LESS < h2o in every layer", all(lower), f"in {sum(lower)} of {len(lower)}"))
        rows += [[share, "h2o", *bare], [share, f"LESS ({kernels.name})", *ours]]
        curves |= {f"h2o {share}": bare, f"LESS {share}": ours}
    body = "\n" + markdown_table(["budget", "", *(f"layer {i}" for i in range(runs.model.config.layers))], rows)
    body += (
        f"\nMean over heads, {len(chosen)} passages and the positions beyond the budget; each model reads on its own "
        "cache, token by token, so that deeper layers inherit what the earlier ones changed.\n"
    )
    if curves:
        figure, (axis,) = new_figure()
        plot_lines(axis, {label: (range(len(values)), values) for label, values in curves.items()})
        axis.set(xlabel="layer", ylabel="Hellinger distance", xticks=range(runs.model.config.layers))
        legend_beside(axis)
        body += less.figure("hellinger", figure)
    return Section("5. Attention rows (eq. 7, Figure 6)", claims, body)


def residual_rank(less: Less) -> Section:
    """Report claim 7, Figure 3."""
    return Section("7. Rank of residuals (Figure 3)", *residuals(less.runs, less.budgets, MATRIX_ROWS, less.figure))
