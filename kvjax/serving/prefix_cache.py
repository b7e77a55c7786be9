"""Beginnings of texts that have been read, for others that begin alike."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.interpreters import partial_eval

from kvjax.cache.memory import allocated_bytes, device_bytes
from kvjax.models.decoder import Weights
from kvjax.policies.policy import Policy
from kvjax.serving.batch import Text, read

Key = bytes


class Snapshots:
    """Texts by what their reading depended on; the one that was wanted longest ago leaves first.

    Args:
        limit: bytes that they may take together, copies on other devices not counted; 0 for none.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes, self.device_bytes = limit, 0, 0
        self._held: collections.OrderedDict[Key, tuple[Text, int, int]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def put(self, key: Key, text: Text) -> None:
        """Keep a text, which is not copied; one that alone is too large is not kept."""
        taken = text.state.storage, text.seen
        size, here = allocated_bytes(taken), device_bytes(taken)
        if key in self._held or size > self.limit:
            return
        self._held[key] = text, size, here
        self.bytes += size
        self.device_bytes += here
        while self.bytes > self.limit:
            _, (_, size, here) = self._held.popitem(last=False)
            self.bytes -= size
            self.device_bytes -= here

    def longest(self, keys: Sequence[Key]) -> tuple[int, Text | None]:
        """Which of a text's beginnings, given from the shortest on, is the longest that is held, from 1; 0 for none.

        The shorter ones count as wanted after the longer ones, for more texts begin with them.
        """
        found: tuple[int, Text | None] = (0, None)
        for number, key in reversed(list(enumerate(keys, 1))):
            if key in self._held:
                found = found if found[0] else (number, self._held[key][0])
                self._held.move_to_end(key)
        return found

    def clear(self) -> None:
        """Keep nothing."""
        self._held.clear()
        self.bytes = self.device_bytes = 0


def beginnings(depends: bytes, tokens: Sequence[int], chunk: int) -> list[Key]:
    """Keys of a text after each whole chunk of it, but for one that its last token is in.

    Args:
        depends: what the reading depends on beside the tokens.
        tokens: of the text.
        chunk: tokens that are read at once.
    """
    known, keys = hashlib.sha256(depends), list[Key]()
    ids = np.asarray(tokens, np.int32)
    for start in range(0, len(ids) - chunk, chunk):
        known.update(ids[start : start + chunk].tobytes())
        keys.append(known.digest())
    return keys


def dependencies(weights: Weights, policy: Policy, text: Text, chunk: int) -> frozenset[str]:
    """What the reading of a text depends on, of its `seed`, `horizon` and `end`.

    Most policies look at none of them, so that texts of other lengths and seeds may share their beginnings.
    """
    names = "seed", "horizon", "end"
    tokens, lengths = np.zeros((1, chunk), np.int32), np.ones(1, np.int32)

    def reading(*fields: jax.Array) -> object:
        known = text.state.replace(**dict(zip(names, fields, strict=True)))
        after, _ = read(weights, policy, text.replace(state=known), tokens, lengths)
        return after.state.storage

    program = jax.make_jaxpr(reading)(*(getattr(text.state, name) for name in names)).jaxpr
    _, used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    return frozenset(name for name, is_used in zip(names, used, strict=True) if is_used)
