"""Maps of the prompt tokens that a cache still holds, and of the choices of its heads."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.text import Text

from kvjax.evaluation.figures import new_figure, save_figure
from kvjax.generation.detokenize import Spelling

PLAIN_MARKS = " .:-=+*#"
"""Marks from a token that no head holds to one that all heads hold."""
SHADES = ("white on #440154", "white on #3b528b", "white on #21918c", "black on #5ec962", "black on #fde725")
"""Styles of the same scale for terminals: five steps of viridis, as in the figure."""
COLOURS = ("cyan", "blue", "green", "yellow", "magenta", "bright_black", "bright_blue")
FULL = "red"
"""Colors of the choices of heads."""
MOST_WORDS = 64
"""Longest prompt, in tokens, of which the figure names every token."""


def share_held(positions: list[np.ndarray], tokens: int) -> Float[np.ndarray, "layers tokens"]:
    """Return the share of each layer's heads that hold each of the first tokens of row 0; see `held_positions`."""
    return np.array([[(layer[0] == token).any(-1).mean() for token in range(tokens)] for layer in positions])


def words_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token as it appears after other tokens."""
    spelling = Spelling(tokenizer)
    contents = [spelling.bytes_of(token) for token in ids]
    return ["\ufffd" if content is None else content.decode(errors="replace") for content in contents]


def print_shaded(words: Sequence[str], share: Float[np.ndarray, " tokens"], file: TextIO) -> None:
    """Print a prompt, each token shaded by the share of heads that hold it, or marked below if there are no colors."""
    console = Console(file=file)
    if console.color_system is None:
        # Replace what cannot be encoded: an escape would be wider than its mark.
        encoding = file.encoding or "utf-8"
        words = [text.replace("\n", "\\n").encode(encoding, "replace").decode(encoding) for text in words]
        for start in range(0, len(words), 12):
            row = words[start : start + 12]
            levels = np.rint(share[start : start + 12] * (len(PLAIN_MARKS) - 1)).astype(int)
            print("|".join(row), file=file)
            print("|".join(PLAIN_MARKS[level] * len(text) for level, text in zip(levels, row, strict=True)), file=file)
        print(f"marks from 0% to 100% of heads: {PLAIN_MARKS!r}", file=file)
        return
    last = len(SHADES) - 1
    shaded = Text()
    for text, part in zip(words, share, strict=True):
        shaded.append(text, style=SHADES[round(last * float(part))])
    legend = Text("share of heads that hold a token: ")
    for step, style in enumerate(SHADES):
        legend.append(f" {step / last:.0%} ", style=style)
    console.print(shaded)
    console.print(legend)


def save_png(share: Float[np.ndarray, "layers tokens"], words: Sequence[str], file: Path, title: str) -> None:
    """Draw a map of layers x prompt tokens to a PNG file."""
    layers, tokens = share.shape
    figure, (axes,) = new_figure(width=max(7.0, min(14.0, 0.17 * tokens + 2.5)), height=0.35 * layers + 2.0)
    image = axes.imshow(share, aspect="auto", interpolation="nearest", vmin=0, vmax=1, cmap="viridis")
    # Name only some tokens of a long prompt.
    ticks = range(0, tokens, -(-tokens // MOST_WORDS))
    axes.set_xticks(ticks, [_visible(words[token]) for token in ticks], rotation=90, fontsize=7, parse_math=False)
    step = -(-layers // 16)
    axes.set(xlabel="prompt token" if tokens <= MOST_WORDS else f"prompt token (1 in {ticks.step} is named)")
    axes.set(ylabel="layer", yticks=range(0, layers, step))
    axes.set_title(title, fontsize=10, parse_math=False)
    figure.colorbar(
        image, label="share of KV heads\nthat hold the token", ticks=[0, 0.25, 0.5, 0.75, 1], format="{x:.0%}"
    )
    save_figure(figure, file)


def _visible(word: str) -> str:
    # White space around a word is dropped, and named if it is all.
    return word.strip()[:14] or {"\n": "\\n", " ": "space"}.get(word, repr(word)[1:-1])


def print_choices(choices: Sequence[str], chosen: Sequence[Sequence[int]], file: TextIO) -> None:
    """Print a line for each layer, with a colored letter for each KV head, and a legend.

    Args:
        choices: possible choices, such as `special+punctuation`, with `full` last.
        chosen: index of the choice of each head of each layer.
    """
    # The letter is that of the part that a choice adds.
    marks = ["F" if choice == "full" else choice.rsplit("+", 1)[-1][0] for choice in choices]
    counts = collections.Counter(head for layer in chosen for head in layer)
    legend = ", ".join(f"{marks[i]} = {choice} ({counts[i]})" for i, choice in enumerate(choices))
    console = Console(file=file, highlight=False, soft_wrap=True)
    styles = [FULL if choice == "full" else COLOURS[i % len(COLOURS)] for i, choice in enumerate(choices)]
    around = " " if file.isatty() else ""
    for index, layer in enumerate(chosen):
        line = Text(f"layer {index:>3}")
        for head in layer:
            line.append(" ").append(f"{around}{marks[head]}{around}", style=f"black on {styles[head]}")
        console.print(line)
    console.print(legend, markup=False)
