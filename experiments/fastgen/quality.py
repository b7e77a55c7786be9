"""Quality of FastGen against bytes, and without some of its parts: Figures 2 and 5, Tables 4 and 5."""

from __future__ import annotations

from typing import Any

from experiments.claims import Claim, Section
from experiments.fastgen.measurements import Report
from experiments.recall import recall
from kvjax import methods
from kvjax.evaluation.figures import Point, new_figure, plot_quality, save_figure
from kvjax.evaluation.grid import describe
from kvjax.evaluation.summary import paired
from kvjax.methods.fastgen import PARTS
from kvjax.policies.policy import Policy
from kvjax.utils.markdown import markdown_table

FIXED = {
    "local": methods.policy("window"),
    "frequent": methods.policy("h2o", recent=1),
    "frequent+local": methods.policy("h2o"),
}
"""Baselines of the paper: one policy for all heads."""

STRONGEST = "frequent+local"
"""The strongest of the paper's baselines, H2O."""

ORDERS = {
    "all four (equation 2)": PARTS,
    "without special": ("punctuation", "frequent", "local"),
    "without punctuation": ("special", "frequent", "local"),
    "without local": ("special", "punctuation", "frequent"),
    "without frequent": ("special", "punctuation", "local"),
    "punctuation last": ("special", "frequent", "local", "punctuation"),
}
"""Orders of Table 4 and of the second row of Table 5."""

NEWEST = 16
"""Newest tokens of every head in a variant that is not in the paper: without `local`, its heads hold one."""


def quality(report: Report) -> Section:
    """Report Figures 2 and 5: quality against bytes, of FastGen and of one policy for all heads."""
    runs = report.runs
    count, length = runs.passages.tokens.shape
    full = report.perplexity("full", methods.policy("full"))
    claims, rows = [], [["full", None, "100.0%", *(full.nats(text) for text in runs.texts)]]
    points: dict[str, list[Point]] = {text: [] for text in runs.texts}
    for threshold in report.thresholds:
        ours = report.fastgen(threshold)
        rows.append([f"fastgen, T = {threshold:g}", None, f"{ours.share:.1%}", *(ours.nats(t) for t in runs.texts)])
        wider = report.fastgen(threshold, PARTS, f" {NEWEST} newest,", NEWEST)
        name = f"with {NEWEST} newest, T = {threshold:g}"
        rows.append([name, None, f"{wider.share:.1%}", *(wider.nats(text) for text in runs.texts)])
        slots = min(length, report.slots(wider.result["cache_bytes"], count, FIXED[STRONGEST]))
        same = report.perplexity(f"fixed {STRONGEST}", FIXED[STRONGEST], slots)
        rows.append([STRONGEST, slots, f"{wider.share:.1%}", *(same.nats(text) for text in runs.texts)])
        others = {}
        for fixed, policy in FIXED.items():
            slots = min(length, report.slots(ours.result["cache_bytes"], count, policy))
            other = others[fixed] = report.perplexity(f"fixed {fixed}", policy, slots)
            rows.append([fixed, slots, f"{ours.share:.1%}", *(other.nats(text) for text in runs.texts)])
        for text in runs.texts:
            points[text].append(Point("fastgen", ours.share, ours.nats(text)))
            points[text].append(Point(f"fastgen, {NEWEST} newest", wider.share, wider.nats(text)))
            points[text] += [Point(fixed, ours.share, other.nats(text)) for fixed, other in others.items()]
            points[text].append(Point(STRONGEST, wider.share, same.nats(text)))
            gain, error = paired(same.rows(text), wider.rows(text))
            claims.append(
                Claim(
                    f"{text}, {name}: better than {STRONGEST} at equal bytes ({wider.share:.0%})",
                    gain > 2 * error,
                    f"{gain:+.4f} ± {error:.4f} nats",
                )
            )
            if ours.share < 1:
                best = min(others, key=lambda fixed: others[fixed].nats(text))
                gain, error = paired(others[best].rows(text), ours.rows(text))
                claims.append(
                    Claim(
                        f"{text}, T = {threshold:g}: better than every fixed policy at equal bytes ({ours.share:.0%})",
                        gain > 2 * error,
                        f"{gain:+.4f} ± {error:.4f} nats to {best}",
                    )
                )
    figure, axes = new_figure(len(runs.texts))
    for text, axis in zip(runs.texts, axes, strict=True):
        plot_quality(axis, points[text], full.nats(text), "nats per token")
        axis.set_title(text)
    save_figure(figure, runs.directory / "fastgen" / f"quality{report.suffix}.png")
    headings = ["policy", "slots", "bytes / full", *(f"{text}, nats per token" for text in runs.texts)]
    body = (
        f"The first {runs.prefix} of {length} tokens are the prompt, the others are read token by token with "
        "eviction. FastGen's bytes are those of its live arrays, slots set aside for the rest of the text, scores, "
        "positions and unused ends of pages included; a full cache is keys and values alone. Fixed policies get "
        f"as many slots in every head as the same bytes hold. *With {NEWEST} newest* is a variant that is not the "
        "paper's: heads that choose no local window hold the newest tokens (`recent`) all the same, and that counts in "
        f"equation 1, too.\n\n{markdown_table(headings, rows)}"
        f"\n![quality](fastgen/quality{report.suffix}.png)\n"
    )
    return Section("Quality against bytes (Figures 2 and 5)", claims, body)


