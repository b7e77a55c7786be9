"""`kvjax evaluate perplexity`: how surprising text is, streamed through real eviction after a prompt."""

from __future__ import annotations

import argparse
import math
from typing import Any

from kvjax.evaluate.grid import Cell, Entry
from kvjax.evaluate.perplexity import perplexity
from kvjax.evaluate.tasks import texts
from kvjax.model import Model

add_arguments, check, cells = texts.add_arguments, texts.check, texts.cells


def measure(model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
    """Nats of each passage after the prompt, per token, word and byte, with the bytes and the time that it took."""
    read, prefix = texts.of_cell(model, options, cell), cell["prefix"]
    made = perplexity(model, entry.policy, read.tokens, entry.budget, prefix=prefix)
    following = [model.tokenizer.decode(row[prefix:]) for row in read.tokens]
    of_rows = made.nats.sum(1)
    per_token = made.nats.mean(1)
    return {
        "cases": len(of_rows),
        "perplexity": math.exp(per_token.mean()),
        "nats_per_token": float(per_token.mean()),
        "standard_error": float(per_token.std(ddof=1) / math.sqrt(len(per_token))) if len(per_token) > 1 else None,
        "nats_per_word": float(of_rows.sum() / sum(len(text.split()) for text in following)),
        "nats_per_byte": float(of_rows.sum() / sum(len(text.encode()) for text in following)),
        "of_cases": [round(float(nats), 6) for nats in per_token],
        "cache_bytes": made.cache_bytes,
        "full_cache_bytes": made.full_cache_bytes,
        "peak_temporary_bytes": made.peak_temporary_bytes,
        "prefill_seconds": made.prefill_seconds,
        "decode_tokens_per_second": made.nats.size / made.decode_seconds,
    }
