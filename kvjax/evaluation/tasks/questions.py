"""Tasks with questions about contexts, which are compressed before the question is known.

`kvjax evaluate retrieval` asks what stands in long texts that are made here, `kvjax evaluate generation` asks the
questions of a file.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluation.grid import Cell, Entry, digest
from kvjax.evaluation.summary import Columns, Measure
from kvjax.evaluation.tasks.cases import Case, exact_match, f1, read_cases, rouge, string_match
from kvjax.evaluation.tasks.ruler import FAMILIES, HAYS, cases
from kvjax.evaluation.tasks.task import Task, mean
from kvjax.generation.generate import lower_begin, texts_of
from kvjax.generation.prompts import encode, token_ids
from kvjax.generation.questions import answer_each, encode_questions
from kvjax.generation.sampling import GREEDY
from kvjax.inference.state import cache_bytes, full_cache_bytes
from kvjax.model import Model
from kvjax.utils.compilation import temporary_bytes
from kvjax.utils.files import check_not_empty, read_text
from kvjax.utils.settings import check_options, whole_number


class QuestionTask(Task):
    """A task whose measure is the answers to questions."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--chat", action="store_true", help="ask context and question as a user turn")
        parser.add_argument("--system", help="system prompt (default: the chat template's)")
        parser.add_argument("--query-aware", action="store_true", help="read the question before eviction, too")
        parser.add_argument("-n", "--max-new-tokens", type=int, help="tokens of an answer (default: the task's)")
        parser.add_argument("--batch-size", type=int, default=8, help="contexts per batch")

    def check(self, options: argparse.Namespace) -> None:
        check_options(options, "batch_size", "max_new_tokens")
        if options.system is not None and not options.chat:
            raise ValueError("--system is a turn of a conversation; give --chat, too.")


