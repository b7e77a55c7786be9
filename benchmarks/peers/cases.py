"""Contexts, questions and answers as token ids in lines of JSON: the input of both sides."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import kvjax
from kvjax.evaluation.tasks.ruler import NOISE, cases
from kvjax.evaluation.texts import passages
from kvjax.models.checkpoints.saving import write_checkpoint

RATIOS = (0.25, 0.5, 0.75, 0.875)
FAMILIES = ("single", "multi_key")
LENGTH = 512
"""Tokens of every context."""
CONTINUATION = 32
"""Number of predicted tokens of a passage after its context."""
NEW_TOKENS = 10
"""Tokens of a greedy answer: a number of seven digits and the text before it."""


def flatten_requests(model: kvjax.Model, family: str, count: int) -> list[dict[str, Any]]:
    """Return cases whose contexts all have exactly `LENGTH` tokens, filled up with hay in front.

    Args:
        model: the model with the tokenizer.
        family: one of `kvjax.evaluation.tasks.ruler.FAMILIES`, with a needle that has a depth.
        count: number of cases, with needles at evenly spaced depths.
    """
    encode, made = model.tokenizer.encode, list[dict[str, Any]]()
    hay = encode(" ".join(NOISE * LENGTH))
    for index in range(count):
        (case,) = cases(model.tokenizer, family, LENGTH, (index + 0.5) / count, count=1, seed=index, hay="noise")
        context = encode(case.context)
        made.append(
            {
                "family": family,
                "context": hay[: LENGTH - len(context)] + context,
                "question": encode(case.continuation),
                "answer": encode(f" {case.references[0]}."),
                "expected": list(case.references),
            }
        )
    return made


def texts(model: kvjax.Model, text: Path, count: int) -> list[dict[str, Any]]:
    """Return passages: the token after the context is the question, and the following tokens are the answer."""
    rows = passages(model, [text], count, LENGTH + 1 + CONTINUATION).tokens.tolist()
    return [
        {
            "family": "text",
            "context": row[:LENGTH],
            "question": row[LENGTH : LENGTH + 1],
            "answer": row[LENGTH + 1 :],
            "expected": [],
        }
        for row in rows
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="whatever kvjax loads")
    parser.add_argument("--write", type=Path, help="where to write the model as a Hugging Face directory of float32")
    parser.add_argument("--text", type=Path, required=True, help="what passages are taken from")
    parser.add_argument("--count", type=int, default=6, help="cases of each family")
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines")
    options = parser.parse_args()
    model = kvjax.load(options.model)
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
        write_checkpoint(model.weights, model.config, options.write)
        model.tokenizer.save_pretrained(options.write)
    families = [flatten_requests(model, name, options.count) for name in FAMILIES] + [
        texts(model, options.text, options.count)
    ]
    made = [case for cases_of_index in zip(*families, strict=True) for case in cases_of_index]
    asked = max(len(case["question"]) + max(len(case["answer"]), NEW_TOKENS) for case in made)
    lines = [{"ratios": RATIOS, "new_tokens": NEW_TOKENS, "asked": asked}, *made]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
