"""FastGen (Algorithms 1 and 2): every head tries the choices in their order on whole attention matrices."""

from __future__ import annotations

import math

import numpy as np

from tests.oracles.decoder import Oracle


class FastGen(Oracle):
    """Ids are given; a token's note is all attention it ever got. The length counts the token being read."""

    evicts_first = True

    threshold: float
    local: float
    frequent: float
    frequent_among: str
    order: tuple[str, ...]
    special: tuple[int, ...]
    punctuation: tuple[int, ...]
    markers: tuple[tuple[int, ...], ...]
    spare_special: int
    spare_punctuation: float

    def start(self):
        super().start()
        self.chosen: list[tuple[str, ...] | None] = [None] * self.kv_heads
        self.fixed: list[set[int]] = [set() for _ in range(self.kv_heads)]
        self.slots = [0] * self.kv_heads
        self.end = 0

    def window(self, length: int, parts: tuple[str, ...]) -> int:
        wide = math.floor(self.local * length + 1e-6) if "local" in parts else 0
        return max(1, int(self.recent), wide)

    def most(self, length: int, parts: tuple[str, ...]) -> int:
        return math.floor(self.frequent * length + 1e-6) if "frequent" in parts else 0

    def kept_for_good(self, tokens: list[int], parts: tuple[str, ...], start: int = 0) -> set[int]:
        """Which tokens of a text that was given, from position `start` on, the parts keep for what they are."""
        kept = set()
        if "special" in parts:
            kept |= {i for i, token in enumerate(tokens) if token in self.special or start + i < self.sinks}
            for marker in self.markers:
                for start in range(len(tokens) - len(marker) + 1):
                    if tuple(tokens[start : start + len(marker)]) == marker:
                        kept |= set(range(start, start + len(marker)))
        if "punctuation" in parts:
            kept |= {i for i, token in enumerate(tokens) if token in self.punctuation}
        return kept

    def best(self, h: int, among: list[int], count: int) -> set[int]:
        """The indices that got most attention; of equals the newest."""
        notes = self.heads[h].notes
        return set(sorted(among, key=lambda i: (notes[i], i), reverse=True)[:count])

    def read(self, prompt):
        n = prompt.prompt_length
        self.end = n + prompt.horizon
        for h, head in enumerate(self.heads):
            mean = np.mean(prompt.probs[h], axis=0)
            for i in range(n):
                head.notes[i] = self.groups * sum(mean[query, i] for query in range(n))
            self.chosen[h] = None  # the full cache
            for count in range(1, len(self.order) + 1):
                parts = self.order[:count]
                kept = self.kept_for_good(prompt.tokens, parts)
                among = list(range(n))
                if self.frequent_among == "others":
                    among = [i for i in among if i not in kept and i < n - self.window(n, parts)]
                kept_or_frequent = kept | self.best(h, among, self.most(n, parts))
                recovered = 0.0
                for query in range(n):
                    for i in range(query + 1):
                        near = i > query - self.window(query + 1, parts)
                        if i in kept_or_frequent or near:
                            recovered += mean[query, i]
                if recovered / n >= self.threshold and self.threshold < 1:
                    self.chosen[h], self.fixed[h] = parts, kept
                    break
            parts = self.chosen[h]
            if parts is None:
                self.slots[h] = self.end
                continue
            slots = len(self.fixed[h]) + self.window(self.end, parts) + self.most(self.end, parts)
            slots += self.spare_special if "special" in parts else 0
            slots += math.ceil(self.spare_punctuation * prompt.horizon - 1e-6) if "punctuation" in parts else 0
            self.slots[h] = min(slots, self.end)

    def lists(self, h: int, length: int):
        """Cached tokens that stay for good, generated ones that stay if they can, and those that frequency keeps."""
        parts, head = self.chosen[h], self.heads[h]
        assert parts is not None
        first = length - self.window(length, parts)
        inside = [i for i, position in enumerate(head.positions) if position >= first]
        prompt = [i for i, position in enumerate(head.positions) if position in self.fixed[h] and i not in inside]
        rest = [i for i in range(len(head.positions)) if i not in inside and i not in prompt]
        generated = [i for i in rest if head.positions[i] >= self.prompt_end and head.tokens[i] in self.wanted(parts)]
        others = [i for i in rest if i not in generated]
        among = list(range(len(head.positions))) if self.frequent_among == "all" else others
        frequent = self.best(h, among, self.most(length, parts))
        return inside + prompt, generated, [i for i in others if i in frequent]

    def wanted(self, parts: tuple[str, ...]) -> tuple[int, ...]:
        return (self.special if "special" in parts else ()) + (self.punctuation if "punctuation" in parts else ())

    def keep(self, prompt):
        staying = []
        self.prompt_end = n = prompt.prompt_length
        for h, head in enumerate(self.heads):
            parts = self.chosen[h]
            if parts is None:
                staying.append(list(range(len(head.positions))))
                continue
            if prompt.start > 0:
                # What was written is given now; markers are recognised inside of a turn.
                known, wanted = zip(head.positions, head.tokens, strict=True), self.wanted(parts)
                self.fixed[h] |= {position for position, token in known if token in wanted}
                self.fixed[h] |= {prompt.start + i for i in self.kept_for_good(prompt.tokens, parts, prompt.start)}
            always, _, frequent = self.lists(h, n)
            if prompt.start == 0:
                # One token arrives at a time: more slots than that could not be filled.
                self.slots[h] = min(self.slots[h], len(always) + len(frequent) + prompt.horizon)
            # Where text is given that outgrows the slots, what is merely frequent leaves first, then the oldest.
            ranked = sorted(always, reverse=True) + sorted(frequent, key=lambda i: (head.notes[i], i), reverse=True)
            staying.append(ranked[: self.slots[h]])
        return staying

    def leaving(self, new):
        leaving: list[int | None] = []
        length = min(new.position + 1, self.end)
        for h, head in enumerate(self.heads):
            if self.chosen[h] is None:
                leaving.append(None)
                continue
            always, generated, frequent = self.lists(h, length)
            self.retain(h, sorted(always + generated + frequent))
            always, generated, frequent = self.lists(h, length)
            if len(head.positions) < self.slots[h]:
                leaving.append(None)
            elif generated:
                leaving.append(min(generated))
            else:
                leaving.append(min(frequent, key=lambda i: (head.notes[i], i)) if frequent else min(always))
        return leaving

    def note(self, h, new):
        return 0.0

    def after(self, new, probs):
        for h, head in enumerate(self.heads):
            for i in range(len(head.notes)):
                head.notes[i] += sum(probs[h][g][i] for g in range(self.groups))
