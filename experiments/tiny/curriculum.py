"""Training data of the embedded model: copies, facts planted in running text with questions, and plain text."""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.tiny.planted_facts import SPECIAL, USER, Fact, Facts, load_tokenizer
from experiments.tiny.tokenizer import read_prepared


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of the curriculum.

    Args:
        name: name in the log.
        length: predicted tokens of a row.
        rows: rows of a batch.
        steps: optimiser steps.
        mix: shares of rows by kind: `copy`, `recall`, `chat`, `text`.
        forms: shares of facts by form; `chat` is not a form here.
        copy_ids: number of distinct ids in copied sequences, None for all.
        facts: fewest and most facts of a row.
        text_weight: weight of a plain-text token in the loss of a recall row.
        answer_weight: weight of an answer's token.
    """

    name: str
    length: int
    rows: int
    steps: int
    mix: dict[str, float]
    forms: dict[str, float] = dataclasses.field(default_factory=lambda: {"pair": 1.0})
    copy_ids: int | None = None
    facts: tuple[int, int] = (1, 6)
    text_weight: int = 1
    answer_weight: int = 4


class Lessons:
    """Generator of batches; the same seed and step give the same batch.

    Args:
        directory: output of `experiments.tiny.tokenizer.prepare`.
        shares: share of plain text from each training text, in the order of preparation.
    """

    def __init__(self, directory: Path, shares: Sequence[float]) -> None:
        described, arrays = read_prepared(directory)
        if len(shares) != len(described["train"]):
            raise ValueError(f"{len(shares)} shares for {len(described['train'])} training texts: give one for each.")
        self.texts = [arrays[name] for name in described["train"]]
        self.shares = list(shares)
        self.facts = Facts(load_tokenizer(directory))
        self.encode, self.end = self.facts.encode, self.facts.end
        vocabulary = self.facts.tokenizer.get_vocab()
        special = {vocabulary[token] for token in SPECIAL}
        self.copyable = [i for i in sorted(vocabulary.values()) if i not in special]
        random.Random(0).shuffle(self.copyable)
        self.stops = [vocabulary[token] for token in (".", '."', "!", "?") if token in vocabulary]
        self.starts = [np.concatenate([[0], np.flatnonzero(text == self.end) + 1]) for text in self.texts]

    def text(self, rng: random.Random, length: int) -> list[int]:
        """Return a window of a training text, one in four from the beginning of a document."""
        which = rng.choices(range(len(self.texts)), self.shares)[0]
        ids = self.texts[which]
        start = int(rng.choice(self.starts[which])) if rng.random() < 0.25 else rng.randrange(len(ids))
        start = max(0, min(start, len(ids) - length))
        window = ids[start : start + length].tolist()
        return window if len(window) == length else (window * (length // len(window) + 1))[:length]

    def _copy(self, rng: random.Random, stage: Stage) -> tuple[list[int], list[int]]:
        ids = self.copyable if stage.copy_ids is None else self.copyable[: stage.copy_ids]
        longest = 16 if stage.copy_ids is not None else stage.length // 3
        period, length = rng.randint(4, min(longest, 64)), stage.length + 1
        sequence = rng.choices(ids, k=period)
        row = (sequence * (length // period + 1))[:length]
        return row, [0] * period + [2] * (length - period)

    def _facts(self, rng: random.Random, stage: Stage, room: int, chat: bool) -> list[Fact]:
        facts, used, length = [], set(), 0
        for _ in range(rng.randint(*stage.facts)):
            form = "chat" if chat else rng.choices(list(stage.forms), list(stage.forms.values()))[0]
            new = self.facts.fact(form, rng, used)
            length += sum(len(f.plant) + len(f.cue) + len(f.answer) + len(f.closing) for f in new)
            if facts and length > room:
                break
            facts += new
        return facts

    def _places(self, rng: random.Random, text: Sequence[int], times: Sequence[float]) -> list[int]:
        """Return positions in a text for events of sorted times, 0 to 1: mostly at the ends of sentences."""
        ends = [i + 1 for i, token in enumerate(text) if token in self.stops] + [len(text)]
        places = [round(time * len(text)) for time in times]
        return places if rng.random() < 0.2 else [ends[bisect.bisect_left(ends, place)] for place in places]

    def _recall(self, rng: random.Random, stage: Stage) -> tuple[list[int], list[int]]:
        length = stage.length + 1
        facts = self._facts(rng, stage, length * 3 // 5, chat=False)
        order: list[tuple[float, list[int], list[int]]] = []
        apart = rng.random() < 0.5  # all facts first, all questions last: the long distances
        planted = 0.0
        for fact in facts:
            if fact.plant:  # the other facts of a list were planted with its first
                planted = rng.uniform(0, 0.3 if apart else 0.9)
                order.append((planted, fact.plant, [0] * len(fact.plant)))
            asked = rng.uniform(0.7 if apart else planted, 1.0)
            weights = [0] * len(fact.cue) + [stage.answer_weight] * len(fact.answer) + [1] * len(fact.closing)
            order.append((asked, [*fact.cue, *fact.answer, *fact.closing], weights))
        order.sort(key=lambda event: event[0])
        return self._weave(rng, order, length, stage.text_weight)

    def _weave(
        self, rng: random.Random, order: Sequence[tuple[float, list[int], list[int]]], length: int, text_weight: int
    ) -> tuple[list[int], list[int]]:
        text = self.text(rng, max(length - sum(len(ids) for _, ids, _ in order), 1))
        row, weights, read = [], [], 0
        for place, (_, ids, event_weights) in zip(
            self._places(rng, text, [time for time, _, _ in order]), order, strict=True
        ):
            row += text[read:place] + ids
            weights += [text_weight] * (place - read) + event_weights
            read = place
        row += text[read:]
        weights += [text_weight] * (len(text) - read)
        return row[:length], weights[:length]

    def _chat(self, rng: random.Random, stage: Stage) -> tuple[list[int], list[int]]:
        length = stage.length + 1
        facts = self._facts(rng, stage, length // 2, chat=True)
        turns: list[int] = []
        weights: list[int] = []
        for i, fact in enumerate(rng.sample(facts, len(facts))):
            opening = self.encode(f"{USER}\n") if i else []
            asked = fact.cue if i == 0 else self.encode("What") + fact.cue[len(self.encode(" What")) :]
            turns += [*opening, *asked, *fact.answer, *fact.closing]
            weights += [0] * (len(opening) + len(asked)) + [stage.answer_weight] * (len(fact.answer) + 1)
        opening = self.encode(f"{USER}\n")
        room = length - len(turns) - len(opening)
        first = room if rng.random() < 0.7 else rng.randint(sum(len(f.plant) for f in facts) + 1, room)
        times = sorted(rng.random() for _ in facts)
        plants = [(time, fact.plant, [0] * len(fact.plant)) for time, fact in zip(times, facts, strict=True)]
        body, body_weights = self._weave(rng, plants, first, stage.text_weight)
        row = [*opening, *body, *turns]
        weights = [0] * len(opening) + body_weights + weights
        if len(row) < length:
            after = self.text(rng, length - len(row))
            row, weights = row + after, weights + [stage.text_weight] * len(after)
        return row[:length], weights[:length]

    def batch(self, stage: Stage, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids uint16 [rows, length + 1] and weights of the predicted ids uint8 [rows, length]."""
        rng = random.Random(f"{seed} {step}")
        rows, weights = [], []
        for kind in rng.choices(list(stage.mix), list(stage.mix.values()), k=stage.rows):
            if kind == "text":
                row, weight = self.text(rng, stage.length + 1), [1] * (stage.length + 1)
            else:
                row, weight = {"copy": self._copy, "recall": self._recall, "chat": self._chat}[kind](rng, stage)
            rows.append(row)
            weights.append(weight)
        return np.asarray(rows, np.uint16), np.asarray(weights, np.uint8)[:, 1:]
