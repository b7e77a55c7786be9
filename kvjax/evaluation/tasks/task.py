"""The interface of a task of `kvjax evaluate`."""

from __future__ import annotations

import abc
import argparse
from typing import Any

from kvjax.evaluation.grid import Cell, Entry
from kvjax.model import Model


class Task(abc.ABC):
    """A measurement that compares policies at budgets: `kvjax evaluate NAME`."""

    summary: str
    """One line about the measurement, for the help text."""

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
