"""Claims of papers, the measurements that they need, and the checks that decide them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.claims import Claim
from kvjax.evaluation.summary import paired

FULL = "full"


class EqualBytes(NamedTuple):
    """A number of slots per head with the bytes of a policy that sets its own slots."""

    policy: str


class Trained(NamedTuple):
    """A multiple of the slots per head at which LESS's kernels over h2o were trained."""

    times: float = 1.0


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A row of a grid: the result of a task for a policy at a budget.

    Args:
        policy: in the format of `kvjax.evaluation.grid.combination`.
        budget: slots per head, a share of the text, or an object that computes them for a model.
        task: `perplexity`, `fidelity` or `retrieval`.
        prefix: share of a passage that is read as a prompt; 0 to read all of it token by token.
        length: ratio of a passage's tokens to those of the run.
        depth: depth of the needle, for the task `retrieval`.
    """

    policy: str
    budget: int | float | EqualBytes | Trained = 1.0
    task: str = "perplexity"
    prefix: float = 0.5
    length: float = 1.0
    depth: float | None = None

    def but(self, **changed: Any) -> Wanted:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changed)


class Missing(LookupError):
    """Error for a missing measurement that a claim needs."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of one model.

    Args:
        rows: rows of grids.
        special: measurements outside of grids, by name; see `experiments.papers.attention`.
    """

    rows: Mapping[Wanted, Mapping[str, Any]]
    special: Mapping[str, Mapping[str, Any]]

    def value(self, wanted: Wanted, column: str) -> Any:
        """Return a column of a row.

        Raises:
            Missing: there is no such row, or it has no such column.
        """
        row = self.rows.get(wanted, {})
        if row.get(column) is None:
            raise Missing(row.get("refused", ""))
        return row[column]

    def cases(self, wanted: Wanted, column: str = "of_cases") -> list[float]:
        """Return a column with one number for each passage or question; the nats per token of passages."""
        return self.value(wanted, column)

    def of_special(self, name: str, key: str) -> Any:
        """Return a number or a list of a special measurement.

        Raises:
            Missing: it was not made.
        """
        found = self.special.get(name, {}).get(key)
        if found is None:
            raise Missing("")
        return found


class Finding(NamedTuple):
    """The result of the measurements for a claim."""

    numbers: str
    shown: bool | None


class Check(NamedTuple):
    """The rule that decides a claim.

    Args:
        needs: rows that it needs.
        judge: function that returns a finding, or raises Missing.
        special: names of special measurements that it also needs.
    """

    needs: tuple[Wanted, ...]
    judge: Callable[[Measured], Finding]
    special: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PaperClaim:
    """A statement of a paper about its models, and the rule that decides it on another model.

    Args:
        what: the claim, in words.
        place: place in the paper.
        number: number in the paper.
        check: rule that decides it.
    """

    what: str
    place: str
    number: str
    check: Check

    def against(self, measured: Measured) -> Claim:
        """Return the claim with its verdict on one model."""
        try:
            numbers, shown = self.check.judge(measured)
        except Missing as missing:
            return Claim(self.what, None, str(missing))
        return Claim(self.what, shown, numbers)


def better(*order: Wanted, column: str = "of_cases", higher: bool = False) -> Check:
    """Check that each is better than the next by more than two standard errors of their paired difference."""

    def judge(measured: Measured) -> Finding:
        cases = [measured.cases(wanted, column) for wanted in order]
        steps = [paired(a, b) if higher else paired(b, a) for a, b in itertools.pairwise(cases)]
        return _finding(cases, steps, [gain > 2 * error for gain, error in steps])

    return Check(order, judge)


def best(ours: Wanted, *others: Wanted) -> Check:
    """Check that the first is better than every other by more than two standard errors of their paired difference."""

    def judge(measured: Measured) -> Finding:
        first, *rest = (measured.cases(wanted) for wanted in (ours, *others))
        steps = [paired(case, first) for case in rest]
        return _finding([first, *rest], steps, [gain > 2 * error for gain, error in steps])

    return Check((ours, *others), judge)


def alike(reference: Wanted, *others: Wanted, column: str = "of_cases") -> Check:
    """Check that all others are within two standard errors of their paired difference from the first."""

    def judge(measured: Measured) -> Finding:
        first, *rest = (measured.cases(wanted, column) for wanted in (reference, *others))
        steps = [paired(case, first) for case in rest]
        return _finding([first, *rest], steps, [abs(gain) <= 2 * error for gain, error in steps])

    return Check((reference, *others), judge)


def no_worse(ours: Wanted, *others: Wanted, column: str = "of_cases", higher: bool = False) -> Check:
    """Check that the first is not worse than any other by more than two standard errors of their paired difference."""

    def judge(measured: Measured) -> Finding:
        first, *rest = (measured.cases(wanted, column) for wanted in (ours, *others))
        steps = [paired(first, case) if higher else paired(case, first) for case in rest]
        return _finding([first, *rest], steps, [gain >= -2 * error for gain, error in steps])

    return Check((ours, *others), judge)


def near(ours: Wanted, reference: Wanted, share: float, *, within: bool = True) -> Check:
    """Check that nats exceed those of a reference by at most a share of them; with `within` False, by more."""

    def judge(measured: Measured) -> Finding:
        mine, theirs = (float(np.mean(measured.cases(wanted))) for wanted in (ours, reference))
        excess = mine / theirs - 1
        return Finding(f"{mine:.3f}, {theirs:.3f}: {100 * excess:+.2f}%", (excess <= share) == within)

    return Check((ours, reference), judge)


def ratio(
    column: str, above: Wanted, below: Wanted, *, least: float = -math.inf, most: float = math.inf, places: int = 2
) -> Check:
    """Check that the ratio of a column between two rows is in a range."""

    def judge(measured: Measured) -> Finding:
        a, b = (float(measured.value(wanted, column)) for wanted in (above, below))
        return Finding(f"{a / b:.{places}f}×", least <= a / b <= most)

    return Check((above, below), judge)


def falling(column: str, *order: Wanted) -> Check:
    """Check that a column gets smaller from each row to the next."""

    def judge(measured: Measured) -> Finding:
        values = [float(measured.value(wanted, column)) for wanted in order]
        numbers = ", ".join(f"{value / values[0]:.3f}" for value in values)
        return Finding(f"{numbers} of the first", all(b < a for a, b in itertools.pairwise(values)))

    return Check(order, judge)


def of_special(name: str, judge: Callable[[Callable[[str], Any]], Finding]) -> Check:
    """Decide by a special measurement; `judge` gets a function that returns its numbers by key."""
    return Check((), lambda measured: judge(lambda key: measured.of_special(name, key)), (name,))


def _finding(cases: Sequence[Sequence[float]], steps: Sequence[tuple[float, float]], each: Sequence[bool]) -> Finding:
    means = ", ".join(f"{np.mean(case):.3f}" for case in cases)
    by = "; ".join(f"{gain:+.4f} ± {error:.4f}" for gain, error in steps)
    if not any(any(case) for case in cases):  # not even with a full cache
        return Finding("nothing is found", None)
    # One passage has no standard error, and cannot decide.
    shown = None if any(math.isnan(error) for _, error in steps) else all(each)
    return Finding(f"{means} ({by})", shown)
