"""Text that appears as its tokens do: whole characters, and nothing of what may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Texts that end a text, as a tuple; one text counts as a list of one.

    Raises:
        TypeError: they are no texts.
        ValueError: one is empty.
    """
    given = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, str) for each in given):
        raise TypeError(f"stop={stop!r} is not a text, nor a list of texts.")
    if "" in given:
        raise ValueError("stop='' would end every text before it begins; give some text, or none.")
    return tuple(given)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """A text up to the first place where one of some texts begins."""
    return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]


class Pieces:
    """One text in pieces, which together are its tokens' text up to the first stop string.

    Args:
        tokenizer: of the ids.
        stop: texts that end the text before them; special tokens are no part of a text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        """Whether a stop string has come: nothing follows."""
        self._ids: list[int] = []
        # Text up to `_told` has been decoded; tokens from `_context` are decoded with what follows, not the whole text.
        self._context, self._told = 0, 0
        self._held = ""

    def add(self, ids: Sequence[int]) -> str:
        """What is certain of the text once these tokens have come, and was not before."""
        self._ids += ids
        # A character whose bytes are not all there yet waits for them.
        return "" if self._decode(self._context).endswith("\ufffd") else self._release(last=False)

    def finish(self) -> str:
        """What has been held back, as no more tokens come."""
        return self._release(last=True)

    def _release(self, last: bool) -> str:
        if self.stopped:
            return ""
        before = self.tokenizer.decode(self._ids[self._context : self._told], skip_special_tokens=True)
        text = self._held + self._decode(self._context)[len(before) :]
        if self._told < len(self._ids):
            self._context, self._told = self._told, len(self._ids)
        certain = before_stop(text, self.stop)
        self.stopped = certain != text
        if not self.stopped and not last:
            begun = (n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
            certain = text[: len(text) - max(begun, default=0)]
        self._held = "" if self.stopped else text[len(certain) :]
        return certain

    def _decode(self, start: int) -> str:
        return self.tokenizer.decode(self._ids[start:], skip_special_tokens=True)


class Stops:
    """Which tokens of each row belong to its text, where stop strings end texts: up to the one that completes one.

    Args:
        tokenizer: of the ids.
        stop: texts that end a text before them.
        rows: of the blocks, from the first; others are left as they are.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], rows: int) -> None:
        self.pieces = [Pieces(tokenizer, stop) for _ in range(rows)]

    def __call__(
        self, tokens: Int[np.ndarray, "b n"], belongs: Bool[np.ndarray, "b n"]
    ) -> tuple[Bool[np.ndarray, "b n"], Bool[np.ndarray, " b"]]:
        """Which tokens of a block belong, and which rows have ended."""
        left, ended = belongs.copy(), ~belongs[:, -1]
        for row, pieces in enumerate(self.pieces):
            for place in np.flatnonzero(belongs[row]):
                left[row, place] = not pieces.stopped
                if not pieces.stopped:
                    pieces.add([int(tokens[row, place])])
            ended[row] |= pieces.stopped
        return left, ended


class Stream:
    """Writes the text of a block's first row as its tokens arrive: see `Pieces`."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any], stop: Sequence[str] = ()) -> None:
        self.pieces, self.write = Pieces(tokenizer, stop), write

    def __call__(self, block: Int[np.ndarray, "b n"], belongs: Bool[np.ndarray, "b n"]) -> None:
        self._write(self.pieces.add(block[0][belongs[0]].tolist()))

    def flush(self) -> None:
        """Write what has been held back of the text so far."""
        self._write(self.pieces.finish())

    def _write(self, text: str) -> None:
        if text:
            self.write(text)
