"""LightKV: with an exact window a token's note is what the last queries give it, each time over all that is held.

With a running one it is the list of (query, attention) that it got; what counts of it is decided when it is scored.
"""

from __future__ import annotations

import math

import numpy as np

from tests.oracles.decoder import Oracle, softmax


class LightKV(Oracle):
    """Of C_l, too, the token being read takes one slot: sinks and streaming tokens are shares of all of it."""

    evicts_first = True
    omega: float
    alpha: int | None
    middle: str
    context_limit: int | None
    exact: bool

    def start(self):
        super().start()
        self.budgets = list(self.limits)
        self.anchor: int | None = None
        self.asked: list[tuple[int, list[list[np.ndarray]]]] = []

    def mask_width(self, h: int) -> int:
        return max(1, int(self.budgets[h] / (2 * self.omega) + 1e-6))

    def sink_slots(self, h):
        return max(self.mask_width(h), self.sinks)

    def recent_slots(self, h):
        return max(self.mask_width(h), super().recent_slots(h))

    def slots(self, h: int, length: int) -> int:
        """Slots for a text of this length."""
        few = self.budgets[h]
        if self.middle == "mask":
            few = min(few, self.sink_slots(h) + self.recent_slots(h) + self.mask_width(h))
        if self.context_limit is not None and length <= self.context_limit:
            return max(few, self.context_limit)
        return few

    def see(self, h, new, raw, turn):
        self.turn = turn
        return super().see(h, new, raw, turn)

    def anew(self, h: int, length: int) -> list[float]:
        """Equation 4 over the tokens that are held now: each of the last queries sees those not after it."""
        head, sums = self.heads[h], [0.0] * len(self.heads[h].positions)
        for position, queries in self.asked:
            if position < length - (self.alpha or self.budgets[h]):
                continue
            seen = [i for i, p in enumerate(head.positions) if p <= position]
            earlier = sum(1 for p in head.positions if p < position)
            for g, query in enumerate(queries[h]):
                keys = [head.keys[i] for i in seen]
                if self.positions == "cache":
                    keys = [self.turn(head.raw_keys[i], i) for i in seen]
                    query = self.turn(query, earlier - position)
                if seen:
                    bias = self.bias(h, g, [self.places(h)[i] for i in seen])
                    for i, p in zip(seen, softmax(np.array(keys) @ query / math.sqrt(len(query)) + bias), strict=True):
                        sums[i] += p
        return sums

    def read(self, prompt):
        if self.exact:
            for i in range(prompt.prompt_length):
                self.asked.append((i, [[query[i] for query in group] for group in prompt.queries]))
            for h, head in enumerate(self.heads):
                first = max(0, prompt.prompt_length - (self.alpha or self.budgets[h]))
                head.notes = [float(sum(p[first:, i].sum() for p in prompt.probs[h])) for i in range(len(head.notes))]
            return
        window = self.alpha or sum(self.budgets) // self.kv_heads
        last = prompt.prompt_length - 1
        for h, head in enumerate(self.heads):
            for i in range(prompt.prompt_length):
                # What a head gets later does not change the window in which its prompt was seen: it counts as a whole.
                head.notes[i] = []
                for query in range(max(i, last + 1 - window), last + 1):
                    for g in range(self.groups):
                        head.notes[i].append((last, prompt.probs[h][g][query, i]))

    def keep(self, prompt):
        self.limits = [self.slots(h, prompt.prompt_length) for h in range(self.kv_heads)]
        return super().keep(prompt)

    def leaving(self, new):
        for h in range(self.kv_heads):
            # A prompt that is read token by token is known to be long before it has been.
            self.limits[h] = self.slots(h, max(new.position + 1, new.prompt_length))
            if len(self.heads[h].positions) > self.limits[h]:
                ranks = self.ranks(h, new)
                order = sorted(range(len(ranks)), key=lambda i: (ranks[i], i), reverse=True)
                self.retain(h, order[: self.limits[h]])
        return super().leaving(new)

    def note(self, h, new):
        return 0.0 if self.exact else []

    def turned(self, turn):
        if self.exact:
            for h, head in enumerate(self.heads):
                head.notes = self.anew(h, turn.prompt_length)

    def after(self, new, probs):
        if self.exact:
            self.asked.append((new.position, new.queries))
            for h, head in enumerate(self.heads):
                head.notes = head.notes if self.given else self.anew(h, new.position + 1)
            return
        for h, head in enumerate(self.heads):
            for i, note in enumerate(head.notes):
                for g in range(self.groups):
                    note.append((new.position, probs[h][g][i]))

    def scores(self, h, new):
        if self.exact:
            return self.heads[h].notes
        # Windows of alpha queries, one of which ends with the prompt: the one being filled and the one before count.
        if self.anchor is None:
            self.anchor = new.prompt_length
        seen = new.position + 1 if hasattr(new, "probs") else new.position
        alpha = self.alpha or self.budgets[h]
        first = self.anchor + ((seen - self.anchor) // alpha - 1) * alpha
        return [sum(p for query, p in note if query >= first) for note in self.heads[h].notes]
