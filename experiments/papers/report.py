"""Claims of the papers on one page for several models: `kvjax evaluate claims --model MODEL --text FILE`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.claims import SHOWS, UNKNOWN, Claim
from experiments.fastgen.measurements import slots_within
from experiments.less.checkpoints import Shelf, open_shelf
from experiments.papers import attention, fastgen, keyformer, less, lightkv, lsh_e
from experiments.papers.paper import EqualBytes, PaperClaim, Wanted
from experiments.papers.subject import (
    SPECIAL,
    SUBJECT,
    TASKS,
    Subject,
    equal_name,
    grouped,
    learned,
)
from experiments.store import Store
from kvjax.evaluation import tasks
from kvjax.evaluation.grid import Entry, RowFile
from kvjax.evaluation.texts import passages
from kvjax.methods.notation import combination
from kvjax.model import Model, load
from kvjax.models.fingerprint import fingerprint
from kvjax.policies.policy import Policy
from kvjax.utils.files import read_text, write_text
from kvjax.utils.markdown import markdown_table


class Paper(NamedTuple):
    """A paper with its claims."""

    title: str
    letter: str
    claims: list[PaperClaim]


PAPERS = {
    "keyformer": Paper("Keyformer (arXiv 2403.09054)", "K", keyformer.CLAIMS),
    "lsh_e": Paper("LSH-E (arXiv 2412.16187)", "H", lsh_e.CLAIMS),
    "lightkv": Paper("LightKV", "V", lightkv.CLAIMS),
    "fastgen": Paper("FastGen (arXiv 2310.01801)", "F", fastgen.CLAIMS),
    "less": Paper("LESS (arXiv 2402.09398)", "L", less.CLAIMS),
}
MATRIX_ROWS = 2
"""Passages for measurements of n x n attention."""
REMARKS = "remarks.md"
"""File beside the models' directories with hand-written remarks on the verdicts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the report."""
    parser.add_argument("--only", nargs="+", choices=tuple(PAPERS), default=tuple(PAPERS), help="measure for these")
    parser.add_argument(
        "--kernels", nargs="+", default=[], metavar="NAME=DIR", help="LESS's, for this model (default: shipped ones)"
    )
    parser.set_defaults(rows=4, length=512)


def run(options: argparse.Namespace) -> None:
    """Measure the missing values for one model, and write `claims.md` for all measured models.

    Raises:
        ValueError: there are several texts, kernels do not fit, or `--redo` comes with `--only`.
    """
    if len(options.text) > 1:
        raise ValueError(f"claims are measured on one text, not on {len(options.text)}; give one.")
    if options.redo and set(options.only) != set(PAPERS):
        raise ValueError("--redo measures everything again, --only some of it; leave one of them out.")
    model = load(options.model, "float32", options.revision, mesh=options.mesh)
    directory = options.out / "claims" / Path(model.name).name
    if options.redo:
        for name in (*(f"{task}.jsonl" for task in TASKS), SPECIAL, SUBJECT):
            (directory / name).unlink(missing_ok=True)
    measure(model, options, directory, [claim for paper in options.only for claim in PAPERS[paper].claims])
    write_page(options.out)
    print(options.out / "claims.md")


