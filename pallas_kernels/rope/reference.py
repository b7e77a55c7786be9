"""RoPE of one token's queries and keys in plain XLA."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.op import Options
from pallas_kernels.operands import turn
from pallas_kernels.rope.api import RotateHeads


def rope(x: RotateHeads, _: Options) -> tuple[Float[Array, "b n d"], ...]:
    return (*(turn(heads, x.cos[:, None], x.sin[:, None], x.interleaved) for heads in x.rotated), *x.still)
