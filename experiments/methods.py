"""Every method on one model, beside the full cache: `python -m experiments.methods --model smollm2 --text FILE`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from kvjax import methods
from kvjax.cli.main import main as kvjax
from kvjax.evaluation.figures import legend_beside, new_figure, save_figure
from kvjax.evaluation.grid import RowFile
from kvjax.evaluation.summary import paired
from kvjax.methods.register import PAPERS
from kvjax.utils.files import output_directory, write_text
from kvjax.utils.markdown import markdown_table

LEFT_OUT = ("full", "topk_oracle", "baseline_plus")
"""Methods that evict nothing, or that are others with more slots."""

VARIANTS = {
    "perplexity": (
        "lagkv[lag=16]",
        "lagkv[lag=16,evict_every={prompt}]",
        "triattention[keep_prompt=false]",
        "cur[evict_every={prompt}]",
        "snapkv[evict_every={prompt}]",
        "streaming[evict_every={prompt}]",
    ),
    "retrieval": ("lagkv[lag=16]", "triattention[keep_prompt=false]"),
}
"""Other settings of methods whose defaults do not show what their papers do at these lengths, for each task.

If tokens are evicted every `prompt` tokens, none is evicted after a prompt of that length.
"""

Row = dict[str, Any]

TIMED = {
    "decode": ["--batch", "4", "--prompt-tokens", "512", "--new-tokens", "32"],
    "prefill": ["--batch", "1", "--prompt-tokens", "1024"],
}
"""Arguments of `kvjax bench`."""


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing, and write the page of what there is; a run that is cut off goes on where it stopped."""
    options = _parser().parse_args(argv)
    rows = options.out / options.name
    if not options.page_only:
        for budget in options.budgets.split(","):  # all methods at one budget first, so that a part can be read
            for task in _tasks(options):
                policies = ",".join(_names(options, task[0]))
                given = ["--model", options.model, "--policies", policies, "--out", str(rows)]
                code = kvjax(["evaluate", *task, *given, "--budgets", budget])
                if code:
                    return code
        for what in TIMED if options.times else ():
            if (rows / f"{what}.json").exists():
                continue
            code = kvjax(["bench", what, *TIMED[what], *_timed(options, rows), "--json", str(rows / f"{what}.json")])
            if code:
                return code
    texts, needles = (_measured(rows / f"{task}.jsonl", options.model) for task in ("perplexity", "retrieval"))
    _draw(texts, rows / "loss.png")
    remarks = rows / "remarks.md"
    known = remarks.read_text(encoding="utf-8") if remarks.exists() else ""
    times = {what: json.loads(found.read_text()) for what in TIMED if (found := rows / f"{what}.json").exists()}
    write_text(options.out / f"{options.name}.md", page(texts, needles, times, options, known))
    return 0


def page(
    texts: Sequence[Row],
    needles: Sequence[Row],
    times: dict[str, dict[str, Any]],
    options: argparse.Namespace,
    remarks: str = "",
) -> str:
    """Return the page as Markdown.

    Args:
        texts: rows of perplexity.
        needles: rows of retrieval.
        times: what `kvjax bench` wrote, for the names of `TIMED`.
        options: of the command line.
        remarks: Markdown, from the file `remarks.md` beside the rows.
    """
    command = (
        f"python -m experiments.methods --model {options.model} --text {' '.join(file.name for file in options.text)} "
        f"--budgets {options.budgets} --rows {options.rows} --length {options.length} --cases {options.cases}"
    )
    if needles:
        command += f" --families {options.families} --depths {' '.join(options.depths)}{' --chat' * options.chat}"
    command += f" --times {_budget(times)}" if times else ""
    command += "" if options.calibrated is None else " --calibrated DIR"
    budgets = ", ".join(f"{float(budget):.0%}" for budget in _budgets(texts))
    full = [row for row in texts if row["policy"] == "full"]
    nats = f"{np.mean([row['nats_per_token'] for row in full]):.4f}" if full else "not measured"
    parts = [
        f"# Methods on {options.model}",
        f"Every method with its default settings, or with those in brackets, at budgets of {budgets} of the text. Half "
        f"of each passage of {options.length} tokens is read as a prompt and compressed to the budget; the other half "
        "is then predicted token by token, while the method evicts on. No method knows what comes, so the table is "
        f"about both phases together. Made by `{command}`, which goes on where it stopped.",
        "Methods that are ranked once for each prompt keep 32 recent tokens by default, and evict generated tokens "
        "first. At a budget of 5% there is little left for them to choose.",
        remarks,
        "## Loss on texts",
        f"Nats per token less those of the full cache ({nats}), the mean over passages ± its standard error. Sorted "
        "by the loss at the first budget within each group of `kvjax generate --policy list`.",
        f"![Loss of every method]({options.name}/loss.png)",
        _table(texts, _loss),
        "## Agreement on texts",
        "Share of tokens whose likeliest is that of the full cache.",
        _table(texts, _agreement),
    ]
    if needles:
        parts += ["## Facts in a long text", _told(needles, options), _table(needles, _match)]
    parts += [
        "## Bytes",
        "Bytes of the cache over those of the full one. All buffers count: with `evict_every` a head has slots in "
        "which new tokens wait, and heads with budgets of their own have the buffers of the largest.",
        _table(texts, lambda row, full: f"{row['cache_bytes'] / row['full_cache_bytes']:.1%}"),
    ]
    if times:
        parts += ["## Time", _timing(times), _times(times)]
    refused = {(row["policy"], f"{row['budget']:g}", row["refused"]) for row in [*texts, *needles] if "refused" in row}
    if refused:
        parts += ["## Left out", markdown_table(["policy", "budget", "reason"], sorted(refused))]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _told(needles: Sequence[Row], options: argparse.Namespace) -> str:
    full = {}
    for row in needles:
        if row["policy"] == "full":
            full.setdefault(row["family"], []).append(row["string_match"])
    answered = ", ".join(f"{np.mean(found):.0%} of `{family}`" for family, found in full.items())
    return (
        f"Questions answered of those asked, each about a text of {options.length} tokens, over families and depths, "
        "with the 95% interval of the share (Clopper and Pearson). The text is compressed before the question is read. "
        f"The full cache answers {answered}."
    )