def measure(model: Model, options: argparse.Namespace, directory: Path, claims: Sequence[PaperClaim]) -> None:
    """Measure the values that claims need for a model and that are not on disk.

    Args:
        model: the model, in float32.
        options: options of the command line.
        directory: directory of the model's rows.
        claims: claims to decide.
    """
    shelf = open_shelf(model, options.kernels) if options.kernels or model.name == "tiny" else Shelf(())
    kernels = max(shelf.of("h2o"), key=lambda each: each.slots, default=None)
    subject = Subject(
        name=directory.name,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(model.weights)),
        text=options.text[0].name,
        rows=options.rows,
        length=options.length,
        chat=getattr(model.tokenizer, "chat_template", None) is not None,
    )
    if kernels is not None:
        subject = dataclasses.replace(subject, kernels=kernels.name, trained=kernels.slots)
    elif (directory / SUBJECT).exists():  # its rows exist, although no more of them can be made
        before = Subject.read(directory)
        subject = dataclasses.replace(subject, kernels=before.kernels, trained=before.trained)
    wanted = list(dict.fromkeys(each for claim in claims for each in claim.check.needs))
    fill_all = functools.partial(_fill, model, options, directory)
    fill_all(subject, shelf, [each for each in wanted if not isinstance(each.budget, EqualBytes)])
    subject = dataclasses.replace(subject, equal=_equal(model, directory, subject))
    fill_all(subject, shelf, [each for each in wanted if isinstance(each.budget, EqualBytes)])
    subject.write(directory)
    read = passages(model, options.text, options.rows, options.length)
    store = Store(directory / SPECIAL, show=lambda line: print(line, file=sys.stderr))
    few = read.tokens[:MATRIX_ROWS]
    made: dict[str, Callable[[], Any]] = {
        "attention": lambda: attention.attention(model, few),
        "profile": lambda: attention.profile(model, few),
        "memory": lambda: attention.memory(model, kernels),
    }
    settings = {"model": fingerprint(model), "texts": read.digest}
    for name in dict.fromkeys(name for claim in claims for name in claim.check.special):
        more = {"kernels": subject.kernels} if name == "memory" else {}
        store.measure(name, settings | more, made[name])


def _fill(
    model: Model,
    options: argparse.Namespace,
    directory: Path,
    subject: Subject,
    shelf: Shelf,
    wanted: Iterable[Wanted],
) -> None:
    for (name, *_), group in grouped(wanted).items():
        told = {"text": options.text, "hay": None, "seed": 0, "chat": subject.chat, "system": None}
        told |= {"query_aware": False, "max_new_tokens": None, "batch_size": 8, "masked": None} | subject.of_task(
            group[0]
        )
        if name == "retrieval":
            told["text"] = None
        namespace = argparse.Namespace(**told)
        compared: list[Entry] = []
        for each in group:
            budget, policy = subject.budget(each), _policy(each.policy, shelf, subject)
            if budget is not None and policy is not None:
                compared.append(Entry(each.policy, policy, budget))
        tasks.TASKS[name].fill(RowFile(directory / f"{name}.jsonl"), model, namespace, compared)


def _policy(text: str, shelf: Shelf, subject: Subject) -> Policy | None:
    if not learned(text):
        return combination(text)
    base = text.removesuffix("+less")
    kernels = None if subject.trained is None else shelf.nearest(base, subject.trained)
    return None if kernels is None else kernels.over(combination(base))


def _equal(model: Model, directory: Path, subject: Subject) -> dict[str, int]:
    """Return the slots of policies at the measured bytes of other policies."""
    rows = RowFile(directory / "perplexity.jsonl")
    made: dict[str, int] = {}
    for each in _needed():
        if isinstance(each.budget, EqualBytes):
            row = rows.of(subject.cell(Wanted(each.budget.policy)))
            if row is not None and "refused" not in row:
                slots = slots_within(model, row["cache_bytes"], row["cases"], combination(each.policy))
                made[equal_name(each)] = min(subject.length, slots)
    return made


def _needed() -> list[Wanted]:
    """Return the rows of all claims."""
    claims = itertools.chain(*(paper.claims for paper in PAPERS.values()))
    return list(dict.fromkeys(each for claim in claims for each in claim.check.needs))


def write_page(out: Path) -> None:
    """Write `claims.md` from all rows below `claims/`, and from the remarks there."""
    found = sorted((file.parent for file in (out / "claims").glob(f"*/{SUBJECT}")), key=_size)
    subjects = [Subject.read(directory) for directory in found]
    measured = [subject.measured(place, _needed()) for subject, place in zip(subjects, found, strict=True)]
    verdicts = {
        name: [[claim.against(each) for each in measured] for claim in paper.claims] for name, paper in PAPERS.items()
    }
    sections = [_section(paper, verdicts[name], subjects) for name, paper in PAPERS.items()]
    file = out / "claims" / REMARKS
    remarks = f"\n{read_text(file).strip()}\n" if file.exists() else ""
    write_text(out / "claims.md", _opening(verdicts, subjects) + remarks + "".join(sections))


