"""RoPE of one token's queries and keys, with each head in a separate row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.attention import static
from pallas_kernels.common import LANES, SUBLANES
from pallas_kernels.op import Limit, Op, operation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RotateHeads(Op[tuple[Float[Array, "b _ _"], ...]]):
    """Rotate the first channels of one token's heads in pairs, for each row.

    On a TPU, projections put the channels of all heads into one row, and kernels need one row per head. XLA moves the
    heads and swaps their halves separately; `pallas` does both in one pass.

    Args:
        rotated: queries and keys, if any.
        cos, sin: cosines and sines of the angles, as `whole_widths` returns them.
        still: values, whose heads are moved without rotation.
        interleaved: rotates pairs (0, 1), (2, 3), ... instead of (0, w/2), (1, w/2 + 1), ...
        how: see `pallas_kernels.op.How`. `xla` takes everything. `pallas` is for TPU; it takes float32 and bfloat16, d
            = 128, halves of whole heads, n a multiple of 8, and b a multiple of 8, or of 16 in bfloat16.
    """

    rotated: Sequence[Float[Array, "b _ d"]]
    cos: Float[Array, "b w"]
    sin: Float[Array, "b w"]
    still: Sequence[Float[Array, "b _ e"]] = ()
    _: dataclasses.KW_ONLY
    interleaved: bool = static(False)

    name = "rope"
    backends = ("pallas_tpu",)

    @property
    def heads(self) -> list[Float[Array, "b _ _"]]:
        """Queries, keys and values."""
        return [*self.rotated, *self.still]

    def limits(self, backend: str) -> Iterator[Limit]:
        arrays, b = self.heads, len(self.cos)
        dtypes, heads, widths = ([x.dtype.name for x in arrays], *([x.shape[axis] for x in arrays] for axis in (1, 2)))
        yield (
            len({*dtypes}) == 1 and dtypes[0] in ("float32", "bfloat16") and self.cos.dtype.name == "float32",
            f"it takes heads all in float32 or all in bfloat16, and angles in float32, not {_listed(dtypes)} and "
            f"{self.cos.dtype}",
        )
        yield not self.interleaved, "pairs of neighbours are not halves of a head"
        yield {*widths} == {LANES}, f"d={_listed(widths)} is not {LANES}"
        yield self.cos.shape[1] == LANES, f"w={self.cos.shape[1]} of {LANES} channels are not whole heads"
        yield all(n % SUBLANES == 0 for n in heads), f"n={_listed(heads)} heads are not multiples of {SUBLANES}"
        kernel = self.module(backend)
        rows, needed = kernel.rows_of_block(arrays[0].dtype), kernel.block_bytes(arrays)
        yield b % rows == 0, f"b={b} rows are not a multiple of {rows}"
        yield needed <= kernel.VMEM_BYTES, f"n={_listed(heads)} heads of {rows} rows are too many at once"

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        heads, widths = (_listed([x.shape[axis] for x in self.heads]) for axis in (1, 2))
        settings = dict(n=heads, d=widths, w=self.cos.shape[-1], dtype=self.heads[0].dtype.name)
        return dict(b=len(self.cos)), settings | dict(still=len(self.still) > 0, interleaved=self.interleaved)


rope = operation(RotateHeads)


def _listed(numbers: Sequence[Any]) -> str:
    return ",".join(map(str, numbers))
