"""`kvjax evaluate fidelity`: attention and next tokens beside the full cache's, in the second part of texts."""

from __future__ import annotations

import argparse
from typing import Any

from kvjax.evaluate.fidelity import fidelity
from kvjax.evaluate.grid import Cell, Entry
from kvjax.evaluate.tasks import asking, texts
from kvjax.model import Model

add_arguments, check, cells = texts.add_arguments, texts.check, texts.cells


def measure(model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
    """Means over the tokens after the first part of each passage, all of which is read token by token.

    Raises:
        ValueError: the policy has no attention rows that compare, or needs a prompt.
    """
    read, prefix = texts.of_cell(model, options, cell), cell["prefix"]
    found = fidelity(model, entry.policy, read.tokens, entry.budget)
    layers = {
        "hellinger_of_layers": found.hellinger[:, prefix:].mean((0, 1)),
        "attention_kept_of_layers": found.kept[:, prefix:].mean((0, 1)),
    }
    return (
        asking.mean("divergence", found.divergence[:, prefix:].mean(1).tolist())
        | asking.mean("agreement", found.agrees[:, prefix:].mean(1).tolist())
        | {name: [round(float(value), 6) for value in values] for name, values in layers.items()}
        | {
            "hellinger": float(found.hellinger[:, prefix:].mean()),
            "attention_kept": float(found.kept[:, prefix:].mean()),
            "cases": len(read.tokens),
            "cache_bytes": found.cache_bytes,
            "full_cache_bytes": found.full_cache_bytes,
        }
    )
