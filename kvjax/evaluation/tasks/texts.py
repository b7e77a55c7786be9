"""Tasks on passages of text files, of which a given fraction is the prompt."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.evaluation.grid import Cell
from kvjax.evaluation.tasks.task import Task
from kvjax.evaluation.texts import Passages, check_texts, passages
from kvjax.model import Model


def add_text_options(
    parser: argparse.ArgumentParser, default: Sequence[Path] = (), rows: int = 8, lengths: Sequence[int] = (1024,)
) -> None:
    """Add the options that tasks on texts share; without a `default`, texts are required."""
    usual: dict[str, Any] = {"default": list(default)} if default else {"required": True}
    held_out = "held-out texts" + (f" (default: {', '.join(file.name for file in default)})" if default else "")
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help=held_out, **usual)
    parser.add_argument("--rows", type=int, default=rows, help=f"passages of each text (default: {rows})")
    tokens = f"tokens of each passage (default: {', '.join(map(str, lengths))})"
    parser.add_argument("--lengths", type=int, nargs="+", default=list(lengths), help=tokens)
    parser.add_argument("--prefix", type=float, default=0.5, help="fraction of a passage that is read as a prompt")


class TextTask(Task):
    """A task on passages of text files."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_text_options(parser)

    def check(self, options: argparse.Namespace) -> None:
        if not 0 <= options.prefix < 1:
            raise ValueError(f"--prefix {options.prefix} is not a share from 0 to below 1 of a passage.")
        for length in options.lengths:
            check_texts(options.text, options.rows, length)
            if round(options.prefix * length) >= length:
                raise ValueError(
                    f"--prefix {options.prefix} of {length} tokens leaves none to predict; use a smaller one."
                )

    def cells(self, model: Model, options: argparse.Namespace) -> list[Cell]:
        """Return a cell for each text and length."""
        return [
            {
                "text": file.stem,
                "length": length,
                "prefix": max(1, round(options.prefix * length)),
                "passages": _passages(model, (file,), options.rows, length).digest,
            }
            for length in options.lengths
            for file in options.text
        ]


def cell_passages(model: Model, options: argparse.Namespace, cell: Cell) -> Passages:
    """Return the passages of a cell."""
    (file,) = (file for file in options.text if file.stem == cell["text"])
    return _passages(model, (file,), options.rows, cell["length"])


_passages = functools.lru_cache(4)(passages)
