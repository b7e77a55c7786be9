"""Selection of the token whose packed code is farthest from the query's (LSH-E, arXiv 2412.16187, Algorithm 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jaxtyping import Array, Bool, Int, UInt32

from pallas_kernels.op import Limit, Op, operation
from pallas_kernels.ranking import EvictionRules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class HammingVictim(Op[Int[Array, "b h"]]):
    """Return the slot whose code differs in most bits from those of its query group, summed over the group.

    Empty slots come first, then the farthest, and among equal distances the oldest. Protected slots come last. Slots
    beyond the limit are never selected.

    Args:
        query: codes of the g queries of a group, 32 bits to a word.
        codes: codes of the slots' keys, a buffer for each of the w words.
        position: position of the token in each slot, -1 if empty.
        new_position: position of each row's new token, for the recent window.
        protection: sinks, recent window and limit of each head.
        keep: slots that are never evicted, or None.
        how: see `pallas_kernels.op.How`. `xla` takes everything. `pallas` is for TPU; it takes c up to 16384, g * w up
            to 64 and w * c up to 32768.
    """

    query: UInt32[Array, "b h g w"]
    codes: Sequence[UInt32[Array, "b h c"]]
    position: Int[Array, "b h c"]
    new_position: Int[Array, " b"]
    _: dataclasses.KW_ONLY
    protection: EvictionRules
    keep: Bool[Array, "b h c"] | None = None

    name = "hamming"
    backends = ("pallas_tpu",)

    def limits(self, backend: str) -> Iterator[Limit]:
        (groups, words), c = self.query.shape[2:], self.position.shape[2]
        yield c <= 16384, f"c={c} slots are more than 16384"
        yield from words_limits(groups, words, c)

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        b, h, groups, words = self.query.shape
        return dict(b=b, c=self.position.shape[2]), dict(h=h, g=groups, words=words, keep=self.keep is not None)


hamming = operation(HammingVictim)


def words_limits(groups: int, words: int, c: int) -> Iterator[Limit]:
    """Yield the kernels' limits on codes of this many words."""
    yield groups * words <= 64, f"g={groups} queries of w={words} words are more than 64 words"
    yield words * c <= 32768, f"c={c} codes of w={words} words are more than 32768 words"
