"""Measure what a model retrieves from a long text after its cache is compressed: `kvjax evaluate retrieval`."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from kvjax.evaluation.grid import Cell, Entry, digest
from kvjax.evaluation.summary import Columns, Measure
from kvjax.evaluation.tasks import qa
from kvjax.evaluation.tasks.cases import Case
from kvjax.evaluation.tasks.ruler import FAMILIES, HAYS, cases
from kvjax.evaluation.tasks.scoring import string_match
from kvjax.evaluation.tasks.task import Task
from kvjax.model import Model
from kvjax.utils.files import check_not_empty, read_text
from kvjax.utils.settings import check_options, whole_number

MATCH = Measure("string_match", "string match")


class RetrievalTask(Task):
    """Answers to questions about a long text, whose cache is compressed before the question is read."""

    summary = "questions about what stands in a long text, made here"
    subject = ("model", "dtype", "chat", "query_aware", "length")
    columns = Columns(MATCH, MATCH, of_cases="string_match_of_cases")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        told = "; ".join(f"{name}: {family.summary}" for name, family in FAMILIES.items())
        parser.add_argument("--families", default=",".join(FAMILIES), help=told)
        parser.add_argument("--lengths", type=int, nargs="+", default=[1024], help="tokens, including the question")
        parser.add_argument(
            "--depths", type=float, nargs="+", default=[0.1, 0.5, 0.9], help="depths of needles, 0.0 to 1.0"
        )
        parser.add_argument("--hay", choices=HAYS, help="text around needles (default: the family's)")
        parser.add_argument("--text", type=Path, metavar="FILE", help="text file for --hay essay")
        parser.add_argument("--cases", type=int, default=8, help="cases per family, length and depth")
        parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
        qa.add_question_options(parser)

    def check(self, options: argparse.Namespace) -> None:
        qa.check_question_options(options)
        for name in options.families.split(","):
            if name not in FAMILIES:
                raise ValueError(f"--families: {name!r} is not one of {', '.join(FAMILIES)}.")
        check_options(options, "cases")
        for length in options.lengths:
            whole_number("--lengths", length)
        check_options(options, "seed", least=0)
        for depth in options.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"--depths {depth} is not from 0.0, before all hay, to 1.0, after it.")
        if (options.hay == "essay") != (options.text is not None):
            raise ValueError("--text is the hay of --hay essay; give both or none.")
        check_not_empty([] if options.text is None else [options.text])

    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        """Return a cell for each family, length and, if its needle has one, depth."""
        text: Path | None = options.text
        common = {"hay": options.hay, "text": text and text.stem, "content": text and digest(text.read_bytes())}
        common |= {"seed": options.seed, "cases": options.cases} | qa.way(options)
        common |= {"max_new_tokens": options.max_new_tokens}
        return [
            {"family": family, "length": length, "depth": depth} | common
            for length in options.lengths
            for family in options.families.split(",")
            for depth in (options.depths if FAMILIES[family].depth else [None])
        ]

    def measure(self, model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
        """Return the share of expected texts in answers (LSH-E's string match), the answers and their cost."""
        family = FAMILIES[cell["family"]]
        new = options.max_new_tokens or family.max_new_tokens
        taken = 0
        if options.chat:  # extra tokens of the turns of a chat
            letters, outside = Case("a", "b", ("c",)), argparse.Namespace(chat=False)
            turn, plain = (sum(map(len, qa.encoded(model, way, letters))) for way in (options, outside))
            taken = turn - plain
        hay = options.hay if options.hay in family.hays else None
        essay = read_text(options.text) if options.text and "essay" in family.hays else None
        asked = model.tokenizer, cell["family"], cell["length"] - new - taken, cell["depth"]
        made = _cases(*asked, count=options.cases, seed=options.seed, hay=hay, text=essay)
        found, cost = qa.answers(model, options, entry, made, new)
        scores = [string_match(answer, case.answers) for answer, case in zip(found, made, strict=True)]
        return qa.mean("string_match", scores) | cost | {"answers": found}


_cases = functools.lru_cache(1)(cases)  # all policies and budgets get the same cases
