"""Choices of FastGen's heads, and their stability: Figures 3 and 4."""

from __future__ import annotations

import numpy as np

from experiments.claims import Claim, Section
from experiments.fastgen.measurements import Report
from kvjax.evaluation.figures import legend_beside, new_figure, save_figure
from kvjax.methods.fastgen import PARTS, Profiled
from kvjax.utils.markdown import markdown_table

STEPS = (0, 10, 20, 30)
"""Numbers of tokens after the prompt."""


def choices(report: Report) -> Section:
    """Report Figure 3: the choices of each layer's heads."""
    names = ["+".join(parts) or "full" for parts in Profiled().choices]
    short = ["special", "+ punctuation", "+ frequent", "+ local", "full"]
    prompt = report.runs.prefix

    def share(threshold: float) -> np.ndarray:
        chosen = np.asarray(report.profile(threshold, prompt)["choice"])
        return np.stack([(chosen == i).mean((1, 2)) for i in range(len(names))], axis=1)

    shares = share(0.95)
    spread = float((shares.max(0) - shares.min(0)).max())
    middle = shares[1:-1, -1].mean() if len(shares) > 2 else np.nan
    outer = (shares[0, -1] + shares[-1, -1]) / 2
    mixed = int(((shares >= 0.1).sum(1) >= 2).sum())
    special = float(shares[1:-1, 0].mean()) if len(shares) > 2 else np.nan
    claims = [
        Claim("layers differ: some choice is 25 points more frequent in one than in another", spread >= 0.25,
              f"{100 * spread:.0f} points"),
        Claim("heads of one layer differ: in half of the layers two choices have a tenth of the heads each",
              2 * mixed >= len(shares), f"{mixed} of {len(shares)} layers"),
        Claim("the first and the last layer have more full heads than those between", bool(outer > middle),
              f"{outer:.0%} against {middle:.0%}"),
        Claim("most heads of the layers between choose special tokens alone", special > 0.5, f"{special:.0%}"),
    ]  # fmt: skip
    figure, axes = new_figure(1, 6.0)
    bottom = np.zeros(len(shares))
    for i, name in enumerate(short):
        axes[0].bar(range(len(shares)), shares[:, i], bottom=bottom, label=name)
        bottom += shares[:, i]
    axes[0].set(xlabel="layer", ylabel="share of heads", xticks=range(len(shares)), title="T = 0.95")
    legend_beside(axes[0])
    save_figure(figure, report.runs.directory / "fastgen" / f"choices{report.suffix}.png")
    rows = [[f"T = 0.95, layer {i}", *(f"{s:.1%}" for s in layer)] for i, layer in enumerate(shares)]
    rows += [[f"T = {t:g}, all", *(f"{s:.1%}" for s in share(t).mean(0))] for t in report.thresholds]
    body = f"Prompts of {prompt} tokens, {len(report.runs.passages.tokens)} of them.\n\n"
    body += markdown_table(["heads", *short], rows)
    return Section("Choices (Figure 3)", claims, body + f"\n![choices](fastgen/choices{report.suffix}.png)\n")


def stability(report: Report) -> Section:
    """Report Figure 4: the distribution of accumulated attention, and its stability."""
    prompt, parts = report.runs.prefix, [*PARTS, "others"]
    composed, chosen = [], []
    for step in STEPS:
        found = report.profile(0.95, prompt + step)
        recovered = np.asarray(found["recovered"])
        whole = np.concatenate([recovered, np.ones((*recovered.shape[:3], 1))], axis=-1)
        composed.append(np.diff(whole, axis=-1, prepend=0.0))
        chosen.append(np.asarray(found["choice"]))
    change = [float(np.abs(made - composed[0]).mean()) for made in composed]
    same = [float((made == chosen[0]).mean()) for made in chosen]
    claims = [
        Claim("parts of the accumulated attention move by less than 2 points over 30 steps", change[-1] < 0.02,
              f"{100 * change[-1]:.2f} points on average"),
        Claim("nine heads in ten would choose the same after 30 steps", same[-1] >= 0.9, f"{same[-1]:.1%}"),
        Claim("special tokens are the largest part", bool(composed[0].mean((0, 1, 2)).argmax() == 0),
              f"{composed[0][..., 0].mean():.0%} of the attention"),
    ]  # fmt: skip
    layers, heads = composed[0].shape[0], composed[0].shape[2]
    shown = [(0, 0), (layers // 2, heads - 1), (layers - 1, 0), (layers - 1, heads - 1)]
    figure, axes = new_figure(len(shown), 2.6, 3.0)
    for axis, (layer, head) in zip(axes, shown, strict=True):
        bottom = np.zeros(len(STEPS))
        for i, part in enumerate(parts):
            values = np.array([made[layer, 0, head, i] for made in composed])
            axis.bar([str(max(1, step)) for step in STEPS], values, bottom=bottom, label=part)
            bottom += values
        axis.set(title=f"layer {layer}, head {head}", xlabel="step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(parts), fontsize=7)
    save_figure(figure, report.runs.directory / "fastgen" / f"stability{report.suffix}.png")
    rows = [
        [max(1, step), *(f"{100 * x:.2f}%" for x in made.mean((0, 1, 2))), f"{100 * moved:.2f}", f"{kept:.1%}"]
        for step, made, moved, kept in zip(STEPS, composed, change, same, strict=True)
    ]
    body = (
        "Attention of all queries up to a step, summed with the full cache. What falls on two parts counts for the "
        "first; a token's attention to itself counts for special tokens, whatever it is. Frequent and local tokens are "
        f"30% of the current length each.\n\n{markdown_table(['step', *parts, 'moved, points', 'same choice'], rows)}"
        f"\n![stability](fastgen/stability{report.suffix}.png)\n"
    )
    return Section("Stability (Figure 4)", claims, body)
