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
from kvjax.evaluation.tasks import qa
from kvjax.evaluation.tasks.texts import TextTask, cell_passages
from kvjax.model import Model


class FidelityTask(TextTask):
    """Fidelity of attention and next tokens to those of the full cache."""

    summary = "how far attention and next tokens are from the full cache's"
    subject = ("model", "dtype", "text", "length", "prefix")
    columns = Columns(
        Measure("agreement", "agreement"),
        Measure("divergence", "divergence from the full cache, nats"),
        ("agreement", "attention_kept", "hellinger", "attention_loss_ratio", "score_correlation"),
        "divergence_of_cases",
    )

    def measure(self, model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
        """Measure means over the tokens after the prefix of each passage; the whole passage is read token by token."""
        read, prefix = cell_passages(model, options, cell), cell["prefix"]
        found = fidelity(model, entry.policy, read.tokens, entry.budget)
        order = _ordering(model, entry, read.tokens)
        measures = {"hellinger": found.hellinger[:, prefix:], "attention_kept": found.kept[:, prefix:]}
        layers = {f"{name}_of_layers": values.mean((0, 1)) for name, values in measures.items()}
        return (
            qa.mean("divergence", found.divergence[:, prefix:].mean(1).tolist())
            | qa.mean("agreement", found.agrees[:, prefix:].mean(1).tolist())
            | order
            | {name: [round(float(value), 6) for value in values] for name, values in layers.items()}
            | {name: float(values.mean()) for name, values in measures.items()}
            | {"cases": len(read.tokens), "cache_bytes": found.cache_bytes, "full_cache_bytes": found.full_cache_bytes}
        )


def _ordering(model: Model, entry: Entry, tokens: Int[np.ndarray, "b n"]) -> dict[str, Any]:
    """Measure how scores order the passages' tokens, for any budget; None if they cannot be replayed."""
    policy, requires = entry.policy, entry.policy.score.requires
    evicts_one = policy.plan.sizing.mode != "unbounded" and not policy.may_shrink
    if not evicts_one or requires.shared_slots == "layers" or requires.host_memory:
        return {"attention_loss_ratio": None, "score_correlation": None}
    found = ordering(model, policy, tokens)
    told = {"attention_loss_ratio": found.loss_ratio, "score_correlation": found.correlation}
    return {name: None if np.isnan(values).all() else float(np.nanmean(values)) for name, values in told.items()}