def _agreement(row: Row, full: Row) -> str | None:
    # Rows that were measured before agreement have none.
    return f"{row['agreement']:.1%}" if "agreement" in row else None


def _loss(row: Row, full: Row) -> str:
    mean, error = paired(row["of_cases"], full["of_cases"])
    return f"{mean:+.3f} ± {error:.3f}"


def _match(row: Row, full: Row) -> str:
    cases = row["string_match_of_cases"]
    found = round(sum(cases))
    share = binomtest(found, len(cases)).proportion_ci()
    return f"{found} of {len(cases)} ({share.low:.0%} to {share.high:.0%})"


def _table(rows: Sequence[Row], shown: Callable[[Row, Row], str | None]) -> str:
    """Return a table of methods and budgets; methods that choose their own size have one column of their own."""
    merged = _merged(rows)
    budgets = _budgets(rows)
    full = merged.get(("full", 1.0))
    if full is None:
        return "Not measured."
    lines, measured = list[list[str | None]](), dict.fromkeys(policy for policy, _ in merged)
    for group, papers in PAPERS.items():
        names = [each for name in papers for each in measured if name != "full" and each.partition("[")[0] == name]
        for name in sorted(names, key=lambda name: _order(merged, name)):
            cells = [merged.get((name, float(budget))) for budget in (*budgets, "1")]
            lines.append([group, f"`{name}`", *(None if row is None else shown(row, full) for row in cells)])
    own = any(line[-1] is not None for line in lines)
    heads = ["group", "method", *(f"{float(budget):.0%}" for budget in budgets), "size of its own"]
    return markdown_table(heads if own else heads[:-1], lines if own else [line[:-1] for line in lines])


def _timing(times: dict[str, dict[str, Any]]) -> str:
    titles = " and ".join(f"`{measured['title']}`" for measured in times.values())
    return (
        f"Time over that of the full cache, with slots for {float(_budget(times)):.0%} of the text: {titles}. The "
        "programs of all methods take turns in one process."
    )


def _budget(times: dict[str, dict[str, Any]]) -> str:
    # Methods that choose their own size have another budget than all others.
    return statistics.mode(row["budget"] for measured in times.values() for row in measured["rows"])


def _times(times: dict[str, dict[str, Any]]) -> str:
    found: dict[str, dict[str, float]] = {}
    for what, measured in times.items():
        for row in measured["rows"]:
            found.setdefault(row["policy"].partition("[")[0], {})[what] = row["time_over_first"]
    lines = [
        [group, f"`{name}`", *(f"{found[name][what]:.2f}" if what in found[name] else None for what in times)]
        for group, papers in PAPERS.items()
        for name in papers
        if name in found and name != "full"
    ]
    heads = {"decode": "decode step", "prefill": "prompt"}
    return markdown_table(["group", "method", *(heads[what] for what in times)], lines)


def _order(merged: dict[tuple[str, float], Row], name: str) -> float:
    mine = {budget: row for (policy, budget), row in merged.items() if policy == name}
    row = mine[min(mine)]
    return row["nats_per_token"] if "nats_per_token" in row else -row["string_match"]


def _merged(rows: Sequence[Row]) -> dict[tuple[str, float], Row]:
    """Return one row for each method and budget: means over texts, families and depths, and their cases in order."""
    of: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if "refused" not in row:
            of.setdefault((row["policy"], float(row["budget"])), []).append(row)
    whole = max((len(some) for some in of.values()), default=0)
    return {key: _mean(some) for key, some in of.items() if len(some) == whole}


def _mean(rows: Sequence[Row]) -> Row:
    # Rows of one budget and method are in the order in which cases were measured, as those of the full cache are.
    mean: Row = {}
    for name, value in rows[0].items():
        if isinstance(value, list):
            mean[name] = [one for row in rows for one in row[name]]
        elif all(type(row.get(name)) in (int, float) for row in rows):
            mean[name] = float(np.mean([row[name] for row in rows]))
    return mean


