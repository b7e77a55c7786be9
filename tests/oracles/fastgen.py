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

    def kept_for_good(self, tokens: list[int], parts: tuple[str, ...]) -> set[int]:
        """Positions of a prompt's tokens that the parts keep for what they are."""
        kept = set()
        if "special" in parts:
            kept |= {i for i, token in enumerate(tokens) if token in self.special or i < self.sinks}
            for marker in self.markers:
                for start in range(len(tokens) - len(marker) + 1):
                    if tuple(tokens[start : start + len(marker)]) == marker:
                        kept |= set(range(start, start + len(marker)))
        if "punctuation" in parts:
            kept |= {i for i, token in enumerate(tokens) if token in self.punctuation}
        return kept

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
                window = self.window(n, parts)
                free = [i for i in range(n) if i not in kept and i < n - window]
                free.sort(key=lambda i: (head.notes[i], i), reverse=True)
                kept_or_frequent = kept | set(free[: self.most(n, parts)])
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
        """Cached tokens that stay for good, generated ones that stay if they can, and those that compete."""
        parts, head = self.chosen[h], self.heads[h]
        assert parts is not None
        first = length - self.window(length, parts)
        inside = [i for i, position in enumerate(head.positions) if position >= first]
        prompt = [i for i, position in enumerate(head.positions) if position in self.fixed[h] and i not in inside]
        wanted = (self.special if "special" in parts else ()) + (self.punctuation if "punctuation" in parts else ())
        rest = [i for i in range(len(head.positions)) if i not in inside and i not in prompt]
        generated = [i for i in rest if head.positions[i] >= self.prompt_end and head.tokens[i] in wanted]
        return inside + prompt, generated, [i for i in rest if i not in generated]

    def keep(self, prompt):
        staying = []
        self.prompt_end = n = prompt.prompt_length
        for h, head in enumerate(self.heads):
            parts = self.chosen[h]
            if parts is None:
                staying.append(list(range(n)))
                continue
            always, _, competing = self.lists(h, n)
            best = sorted(competing, key=lambda i: (head.notes[i], i), reverse=True)
            staying.append(always + best[: self.most(n, parts)])
        return staying

    def leaving(self, new):
        leaving: list[int | None] = []
        length = min(new.position + 1, self.end)
        for h, head in enumerate(self.heads):
            parts = self.chosen[h]
            if parts is None:
                leaving.append(None)
                continue
            _, generated, competing = self.lists(h, length)
            if len(competing) > self.most(length, parts):
                leaving.append(min(competing, key=lambda i: (head.notes[i], i)))
            elif len(head.positions) == self.slots[h]:
                leaving.append(min(generated))
            else:
                leaving.append(None)
        return leaving

    def note(self, h, new):
        return 0.0

    def after(self, new, probs):
        for h, head in enumerate(self.heads):
            for i in range(len(head.notes)):
                head.notes[i] += sum(probs[h][g][i] for g in range(self.groups))
