"""Measure the perplexity of text after a prompt, through real eviction: `kvjax evaluate perplexity`."""

from __future__ import annotations

import argparse
import math
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kvjax.evaluation.grid import Cell, Entry
from kvjax.evaluation.masked import masked_perplexity
from kvjax.evaluation.perplexity import costs, perplexity
from kvjax.evaluation.summary import Columns, Measure
from kvjax.evaluation.tasks.texts import TextTask, cell_passages
from kvjax.evaluation.texts import Passages
from kvjax.model import Model
from kvjax.training.less.record import MASKS


class PerplexityTask(TextTask):
    """Perplexity of text after a prompt."""

    summary = "how surprising text is after a prompt, through real eviction"
    subject = ("model", "dtype", "text", "length", "prefix", "masked")
    columns = Columns(
        Measure("perplexity", "perplexity", relative=True),
        Measure("nats_per_token", "nats per token"),
        ("perplexity", "agreement", "nats_per_word", "nats_per_byte"),
        "of_cases",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--masked", choices=MASKS, help="mask evicted tokens out of whole texts, as LESS's harness does"
        )

    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        """Return a cell for each text and length."""
        return [cell | {"masked": options.masked} for cell in super().cells(model, options)]

    def measure(self, model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
        """Measure nats after the prompt per token, word and byte, with the bytes and seconds they took.

        The agreement is the share of tokens whose likeliest is the full cache's. Masked texts have neither an agreement
        nor seconds, since no decode steps read them.
        """
        read, prefix = cell_passages(model, options, cell), cell["prefix"]
        if options.masked is not None:
            masked = masked_perplexity(model, entry.policy, read.tokens, entry.budget, mask=options.masked)
            sizes = {"cache_bytes": masked.cache_bytes, "full_cache_bytes": masked.full_cache_bytes}
            return _of_nats(model, read, prefix, masked.nats[:, prefix - 1 :]) | sizes
        made = perplexity(model, entry.policy, read.tokens, entry.budget, prefix=prefix)
        steps = costs(model, entry.policy, read.tokens, entry.budget, made)
        choices = first_choices(model, read.tokens)
        return _of_nats(model, read, prefix, made.nats) | {
            "agreement": float((made.likeliest == choices[:, prefix:]).mean()),
            "cache_bytes": made.cache_bytes,
            "full_cache_bytes": made.full_cache_bytes,
            "peak_temporary_bytes": steps.peak_temporary_bytes,
            "prefill_seconds": made.prefill_seconds,
            "decode_tokens_per_second": steps.tokens_per_second,
        }


_READ: weakref.WeakKeyDictionary[Model, tuple[np.ndarray, np.ndarray]] = weakref.WeakKeyDictionary()
"""Tokens that a model read last, and its choices: all policies and budgets read the same passages."""


def first_choices(model: Model, tokens: Int[np.ndarray, "b n"]) -> Int[np.ndarray, "b n"]:
    """Return the likeliest token in the place of each under full attention; the first of a row is itself."""
    read = _READ.get(model)
    if read is None or not np.array_equal(read[0], tokens):
        # Logits are large: those of one row at a time.
        choices = [np.asarray(jnp.argmax(model.logits([row])[0, :-1], axis=-1)) for row in tokens.tolist()]
        read = _READ[model] = tokens, np.concatenate([tokens[:, :1], np.stack(choices)], axis=1)
    return read[1]


def _of_nats(model: Model, read: Passages, prefix: int, nats: Float[np.ndarray, "b m"]) -> dict[str, Any]:
    following = [model.tokenizer.decode(row[prefix:]) for row in read.tokens]
    words = sum(len(text.split()) for text in following)
    of_rows, per_token = nats.sum(1), nats.mean(1)
    return {
        "cases": len(of_rows),
        "perplexity": math.exp(per_token.mean()),
        "nats_per_token": float(per_token.mean()),
        "standard_error": float(per_token.std(ddof=1) / math.sqrt(len(per_token))) if len(per_token) > 1 else None,
        "nats_per_word": float(of_rows.sum() / words) if words else None,
        "nats_per_byte": float(of_rows.sum() / sum(len(text.encode()) for text in following)),
        "of_cases": [round(float(nats), 6) for nats in per_token],
    }
