"""Facts planted in text, and later questions about them, in the forms of the embedded model's training data."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END, USER, ASSISTANT, PAD = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|pad|>"
SPECIAL = (END, PAD, USER, ASSISTANT)
FORMS = ("pair", "sentence", "question", "list", "phrase", "chat")
_NUMBERS = ("secret number", "lucky number", "magic number", "room number")
_WORDS = ("secret word", "favourite thing", "hidden word")
_FIRST_NAMES = """
Anna Tom Lily Ben Mia Max Sara Sam Lucy Tim Jane Jack Emma Peter Mary John Kate Paul Rose Mark Alice David
Clara Henry Ella Simon Nora Oscar Julia Victor Ruth Felix Laura Hugo Helen Leo Grace Adam Ivy Martin Eva
Robert Ada Edward Sophie George Maria Daniel Olivia Thomas Amelia William Charlotte James Elizabeth Charles
Fanny Arthur Margaret Frank Dorothy Walter Susan Roger Judith Philip Monica Omar Priya Chen Yuki Ravi Ingrid
Lars Fatima Diego
"""
_NAMES = tuple(_FIRST_NAMES.split())


@dataclasses.dataclass(frozen=True)
class Fact:
    """Token ids of a fact: its statement, the question, the answer, and the text after the answer."""

    plant: list[int]
    cue: list[int]
    answer: list[int]
    closing: list[int]


class Facts:
    """Generator of facts and questions from words that are single tokens.

    Args:
        tokenizer: tokenizer of the embedded model's kind, see `load_tokenizer`.

    Raises:
        ValueError: its vocabulary has too few whole words.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self.end = vocabulary[END]
        words = [token[1:] for token in sorted(vocabulary) if token[0] == "Ġ" and token[1:].isalpha()]
        words = [word for word in words if word.isascii() and len(word) >= 3]
        self.keys = sorted({w for w in words if w[0].isupper()} | {n for n in _NAMES if f"Ġ{n}" in vocabulary})
        self.words = [word for word in words if word.islower()]
        if min(len(self.keys), len(self.words)) < 8:
            raise ValueError(
                f"The vocabulary has {len(self.keys)} names and {len(self.words)} words of one token, "
                "recall lessons need 8 of each: prepare with more text or a larger vocabulary."
            )
        self.encode = functools.cache(self._encode)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _value(self, rng: random.Random, number: bool) -> str:
        if number:
            return str(rng.randrange(10 ** (n := rng.choice((2, 3, 4, 4, 4)) - 1), 10 ** (n + 1)))
        return rng.choice(self.words)

    def fact(self, form: str, rng: random.Random, used: set[tuple[str, str]], number: str | None = None) -> list[Fact]:
        """Make new facts of a form; `list` makes several, whose statements are all in the first.

        Args:
            form: one of FORMS.
            rng: random number generator.
            used: names already used in this row, by form; updated.
            number: a number to hide, for evaluation; None for random values.
        """
        enc = self.encode
        if form == "pair":
            key = self._name(rng, "pair", self.keys, used)
            value = enc(f" {rng.choice(self.words)}")
            return [Fact([*enc(";"), *enc(f" {key}"), *value, *enc(";")], enc(";") + enc(f" {key}"), value, enc(";"))]
        if form == "phrase":
            words = [enc(f" {rng.choice(self.words)}")[0] for _ in range(rng.randint(6, 14))]
            opening = enc(" Remember:")
            return [Fact([*opening, *words, *enc(".")], [*opening, *words[:2]], words[2:], enc("."))]
        if form == "list":
            facts, plant = [], []
            for _ in range(rng.randint(2, 6)):
                cue = enc(f"\n{self._name(rng, 'list', _NAMES, used)}:")
                text = self._value(rng, rng.random() < 0.5)
                value = enc(" ") + [t for c in text for t in enc(c)] if text[0].isdigit() else enc(f" {text}")
                facts.append(Fact([], cue, value, enc("\n")))
                plant += [*cue, *value]
            return [dataclasses.replace(facts[0], plant=[*plant, *enc("\n")]), *facts[1:]]
        of_number = form == "chat" or number is not None or rng.random() < 0.7
        kind = rng.choice(_NUMBERS if of_number else _WORDS) if number is None else _NUMBERS[0]
        name = self._name(rng, kind, _NAMES, used)
        text = number or self._value(rng, of_number)
        bare = [t for c in text for t in enc(c)] if of_number else enc(f" {text}")
        value = enc(" ") + bare if of_number else bare
        stated = enc(f" The {kind} of {name} is")
        asked = enc(f" What is the {kind} of {name}?")
        if form == "sentence":
            return [Fact([*stated, *value, *enc(".")], stated, value, enc("."))]
        if form == "question":
            return [Fact([*stated, *value, *enc(".")], asked, value, enc("."))]
        return [Fact([*stated, *value, *enc(".")], [*asked, *enc(f"{ASSISTANT}\n")], bare, [self.end])]

    def _name(self, rng: random.Random, kind: str, names: Sequence[str], used: set[tuple[str, str]]) -> str:
        while (kind, name := rng.choice(names)) in used:
            pass
        used.add((kind, name))
        return name

    def question(
        self, text: Int[np.ndarray, " n"], form: str, distance: int, rng: random.Random, distractors: int = 3
    ) -> tuple[list[int], list[int]]:
        """Make a new question: the ids up to its answer, and the answer's ids.

        Args:
            text: ids of held-out text to plant facts in.
            form: one of `FORMS`.
            distance: tokens from the end of the planted fact to the first token of its answer.
            rng: random number generator.
            distractors: facts of the same form planted at other places.
        """
        used: set[tuple[str, str]] = set()

        def fact() -> tuple[Fact, list[int]]:
            hidden = f"{rng.randrange(1000, 10000)}" if form in ("sentence", "question", "chat") else None
            made = self.fact(form, rng, used, hidden)
            return rng.choice(made), made[0].plant  # any entry of a list may be asked for

        target, plant = fact()
        others = [fact()[1] for _ in range(distractors)]
        longest = max(len(other) for other in others or [[0]])
        others = others[: max(0, (distance - len(target.cue)) // (2 * longest + 1))]
        room = distance - len(target.cue) - sum(len(other) for other in others)
        opening = self.encode(f"{USER}\n") if form == "chat" else []
        before = rng.randrange(10, 60)
        start = rng.randrange(len(text) - before - max(room, 0) - 1)
        cuts = sorted(rng.randrange(max(room, 0) + 1) for _ in others)
        row = [*opening, *text[start : start + before].tolist(), *plant]
        filler, read = text[start + before : start + before + max(room, 0)].tolist(), 0
        for cut, other in zip(cuts, others, strict=True):
            row += filler[read:cut] + other
            read = cut
        return [*row, *filler[read:], *target.cue], target.answer


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer from a directory with prepared data or the embedded model.

    Raises:
        ValueError: the directory has none.
    """
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{file} is missing: prepare the data first with `--text FILES --prepare {directory}`.")
    return Tokenizer.from_file(str(file))
