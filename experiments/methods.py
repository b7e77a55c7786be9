"""Every method on one model, beside the full cache: `python -m experiments.methods --model smollm2 --text FILE`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvjax import methods
from kvjax.cli.main import main as kvjax

LEFT_OUT = ("topk_oracle", "baseline_plus")
"""Methods that evict nothing, or that are others with more slots."""


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing, and write the page of what there is; a run that is cut off goes on where it stopped."""
    options = _parser().parse_args(argv)
    rows = options.out / options.name
    names = (
        [name for name in methods.REGISTRY if name not in LEFT_OUT] if options.policies is None else options.policies
    )
    given = ["--model", options.model, "--policies", ",".join(names), "--out", str(rows)]
    tasks = [
        ["perplexity", "--text", *map(str, options.text), "--rows", options.rows, "--lengths", options.length],
        [
            "retrieval",
            "--families",
            "single,multi_key,key_values",
            "--lengths",
            options.length,
            "--cases",
            options.cases,
        ],
    ]
    for task in tasks if options.cases != "0" else tasks[:1]:
        code = kvjax(["evaluate", *task, *given, "--budgets", options.budgets])
        if code:
            return code
    title = ["--title", f"Methods on {options.model}"]
    return kvjax(["evaluate", "report", "--runs", str(rows), "--out", str(options.out), "--name", options.name, *title])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.methods", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="held-out texts")
    parser.add_argument("--policies", nargs="+", help="methods (default: all)")
    parser.add_argument("--budgets", default="0.05,0.1,0.25,0.5")
    parser.add_argument("--rows", default="8", help="passages of each text (default: 8)")
    parser.add_argument("--length", default="1024", help="tokens of passages and contexts (default: 1024)")
    parser.add_argument("--cases", default="8", help="of each family of needles; 0 for none (default: 8)")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--name", default="methods", help="of the page and of the folder of rows (default: methods)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
