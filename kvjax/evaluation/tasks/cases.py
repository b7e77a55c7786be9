"""Questions about a context with expected answers, and a reader for files of questions."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kvjax.utils.files import parse_json, read_lines


@dataclasses.dataclass(frozen=True)
class Case:
    """A question about a context; no text begins or ends with white space.

    Args:
        context: read first, and compressed before the question is known.
        question: asked afterwards.
        answers: texts that an answer should contain.
        prefix: beginning of the answer, given to the model after the question; may be empty.
        told: fields that are copied to results.
    """

    context: str
    question: str
    answers: tuple[str, ...]
    prefix: str = ""
    told: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def asked(self) -> str:
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
        told = {"id": fields["id"]} if "id" in fields else {}
        return Case(texts[0], texts[1], tuple(texts[2:]), told=told)

    return [case for _, case in read_lines(file, case)]