def _question_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a cell that describe how questions are asked."""
    return {"chat": options.chat, "system": options.system, "query_aware": options.query_aware}


def _encoded(model: Model, options: argparse.Namespace, case: Case) -> tuple[list[int], list[int]]:
    """Encode a context as the beginning of a text or turn, and its question with the beginning of the answer."""
    if not options.chat:
        return encode(model, case.context), token_ids(model, case.continuation, begins=False)
    context, (question,) = encode_questions(model, case.context, [case.question], chat=True, system=options.system)
    return context, question + (token_ids(model, case.prefix, begins=False) if case.prefix else [])


def _generate(
    model: Model, options: argparse.Namespace, entry: Entry, cases: Sequence[Case], max_new_tokens: int
) -> tuple[list[str], dict[str, Any]]:
    """Return greedy answers of a policy at a budget, and their cost."""
    encoded = [_encoded(model, options, case) for case in cases]
    if options.query_aware:  # all but its last token, which is read from the compressed cache
        encoded = [([*context, *question[:-1]], question[-1:]) for context, question in encoded]
    contexts, questions = zip(*encoded, strict=True)
    rows, reading = options.batch_size, {"policy": entry.policy, "budget": entry.budget}
    keywords: dict[str, Any] = dict(batch_size=rows, max_new_tokens=max_new_tokens, chat=options.chat, **GREEDY)
    generations = list(answer_each(model, contexts, questions, **keywords, **reading))
    seconds, timed = (sum(getattr(x, name) for x in generations) for name in ("decode_seconds", "timed_tokens"))
    longest = max(map(len, questions)) + max_new_tokens
    programs = lower_begin(model, contexts[:rows], max_new_tokens=longest, **reading)
    cost = {
        "cases": len(cases),
        "cache_bytes": sum(cache_bytes(generation.state) for generation in generations),
        "full_cache_bytes": sum(full_cache_bytes(generation.state) for generation in generations),
        "peak_temporary_bytes": temporary_bytes(programs),
        "prefill_seconds": sum(generation.prefill_seconds for generation in generations),
        "decode_tokens_per_second": timed / seconds if timed else None,
    }
    return [text for generation in generations for text in texts_of(model, generation)], cost


MATCH, F1 = Measure("string_match", "string match"), Measure("f1", "F1")
NEW_TOKENS = 64
"""Tokens of an answer of `generation`."""
_cases = functools.lru_cache(1)(cases)  # all policies and budgets get the same cases


class RetrievalTask(QuestionTask):
    """Answers to questions about a long text, whose cache is compressed before the question is read."""

    summary = "questions about what stands in a long text, made here"
    subject = ("model", "dtype", "chat", "query_aware", "length")
    columns = Columns(MATCH, MATCH, of_cases="string_match_of_cases")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        summaries = "; ".join(f"{name}: {family.summary}" for name, family in FAMILIES.items())
        add = parser.add_argument
        add("--families", default=",".join(FAMILIES), help=summaries)
        add("--lengths", type=int, nargs="+", default=[1024], help="tokens, including the question")
        add("--depths", type=float, nargs="+", default=[0.1, 0.5, 0.9], help="depths of needles, 0.0 to 1.0")
        add("--hay", choices=HAYS, help="text around needles (default: the family's)")
        add("--text", type=Path, metavar="FILE", help="text file for --hay essay")
        add("--cases", type=int, default=8, help="cases per family, length and depth")
        add("--seed", type=int, default=0, help="seed of the cases")
        super().add_arguments(parser)

    def check(self, options: argparse.Namespace) -> None:
        super().check(options)
        for name in options.families.split(","):
            if name not in FAMILIES:
                raise ValueError(f"--families: {name!r} is not one of {', '.join(FAMILIES)}.")
        check_options(options, "cases")
        for length in options.lengths:
            whole_number("--lengths", length)
        check_options(options, "seed", minimum=0)
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
        common |= {"seed": options.seed, "cases": options.cases} | _question_settings(options)
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
        overhead = 0
        if options.chat:  # extra tokens of the turns of a chat
            letters, outside = Case("a", "b", ("c",)), argparse.Namespace(chat=False)
            turn, plain = (sum(map(len, _encoded(model, way, letters))) for way in (options, outside))
            overhead = turn - plain
        hay = options.hay if options.hay in family.hays else None
        essay = read_text(options.text) if options.text and "essay" in family.hays else None
        arguments = model.tokenizer, cell["family"], cell["length"] - new - overhead, cell["depth"]
        cases = _cases(*arguments, count=options.cases, seed=options.seed, hay=hay, text=essay)
        texts, cost = _generate(model, options, entry, cases, new)
        scores = [string_match(answer, case.references) for answer, case in zip(texts, cases, strict=True)]
        return mean("string_match", scores) | cost | {"answers": texts}


class GenerationTask(QuestionTask):
    """Scores of answers to the questions of a file."""

    summary = "questions of a file, by ROUGE, exact match and F1"
    subject = ("model", "dtype", "file", "chat", "query_aware")
    columns = Columns(F1, F1, ("exact_match", "rouge-1", "rouge-2", "rouge-l"), "f1_of_cases")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        help = 'lines of JSON: {"context": "...", "question": "...", "answer": "..."}, "answer" perhaps a list'
        parser.add_argument("--file", type=Path, required=True, help=help)
        super().add_arguments(parser)

    def check(self, options: argparse.Namespace) -> None:
        super().check(options)
        read_cases(options.file)
        rouge("", "")  # raises if the package is missing

    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        """Return the single cell of the file."""
        content = digest(options.file.read_bytes())
        new = options.max_new_tokens or NEW_TOKENS
        return [{"file": options.file.stem, "content": content, "max_new_tokens": new} | _question_settings(options)]

    def measure(self, model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
        """Return the scores of the answers, the answers and their cost; the best of several expected answers counts."""
        cases = read_cases(options.file)
        texts, cost = _generate(model, options, entry, cases, cell["max_new_tokens"])
        pairs = list(zip(texts, cases, strict=True))
        scores: dict[str, list[float]] = {
            "exact_match": [exact_match(answer, case.references) for answer, case in pairs],
            "f1": [f1(answer, case.references) for answer, case in pairs],
        }
        overlaps = [[rouge(answer, expected) for expected in case.references] for answer, case in pairs]
        for name in overlaps[0][0]:
            scores[name] = [max(overlap[name] for overlap in of_case) for of_case in overlaps]
        means = {name: value for metric, of_cases in scores.items() for name, value in mean(metric, of_cases).items()}
        return means | cost | {"answers": texts}
