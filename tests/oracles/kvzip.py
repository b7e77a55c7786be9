"""KVzip: the largest attention that a token gets while the text is read again; of all tokens the best stay."""

from __future__ import annotations

import math

from tests.oracles.decoder import Oracle

UNREAD = -1e30


class KVzip(Oracle):
    """A token's note is its score."""

    again = True
    prompt: tuple[int, ...]
    later: tuple[int, ...]
    overlap: int
    chunk: int
    normalized: bool

    def read(self, prompt):
        for head in self.heads:
            head.notes = [UNREAD] * len(head.positions)

    def note(self, h, new):
        return UNREAD

    def reread(self, h, g, probs, hidden):
        """Take the attention of a query head to the tokens of the cache, and the layer's input at the query."""
        head = self.heads[h]
        for i, value in enumerate(head.values):
            score = float(probs[i])
            if self.normalized:
                first = (h * self.groups + g) * len(value)
                added = [float(row[first : first + len(value)] @ value) for row in self.output]
                score *= math.hypot(*added) / math.hypot(*hidden)
            head.notes[i] = max(head.notes[i], score)

    def scores(self, h, new):
        return self.heads[h].notes
