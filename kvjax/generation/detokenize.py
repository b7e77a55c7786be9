"""Incremental detokenization, which holds back incomplete characters and possible beginnings of stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from kvjax.generation.token_bytes import characters, special_tokens


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings as a tuple; one string counts as a list of one."""
    given = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, str) for each in given):
        raise TypeError(f"stop={stop!r} is not a text, nor a list of texts.")
    if "" in given:
        raise ValueError("stop='' would end every text before it begins; give some text, or none.")
    return tuple(given)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before its first stop string, or the whole text if there is none."""
    return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]


class Pieces:
    """Incremental detokenizer of one text, up to the first stop string.

    The text is what the tokens add to the text of the context, so a word keeps the space before it. The text does not
    depend on how many tokens are added per call.

    Args:
        stop: strings that end the text before them. Special tokens are not part of the text, but a stop string that
            contains one is matched at that token.
        context: ids that the text follows, such as the prompt's.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        """True after a stop string; no text follows it."""
        self.used = 0
        """Number of tokens of the text so far; the last one may complete a stop string."""
        named = special_tokens(tokenizer) if self.stop else {}
        self._special = {token: text for token, text in named.items() if any(text in stop for stop in self.stop)}
        self._with_special = [stop for stop in self.stop if any(text in stop for text in self._special.values())]
        self._characters = characters(tokenizer, context)
        self._held: list[tuple[str, bool]] = []
        """Characters that may begin a stop string, and True for those of the text, not of a special token."""

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens, and return the text that has become certain."""
        return "".join(map(self._add, ids))

    def finish(self) -> str:
        """Return the text held back so far, after the last token."""
        return self._release(self._characters.finish(), last=True)

    def _add(self, token: int) -> str:
        if self.stopped:
            return ""
        self.used += 1
        if token in self._special:
            return self._release(self._special[token], shown=False)
        return self._release(self._characters.add(token))

    def _release(self, new: str, shown: bool = True, last: bool = False) -> str:
        if self.stopped or not self.stop:
            return "" if self.stopped else new
        held = self._held + [(character, shown) for character in new]
        places = [place for place, (_, shown) in enumerate(held) if shown]
        views: list[tuple[str, Sequence[int], Sequence[str]]] = [
            ("".join(held[place][0] for place in places), places, self.stop),
            ("".join(character for character, _ in held), range(len(held)), self._with_special),
        ]
        found = [places[at] for text, places, stops in views for at in map(text.find, stops) if at >= 0]
        self.stopped = bool(found)
        if not found and not last:
            found = [
                places[len(text) - n]
                for text, places, stops in views
                for stop in stops
                for n in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:n])
            ]
        end = min(found, default=len(held))
        self._held = [] if self.stopped else held[end:]
        return "".join(character for character, shown in held[:end] if shown)


class Stream:
    """Writer of the text of each block's first row as its tokens arrive; `write` gets each piece of `Pieces`."""

    def __init__(
        self, tokenizer: Any, write: Callable[[str], Any], stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self.pieces, self.write = Pieces(tokenizer, stop, context), write

    def __call__(self, block: Int[np.ndarray, "b n"], belongs: Bool[np.ndarray, "b n"]) -> None:
        self._write(self.pieces.add(block[0][belongs[0]].tolist()))

    def flush(self) -> None:
        """Write the text held back so far."""
        self._write(self.pieces.finish())

    def _write(self, text: str) -> None:
        if text:
            self.write(text)
