"""`kvjax evaluate perplexity`: how surprising text is, streamed through real eviction after a prompt."""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path
from typing import Any

from kvjax.evaluate.grid import Cell, Entry
from kvjax.evaluate.perplexity import perplexity
from kvjax.evaluate.texts import Passages, check_texts, passages
from kvjax.model import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of the task."""
    parser.add_argument("--text", nargs="+", type=Path, required=True, metavar="FILE", help="held-out texts")
    parser.add_argument("--rows", type=int, default=8, help="passages of each text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024], help="tokens of each passage")
    parser.add_argument("--prefix", type=float, default=0.5, help="share of a passage that is read as a prompt")


def check(options: argparse.Namespace) -> None:
    """Refuse what no model could do.

    Raises:
        ValueError: a text is no file, or there is nothing to predict.
    """
    for length in options.lengths:
        check_texts(options.text, options.rows, length)
    if not 0 <= options.prefix < 1:
        raise ValueError(f"--prefix {options.prefix} is not a share from 0 to below 1 of a passage.")


def cells(model: Model, options: argparse.Namespace) -> list[Cell]:
    """Each text at each length."""
    return [
        {
            "text": file.stem,
            "length": length,
            "prefix": max(1, round(options.prefix * length)),
            "passages": passages(model, [file], options.rows, length).digest,
        }
        for length in options.lengths
        for file in options.text
    ]


def measure(model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
    """Nats of each passage after the prompt, per token, word and byte, with the bytes and the time that it took."""
    (file,) = (file for file in options.text if file.stem == cell["text"])
    read, prefix = _passages(model, file, options.rows, cell["length"]), cell["prefix"]
    made = perplexity(model, entry.policy, read.tokens, entry.budget, prefix=prefix)
    texts = [model.tokenizer.decode(row[prefix:]) for row in read.tokens]
    of_rows = made.nats.sum(1)
    per_token = made.nats.mean(1)
    return {
        "cases": len(of_rows),
        "perplexity": math.exp(per_token.mean()),
        "nats_per_token": float(per_token.mean()),
        "standard_error": float(per_token.std(ddof=1) / math.sqrt(len(per_token))) if len(per_token) > 1 else None,
        "nats_per_word": float(of_rows.sum() / sum(len(text.split()) for text in texts)),
        "nats_per_byte": float(of_rows.sum() / sum(len(text.encode()) for text in texts)),
        "of_cases": [round(float(nats), 6) for nats in per_token],
        "cache_bytes": made.cache_bytes,
        "full_cache_bytes": made.full_cache_bytes,
        "prefill_seconds": made.prefill_seconds,
        "decode_tokens_per_second": made.nats.size / made.decode_seconds,
    }


@functools.lru_cache(4)
def _passages(model: Model, file: Path, rows: int, length: int) -> Passages:
    return passages(model, [file], rows, length)
