"""The task of drafts: how many tokens of the full cache's text a policy guesses right."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.evaluation.acceptance import acceptance, continuations, refreshed_rounds
from kvjax.evaluation.grid import Cell, Entry
from kvjax.evaluation.summary import Columns, Measure
from kvjax.evaluation.tasks.task import Task, mean
from kvjax.evaluation.tasks.texts import add_passage_options, cell_passages, passages_of
from kvjax.evaluation.texts import check_texts
from kvjax.model import Model
from kvjax.utils.settings import whole_number

DRAFT_TOKENS = 2, 4, 8
"""Tokens that are drafted before a verification, in the columns of the results."""


class AcceptanceTask(Task):
    """Tokens that a verification of a policy's drafts adds to the full cache's text."""

    summary = "how many tokens of the full cache's text a policy drafts right"
    subject = ("model", "dtype", "text", "length", "new_tokens", "temperature", "refresh")
    columns = Columns(
        Measure("acceptance", "acceptance"),
        Measure("tokens_per_round_4", "tokens a verification of 4"),
        ("acceptance", *(f"tokens_per_round_{count}" for count in DRAFT_TOKENS)),
        "acceptance_of_cases",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_passage_options(parser)
        parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each continuation (default: 128)")
        parser.add_argument("--temperature", type=float, default=0.0, help="of the continuations (default: 0, greedy)")
        parser.add_argument("--seed", type=int, default=0, help="of the continuations")
        parser.add_argument(
            "--refresh",
            type=int,
            choices=DRAFT_TOKENS,
            nargs="?",
            const=4,
            metavar="N",
            help="choose the draft's slots anew after each verification of N draft tokens (2, 4 or 8; 4 if left out)",
        )

    def check(self, options: argparse.Namespace) -> None:
        whole_number("new_tokens", options.new_tokens, 2)
        for length in options.lengths:
            check_texts(options.text, options.rows, length)

    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        """Return a cell for each text and length of its prompts."""
        continued = {name: getattr(options, name) for name in ("new_tokens", "temperature", "seed")}
        continued |= {} if options.refresh is None else {"refresh": options.refresh}
        return [cell | continued for cell in passages_of(model, options)]

    def measure(self, model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
        """Measure the share of tokens that the policy guesses, and the tokens that a round adds.

        The passages are the prompts. The full cache continues them, and the policy reads prompt and continuation.
        """
        prompts = cell_passages(model, options, cell).tokens
        drawn: dict[str, Any] = dict(temperature=cell["temperature"], seed=cell["seed"])
        texts = _continuations(model, prompts.tobytes(), len(prompts), cell["new_tokens"], *drawn.values())
        of_policy = model, entry.policy, prompts, texts, entry.budget
        if "refresh" in cell and entry.policy.bounded:
            measured = refreshed_rounds(*of_policy, draft_tokens=cell["refresh"], **drawn)
            agrees, rounds = measured.acceptance, {cell["refresh"]: measured.tokens_per_round}
        else:
            measured = acceptance(*of_policy, **drawn)
            rounds = {count: measured.tokens_per_round(count) for count in DRAFT_TOKENS}
            agrees = measured.agrees.mean(1).tolist()
        return (
            mean("acceptance", agrees)
            | {f"tokens_per_round_{count}": float(np.mean(tokens)) for count, tokens in rounds.items()}
            | {
                "cases": len(prompts),
                "cache_bytes": measured.cache_bytes,
                "full_cache_bytes": measured.full_cache_bytes,
            }
        )


@functools.lru_cache(4)
def _continuations(
    model: Model, prompts: bytes, rows: int, new_tokens: int, temperature: float, seed: int
) -> Int[np.ndarray, "b n"]:
    # All policies and budgets continue the same prompts, which are bytes so that they can be looked up.
    ids = np.frombuffer(prompts, np.int32).reshape(rows, -1)
    return continuations(model, ids.tolist(), new_tokens, temperature, seed)
