"""RoPE of one token's queries and keys by its place, with each head in a separate row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.common import LANES, SUBLANES, Task, bucket, choose, first_limit, pallas_form
from pallas_kernels.operands import turn
from pallas_kernels.rotate import pallas_tpu


def rotate(
    turned: Sequence[Float[Array, "b n d"]],
    cos: Float[Array, "b w"],
    sin: Float[Array, "b w"],
    still: Sequence[Float[Array, "b n d"]] = (),
    *,
    interleaved: bool = False,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> tuple[Float[Array, "b n d"], ...]:
    """Rotate the first channels of one token's heads in pairs, for each row.

    Projections on a TPU leave the channels of all heads side by side, while kernels take a head per row. XLA moves the
    heads, and swaps the halves, in separate programs; `pallas` does both in one pass.

    Args:
        turned: queries and keys, if any.
        cos, sin: cosines and sines of the angles, as `whole_widths` returns them.
        still: values, whose heads are moved without rotation.
        interleaved: rotates pairs (0, 1), (2, 3), ... instead of (0, w/2), (1, w/2 + 1), ...
        implementation: `auto`, `xla` or `pallas`. `xla` takes everything. `pallas` is for TPU; it takes float32 and
            bfloat16, d = 128, halves of whole heads, n a multiple of 8, and b a multiple of 8, or of 16 in bfloat16.
            It compiles and has run in interpreters, never on a chip. There is no form for GPU.
        interpret: `True`, or `pltpu.InterpretParams()`, to run `pallas` without an accelerator.
        platform: target of compilation; None for that of `jax.set_mesh`, else of `jax.default_backend()`.

    Raises:
        Unsupported: the requested implementation cannot run these arguments here.
        ValueError: the implementation is unknown.
    """
    given = [*turned, *still]
    heads, widths = (_listed([x.shape[axis] for x in given]) for axis in (1, 2))
    settings = dict(n=heads, d=widths, w=cos.shape[-1], dtype=given[0].dtype.name)
    name = bucket("rotate", dict(b=len(cos)), settings | dict(still=len(still) > 0, interleaved=interleaved))
    arguments = dict(turned=tuple(turned), cos=cos, sin=sin, still=tuple(still), interleaved=interleaved)
    limits = {"pallas": limit(turned, cos, still, interleaved, platform)}
    task = Task(name, rotate, arguments)
    if choose("rotate", implementation, limits, platform=platform, interpret=interpret, task=task) == "pallas":
        return pallas_tpu.rotate(turned, cos, sin, still, interpret=interpret)
    return (*(turn(x, cos[:, None], sin[:, None], interleaved) for x in turned), *still)


def limit(
    turned: Sequence[Array], cos: Array, still: Sequence[Array], interleaved: bool, platform: str | None
) -> str | None:
    """Return what these arguments need that the Pallas kernel cannot do, or None."""
    given, b = [*turned, *still], len(cos)
    dtypes, heads, widths = ([x.dtype.name for x in given], *([x.shape[axis] for x in given] for axis in (1, 2)))
    rows = pallas_tpu.rows_of_block(given[0].dtype)
    return first_limit(
        (pallas_form(platform) == "tpu", "it is written for tpu alone"),
        (
            len({*dtypes}) == 1 and dtypes[0] in ("float32", "bfloat16") and cos.dtype.name == "float32",
            f"it takes heads all in float32 or all in bfloat16, and angles in float32, not {_listed(dtypes)} and "
            f"{cos.dtype}",
        ),
        (not interleaved, "pairs of neighbours are not halves of a head"),
        ({*widths} == {LANES}, f"d={_listed(widths)} is not {LANES}"),
        (cos.shape[1] == LANES, f"w={cos.shape[1]} of {LANES} channels are not whole heads"),
        (all(n % SUBLANES == 0 for n in heads), f"n={_listed(heads)} heads are not multiples of {SUBLANES}"),
        (b % rows == 0, f"b={b} rows are not a multiple of {rows}"),
        (
            pallas_tpu.block_bytes(given) <= pallas_tpu.VMEM_BYTES,
            f"n={_listed(heads)} heads of {rows} rows are too many at once",
        ),
    )


def _listed(numbers: Sequence[Any]) -> str:
    return ",".join(map(str, numbers))
