"""Map of the choice of each head: layers x heads, with a letter and a color per choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

COLOURS = ("cyan", "blue", "green", "yellow", "magenta", "bright_black", "bright_blue")
FULL = "red"


def letters(choices: Sequence[str]) -> list[str]:
    """Return a letter for each choice: that of the part that it adds, and F for the full cache."""
    names = {"special": "s", "punctuation": "p", "frequent": "f", "local": "l"}
    return ["F" if choice == "full" else names[choice.rsplit("+", 1)[-1]] for choice in choices]


def print_choices(choices: Sequence[str], chosen: Sequence[Sequence[int]], file: TextIO) -> None:
    """Print a line for each layer, with a letter for each KV head, and a legend.

    Args:
        choices: possible choices, such as `special+punctuation`, with `full` last.
        chosen: index of the choice of each head of each layer.
        file: output, colored if it is a terminal.
    """
    marks = letters(choices)
    counts = [sum(head == i for layer in chosen for head in layer) for i in range(len(choices))]
    legend = ", ".join(
        f"{mark} = {choice} ({count})" for mark, choice, count in zip(marks, choices, counts, strict=True)
    )
    console = Console(file=file, highlight=False, soft_wrap=True)
    styles = [FULL if choice == "full" else COLOURS[i % len(COLOURS)] for i, choice in enumerate(choices)]
    around = " " if file.isatty() else ""
    for index, layer in enumerate(chosen):
        line = Text(f"layer {index:>3}")
        for head in layer:
            line.append(" ").append(f"{around}{marks[head]}{around}", style=f"black on {styles[head]}")
        console.print(line)
    console.print(legend, markup=False)
