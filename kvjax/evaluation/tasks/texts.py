"""Tasks on passages of text files, of which a given fraction is the prompt.

`kvjax evaluate perplexity` measures how surprising the rest is, `kvjax evaluate fidelity` how far attention and next
tokens are from the full cache's.
"""

from __future__ import annotations

import argparse
import functools
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from kvjax.evaluation.fidelity import fidelity
from kvjax.evaluation.grid import Cell, Entry
from kvjax.evaluation.perplexity import costs, perplexity
from kvjax.evaluation.replay import masked_perplexity, ordering
from kvjax.evaluation.summary import Columns, Measure
from kvjax.evaluation.tasks.task import Task, mean
from kvjax.evaluation.texts import Passages, check_texts, passages
from kvjax.model import Model
from kvjax.training.less.record import MASKS


def add_text_options(
    parser: argparse.ArgumentParser, default: Sequence[Path] = (), rows: int = 8, lengths: Sequence[int] = (1024,)
) -> None:
    """Add the options of passages of which a share is a prompt; without a `default`, texts are required."""
    add_passage_options(parser, default, rows, lengths)
    parser.add_argument("--prefix", type=float, default=0.5, help="fraction of a passage that is read as a prompt")


def add_passage_options(
    parser: argparse.ArgumentParser, default: Sequence[Path] = (), rows: int = 8, lengths: Sequence[int] = (1024,)
) -> None:
    """Add the options that tasks on passages of texts share; without a `default`, texts are required."""
    requirement: dict[str, Any] = {"default": list(default)} if default else {"required": True}
    held_out = "held-out texts" + (f" (default: {', '.join(file.name for file in default)})" if default else "")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help=held_out, **requirement)
    parser.add_argument("--rows", type=int, default=rows, help=f"passages of each text (default: {rows})")
    tokens = f"tokens of each passage (default: {', '.join(map(str, lengths))})"
    parser.add_argument("--lengths", type=int, nargs="+", default=list(lengths), help=tokens)


class TextTask(Task):
    """A task on passages of text files."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_text_options(parser)

    def check(self, options: argparse.Namespace) -> None:
        if not 0 <= options.prefix < 1:
            raise ValueError(f"--prefix {options.prefix} is not a share from 0 to below 1 of a passage.")
        for length in options.lengths:
            check_texts(options.text, options.rows, length)
            if round(options.prefix * length) >= length:
                raise ValueError(
                    f"--prefix {options.prefix} of {length} tokens leaves none to predict; use a smaller one."
                )

    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        """Return a cell for each text and length."""
        return [
            cell | {"prefix": max(1, round(options.prefix * cell["length"]))} for cell in passages_of(model, options)
        ]


def passages_of(model: Model, options: argparse.Namespace) -> list[Cell]:
    """Return the fields of cells that identify the passages of each text and length."""
    return [
        {"text": file.stem, "length": length, "passages": _passages(model, (file,), options.rows, length).digest}
        for length in options.lengths
        for file in options.text
    ]


def cell_passages(model: Model, options: argparse.Namespace, cell: Cell) -> Passages:
    """Return the passages of a cell."""
    (file,) = (file for file in options.text if file.stem == cell["text"])
    return _passages(model, (file,), options.rows, cell["length"])


_passages = functools.lru_cache(4)(passages)


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
        masked = "mask evicted tokens out of whole texts, as LESS's harness does"
        parser.add_argument("--masked", choices=MASKS, help=masked)

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
        likelihoods = perplexity(model, entry.policy, read.tokens, entry.budget, prefix=prefix)
        steps = costs(model, entry.policy, read.tokens, entry.budget, likelihoods)
        choices = first_choices(model, read.tokens)
        return _of_nats(model, read, prefix, likelihoods.nats) | {
            "agreement": float((likelihoods.likeliest == choices[:, prefix:]).mean()),
            "cache_bytes": likelihoods.cache_bytes,
            "full_cache_bytes": likelihoods.full_cache_bytes,
            "peak_temporary_bytes": steps.peak_temporary_bytes,
            "prefill_seconds": likelihoods.prefill_seconds,
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
        stats = fidelity(model, entry.policy, read.tokens, entry.budget)
        order = _ordering(model, entry, read.tokens)
        measures = {"hellinger": stats.hellinger[:, prefix:], "attention_kept": stats.attention_kept[:, prefix:]}
        layers = {f"{name}_of_layers": values.mean((0, 1)) for name, values in measures.items()}
        return (
            mean("divergence", stats.divergence[:, prefix:].mean(1).tolist())
            | mean("agreement", stats.agrees[:, prefix:].mean(1).tolist())
            | order
            | {name: [round(float(value), 6) for value in values] for name, values in layers.items()}
            | {name: float(values.mean()) for name, values in measures.items()}
            | {"cases": len(read.tokens), "cache_bytes": stats.cache_bytes, "full_cache_bytes": stats.full_cache_bytes}
        )


def _ordering(model: Model, entry: Entry, tokens: Int[np.ndarray, "b n"]) -> dict[str, Any]:
    """Measure how scores order the passages' tokens, for any budget; None if they cannot be replayed."""
    policy, requires = entry.policy, entry.policy.score.requires
    evicts_one = policy.plan.sizing.mode != "unbounded" and not policy.may_shrink
    if not evicts_one or requires.shared_slots == "layers" or requires.host_memory:
        return {"attention_loss_ratio": None, "score_correlation": None}
    order = ordering(model, policy, tokens)
    measures = {"attention_loss_ratio": order.loss_ratio, "score_correlation": order.correlation}
    return {name: None if np.isnan(values).all() else float(np.nanmean(values)) for name, values in measures.items()}
