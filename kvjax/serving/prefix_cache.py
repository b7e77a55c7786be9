"""Prefix cache: states of prompts after whole chunks, for other prompts with the same prefix."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from kvjax.cache.buffers import allocated_bytes, device_bytes
from kvjax.inference.decoder import Decoder
from kvjax.serving.batch import Text, read
from kvjax.utils.dependence import depends_on

Key = bytes


class PrefixCache:
    """LRU cache of prefilled prefixes, keyed by all inputs that their states depend on.

    Args:
        limit: maximal bytes of all prefixes, not counting copies on other devices; 0 to store none.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes, self.device_bytes = limit, 0, 0
        self._entries: collections.OrderedDict[Key, tuple[Text, int, int]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: Key, text: Text) -> None:
        """Store a text without copying it, unless it is larger than the limit."""
        arrays = text.cache.memory, text.token_mask
        size, device_size = allocated_bytes(arrays), device_bytes(arrays)
        if key in self._entries or size > self.limit:
            return
        self._entries[key] = text, size, device_size
        self.bytes += size
        self.device_bytes += device_size
        while self.bytes > self.limit:
            _, (_, size, device_size) = self._entries.popitem(last=False)
            self.bytes -= size
            self.device_bytes -= device_size

    def longest(self, keys: Sequence[Key]) -> tuple[int, Text | None]:
        """Find the longest stored prefix among `keys`, sorted from the shortest; return its number from 1, or 0.

        Shorter prefixes count as used more recently than longer ones, because more texts begin with them.
        """
        match: tuple[int, Text | None] = (0, None)
        for number, key in reversed(list(enumerate(keys, 1))):
            if key in self._entries:
                match = match if match[0] else (number, self._entries[key][0])
                self._entries.move_to_end(key)
        return match

    def clear(self) -> None:
        """Drop all prefixes."""
        self._entries.clear()
        self.bytes = self.device_bytes = 0


def prefix_keys(depends: bytes, tokens: Sequence[int], chunk: int) -> list[Key]:
    """Return the key of a text after each whole chunk, except a chunk with the last token.

    `depends` are the bytes of all other inputs that the state depends on.
    """
    hasher, keys = hashlib.sha256(depends), list[Key]()
    ids = np.asarray(tokens, np.int32)
    for start in range(0, len(ids) - chunk, chunk):
        hasher.update(ids[start : start + chunk].tobytes())
        keys.append(hasher.digest())
    return keys


def dependencies(decoder: Decoder, text: Text, chunk: int) -> frozenset[str]:
    """Return which of `seed`, `horizon`, `end` and `rope_length` affect the state of a text after prefill.

    Most policies use none of them, so texts with other lengths and seeds can share prefixes.
    """
    tokens, lengths = np.zeros((1, chunk), np.int32), np.ones(1, np.int32)

    def reading(**fields: jax.Array) -> object:
        cache = text.cache.with_caches([each.replace(**fields) for each in text.cache.caches])
        after, _ = read(decoder, text.replace(cache=cache), tokens, lengths)
        return after.cache.memory

    names = ("seed", "horizon", "end", "rope_length")
    return frozenset(depends_on(reading, {name: getattr(text.cache, name) for name in names}))
