"""Held-out text as rows of tokens."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.model import Model
from kvjax.utils.files import check_not_empty, read_text

SAMPLE = Path(__file__).with_name("sample.txt")
"""Nathaniel Hawthorne, "Edward Randolph's Portrait" (1838, public domain), 24 kB of text to measure with. The
embedded model was not trained on it; other models may be."""


@dataclasses.dataclass(frozen=True)
class Passages:
    """Passages of several texts, all of one length.

    Args:
        tokens: ids [b, n].
        bytes: UTF-8 bytes of what follows the first token [b].
        rows: slice of the rows of each text, by its name.
    """

    tokens: Int[np.ndarray, "b n"]
    bytes: Int[np.ndarray, " b"]
    rows: dict[str, slice]

    @property
    def digest(self) -> str:
        """Twelve hex digits of the tokens and names."""
        content = np.ascontiguousarray(self.tokens, np.int32).tobytes() + "\n".join(self.rows).encode()
        return hashlib.sha256(content).hexdigest()[:12]


def passages(model: Model, files: Sequence[Path], rows: int, length: int) -> Passages:
    """Read passages from evenly spaced places of each text, from the beginning of the next line if there is one."""
    check_texts(files, rows, length)
    tokens, sizes, where = [], [], {}
    for file in files:
        text = read_text(file)
        where[file.stem] = slice(len(tokens), len(tokens) + rows)
        for i in range(rows):
            start = i * len(text) // rows
            line = text.find("\n", start) + 1 or start
            ids = first_tokens(model.tokenizer, text[line if i else 0 :], length)
            if len(ids) < length:
                raise ValueError(f"{file} is too short for {rows} passages of {length} tokens; ask for fewer.")
            tokens.append(ids)
            sizes.append(len(model.tokenizer.decode(ids[1:]).encode()))
    return Passages(np.asarray(tokens, np.int32), np.asarray(sizes), where)


def check_texts(files: Sequence[Path], rows: int, length: int) -> None:
    """Refuse missing and empty texts, two texts of one name, and passages with nothing to predict."""
    check_not_empty(files)
    if len({file.stem for file in files}) < len(files):
        raise ValueError("two texts have the same name; rename one, the report names texts by their files.")
    if rows < 1 or length < 2 or not files:
        raise ValueError(f"{rows} rows of {length} tokens from {len(files)} texts hold nothing to predict.")


def first_tokens(tokenizer: Any, text: str, count: int) -> list[int]:
    """Return the first tokens of a text, fewer if it is shorter."""
    # Encode only as much text as needed: a tokenizer is slow on megabytes.
    characters = 6 * count
    while True:
        ids = list(tokenizer(text[:characters], verbose=False)["input_ids"])
        # One token more than needed: the cut may have changed the last one.
        if len(ids) > count or characters >= len(text):
            return ids[:count]
        characters *= 2
