"""Score answers to the questions of a file by ROUGE, exact match and F1: `kvjax evaluate generation`."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from kvjax.evaluation.grid import Cell, Entry, digest
from kvjax.evaluation.summary import Columns, Measure
from kvjax.evaluation.tasks import qa
from kvjax.evaluation.tasks.cases import read_cases
from kvjax.evaluation.tasks.scoring import exact_match, f1, rouge
from kvjax.evaluation.tasks.task import Task
from kvjax.model import Model

NEW_TOKENS = 64
F1 = Measure("f1", "F1")


class GenerationTask(Task):
    """Scores of answers to the questions of a file."""

    summary = "questions of a file, by ROUGE, exact match and F1"
    subject = ("model", "dtype", "file", "chat", "query_aware")
    columns = Columns(F1, F1, ("exact_match", "rouge-1", "rouge-2", "rouge-l"), "f1_of_cases")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        help = 'lines of JSON: {"context": "...", "question": "...", "answer": "..."}, "answer" perhaps a list'
        parser.add_argument("--file", type=Path, required=True, help=help)
        qa.add_question_options(parser)

    def check(self, options: argparse.Namespace) -> None:
        qa.check_question_options(options)
        read_cases(options.file)
        rouge("", "")  # raises if the package is missing

    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        """Return the single cell of the file."""
        content = digest(options.file.read_bytes())
        new = options.max_new_tokens or NEW_TOKENS
        return [{"file": options.file.stem, "content": content, "max_new_tokens": new} | qa.way(options)]

    def measure(self, model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
        """Return the scores of the answers, the answers and their cost; the best of several expected answers counts."""
        made = _read_cases(options.file)
        found, cost = qa.answers(model, options, entry, made, cell["max_new_tokens"])
        pairs = list(zip(found, made, strict=True))
        scores: dict[str, list[float]] = {
            "exact_match": [exact_match(answer, case.answers) for answer, case in pairs],
            "f1": [f1(answer, case.answers) for answer, case in pairs],
        }
        overlaps = [[rouge(answer, expected) for expected in case.answers] for answer, case in pairs]
        for name in overlaps[0][0]:
            scores[name] = [max(each[name] for each in of_case) for of_case in overlaps]
        told = {name: value for each, of_cases in scores.items() for name, value in qa.mean(each, of_cases).items()}
        return told | cost | {"answers": found}


_read_cases = functools.lru_cache(1)(read_cases)
