"""What FastGen keeps, and what it costs: `python -m kvjax.evaluate fastgen`, the figures and tables of the paper."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax import bench, decode, paged, policies
from kvjax.evaluate.recall import recall
from kvjax.evaluate.report import (
    Claim,
    Point,
    Store,
    claims_table,
    new_figure,
    paired,
    plot_quality,
    save_figure,
    table,
    write,
)
from kvjax.evaluate.runs import Run, Runs, describe
from kvjax.evaluate.texts import passages
from kvjax.policies.fastgen import PARTS, FastGen

FIXED = {
    "local": policies.policy("window"),
    "frequent": policies.policy("h2o", recent=1),
    "frequent+local": policies.policy("h2o"),
}
"""What the paper compares with: one policy for all heads."""

ORDERS = {
    "all four (equation 2)": PARTS,
    "without special": ("punctuation", "frequent", "local"),
    "without punctuation": ("special", "frequent", "local"),
    "without local": ("special", "punctuation", "frequent"),
    "without frequent": ("special", "punctuation", "local"),
    "punctuation last": ("special", "frequent", "local", "punctuation"),
}
"""Table 4 and the second row of Table 5."""

NEWEST = 16
"""Newest tokens that every head holds in a variant that is not the paper's: without `local`, its heads hold one."""

STEPS = (0, 10, 20, 30)
GENERATED = (128, 256, 512, 1024)


