"""The interface of a task of `kvjax evaluate`, and the loop over its measurements."""

from __future__ import annotations

import abc
import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.evaluation.grid import Cell, Entry, RowFile
from kvjax.evaluation.refusals import Unsupported, refusals
from kvjax.evaluation.summary import Columns, Measure, Measured, result_line
from kvjax.model import Model
from kvjax.utils.compilation import drop_programs
from kvjax.utils.progress import Bar

DIGESTS = ("passages", "content")
"""Fields of a cell that identify its text and are of no use to readers."""


class Task(abc.ABC):
    """A measurement that compares policies at budgets: `kvjax evaluate NAME`."""

    summary: str
    """One line about the measurement, for the help text."""
    subject: tuple[str, ...]
    """Fields of rows that are compared only with each other; a page has a section for each group of them."""
    columns: Columns | None
    """Fields of rows to show; None for all that have a standard error."""

    @abc.abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the task."""

    @abc.abstractmethod
    def check(self, options: argparse.Namespace) -> None:
        """Refuse invalid options, before a model is loaded.

        Raises:
            ValueError: an option is invalid for every model; the message names it.
        """

    @abc.abstractmethod
    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        """Return the cases that each policy is measured on at each budget, such as texts and lengths."""

    @abc.abstractmethod
    def measure(self, model: Model, options: argparse.Namespace, entry: Entry, cell: Cell) -> dict[str, Any]:
        """Measure a policy at a budget on a cell; return the other fields of the row, in JSON types.

        Raises:
            ValueError: the policy or the model does not support the cell; the message says why.
        """

    def columns_of(self, rows: Sequence[dict[str, Any]]) -> Columns:
        """Return the fields to show of some rows."""
        if self.columns is not None:
            return self.columns
        measured_row = next((row for row in rows if "refused" not in row), {})
        metrics = [name.removesuffix("_standard_error") for name in measured_row if name.endswith("_standard_error")]
        first = Measure(metrics[0], metrics[0]) if metrics else Measure("", "result")
        return Columns(first, first, tuple(metrics[1:]))

    def fill(self, rows: RowFile, model: Model, options: argparse.Namespace, compared: Sequence[Entry]) -> Measured:
        """Measure the missing cells; print each result as it comes, and the time left.

        Args:
            rows: stores the results; an interrupted grid resumes from them.

        Returns:
            The rows of this grid, in order; if a policy does not support a cell, its row has the reason (`refused`).
        """
        cells = self.cells(model, options)
        cells = [cell for place, cell in enumerate(cells) if cell not in cells[:place]]
        entries = [(entry, entry.cell(model)) for entry in compared]
        results: list[list[dict[str, Any]]] = [[] for _ in cells]
        with Bar("cells", total=len(cells) * len(entries)) as bar:
            for cell, of_cell in zip(cells, results, strict=True):
                shown = {name: value for name, value in cell.items() if value is not None and name not in DIGESTS}
                bar.say(f"{rows.file.stem}: {', '.join(f'{name} {value}' for name, value in shown.items())}")
                for entry, entry_cell in entries:
                    row = rows.of(entry_cell | cell)
                    new = row is None
                    if row is None:
                        drop_programs()
                        try:
                            with refusals():
                                fields = self.measure(model, options, entry, cell)
                        except Unsupported as error:
                            fields = {"refused": str(error)}
                        row = rows.add(entry_cell | cell | fields)
                    bar.advance(new)
                    full = next((earlier for earlier in of_cell if earlier["policy"] == "full"), None)
                    bar.say(result_line(self.columns_of([row]), row, full))
                    of_cell.append(row)
        rows.write_csv()
        return Measured(self.columns_of([row for of_cell in results for row in of_cell]), cells, results)


def mean(name: str, scores: Sequence[float]) -> dict[str, Any]:
    """Return the mean of scores under a name, with its standard error and the scores of all cases."""
    error = float(np.std(scores, ddof=1)) / math.sqrt(len(scores)) if len(scores) > 1 else None
    return {
        name: float(np.mean(scores)),
        f"{name}_standard_error": error,
        f"{name}_of_cases": [round(float(score), 6) for score in scores],
    }
