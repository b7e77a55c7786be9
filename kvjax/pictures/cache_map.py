"""Pictures of a cache: which prompt tokens it still holds, in the terminal and as a figure."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from jaxtyping import Float

from kvjax.files import check_writable, written_aside

PLAIN_MARKS = " .:-=+*#"
"""From a token that no head holds to one that all of them hold."""


def share_held(positions: list[np.ndarray], tokens: int) -> Float[np.ndarray, "layers tokens"]:
    """Share of a layer's heads that hold each of the first tokens of row 0.

    Args:
        positions: for each layer, position in each slot [b, h, c], -1 = empty.
        tokens: how many.
    """
    return np.array(
        [[np.mean([(head == token).any() for head in layer[0]]) for token in range(tokens)] for layer in positions]
    )


def show(tokenizer: Any, ids: list[int], share: Float[np.ndarray, " tokens"], file: TextIO) -> None:
    """Print a prompt with each token shaded by the share of heads that hold it, or marked below on a plain file."""
    texts = [tokenizer.decode([token]) for token in ids]
    if not file.isatty():
        for start in range(0, len(texts), 12):
            row = [text.replace("\n", "\\n") for text in texts[start : start + 12]]
            levels = np.rint(share[start : start + 12] * (len(PLAIN_MARKS) - 1)).astype(int)
            print("|".join(row), file=file)
            print("|".join(PLAIN_MARKS[level] * len(text) for level, text in zip(levels, row, strict=True)), file=file)
        print(f"marks from 0% to 100% of heads: {PLAIN_MARKS!r}", file=file)
        return
    from rich.console import Console
    from rich.text import Text

    shaded = Text()
    for text, part in zip(texts, share, strict=True):
        level = round(100 + 155 * float(part))  # still to be seen where a terminal has eight colours
        shaded.append(text, style=f"rgb({level},{level},{level}) on rgb(20,20,{20 + round(60 * float(part))})")
    Console(file=file).print(shaded)


def check_file(file: Path) -> None:
    """Refuse to draw where `save` could not.

    Raises:
        ValueError: matplotlib is not installed, or the file cannot be a PNG in an existing directory.
    """
    check_writable(file, ".png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            'drawing needs matplotlib; install it with: pip install matplotlib, or pip install -e ".[plots]".'
        )


def save(share: Float[np.ndarray, "layers tokens"], file: Path, title: str) -> None:
    """Draw layers x positions to a PNG file, written aside and then renamed.

    Raises:
        ValueError: matplotlib is not installed, or the file is not a PNG in an existing directory.
    """
    check_file(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.4 * len(share) + 1.5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(share, aspect="auto", interpolation="nearest", vmin=0, vmax=1, cmap="viridis")
    axes.set(xlabel="prompt position", ylabel="layer", yticks=range(len(share)), title=f"{title}: share of heads")
    figure.colorbar(image)
    with written_aside(file) as aside:
        figure.savefig(aside, format="png", dpi=120)
