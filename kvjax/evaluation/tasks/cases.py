"""Questions about a context with expected answers, and scores of answers from 0 to 1."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.utils.files import parse_json, read_lines

ROUGE = {"rouge1": "rouge-1", "rouge2": "rouge-2", "rougeL": "rouge-l"}
"""Scores of `rouge` by the package's names for them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A question about a context; no text begins or ends with white space.

    Args:
        context: read first, and compressed before the question is known.
        question: asked afterwards.
        references: texts that an answer should contain.
        prefix: beginning of the answer, given to the model after the question; may be empty.
        metadata: fields that are copied to results.
    """

    context: str
    question: str
    references: tuple[str, ...]
    prefix: str = ""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def continuation(self) -> str:
        """Continuation of the context in a text without turns: the question on its own line, and the prefix."""
        return f"\n{self.question} {self.prefix}".rstrip()


def read_cases(file: Path) -> list[Case]:
    """Read cases from lines of JSON with `context`, `question`, `answer` (text or list of texts), optionally `id`.

    Args:
        file: of JSON lines; empty ones are skipped.
    """

    def case(text: str) -> Case:
        value = parse_json(text)
        fields = value if isinstance(value, dict) else dict[str, Any]()
        answer = fields.get("answer")
        parts = [fields.get("context"), fields.get("question"), *(answer if isinstance(answer, list) else [answer])]
        texts = [part.strip() for part in parts if isinstance(part, str) and part.strip()]
        if set(fields) - {"id"} != {"context", "question", "answer"} or len(texts) < max(3, len(parts)):
            raise ValueError(
                'it is not of the form {"context": "...", "question": "...", "answer": "..."} with texts that are not '
                'empty, "answer" perhaps a list of them, with an "id" or without.'
            )
        metadata = {"id": fields["id"]} if "id" in fields else {}
        return Case(texts[0], texts[1], tuple(texts[2:]), metadata=metadata)

    return [case for _, case in read_lines(file, case)]


def string_match(answer: str, references: Sequence[str]) -> float:
    """Return the share of expected texts that occur in an answer, ignoring case.

    This is the score of RULER's retrieval and counting (Hsieh et al. 2024, arXiv 2404.06654: recall, by the presence of
    the expected texts). LSH-E (arXiv 2412.16187, section 4, "Metrics") takes its string matching score from there. Its
    appendix G.1 describes the share of characters that match instead, and does not define which characters match.
    """
    _check(references)
    return sum(expected.lower() in answer.lower() for expected in references) / len(references)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if an answer is an expected text, ignoring case, punctuation, articles and white space, else 0.

    This is SQuAD's exact match (Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1). Any of the expected texts will
    do; see `string_match`.
    """
    _check(references)
    return float(any(_words(answer) == _words(expected) for expected in references))


def f1(answer: str, references: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of an answer's words, against the nearest expected text.

    This is SQuAD's macro-averaged F1 (Rajpurkar et al. 2016, arXiv 1606.05250, section 6.1). Words count as often as
    they occur, after the normalization of `exact_match`. A text without words agrees only with another such text.
    """
    _check(references)
    return max(_overlap(_words(answer), _words(expected)) for expected in references)


def rouge(answer: str, reference: str) -> dict[str, float]:
    """Return the F-measures `rouge-1`, `rouge-2` and `rouge-l` (Lin 2004) by the package rouge-score, with stemming."""
    try:
        scorer = importlib.import_module("rouge_score.rouge_scorer")
    except ImportError:
        raise ValueError("ROUGE needs the package rouge-score: pip install 'kvjax[evaluate]'.") from None
    scores = scorer.RougeScorer(list(ROUGE), use_stemmer=True).score(reference, answer)
    return {name: float(scores[key].fmeasure) for key, name in ROUGE.items()}


def _check(references: Sequence[str]) -> None:
    # A str is a sequence of texts, too: its letters.
    if isinstance(references, str) or not references or not all(references):
        raise ValueError(f"references={references!r} expects nothing; give a list of texts that are not empty.")


def _words(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _overlap(words: list[str], expected: list[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    common = (collections.Counter(words) & collections.Counter(expected)).total()
    return 2 * common / (len(words) + len(expected))
