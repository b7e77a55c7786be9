"""Eviction of r tokens at once, before each position that r divides: in between, a cache grows by a slot a token."""

from __future__ import annotations

from tests.oracles.decoder import Oracle


class EvictEvery(Oracle):
    """In kvjax's order and with its numbers: the budget counts the token being read, which finds a slot that is empty.

    Tokens that leave together leave by one ranking.
    """

    evicts_first = True
    evict_every = 1

    def room(self, h: int, length: int) -> int:
        """Slots in a text of so many tokens, the one being read included."""
        return self.limits[h] + (length - 1) % self.evict_every

    def best(self, h, new, count: int) -> list[int]:
        """Indices of the highest ranks, of equals the newest."""
        if count >= len(self.heads[h].positions):
            return list(range(len(self.heads[h].positions)))
        ranks = self.ranks(h, new)
        return sorted(range(len(ranks)), key=lambda i: (ranks[i], i), reverse=True)[:count]

    def keep(self, prompt):
        return [self.best(h, prompt, self.room(h, prompt.prompt_length)) for h in range(self.kv_heads)]

    def leaving(self, new):
        for h in range(self.kv_heads):
            self.retain(h, self.best(h, new, self.room(h, new.position + 1) - 1))
        return [None] * self.kv_heads


def every(kind: type[Oracle]) -> type[Oracle]:
    """A policy that evicts r tokens at once."""
    return kind if issubclass(kind, EvictEvery) else type(f"{kind.__name__}EvictEvery", (EvictEvery, kind), {})
