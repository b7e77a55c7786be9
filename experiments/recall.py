"""Recall of facts planted in a text, whose tokens may have been evicted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from experiments.tiny.planted_facts import FORMS, SPECIAL, Facts, load_tokenizer
from kvjax.evaluation.perplexity import stream
from kvjax.inference.extend import prefill
from kvjax.inference.state import cache_bytes, full_cache_bytes
from kvjax.model import Model
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy

ROWS = 20
"""Questions per batch."""


@dataclasses.dataclass(frozen=True)
class Recalled:
    """Share of questions answered exactly, and bytes of the cache.

    Args:
        share: by form, see `experiments.tiny.planted_facts.FORMS`.
        cases: questions of each form.
        cache_bytes: bytes allocated for all questions.
        full_cache_bytes: bytes that `full` allocates for them.
    """

    share: dict[str, float]
    cases: int
    cache_bytes: int
    full_cache_bytes: int

    @property
    def mean(self) -> float:
        """Mean share over the forms."""
        return float(np.mean(list(self.share.values())))


def recall(
    model: Model,
    policy: Policy | str,
    budget: int | float | Sequence[int] = 1.0,
    length: int = 400,
    *,
    text: Int[np.ndarray, " n"],
    forms: Sequence[str] = FORMS,
    cases: int = 20,
    plan: Plan | str | None = None,
    prefill_chunk: int | None = None,
    seed: int = 1,
) -> Recalled:
    """Measure how often a model recalls facts planted a given distance back.

    Args:
        model: the embedded one, or another trained on such facts.
        policy: eviction policy.
        budget: slots per KV head, a fraction of question and answer, or slots for each layer.
        length: tokens from the end of the planted fact to the first token of its answer.
        text: ids of held-out text between fact and question, at least `length` + 200.
        forms: forms of the facts.
        cases: questions of each form.
        plan: allocation of the budget to the layers.
        prefill_chunk: None reads all but the question's last token at once; 1 reads token by token, with eviction.
        seed: seed of the questions, equal for every policy.

    Raises:
        ValueError: the tokenizer is of another kind, or the texts do not fit the model.
    """
    vocabulary = model.tokenizer.get_vocab()
    if model.directory is None or any(token not in vocabulary for token in SPECIAL):
        raise ValueError(f"{model!r} has not the embedded model's tokenizer, which the questions are made with.")
    for form in forms:
        if form not in FORMS:
            raise ValueError(f"form={form!r} is not one of {', '.join(FORMS)}.")
    if length < 1 or len(text) < length + 200:
        raise ValueError(f"length={length} is not from 1 to {len(text) - 200}, what the text has room for.")
    facts, share, held, whole = Facts(load_tokenizer(model.directory)), {}, 0, 0
    for form in forms:
        rng = random.Random(f"{seed} {form} {length}")
        asked = [facts.question(text, form, length, rng) for _ in range(cases)]
        right = 0
        for group in (asked[i : i + ROWS] for i in range(0, cases, ROWS)):
            # Decode the question's last token from the compressed cache, too: prefill logits use the full prompt.
            longest = 1 + max(len(answer) for _, answer in group)
            asking = [ids[-1:] + answer for ids, answer in group]
            asking = np.asarray([ids + [0] * (longest - len(ids)) for ids in asking])
            state, logits = prefill(
                model,
                policy,
                [ids[:-1] for ids, _ in group],
                budget,
                max_new_tokens=longest,
                plan=plan,
                prefill_chunk=prefill_chunk,
                key=jax.random.key(seed),
            )
            held, whole = held + cache_bytes(state), whole + full_cache_bytes(state)
            hits = stream(state, logits, asking)[1] == asking
            right += sum(bool(row[1 : 1 + len(answer)].all()) for row, (_, answer) in zip(hits, group, strict=True))
        share[form] = right / cases
    return Recalled(share, cases, held, whole)
