"""Scissorhands: a token's note is the list of queries that paid it less attention than the average token."""

from __future__ import annotations

from tests.oracles.decoder import Oracle


class Scissorhands(Oracle):
    history: int

    def look(self, h: int, query: int, rows: list) -> None:
        """Note for every token that the query saw whether it was below 1/n; rows[g] are the group's probabilities."""
        n = len(rows[0])
        for i in range(n):
            mean = sum(row[i] for row in rows) / self.groups
            if mean * n < 1:
                self.heads[h].notes[i].append(query)

    def read(self, prompt):
        for h, head in enumerate(self.heads):
            head.notes = [[] for _ in head.positions]
            for query in range(prompt.prompt_length):
                self.look(h, query, [prompt.probs[h][g][query, : query + 1] for g in range(self.groups)])

    def note(self, h, new):
        return []

    def after(self, new, probs):
        for h in range(self.kv_heads):
            self.look(h, new.position, probs[h])

    def scores(self, h, new):
        # What leaves first does so before the new token has looked: the window ends with the query before it.
        last = new.position - (self.evicts_first and not hasattr(new, "probs"))
        return [-sum(query > last - self.history for query in note) for note in self.heads[h].notes]