def recalled(report: Report) -> Section:
    """Report recall of facts, of FastGen and of the strongest fixed policy at equal bytes."""
    runs, claims, rows = report.runs, [], []

    def ask(label: str, policy: Policy, budget: int | float, distance: int) -> dict[str, Any]:
        text = runs.passages.tokens[: 2 + distance // runs.passages.tokens.shape[1]].reshape(-1)
        settings = runs.settings(policy=describe(policy), budget=budget, distance=distance)

        def make() -> dict[str, Any]:
            made = recall(runs.model, policy, budget, distance, text=text)
            whole = made.cache_bytes / made.full_cache_bytes
            return {"mean": made.mean, "share": made.share, "bytes": made.cache_bytes, "whole": whole}

        return report.measured(f"recall: {label}, {budget:g}, distance {distance}", settings, make)

    for distance in report.distances:
        full = ask("full", methods.policy("full"), 1.0, distance)
        rows.append([distance, "full", None, "100.0%", full["mean"]])
        variants = [(t, recent) for recent in (0, NEWEST) for t in report.thresholds]
        for threshold, recent in variants:
            label = f"fastgen{f', {recent} newest' if recent else ''}, T = {threshold:g}"
            ours = ask(label + report.suffix, report.policy(threshold, recent=recent), 1.0, distance)
            rows.append([distance, label, None, f"{ours['whole']:.1%}", ours["mean"]])
            if ours["whole"] >= 1:
                continue
            policy, flatten_requests = FIXED[STRONGEST], 20 * len(ours["share"])
            slots = report.slots(ours["bytes"], flatten_requests, policy)
            other = ask(STRONGEST, policy, slots, distance)
            rows.append([distance, STRONGEST, slots, f"{ours['whole']:.1%}", other["mean"]])
            claims.append(
                Claim(
                    f"distance {distance}, {label}: more facts than {STRONGEST} at equal bytes",
                    ours["mean"] > other["mean"],
                    f"{ours['mean']:.0%} against {other['mean']:.0%}",
                )
            )
    return Section(
        "Recall", claims, markdown_table(["distance", "policy", "slots", "bytes / full", "facts recalled"], rows)
    )


def ablations(report: Report) -> Section:
    """Report Tables 4 and 5: fewer parts, and another order."""
    runs, claims, rows = report.runs, [], []
    for threshold in report.ablated:
        made = {name: report.fastgen(threshold, order, f" {name},") for name, order in ORDERS.items()}
        for name, run in made.items():
            rows.append([threshold, name, f"{1 - run.share:.1%}", *(run.nats(text) for text in runs.texts)])
        all_four = made["all four (equation 2)"]
        for name, run in made.items():
            if run is not all_four and not name.endswith("last"):
                claims.append(
                    Claim(f"T = {threshold:g}: {name}, less is pruned", run.share > all_four.share,
                          f"{1 - run.share:.1%} against {1 - all_four.share:.1%}")
                )  # fmt: skip
        least = max(made, key=lambda name: made[name].share)
        claims.append(
            Claim(f"T = {threshold:g}: without frequent tokens least is pruned", least == "without frequent", least)
        )
    headings = ["T", "parts", "pruned", *(f"{text}, nats per token" for text in runs.texts)]
    return Section("Ablations (Tables 4 and 5)", claims, markdown_table(headings, rows))