@dataclasses.dataclass
class Report:
    """What the sections share.

    Args:
        runs: of perplexity.
        thresholds: T of the curves, rising.
        ablated: T of the ablations.
        distances: of questions for recall.
    """

    runs: Runs
    thresholds: tuple[float, ...]
    ablated: tuple[float, ...]
    distances: tuple[int, ...]

    def profile(self, threshold: float, tokens: int) -> dict[str, Any]:
        """Choices [layer, row, head] and recovered attention [layer, row, head, choice] of prompts of some tokens."""
        policy = FastGen(threshold=threshold)
        settings = self.runs.settings(policy=describe(policy), tokens=tokens)

        def make():
            state, _ = decode.prefill(self.runs.model, policy, self.runs.passages.tokens[:, :tokens], max_new_tokens=1)
            assert isinstance(state.caches, paged.Pool)
            found = jax.device_get([(layer.choice, layer.recovered) for layer in state.caches.state])
            return {
                "choice": [choice.tolist() for choice, _ in found],
                "recovered": [np.round(shares.astype(float), 5).tolist() for _, shares in found],
            }

        return self.measured(f"profile: T {threshold:g}, {tokens} tokens", settings, make)

    def measured(self, name: str, settings: dict[str, Any], make: Callable[[], Any]) -> Any:
        """A measurement, from disk or made now."""
        return self.runs.store.measure(name, settings, make)

    def perplexity(self, label: str, policy: policies.Policy, budget: int | float = 1.0) -> Run:
        """A policy on all passages."""
        made = self.runs.run(label, policy, budget)
        assert made is not None
        return made

    def fastgen(self, threshold: float, order: Sequence[str] = PARTS, label: str = "", recent: int = 0) -> Run:
        """FastGen on all passages."""
        policy = FastGen(threshold=threshold, order=tuple(order), recent=recent)
        return self.perplexity(f"fastgen{label} T {threshold:g}", policy)

    def slots(self, held: int, tokens: int, policy: policies.Policy) -> int:
        """Slots per head that a fixed policy gets for so many bytes, of so many rows."""
        config = self.runs.model.config
        stats = 4 if policy.needs_probs else 0
        slot = 2 * config.head_width * self.runs.model.weights.embedding.dtype.itemsize + 4 + stats
        return max(2, held // (tokens * config.layers * config.kv_heads * slot))


Section = tuple[str, list[Claim], str]


def choices(report: Report) -> Section:
    """Figure 3: the choices of each layer's heads."""
    names = ["+".join(parts) or "full" for parts in FastGen().choices]
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
    axes[0].legend(fontsize=7)
    save_figure(figure, report.runs.directory / "fastgen" / "choices.png")
    rows = [[f"T = 0.95, layer {i}", *(f"{s:.1%}" for s in layer)] for i, layer in enumerate(shares)]
    rows += [[f"T = {t:g}, all", *(f"{s:.1%}" for s in share(t).mean(0))] for t in report.thresholds]
    body = (
        f"Prompts of {prompt} tokens, {len(report.runs.passages.tokens)} of them.\n\n{table(['heads', *short], rows)}"
    )
    return "Choices (Figure 3)", claims, body + "\n![choices](fastgen/choices.png)\n"


def stability(report: Report) -> Section:
    """Figure 4: what the accumulated attention goes to, and whether that stays so."""
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
    axes[0].legend(fontsize=6)
    save_figure(figure, report.runs.directory / "fastgen" / "stability.png")
    rows = [
        [max(1, step), *(f"{100 * x:.2f}%" for x in made.mean((0, 1, 2))), f"{100 * moved:.2f}", f"{kept:.1%}"]
        for step, made, moved, kept in zip(STEPS, composed, change, same, strict=True)
    ]
    body = (
        "Attention of all queries up to a step, summed with the full cache. What falls on two parts counts for the "
        "first; a token's attention to itself counts for special tokens, whatever it is. Frequent and local tokens are "
        f"30% of the current length each.\n\n{table(['step', *parts, 'moved, points', 'same choice'], rows)}"
        "\n![stability](fastgen/stability.png)\n"
    )
    return "Stability (Figure 4)", claims, body


def quality(report: Report) -> Section:
    """Figures 2 and 5: quality against bytes, FastGen and one policy for all heads."""
    runs = report.runs
    count, length = runs.passages.tokens.shape
    full = report.perplexity("full", policies.policy("full"))
    claims, rows = [], [["full", None, "100.0%", *(full.nats(text) for text in runs.texts)]]
    points: dict[str, list[Point]] = {text: [] for text in runs.texts}
    for threshold in report.thresholds:
        ours = report.fastgen(threshold)
        rows.append([f"fastgen, T = {threshold:g}", None, f"{ours.share:.1%}", *(ours.nats(t) for t in runs.texts)])
        wider = report.fastgen(threshold, PARTS, f" {NEWEST} newest,", NEWEST)
        name = f"with {NEWEST} newest, T = {threshold:g}"
        rows.append([name, None, f"{wider.share:.1%}", *(wider.nats(text) for text in runs.texts)])
        others = {}
        for name, policy in FIXED.items():
            slots = min(length, report.slots(ours.result["cache_bytes"], count, policy))
            other = others[name] = report.perplexity(f"fixed {name}", policy, slots)
            rows.append([name, slots, f"{ours.share:.1%}", *(other.nats(text) for text in runs.texts)])
        for text in runs.texts:
            points[text].append(Point("fastgen", ours.share, ours.nats(text)))
            points[text].append(Point(f"fastgen, {NEWEST} newest", wider.share, wider.nats(text)))
            points[text] += [Point(name, ours.share, other.nats(text)) for name, other in others.items()]
            if ours.share < 1:
                best = min(others, key=lambda name: others[name].nats(text))
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
    save_figure(figure, runs.directory / "fastgen" / "quality.png")
    headings = ["policy", "slots", "bytes / full", *(f"{text}, nats per token" for text in runs.texts)]
    body = (
        f"The first {runs.prefix} of {length} tokens are the prompt, the others are read one by one through real "
        "eviction. FastGen's bytes are those of its live arrays, slots set aside for the rest of the text, scores, "
        "positions and unused ends of pages included; a full cache is keys and values alone. Fixed policies get "
        f"as many slots in every head as the same bytes hold. *With {NEWEST} newest* is a variant that is not the "
        "paper's: heads that choose no local window hold the newest tokens (`recent`) all the same, and that counts in "
        f"equation 1, too.\n\n{table(headings, rows)}"
        "\n![quality](fastgen/quality.png)\n"
    )
    return "Quality against bytes (Figures 2 and 5)", claims, body


def recalled(report: Report) -> Section:
    """Facts remembered, FastGen and the strongest fixed policy at equal bytes."""
    runs, claims, rows = report.runs, [], []

    def ask(label: str, policy: policies.Policy, budget: int | float, distance: int) -> dict[str, Any]:
        text = runs.passages.tokens[: 2 + distance // runs.passages.tokens.shape[1]].reshape(-1)
        settings = runs.settings(policy=describe(policy), budget=budget, distance=distance)

        def make():
            made = recall(runs.model, policy, budget, distance, text=text)
            whole = made.cache_bytes / made.full_cache_bytes
            return {"mean": made.mean, "share": made.share, "bytes": made.cache_bytes, "whole": whole}

        return report.measured(f"recall: {label}, {budget:g}, distance {distance}", settings, make)

    for distance in report.distances:
        full = ask("full", policies.policy("full"), 1.0, distance)
        rows.append([distance, "full", None, "100.0%", full["mean"]])
        for threshold in report.thresholds:
            ours = ask(f"fastgen T {threshold:g}", FastGen(threshold=threshold), 1.0, distance)
            policy = FIXED["frequent+local"]
            rows.append([distance, f"fastgen, T = {threshold:g}", None, f"{ours['whole']:.1%}", ours["mean"]])
            if ours["whole"] >= 1:
                continue
            questions = 20 * len(ours["share"])
            other = ask("frequent+local", policy, report.slots(ours["bytes"], questions, policy), distance)
            slots = report.slots(ours["bytes"], questions, policy)
            rows.append([distance, "frequent+local", slots, f"{ours['whole']:.1%}", other["mean"]])
            claims.append(
                Claim(
                    f"distance {distance}, T = {threshold:g}: more facts than frequent+local at equal bytes",
                    ours["mean"] > other["mean"],
                    f"{ours['mean']:.0%} against {other['mean']:.0%}",
                )
            )
    return "Recall", claims, table(["distance", "policy", "slots", "bytes / full", "facts recalled"], rows)


def ablations(report: Report) -> Section:
    """Tables 4 and 5: fewer parts, and another order."""
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
    return "Ablations (Tables 4 and 5)", claims, table(headings, rows)


def profiling(report: Report) -> Section:
    """Table 3: the time that the choice takes, as a share of generation."""
    runs = report.runs
    tokens, steps = runs.passages.tokens[:1, : runs.prefix], 64
    settings = runs.settings(prompt=runs.prefix, threshold=0.95, steps=steps, devices=str(jax.devices()[0]))

    def make():
        full, ours = policies.policy("full"), FastGen(threshold=0.95)
        racing = [bench.reader(runs.model, policy, 1.0, tokens) for policy in (full, ours)]
        racing.append(bench.decoder(runs.model, ours, 1.0, tokens, steps))
        bench.race(racing, 15)
        return {name: c.median for name, c in zip(("full", "fastgen", "steps"), racing, strict=True)}

    seconds = report.measured("profiling time", settings, make)
    extra, step = max(0.0, seconds["fastgen"] - seconds["full"]), seconds["steps"] / steps
    rows = [
        [n, f"{1e3 * (seconds['fastgen'] + n * step):.1f}", f"{1e3 * extra:.2f}", f"{1e3 * step:.3f}",
         f"{extra / (seconds['fastgen'] + n * step):.2%}"]
        for n in GENERATED
    ]  # fmt: skip
    last = extra / (seconds["fastgen"] + GENERATED[-1] * step)
    claims = [Claim(f"below 0.35% of generating {GENERATED[-1]} tokens", last < 0.0035, f"{last:.2%}")]
    headings = ["generated tokens", "whole, ms", "profiling, ms", "one token, ms", "profiling / whole"]
    body = (
        f"One prompt of {runs.prefix} tokens on {jax.devices()[0].device_kind}, medians of 15 runs. Profiling is what "
        "a prompt takes longer than with the full cache: summing attention, choosing, moving what stays into pages. "
        f"The paper's 0.07% to 0.35% are of a 65B model.\n\n{table(headings, rows)}"
    )
    return "Profiling time (Table 3)", claims, body


SECTIONS: dict[str, Callable[[Report], Section]] = {
    "choices": choices,
    "stability": stability,
    "quality": quality,
    "recall": recalled,
    "ablations": ablations,
    "profiling": profiling,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of the report."""
    parser.add_argument("--prefix", type=int, default=512, help="tokens of the prompts; the rest is read one by one")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.6, 0.7, 0.8, 0.9, 0.95, 0.98])
    parser.add_argument("--ablated", type=float, nargs="+", default=[0.8, 0.98], help="thresholds of the ablations")
    parser.add_argument("--recall", type=int, nargs="*", default=[300], metavar="DISTANCE", help="also ask for facts")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS), help="some sections")


def run(options: argparse.Namespace) -> None:
    """Measure what is not on disk, and write `fastgen.md` with its figures.

    Raises:
        ValueError: a text or a setting does not fit.
    """
    from kvjax.models import load

    if not 1 < options.prefix < options.length - STEPS[-1]:
        raise ValueError(f"--prefix {options.prefix} is not from 2 to --length {options.length} less {STEPS[-1] + 1}.")
    model = load(options.model, dtype="float32")
    read = passages(model, options.text, options.rows, options.length)
    store = Store(
        options.out / "fastgen" / "measurements.json", options.redo, lambda line: print(line, file=sys.stderr)
    )
    runs = Runs(model, read, store, (), options.out, options.prefix)
    report = Report(runs, tuple(sorted(options.thresholds)), tuple(options.ablated), tuple(options.recall))
    sections = [SECTIONS[name](report) for name in options.only]
    claims = [claim for _, some, _ in sections for claim in some]
    counts = ", ".join(f"{sum(c.verdict == v for c in claims)} {v}" for v in dict.fromkeys(c.verdict for c in claims))
    texts = " ".join(Path(text).name for text in options.text)
    words = f"--model {options.model} --text {texts} --rows {options.rows} --length {options.length}"
    write(
        options.out / "fastgen.md",
        f"# FastGen on {model.name}\n\nMade by `python -m kvjax.evaluate fastgen {words} --prefix {options.prefix} "
        f"--out DIR`; figures and raw numbers are in `fastgen/`. {options.rows} passages of {options.length} tokens of "
        f"each text, in float32.\n\nOf {len(claims)} claims: {counts}. Verdicts are computed from the numbers, rules "
        "are in `kvjax/evaluate/fastgen.py`.\n"
        + "".join(f"\n## {title}\n\n{claims_table(some)}\n{body}" for title, some, body in sections),
    )
    print(options.out / "fastgen.md")