def _budgets(rows: Sequence[Row]) -> list[str]:
    return [f"{budget:g}" for budget in sorted({float(row["budget"]) for row in rows} - {1.0})]


def _measured(file: Path, model: str) -> list[Row]:
    rows = [row for row in RowFile(file).rows if row["model"] == model]
    return [row | {"policy": _without_checkpoint(row["policy"])} for row in rows]


def _without_checkpoint(policy: str) -> str:
    name, _, settings = policy.removesuffix("]").partition("[")
    shown = ",".join(word for word in settings.split(",") if word and not word.startswith("checkpoint="))
    return f"{name}[{shown}]" if shown else name


def _draw(rows: Sequence[Row], file: Path) -> None:
    """Draw the loss of every method, with a line for the standard error."""
    merged = _merged(rows)
    full = merged.get(("full", 1.0))
    if full is None:
        return
    names = sorted({name for name, _ in merged} - {"full"}, key=lambda name: -_order(merged, name))
    figure, (axes,) = new_figure(width=8.0, height=1.0 + 0.22 * len(names))
    for number, budget in enumerate(sorted({budget for name, budget in merged if name != "full"})):
        found = [(y, merged[name, budget]) for y, name in enumerate(names) if (name, budget) in merged]
        means, errors = zip(*(paired(row["of_cases"], full["of_cases"]) for _, row in found), strict=True)
        label = "size of its own" if budget == 1 else f"{budget:.0%}"
        style = dict(fmt="osD^v"[number % 5], color=f"C{number}", markersize=4, linewidth=1, label=label)
        axes.errorbar(means, [y for y, _ in found], xerr=errors, **style)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlim(left=min(0.0, *axes.dataLim.intervalx) - 0.01)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.grid(axis="both", linewidth=0.3)
    axes.set_xlabel("nats per token more than the full cache")
    legend_beside(axes)
    save_figure(figure, file)


def _names(options: argparse.Namespace, task: str) -> list[str]:
    names = options.policies or [name for name in methods.REGISTRY if name not in LEFT_OUT]
    variants = [each for each in VARIANTS.get(task, ()) if each.partition("[")[0] in names]
    variants = [each.format(prompt=int(options.length) // 2) for each in variants]
    return [_with_checkpoint(each, options.calibrated) for each in (*names, *variants)]


def _with_checkpoint(policy: str, calibrated: Path | None) -> str:
    name, _, settings = policy.removesuffix("]").partition("[")
    if name != "triattention" or calibrated is None:
        return policy
    return f"{name}[{','.join(filter(None, (f'checkpoint={calibrated}', settings)))}]"


def _timed(options: argparse.Namespace, rows: Path) -> list[str]:
    """Return arguments of `kvjax bench` for methods that were not refused at this budget."""
    measured = _measured(rows / "perplexity.jsonl", options.model)
    refused = {row["policy"] for row in measured if "refused" in row and float(row["budget"]) == float(options.times)}
    names = [name for name in _names(options, "bench") if name.partition("[")[0] not in refused | {"full"}]
    return ["--model", options.model, "--policies", ",".join(names), "--budgets", options.times, "--repeats", "3"]


def _tasks(options: argparse.Namespace) -> list[list[str]]:
    texts = ["perplexity", "--text", *map(str, options.text), "--rows", options.rows, "--lengths", options.length]
    needles = ["retrieval", "--families", options.families, "--lengths", options.length, "--cases", options.cases]
    needles += ["--depths", *options.depths, *(["--chat"] if options.chat else [])]
    return [texts] if options.cases == "0" else [texts, needles]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.methods", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="held-out texts")
    parser.add_argument("--policies", nargs="+", help="methods (default: all)")
    parser.add_argument("--budgets", default="0.1,0.25,0.05,0.5", help="in the order in which they are measured")
    parser.add_argument("--rows", default="8", help="passages of each text (default: 8)")
    parser.add_argument("--length", default="1024", help="tokens of passages and contexts (default: 1024)")
    parser.add_argument("--families", default="single,multi_key,key_values", help="of questions about long texts")
    parser.add_argument("--cases", default="8", help="of each family and depth; 0 for none (default: 8)")
    parser.add_argument("--depths", nargs="+", default=["0.25", "0.75"], help="of answers (default: 0.25 0.75)")
    parser.add_argument("--chat", action="store_true", help="ask in the chat template of the model")
    parser.add_argument("--times", metavar="BUDGET", help="also time all methods at this budget")
    parser.add_argument("--out", type=output_directory, default="docs/results")
    parser.add_argument("--name", default="methods", help="of the page and of the folder of rows (default: methods)")
    parser.add_argument("--calibrated", type=Path, metavar="DIR", help="of `kvjax calibrate`, for triattention")
    parser.add_argument("--page-only", action="store_true", help="write the page of what there is; measure nothing")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
