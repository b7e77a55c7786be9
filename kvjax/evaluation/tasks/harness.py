"""Run tasks of EleutherAI's lm-evaluation-harness through real eviction: `kvjax evaluate harness`."""

from __future__ import annotations

import argparse
import functools
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.evaluation.grid import Cell, Entry
from kvjax.evaluation.harness import adapter, required
from kvjax.evaluation.tasks.task import Task
from kvjax.model import Model
from kvjax.utils.settings import check_options


class HarnessTask(Task):
    """Tasks of lm-evaluation-harness."""

    summary = "tasks of lm-evaluation-harness, scored through real eviction"
    subject = ("model", "dtype", "task", "limit", "num_fewshot", "chat")
    columns = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--tasks", required=True, help="tasks or groups of lm-evaluation-harness, such as hellaswag,arc_easy")
        add("--limit", type=_limit, help="cases of each task, or a fraction of them below 1 (default: all)")
        add("--num-fewshot", type=int, help="examples before each case (default: the task's)")
        add("--include-path", type=Path, metavar="DIR", help="directory with your own tasks in YAML")
        add("--chat", action="store_true", help="apply the model's chat template to contexts")
        add("--batch-size", type=int, default=8, help="requests per batch")

    def check(self, options: argparse.Namespace) -> None:
        check_options(options, "batch_size")
        check_options(options, "num_fewshot", minimum=0)
        limit = options.limit
        if limit is not None and (limit <= 0 or (isinstance(limit, float) and limit >= 1)):
            raise ValueError(f"--limit {limit} is neither a number of cases from 1, nor a share between 0.0 and 1.0.")
        if options.include_path is not None and not options.include_path.is_dir():
            raise ValueError(f"--include-path {options.include_path} is no directory.")
        available = _tasks(options.include_path).all_tasks
        for name in options.tasks.split(","):
            if name not in available:
                raise ValueError(f"--tasks: lm-evaluation-harness has no task {name!r}; `lm_eval ls tasks` lists them.")

    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        """Return a cell for each task, with the version of the installed lm-evaluation-harness."""
        common = {"limit": options.limit, "num_fewshot": options.num_fewshot, "chat": options.chat}
        common |= {"lm_eval": required("lm_eval").__version__}
        return [{"task": name} | common for name in options.tasks.split(",")]

    def measure(self, model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
        """Return the metrics of the task, and of all tasks if it is a group, with standard errors and the cost."""
        lm = adapter(model, policy=entry.policy, budget=entry.budget, batch_size=options.batch_size)
        results = required("lm_eval").simple_evaluate(
            lm,
            tasks=[cell["task"]],
            limit=cell["limit"],
            num_fewshot=cell["num_fewshot"],
            apply_chat_template=cell["chat"],
            task_manager=_tasks(options.include_path),
            log_samples=False,
        )
        metrics = {name: _metrics(result) for name, result in results["results"].items()}
        costs = "cache_bytes", "full_cache_bytes", "peak_temporary_bytes", "prefill_seconds"
        timed, seconds = lm.timed_tokens, lm.decode_seconds
        return metrics.pop(cell["task"], {}) | {
            "cases": sum(size["effective"] for size in results["n-samples"].values()),
            "num_fewshot_of_tasks": results["n-shot"],
            "versions": results["versions"],
            "of_tasks": metrics or None,
            "contexts_cut": lm.cut,
            **{name: getattr(lm, name) for name in costs},
            "decode_tokens_per_second": timed / seconds if timed else None,
        }


def _limit(text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of cases nor a fraction of them.") from None


def _metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    """Rename lm_eval's `metric,filter` to `metric`, or to `metric (filter)` if the filter has a name."""
    metrics: dict[str, Any] = {}
    for key, value in result.items():
        metric, comma, filter = key.partition(",")
        if comma:
            name = metric.removesuffix("_stderr") + ("" if filter == "none" else f" ({filter})")
            name += "_standard_error" if metric.endswith("_stderr") else ""
            metrics[name] = float(value) if isinstance(value, numbers.Real) else None
    return metrics


@functools.lru_cache(1)
def _tasks(include_path: Path | None) -> Any:
    return required("lm_eval.tasks").TaskManager(include_path=None if include_path is None else str(include_path))
