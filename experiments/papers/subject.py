"""A model for testing claims: the settings of its rows, their location, and the commands that make them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from experiments.papers.paper import FULL, EqualBytes, Measured, Trained, Wanted
from experiments.store import Store
from kvjax.evaluation.grid import RowFile
from kvjax.utils.files import write_text

FAMILY = "pass_key"
"""Family of `kvjax evaluate retrieval`: the needle."""
SUBJECT, SPECIAL = "subject.json", "special.json"
TASKS = ("perplexity", "fidelity", "retrieval")

Group = tuple[str, float, float, float | None]
"""Task, prefix, length and depth: rows of one grid."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with its runs.

    Args:
        name: name of the model.
        parameters: number of parameters.
        text: name of the text file.
        rows: number of passages; half of it for distances to the full cache, twice of it for questions.
        length: tokens of a passage.
        chat: whether questions are turns of a conversation.
        kernels: name of LESS's kernels over H2O, or None.
        trained: slots per head at which these were trained.
        equal: slots per head of a policy at the bytes of another one, by `equal_name`.
    """

    name: str
    parameters: int
    text: str
    rows: int
    length: int
    chat: bool = False
    kernels: str | None = None
    trained: int | None = None
    equal: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a subject from a directory."""
        return cls(**json.loads((directory / SUBJECT).read_text(encoding="utf-8")))

    def write(self, directory: Path) -> None:
        """Write the subject beside its rows."""
        write_text(directory / SUBJECT, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def budget(self, wanted: Wanted) -> int | float | None:
        """Return slots, or a share of the text; None if unknown."""
        if isinstance(wanted.budget, EqualBytes):
            return self.equal.get(equal_name(wanted))
        if isinstance(wanted.budget, Trained):
            # Even, as in Table 1 of LESS.
            return None if self.trained is None else max(2, 2 * int(wanted.budget.times * self.trained / 2 + 1e-9))
        return wanted.budget

    def tokens(self, wanted: Wanted) -> int:
        """Return the number of tokens of a row's passages."""
        return round(wanted.length * self.length)

    def of_task(self, wanted: Wanted) -> dict[str, Any]:
        """Return the arguments of a row's task, besides its model and its text."""
        if wanted.task == "retrieval":
            depths = [wanted.depth]
            return {"families": FAMILY, "lengths": [self.tokens(wanted)], "depths": depths, "cases": 2 * self.rows}
        rows = max(1, self.rows // 2) if wanted.task == "fidelity" else self.rows
        return {"rows": rows, "lengths": [self.tokens(wanted)], "prefix": wanted.prefix}

    def cell(self, wanted: Wanted) -> dict[str, Any]:
        """Return the fields that identify a row in its file."""
        length = self.tokens(wanted)
        made = {"policy": wanted.policy, "budget": self.budget(wanted), "length": length}
        if wanted.task == "retrieval":
            return made | {"family": FAMILY, "depth": wanted.depth}
        return made | {"prefix": max(1, round(wanted.prefix * length))}

    def measured(self, directory: Path, wanted: Iterable[Wanted]) -> Measured:
        """Read some rows from disk, and all special measurements."""
        kept = {task: RowFile(directory / f"{task}.jsonl") for task in TASKS}
        rows: dict[Wanted, Mapping[str, Any]] = {}
        for each in wanted:
            row = None if self.budget(each) is None else kept[each.task].of(self.cell(each))
            if row is not None:
                rows[each] = row
        return Measured(rows, Store(directory / SPECIAL).results())

    def commands(self, needs: Sequence[Wanted]) -> list[str]:
        """Return the commands that make rows, one for each grid, with model, text and numbers as variables."""
        return [self._command(group) for group in grouped(needs).values()]

    def _command(self, group: Sequence[Wanted]) -> str:
        first = group[0]
        policies = sorted({_with_checkpoint(each.policy) for each in group if each.policy != FULL})
        budgets = {self.budget(each) for each in group if each.budget != 1.0}
        shown = ["SLOTS" if budget is None else f"{budget:g}" for budget in sorted(budgets, key=lambda b: b or 0)]
        numerator, denominator = first.length.as_integer_ratio()
        length = "$LENGTH" if first.length == 1 else f"$(({numerator} * LENGTH / {denominator}))"
        made = f"kvjax evaluate {first.task} --model $MODEL --lengths {length}"
        if first.task == "retrieval":
            made += (
                f" --families {FAMILY} --depths {first.depth:g} --cases $((2 * ROWS)){' --chat' if self.chat else ''}"
            )
        else:
            rows = "$((ROWS / 2))" if first.task == "fidelity" else "$ROWS"
            made += f" --text $TEXT --rows {rows}{f' --prefix {first.prefix:g}' if first.prefix != 0.5 else ''}"
        made += f' --policies "{",".join(policies) or FULL}"'
        return made + (f" --budgets {','.join(shown)}" if shown else "")


def equal_name(wanted: Wanted) -> str:
    """Return the name for the slots of a policy at equal bytes."""
    assert isinstance(wanted.budget, EqualBytes)
    return f"{wanted.policy} at the bytes of {wanted.budget.policy}"


def grouped(wanted: Iterable[Wanted]) -> dict[Group, list[Wanted]]:
    """Group rows by their grid."""
    groups: dict[Group, list[Wanted]] = {}
    for each in dict.fromkeys(wanted):
        groups.setdefault((each.task, each.prefix, each.length, each.depth), []).append(each)
    return groups


def learned(policy: str) -> bool:
    """Return True if a policy needs trained kernels."""
    return policy.endswith("+less")


def _with_checkpoint(policy: str) -> str:
    return f"{policy}[residual.checkpoint=$KERNELS]" if learned(policy) else policy
