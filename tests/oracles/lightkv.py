"""LightKV: a token's note is the list of (query, attention) it got; what counts of it is decided when it is scored."""

from __future__ import annotations

from tests.oracles.decoder import Oracle


class LightKV(Oracle):
    """Of C_l, too, the token being read takes one slot: sinks and streaming tokens are shares of all of it."""

    evicts_first = True
    omega: float
    alpha: int | None
    middle: str
    context_limit: int | None

    def start(self):
        super().start()
        self.budgets = list(self.limits)
        self.anchor: int | None = None

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

    def read(self, prompt):
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
            self.limits[h] = self.slots(h, new.position + 1)
            if len(self.heads[h].positions) > self.limits[h]:
                ranks = self.ranks(h, new)
                order = sorted(range(len(ranks)), key=lambda i: (ranks[i], i), reverse=True)
                self.retain(h, order[: self.limits[h]])
        return super().leaving(new)

    def note(self, h, new):
        return []

    def after(self, new, probs):
        for h, head in enumerate(self.heads):
            for i, note in enumerate(head.notes):
                for g in range(self.groups):
                    note.append((new.position, probs[h][g][i]))

    def scores(self, h, new):
        # Windows of alpha queries, one of which ends with the prompt: the one being filled and the one before count.
        if self.anchor is None:
            self.anchor = new.prompt_length
        seen = new.position + 1 if hasattr(new, "probs") else new.position
        alpha = self.alpha or self.budgets[h]
        first = self.anchor + ((seen - self.anchor) // alpha - 1) * alpha
        return [sum(p for query, p in note if query >= first) for note in self.heads[h].notes]
