"""Compare attention and next tokens with the full cache, in the second part of texts: `kvjax evaluate fidelity`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.evaluation.fidelity import fidelity
from kvjax.evaluation.grid import Cell, Entry
from kvjax.evaluation.ordering import ordering
from kvjax.evaluation.summary import Columns, Measure
from kvjax.evaluation.tasks import qa, texts
from kvjax.evaluation.tasks.task import Task
from kvjax.model import Model


class FidelityTask(Task):
    """Fidelity of attention and next tokens to those of the full cache."""

    summary = "how far attention and next tokens are from the full cache's"
    subject = ("model", "dtype", "text", "length", "prefix")
    columns = Columns(
        Measure("agreement", "agreement"),
        Measure("divergence", "divergence from the full cache, nats"),
        ("agreement", "attention_kept", "hellinger", "attention_loss_ratio", "score_correlation"),
        "divergence_of_cases",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        texts.add_text_options(parser)

    def check(self, options: argparse.Namespace) -> None:
        texts.check_text_options(options)

    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        return texts.text_cells(model, options)

    def measure(self, model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
        """Measure means over the tokens after the prefix of each passage; the whole passage is read token by token."""
        read, prefix = texts.cell_passages(model, options, cell), cell["prefix"]
        found = fidelity(model, entry.policy, read.tokens, entry.budget)
        order = _ordering(model, entry, read.tokens)
        layers = {
            "hellinger_of_layers": found.hellinger[:, prefix:].mean((0, 1)),
            "attention_kept_of_layers": found.kept[:, prefix:].mean((0, 1)),
        }
        return (
            qa.mean("divergence", found.divergence[:, prefix:].mean(1).tolist())
            | qa.mean("agreement", found.agrees[:, prefix:].mean(1).tolist())
            | order
            | {name: [round(float(value), 6) for value in values] for name, values in layers.items()}
            | {
                "hellinger": float(found.hellinger[:, prefix:].mean()),
                "attention_kept": float(found.kept[:, prefix:].mean()),
                "cases": len(read.tokens),
                "cache_bytes": found.cache_bytes,
                "full_cache_bytes": found.full_cache_bytes,
            }
        )


def _ordering(model: Model, entry: Entry, tokens: Int[np.ndarray, "b n"]) -> dict[str, Any]:
    """Measure how scores order the passages' tokens, for any budget; None if they cannot be replayed."""
    policy = entry.policy
    if (
        policy.plan.sizing.mode == "unbounded"
        or policy.score.requires.shared_slots == "layers"
        or policy.score.requires.host_memory
        or policy.may_shrink
    ):
        return {"attention_loss_ratio": None, "score_correlation": None}
    found = ordering(model, policy, tokens)
    told = {"attention_loss_ratio": found.loss_ratio, "score_correlation": found.correlation}
    return {name: None if np.isnan(values).all() else float(np.nanmean(values)) for name, values in told.items()}