def _size(directory: Path) -> int:
    return Subject.read(directory).parameters


def _opening(verdicts: dict[str, list[list[Claim]]], subjects: Sequence[Subject]) -> str:
    every = list(itertools.chain(*verdicts.values()))
    counts = [
        [PAPERS[name].title, len(found), *(_count([claims[i] for claims in found]) for i in range(len(subjects)))]
        for name, found in verdicts.items()
    ]
    counts.append(["all", len(every), *(_count([claims[i] for claims in every]) for i in range(len(subjects)))])
    behind = [[s.name, f"{s.parameters / 1e6:.1f}M", s.text, s.rows, s.length, s.kernels, s.trained] for s in subjects]
    return (
        f"# What five papers claim, on {' and '.join(subject.name for subject in subjects)}\n\n"
        f"{len(every)} claims that models of this size can test. How many show:\n\n"
        + markdown_table(["paper", "claims", *(subject.name for subject in subjects)], counts)
        + "\nPapers report ROUGE, win rates or accuracy of models of 7 to 65 billion parameters; here quality is nats "
        "per token of held-out text that is read with eviction, lower is better, and a needle's string match. "
        "The first half of each passage is the prompt and the other half is read token by token, for LESS all of it "
        "where nothing else is said. Numbers of a row stand in the order of its claim; brackets say by how much the "
        "former of two is better, ± the standard error of the paired difference over passages or questions. Better "
        "means by more than two such errors; two are alike, or one as good as the other, within them. Few passages "
        "have large errors: what does not show may be true and small. Times are single readings on a shared "
        "processor, bytes those that are allocated. What does not show is reported so; no setting was chosen for its "
        "outcome.\n\n"
        + markdown_table(["MODEL", "parameters", "TEXT", "ROWS", "LENGTH", "KERNELS", "trained at slots"], behind)
        + "\nThe capitals are variables of the commands below. Raw rows are in `claims/`; everything at "
        "once, in a checkout, is `kvjax evaluate claims --model $MODEL --text $TEXT --rows $ROWS --length $LENGTH "
        "--out DIR`.\n"
    )


def _count(claims: Sequence[Claim]) -> str:
    decided = [claim for claim in claims if claim.verdict != UNKNOWN]
    return f"{sum(claim.verdict == SHOWS for claim in decided)} of {len(decided)}"


def _section(paper: Paper, verdicts: Sequence[Sequence[Claim]], subjects: Sequence[Subject]) -> str:
    numbers: dict[str, int] = {}
    rows: list[list[str | int]] = []
    for i, (claim, found) in enumerate(zip(paper.claims, verdicts, strict=True), 1):
        number = numbers.setdefault(_commands(claim, subjects), len(numbers) + 1)
        shown = itertools.chain(*([each.numbers or "–", f"**{each.verdict}**"] for each in found))
        rows.append([f"{paper.letter}{i}", claim.what, f"{claim.place}: {claim.number}", *shown, number])
    headings = itertools.chain(*([subject.name, f"on {subject.name}"] for subject in subjects))
    listed = "".join(f"{number}. {command}\n" for command, number in numbers.items())
    shown = markdown_table(["", "claim", "the paper's", *headings, "command"], rows)
    return f"\n## {paper.title}\n\n{shown}\n{listed}"


def _commands(claim: PaperClaim, subjects: Sequence[Subject]) -> str:
    """Return the commands of a claim; one for each model if budgets depend on the model."""
    lent = any(learned(each.policy) and each.policy != "h2o+less" for each in claim.check.needs)
    if lent or not claim.check.needs:
        name = next(name for name, paper in PAPERS.items() if claim in paper.claims)
        return f"`kvjax evaluate claims --model $MODEL --text $TEXT --rows $ROWS --length $LENGTH --only {name}`"
    each = {s.name: ", ".join(f"`{line}`" for line in s.commands(claim.check.needs)) for s in subjects}
    if len(set(each.values())) == 1:
        return next(iter(each.values()))
    return "; ".join(f"{name}: {lines}" for name, lines in each.items())
