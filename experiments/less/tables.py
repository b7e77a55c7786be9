"""Perplexities of LESS, of its base policies and of other uses of the same bytes: claims 1 to 4 and 6."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from experiments.claims import Claim, Section
from experiments.less.axes import log_scale
from experiments.less.checkpoints import LENT, matches
from experiments.less.measurements import Less
from experiments.runs import Run
from kvjax.evaluation.figures import Point, new_figure, plot_quality
from kvjax.evaluation.summary import paired
from kvjax.utils.markdown import markdown_table

GAP = 0.2
"""Share of the gap between baseline and full that LESS should close if the budgets match."""


def closed(less: float, baseline: float, full: float) -> float:
    """Return the closed share of the gap between baseline and full; negative if the gap has grown."""
    return (baseline - less) / (baseline - full)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _differs(better: Run, worse: Run, text: str) -> tuple[bool, str]:
    mean, error = paired(worse.rows(text), better.rows(text))
    return mean > 2 * error, f"{mean:+.4f} ± {error:.4f} nats"


def _ordered(runs: Sequence[Run], text: str) -> tuple[bool, str]:
    """Compare each run with the next by two standard errors; return the verdict and the differences."""
    steps = [_differs(better, worse, text) for better, worse in itertools.pairwise(runs)]
    return all(differs for differs, _ in steps), "; ".join(by for _, by in steps)


def perplexities(less: Less) -> Section:
    """Report claim 1, Table 2."""
    claims, body, full = [], "", less.full()
    for text in less.runs.texts:
        rows: list[list[str | float | None]] = []
        named: dict[str, dict[int, Run | None]] = {
            "full": dict.fromkeys(less.budgets.values(), full),
            "baseline (h2o)": {s: less.baseline("h2o", s) for s in less.budgets.values()},
            f"baseline+ ({less.shelf.features // 2} more slots)": {
                s: less.plus("h2o", s) for s in less.budgets.values()
            },
            "performer": {s: less.performer("h2o", s) for s in less.budgets.values()},
        }
        for kernels in less.shelf.of("h2o"):
            own = {s: less.less(kernels, "h2o", s) if matches(kernels, s) else None for s in less.budgets.values()}
            named[f"LESS ({kernels.name})"] = own
        for label, by_slots in named.items():
            row: list[str | float | None] = [label]
            for slots, run in by_slots.items():
                base = named["baseline (h2o)"][slots]
                if run is None or base is None or full is None:
                    row += [None, None, None]
                    continue
                gap = (
                    None if run in (base, full) else _percent(closed(run.nats(text), base.nats(text), full.nats(text)))
                )
                row += [run.nats(text), run.nats(text, slots), gap]
            rows.append(row)
        headings = [f"{h} {share}" for share in less.budgets for h in ("nats", "beyond", "gap closed")]
        body += "\n" + markdown_table([text, *headings], rows)
        claims += _shape(less, text, full)
    body += "\n" + _perplexity_figure(less, full)
    body += (
        "\n`nats`: per token, mean over all predictions. `beyond`: only over those made after more tokens had been "
        "read than there are slots. `gap closed`: share of the distance from baseline to full. R numbers of a head's "
        "width, float32 as the cache is here, take as many bytes as R/2 slots; beside a bfloat16 cache they take twice "
        "that. The kernels' own weights, which all texts share, are not counted. An order shows where each run is "
        "better than the next by more than two standard errors of their difference over passages; baseline+ need only "
        "not be worse than baseline. Kernels away from the budget of their training are in section 3.\n"
    )
    return Section("1. Perplexity at equal budgets (Table 2)", claims, body)


def _shape(less: Less, text: str, full: Run | None) -> list[Claim]:
    claims = []
    for share, slots in less.budgets.items():
        base, plus, kernels = less.baseline("h2o", slots), less.plus("h2o", slots), less.shelf.nearest("h2o", slots)
        ours = less.less(kernels, "h2o", slots)
        if kernels is None or not matches(kernels, slots):
            continue
        what = f"{text}, {share}: full < LESS < baseline+ ≤ baseline"
        if ours is None or base is None or plus is None or full is None:
            claims.append(Claim(what, None))
            continue
        f, o, p, b = (run.nats(text) for run in (full, ours, plus, base))
        better, by = _ordered((full, ours, plus), text)
        worse = _differs(base, plus, text)[0]
        numbers = f"{f:.4f}, {o:.4f} ({kernels.name}), {p:.4f}, {b:.4f}; steps {by}; {_differs(plus, base, text)[1]}"
        claims.append(Claim(what, better and not worse, numbers))
        part = closed(o, b, f)
        wanted = f"LESS closes at least {_percent(GAP)} of the gap at its training budget"
        claims.append(Claim(f"{text}, {share}: {wanted}", part >= GAP, f"{_percent(part)} ({kernels.name})"))
    return claims


def _perplexity_figure(less: Less, full: Run | None) -> str:
    if full is None:
        return ""
    figure, axes = new_figure(len(less.runs.texts))
    for text, axis in zip(less.runs.texts, axes, strict=True):
        found: list[tuple[str, int, Run | None]] = []
        for slots in less.budgets.values():
            more = slots + less.shelf.features // 2  # slots of LESS and baseline+
            found += [("baseline", slots, less.baseline("h2o", slots)), ("baseline+", more, less.plus("h2o", slots))]
            trained = [k for k in less.shelf.of("h2o") if matches(k, slots)]
            found += [(f"LESS ({k.name})", more, less.less(k, "h2o", slots)) for k in trained]
        lost = [Point(label, x, run.nats(text) - full.nats(text)) for label, x, run in found if run is not None]
        what, cost = "nats per token above the full cache", "slots per head and their equivalent"
        plot_quality(axis, lost, None, what, cost)
        log_scale(axis)
        axis.set_title(text)
    return less.figure("perplexity", figure)


def performer(less: Less) -> Section:
    """Report claim 2."""
    claims = []
    for text in less.runs.texts:
        for share, slots in less.budgets.items():
            base, random, kernels = (
                less.baseline("h2o", slots),
                less.performer("h2o", slots),
                less.shelf.nearest("h2o", slots),
            )
            if kernels is not None and not matches(kernels, slots):
                continue
            ours = less.less(kernels, "h2o", slots)
            what = f"{text}, {share}: random features do not help, learned kernels do"
            if base is None or random is None or ours is None:
                claims.append(Claim(what, None))
                continue
            (helps, by), (learned, by_learned) = _differs(random, base, text), _differs(ours, base, text)
            claims.append(Claim(what, learned and not helps, f"performer {by}, learned {by_learned} below baseline"))
    note = "\nTo help is to be below the baseline by more than two standard errors of the difference over passages.\n"
    return Section("2. Untrained kernels (performer)", claims, note)


def transfer(less: Less) -> Section:
    """Report claim 3: kernels with another budget or policy than in their training."""
    claims, rows, full = [], [], less.full()
    largest = max(less.budgets.values())
    budgets = less.budgets | {f"{2 * largest} slots": 2 * largest}
    for text in less.runs.texts:
        for kernels in less.shelf.of("h2o"):
            for share, slots in budgets.items():
                if matches(kernels, slots):
                    continue
                base, plus, ours = (
                    less.baseline("h2o", slots),
                    less.plus("h2o", slots),
                    less.less(kernels, "h2o", slots),
                )
                what = f"{text}: {kernels.name}, trained at {kernels.slots} slots, helps at {share}"
                if base is None or plus is None or ours is None or full is None:
                    claims.append(Claim(what, None))
                    continue
                helps, by = _differs(ours, base, text)
                claims.append(Claim(what, helps, f"{by} below baseline"))
                gap = _percent(closed(ours.nats(text), base.nats(text), full.nats(text)))
                rows.append([text, kernels.name, share, *(r.nats(text) for r in (full, ours, plus, base)), gap])
    headings = ["text", "kernels", "budget", "full", "LESS", "baseline+", "baseline", "gap closed"]
    lent, lent_table = _over(less, tuple(LENT))
    body = "\n" + markdown_table(headings, rows) + "\nLent to policies that have none of their own:\n\n" + lent_table
    return Section("3. Kernels away from where they were trained", claims + lent, body)


def bases(less: Less) -> Section:
    """Report claim 4, Tables 3 and 7, at the largest budget of the table."""
    claims, shown = _over(less, ("h2o", "streaming", "keyformer"))
    return Section("4. Other policies (Tables 3 and 7)", claims, "\n" + shown)


def _over(less: Less, policies: Sequence[str]) -> tuple[list[Claim], str]:
    claims, rows, full = [], [], less.full()
    share, slots = max(less.budgets.items(), key=lambda item: item[1])
    for base in policies:
        bare, plus, kernels = less.baseline(base, slots), less.plus(base, slots), less.shelf.nearest(base, slots)
        ours = less.less(kernels, base, slots)
        for text in less.runs.texts:
            what = f"{text}, {share}: LESS improves {base} more than its slots would"
            if kernels is None or ours is None or bare is None or plus is None or full is None:
                claims.append(Claim(what, None))
                continue
            lent = "" if kernels.settings.policy == base else f", lent by {kernels.settings.policy}"
            f, o, p, b = (run.nats(text) for run in (full, ours, plus, bare))
            (beats_slots, by_slots), (beats, by) = _differs(ours, plus, text), _differs(ours, bare, text)
            numbers = f"LESS {o:.4f}, {by_slots} below baseline+, {by} below baseline"
            claims.append(Claim(what, beats_slots and beats, numbers))
            rows.append([text, base, kernels.name + lent, f, o, p, b, _percent(closed(o, b, f))])
    headings = ["text", "base", "kernels", "full", "LESS", "baseline+", "baseline", "gap closed"]
    return claims, markdown_table(headings, rows)


def features(less: Less) -> Section:
    """Report claim 6, Figure 7, at the budget of the table that is nearest to the kernels' training budget."""
    title = "6. More features against more slots (Figure 7)"
    sizes = {k.features: k for k in less.sweep.kernels if k.settings.policy == "h2o"}
    if len(sizes) < 2:
        body = "\nNeeds kernels over h2o that were trained alike with several numbers of features; see `--sweep`.\n"
        return Section(title, [Claim("more features help more than the same bytes of slots", None)], body)
    slots = min(less.budgets.values(), key=lambda s: abs(s - next(iter(sizes.values())).slots))
    claims, rows, points = [], [], {text: [] for text in less.runs.texts}
    for text in less.runs.texts:
        for r, kernels in sorted(sizes.items()):
            ours, plus = less.less(kernels, "h2o", slots), less.plus("h2o", slots, r)
            what = f"{text}, {slots} slots: R = {r} helps more than {r // 2} slots"
            if ours is None or plus is None:
                claims.append(Claim(what, None))
                continue
            o, p = ours.nats(text), plus.nats(text)
            better, by = _differs(ours, plus, text)
            claims.append(Claim(what, better, f"{o:.4f}, {p:.4f}; {by}"))
            rows.append([text, r, o, p, p - o, slots + r // 2])
            points[text] += [Point("LESS", r, o), Point("baseline+", r, p)]
        worst, best = (less.less(sizes[r], "h2o", slots) for r in (min(sizes), max(sizes)))
        what = f"{text}, {slots} slots: R = {max(sizes)} is better than R = {min(sizes)}"
        better, by = (None, "") if worst is None or best is None else _differs(best, worst, text)
        claims.append(Claim(what, better, by))
    headings = ["text", "R", "LESS", "baseline+", "difference", "slots of baseline+"]
    figure, axes = new_figure(len(less.runs.texts))
    for (text, found), axis in zip(points.items(), axes, strict=True):
        plot_quality(axis, found, None, "nats per token", "R, or twice the slots")
        axis.set_title(text)
    return Section(title, claims, "\n" + markdown_table(headings, rows) + less.figure("features", figure))
