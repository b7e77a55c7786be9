"""Text that appears as its tokens do: whole characters, and nothing of what may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from kvjax.generation.token_bytes import characters, special_tokens


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

    The text is what the tokens add to that of the context, so that the space with which a word begins stays. It does
    not depend on how many tokens come at once.

    Args:
        tokenizer: of the ids.
        stop: texts that end the text before them. Special tokens are no part of the text, but a stop string that
            contains one is found where the token stands.
        context: ids that the text follows, such as the prompt's.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.stopped = False
        """Whether a stop string has come: nothing follows."""
        named = special_tokens(tokenizer) if self.stop else {}
        self._special = {token: text for token, text in named.items() if any(text in stop for stop in self.stop)}
        self._with_special = [stop for stop in self.stop if any(text in stop for text in self._special.values())]
        self._characters = characters(tokenizer, context)
        self._held: list[tuple[str, bool]] = []
        """Characters that may begin a stop string, and whether they are of the text and not of a special token."""

    def add(self, ids: Sequence[int]) -> str:
        """What is certain of the text once these tokens have come, and was not before."""
        return "".join(map(self._add, ids))

    def finish(self) -> str:
        """What has been held back, as no more tokens come."""
        return self._release(self._characters.finish(), last=True)

    def _add(self, token: int) -> str:
        if self.stopped:
            return ""
        if token in self._special:
            return self._release(self._special[token], shown=False)
        return self._release(self._characters.add(token))

    def _release(self, new: str, shown: bool = True, last: bool = False) -> str:
        if self.stopped or not self.stop:
            return "" if self.stopped else new
        held = self._held + [(character, shown) for character in new]
        places = [place for place, (_, shown) in enumerate(held) if shown]
        views: list[tuple[str, list[int], Sequence[str]]] = [
            ("".join(held[place][0] for place in places), places, self.stop)
        ]
        if self._with_special:
            views.append(("".join(character for character, _ in held), list(range(len(held))), self._with_special))
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


class Stops:
    """Which tokens of each row belong to its text, where stop strings end texts: up to the one that completes one.

    Args:
        tokenizer: of the ids.
        stop: texts that end a text before them.
        rows: of the blocks, from the first; others are left as they are.
        contexts: ids that each row's text follows; none for texts that follow nothing.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], rows: int, contexts: Sequence[Sequence[int]] = ()) -> None:
        self.pieces = [Pieces(tokenizer, stop, contexts[row] if contexts else ()) for row in range(rows)]

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
    """Writes the text of a block's first row as its tokens arrive: see `Pieces`.

    Args:
        tokenizer: of the ids.
        write: gets each piece.
        stop: texts that end the text before them.
        context: ids that the text follows, such as the prompt's.
    """

    def __init__(
        self,
        tokenizer: Any,
        write: Callable[[str], Any],
        stop: Sequence[str] = (),
        context: Sequence[int] = (),
    ) -> None:
        self.pieces, self.write = Pieces(tokenizer, stop, context), write

    def __call__(self, block: Int[np.ndarray, "b n"], belongs: Bool[np.ndarray, "b n"]) -> None:
        self._write(self.pieces.add(block[0][belongs[0]].tolist()))

    def flush(self) -> None:
        """Write what has been held back of the text so far."""
        self._write(self.pieces.finish())

    def _write(self, text: str) -> None:
        if text:
            self.write(text)
