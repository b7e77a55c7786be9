"""Eviction: one new token per row replaces the lowest-ranked slot of each head, in all buffers together."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention import static
from pallas_kernels.common import SUBLANES, padded
from pallas_kernels.op import Limit, Op, operation
from pallas_kernels.ranking import EvictionRules

WORDS = ("float32", "int32", "uint32")
WIDE = ("float32", "bfloat16", "int8", "uint8")
PLANES = 32768
"""Maximum numbers per head that the kernel holds of a buffer [b h c w] with slots along the lanes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Evict(Op[tuple[Int[Array, "b h"], Int[Array, "b h"], Any, Int[Array, "b h c"], Any]]):
    """Rank every slot, return the contents of the lowest, and write the new token there.

    Slots rank as in `pallas_kernels.ranking.rank`: expired (-inf) < empty < scores < protected < sinks (+inf). Among
    equal ranks the oldest is evicted first; slots beyond the limit are never selected. The update is in place if the
    caller donates `position` and `buffers`.

    Args:
        scores: importance of each slot; None to evict the oldest first.
        position: position of the token in each slot, -1 if empty.
        new_position: position of each row's new token; -1 for a row of padding, which writes nothing.
        buffers: other contents of the slots, a tree of arrays [b h c ...]: keys, values, statistics.
        added: the new token's contents, the same tree of arrays [b h ...].
        protection: sinks, recent window and limit of each head.
        keep: slots that are never evicted, or None.
        shrinks: True if live slots may be beyond the limit, as under policies whose budget decreases.
        pairs: True to return the old contents of `buffers` in the slots.
        how: see `pallas_kernels.op.How`. `xla` takes everything. `pallas` is for TPU; it takes c a multiple of 16 up to
            16384. Buffers [b h c] are of 32-bit numbers or bool. Buffers [b h c w] have w up to 256, of 32-bit numbers,
            bfloat16, int8 or uint8, if XLA stores w innermost (w a multiple of 128, or a small c). Otherwise they are
            of 32-bit numbers with w up to 16, and w * c up to 32768 with w rounded up to eights.

    Returns:
        The slots (c for rows of padding), their old contents (position, -1 if empty, and buffers [b h ...] or None),
        and the position and buffers with the new token.
    """

    scores: Float[Array, "b h c"] | None
    position: Int[Array, "b h c"]
    new_position: Int[Array, " b"]
    buffers: Any
    added: Any
    _: dataclasses.KW_ONLY
    protection: EvictionRules
    keep: Bool[Array, "b h c"] | None = None
    shrinks: bool = static(False)
    pairs: bool = static(True)

    name = "evict"
    backends = ("pallas_tpu",)
    in_place = MappingProxyType({"position": operator.itemgetter(3), "buffers": operator.itemgetter(4)})

    def limits(self, backend: str) -> Iterator[Limit]:
        kernel, c = self.module(backend), self.position.shape[2]
        yield c % kernel.UNIT == 0 and c <= 16384, f"c={c} slots are not a multiple of {kernel.UNIT} up to 16384"
        leaves = jax.tree.leaves(self.buffers)
        narrow = [leaf.dtype for leaf in leaves if leaf.ndim == 3 and leaf.dtype not in (*WORDS, "bool")]
        yield not narrow, f"a buffer [b h c] holds {narrow and narrow[0]}, not one of {', '.join(WORDS)}, bool"
        several = [leaf for leaf in leaves if leaf.ndim != 3]
        kinds = all(leaf.ndim == 4 and leaf.dtype in (*WIDE, *WORDS) for leaf in several)
        dtypes = ", ".join(dict.fromkeys(WIDE + WORDS))
        yield kinds, f"a buffer of several numbers per slot is not [b h c w] of {dtypes}"
        yield all(leaf.shape[3] <= 256 for leaf in several), "a buffer holds more than 256 numbers per slot"
        planes = [leaf for leaf in several if kernel.in_planes(leaf)]
        # Buffers with slots along the lanes are read and written as whole blocks: too much for keys and values.
        widths = [leaf.shape[3] for leaf in planes if leaf.dtype not in WORDS or leaf.shape[3] > 16]
        yield not widths, f"w={widths and widths[0]} numbers in each of c={c} slots lie slots-innermost on a TPU"
        large = [leaf.shape[3] for leaf in planes if padded(leaf.shape[3], SUBLANES) * c > PLANES]
        yield not large, f"w={large and large[0]} words, in eights, of c={c} slots are more than {PLANES}"

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        b, h, c = self.position.shape
        leaves = sorted(f"{leaf.dtype.name}{list(leaf.shape[3:])}" for leaf in jax.tree.leaves(self.buffers))
        scores = None if self.scores is None else self.scores.dtype.name
        settings = dict(h=h, scores=scores, buffers=",".join(leaves), keep=self.keep is not None, shrinks=self.shrinks)
        return dict(b=b, c=c), settings


evict = operation(Evict)
