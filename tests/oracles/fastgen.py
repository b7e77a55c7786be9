"""FastGen from the paper: Algorithm 1 profiles a prompt's attention maps, Algorithm 2 appends, attends and compresses.

Where the paper is silent the module says what it takes: slots that fixed buffers run out of, and turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from tests.oracles.decoder import Oracle

Policy = tuple[str, ...]
"""A sum of policies (eq. 2); none of them for the full cache."""
FULL: Policy = ()


def share(ratio: float, length: int) -> int:
    """How many tokens a ratio of a length is, exactly: 0.3 of 10 is 3."""
    return math.floor(Fraction(str(ratio)) * length)


class FastGen(Oracle):
    """A token's note is its cumulative attention score, over all queries that saw it."""

    fills = False

    threshold: float
    local: float
    frequent: float
    frequent_among: str
    order: Policy
    special: tuple[int, ...]
    punctuation: tuple[int, ...]
    markers: tuple[tuple[int, ...], ...]
    spare_special: int
    spare_punctuation: float

    def start(self):
        super().start()
        self.feasible = [self.order[: i + 1] for i in range(len(self.order))]
        self.optimal = [FULL] * self.kv_heads
        self.marked: list[dict[str, set[int]]] = [{} for _ in range(self.kv_heads)]
        """Positions of given text that are special or punctuation."""
        self.slots = [0] * self.kv_heads
        self.text: set[int] = set()

    @property
    def chosen(self) -> list[int]:
        """Each head's place in eq. 2."""
        return [len(self.order) if policy == FULL else len(policy) - 1 for policy in self.optimal]

    # Section 3.2: which indices of a head's lists each policy keeps of the K and V of so many tokens.

    def special_tokens(self, tokens: list[int], first: int) -> set[int]:
        found = {i for i, token in enumerate(tokens) if token in self.special or first + i < self.sinks}
        for marker in self.markers:
            places = range(len(tokens) - len(marker) + 1)
            starts = [i for i in places if tuple(tokens[i : i + len(marker)]) == marker]
            found |= {i + j for i in starts for j in range(len(marker))}
        return found

    def punctuation_tokens(self, tokens: list[int], first: int) -> set[int]:
        return {i for i, token in enumerate(tokens) if token in self.punctuation}

    def mark(self, tokens: list[int], first: int) -> None:
        """Text is given from a position on: what of it is kept for what it is."""
        self.text |= set(range(first, first + len(tokens)))
        found = {"special": self.special_tokens(tokens, first), "punctuation": self.punctuation_tokens(tokens, first)}
        for marked in self.marked:
            for part, indices in found.items():
                marked[part] = marked.get(part, set()) | {first + i for i in indices}

    def of_prompt(self, h: int, policy: Policy) -> set[int]:
        marked = [self.marked[h][part] for part in policy if part in ("special", "punctuation")]
        return {i for i, position in enumerate(self.heads[h].positions) if any(position in part for part in marked)}

    def of_generation(self, h: int, policy: Policy) -> set[int]:
        head = self.heads[h]
        ids = [getattr(self, part) for part in policy if part in ("special", "punctuation")]
        return {
            i
            for i, (position, token) in enumerate(zip(head.positions, head.tokens, strict=True))
            if position not in self.text and any(token in part for part in ids)
        }

    def local_tokens(self, h: int, policy: Policy, length: int) -> set[int]:
        """The newest ones; kvjax's `recent` has one for the token being read."""
        wide = share(self.local, length) if "local" in policy else 0
        first = length - max(wide, int(self.recent) - 1)
        return {i for i, position in enumerate(self.heads[h].positions) if position >= first}

    def frequent_tokens(self, h: int, policy: Policy, length: int, others: Iterable[int]) -> set[int]:
        """By cumulative attention score; of equals the newest."""
        if "frequent" not in policy:
            return set()
        notes = self.heads[h].notes
        among = range(len(notes)) if self.frequent_among == "all" else others
        return set(sorted(among, key=lambda i: (-notes[i], -i))[: share(self.frequent, length)])

    # Algorithm 1: prompt encoding.

    def read(self, prompt):
        n = prompt.prompt_length
        self.mark(prompt.tokens, 0)
        for h, head in enumerate(self.heads):
            head.notes = [sum(matrix[:, i].sum() for matrix in prompt.probs[h]) for i in range(n)]
            attention = np.mean(prompt.probs[h], axis=0)
            for policy in self.feasible:  # from the cheapest on
                if self.threshold < 1 and self.distance(h, policy, attention) <= 1 - self.threshold:
                    self.optimal[h] = policy
                    break
            self.slots[h] = self.slots_of(h, n, n + prompt.horizon)

    def distance(self, h: int, policy: Policy, attention: np.ndarray) -> float:
        """Eq. 1 in total variation, a mean over the rows of A; row i is of i + 1 tokens."""
        n = len(attention)
        everywhere = self.of_prompt(h, policy)
        others = set(range(n)) - everywhere - self.local_tokens(h, policy, n)
        everywhere |= self.frequent_tokens(h, policy, n, others)
        total = 0.0
        for i, row in enumerate(attention):
            wide = share(self.local, i + 1) if "local" in policy else 0
            near = set(range(max(0, i + 1 - max(wide, int(self.recent), 1)), i + 1))
            kept = np.array([j in everywhere or j in near for j in range(n)])
            compressed = np.where(kept, row, 0.0)
            total += np.abs(row - compressed / compressed.sum()).sum() / 2
        return total / n

    def slots_of(self, h: int, n: int, end: int) -> int:
        """A fixed buffer for all that the policy may keep up to the text's end, and the token that is read."""
        policy = self.optimal[h]
        if policy == FULL:
            return end
        fixed = len(self.of_prompt(h, policy))
        fixed += self.spare_special * ("special" in policy)
        fixed += math.ceil(Fraction(str(self.spare_punctuation)) * (end - n)) * ("punctuation" in policy)

        def shares(length: int) -> int:
            frequent = share(self.frequent, length) * ("frequent" in policy)
            return frequent + max(share(self.local, length) * ("local" in policy), int(self.recent) - 1, 0)

        return min(end, fixed + max(shares(end), shares(end - 1) + 1))

    # Algorithm 2: token generation. f(K, V, C), of so many tokens.

    def compress(self, h: int, length: int) -> set[int]:
        policy, every = self.optimal[h], set(range(len(self.heads[h].positions)))
        if policy == FULL:
            return every
        kept = self.of_prompt(h, policy) | self.of_generation(h, policy) | self.local_tokens(h, policy, length)
        return kept | self.frequent_tokens(h, policy, length, every - kept)

    def keep(self, prompt):
        staying = []
        n = prompt.prompt_length
        if prompt.start > 0:
            self.mark(prompt.tokens, prompt.start)
        for h, head in enumerate(self.heads):
            kept = self.compress(h, n)
            if prompt.start == 0:  # a buffer gets one token at a time: what could never be filled is not set aside
                self.slots[h] = min(self.slots[h], len(kept) + prompt.horizon)
            else:  # text that outgrows the buffer: frequent tokens leave first, then the oldest, generated before given
                policy = self.optimal[h]
                for_good = kept if policy == FULL else self.of_prompt(h, policy) | self.local_tokens(h, policy, n)
                generated = self.of_generation(h, policy) - for_good
                rest = kept - for_good - generated
                frequent = sorted(rest, key=lambda i: (-head.notes[i], -i))
                ranked = [*sorted(for_good, reverse=True), *sorted(generated, reverse=True), *frequent]
                kept = set(ranked[: self.slots[h]])
            staying.append(sorted(kept))
        return staying

    def leaving(self, new):
        """The lists hold the new token and its attention, as in Algorithm 2, or not yet (kvjax's order, for turns)."""
        length = new.position + (0 if self.evicts_first else 1)
        for h, head in enumerate(self.heads):
            policy = self.optimal[h]
            if policy == FULL:
                continue
            self.retain(h, sorted(self.compress(h, length)))
            if len(head.positions) < self.slots[h]:
                continue
            # The buffer has no slot for the next token.
            local = self.local_tokens(h, policy, length)
            generated = self.of_generation(h, policy) - local
            frequent = set(range(len(head.positions))) - local - generated - self.of_prompt(h, policy)
            oldest = min(generated or range(len(head.positions)))
            weakest = min(frequent, key=lambda i: (head.notes[i], i), default=oldest)
            leaves = oldest if generated else weakest
            self.retain(h, [i for i in range(len(head.positions)) if i != leaves])
        return [None] * self.kv_heads

    def after(self, new, probs):
        for h, head in enumerate(self.heads):
            # The new token's score begins here.
            head.notes = [(note or 0.0) + sum(p[i] for p in probs[h]) for i, note in enumerate(head.notes)]
