"""Answers to questions about contexts, which are compressed before the question is known."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.evaluation.grid import Entry
from kvjax.evaluation.tasks.cases import Case
from kvjax.generation.generate import lower_begin, texts_of
from kvjax.generation.prompts import encode, token_ids
from kvjax.generation.questions import answer_each, encode_questions
from kvjax.inference.state import cache_bytes, full_cache_bytes
from kvjax.model import Model
from kvjax.utils.compilation import temporary_bytes
from kvjax.utils.settings import check_options


def add_question_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that tasks with questions share."""
    parser.add_argument("--chat", action="store_true", help="ask context and question as a user turn")
    parser.add_argument("--system", help="system prompt (default: the chat template's)")
    parser.add_argument("--query-aware", action="store_true", help="read the question before eviction, too")
    parser.add_argument("--max-new-tokens", type=int, help="maximum tokens of an answer (default: the task's)")
    parser.add_argument("--batch-size", type=int, default=8, help="contexts per batch")


def check_question_options(options: argparse.Namespace) -> None:
    """Refuse options that no model supports."""
    check_options(options, "batch_size", "max_new_tokens")
    if options.system is not None and not options.chat:
        raise ValueError("--system is a turn of a conversation; give --chat, too.")


def way(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a row that describe how questions are asked."""
    return {"chat": options.chat, "system": options.system, "query_aware": options.query_aware}


def encoded(model: Model, options: argparse.Namespace, case: Case) -> tuple[list[int], list[int]]:
    """Encode a context as the beginning of a text or turn, and its question with the beginning of the answer."""
    if not options.chat:
        return encode(model, case.context), token_ids(model, case.asked, begins=False)
    context, (question,) = encode_questions(model, case.context, [case.question], chat=True, system=options.system)
    return context, question + (token_ids(model, case.prefix, begins=False) if case.prefix else [])


def answers(
    model: Model, options: argparse.Namespace, entry: Entry, cases: Sequence[Case], max_new_tokens: int
) -> tuple[list[str], dict[str, Any]]:
    """Return greedy answers of a policy at a budget, and their cost."""
    asked = [encoded(model, options, case) for case in cases]
    if options.query_aware:  # all but its last token, which is read from the compressed cache
        asked = [([*context, *question[:-1]], question[-1:]) for context, question in asked]
    settings: dict[str, Any] = dict(policy=entry.policy, budget=entry.budget, max_new_tokens=max_new_tokens)
    settings["chat"] = options.chat
    contexts, questions = ([pair[i] for pair in asked] for i in (0, 1))
    made = list(answer_each(model, contexts, questions, batch_size=options.batch_size, temperature=0.0, **settings))
    seconds, timed = (sum(getattr(each, name) for each in made) for name in ("decode_seconds", "timed_tokens"))
    longest = max(map(len, questions)) + max_new_tokens
    programs = lower_begin(
        model, contexts[: options.batch_size], policy=entry.policy, budget=entry.budget, max_new_tokens=longest
    )
    cost = {
        "cases": len(cases),
        "cache_bytes": sum(cache_bytes(each.state) for each in made),
        "full_cache_bytes": sum(full_cache_bytes(each.state) for each in made),
        "peak_temporary_bytes": temporary_bytes(programs),
        "prefill_seconds": sum(each.prefill_seconds for each in made),
        "decode_tokens_per_second": timed / seconds if timed else None,
    }
    return [text for each in made for text in texts_of(model, each, ())], cost


def mean(name: str, scores: Sequence[float]) -> dict[str, Any]:
    """Return the mean of scores under a name, with its standard error and the scores of all cases."""
    error = float(np.std(scores, ddof=1)) / math.sqrt(len(scores)) if len(scores) > 1 else None
    return {
        name: float(np.mean(scores)),
        f"{name}_standard_error": error,
        f"{name}_of_cases": [round(float(score), 6) for score in scores],
    }
