"""Eviction: one new token per row takes the slot of the least important one, in all buffers together."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import common
from pallas_kernels.evict import pallas_tpu, reference
from pallas_kernels.ranking import Protection

WORDS = ("float32", "int32", "uint32")
WIDE = ("float32", "bfloat16", "int8", "uint8")
PLANES = 32768
"""Maximum numbers per head that the kernel holds of a buffer [b h c w] with slots along the lanes."""


def evict(
    scores: Float[Array, "b h c"] | None,
    position: Int[Array, "b h c"],
    new_position: Int[Array, " b"],
    buffers: Any,
    added: Any,
    *,
    protection: Protection,
    keep: Bool[Array, "b h c"] | None = None,
    shrinks: bool = False,
    pairs: bool = True,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> tuple[Int[Array, "b h"], Int[Array, "b h"], Any, Int[Array, "b h c"], Any]:
    """Rank every slot, take the contents of the lowest, and write the new token there.

    Slots rank as in `pallas_kernels.ranking.rank`: expired (-inf) < empty < scores < protected < sinks (+inf). The
    oldest of equals comes first, slots beyond the limit never. The update is in place if the caller donates `position`
    and `buffers`.

    Args:
        scores: importance of each slot; None to evict the oldest first.
        position: position of the token in each slot, -1 if empty.
        new_position: position of each row's new token; -1 for a row of padding, which writes nothing.
        buffers: other contents of the slots, a tree of arrays [b h c ...]: keys, values, statistics.
        added: the new token's contents, the same tree of arrays [b h ...].
        protection: sinks, recent window and limit of each head.
        keep: slots that are never evicted, or None.
        shrinks: live slots may be beyond the limit, as for policies whose budget falls.
        pairs: whether to return what `buffers` held in the slots.
        implementation: `auto`, `xla` or `pallas`. `xla` takes everything. `pallas` is for TPU; it takes c a multiple of
            16 up to 16384. Buffers [b h c] are of 32-bit numbers or bool. Buffers [b h c w] have w up to 256, of 32-bit
            numbers, bfloat16, int8 or uint8, if XLA stores w innermost (w a multiple of 128, or a small c). Otherwise
            they are of 32-bit numbers with w up to 16, and w * c up to 32768 with w rounded up to eights. It compiles
            and has run in interpreters, never on a chip. There is no form for GPU.
        interpret: `True`, or `pltpu.InterpretParams()`, to run `pallas` without an accelerator.
        platform: target of compilation; None for that of `jax.set_mesh`, else of `jax.default_backend()`.

    Returns:
        The slots (c for rows of padding), their old contents (position, -1 if empty, and buffers [b h ...] or None),
        and the position and buffers with the new token.

    Raises:
        Unsupported: the requested implementation cannot run these arguments here.
        ValueError: the implementation is unknown.
    """
    limits = {"pallas": limit(position, buffers, common.pallas_form(platform))}
    arguments: dict[str, Any] = dict(protection=protection, keep=keep, shrinks=shrinks)
    asked = dict(scores=scores, position=position, new_position=new_position, buffers=buffers, added=added)
    b, h, c = position.shape
    leaves = sorted(f"{leaf.dtype.name}{list(leaf.shape[3:])}" for leaf in jax.tree.leaves(buffers))
    settings = dict(
        h=h,
        scores=None if scores is None else scores.dtype.name,
        buffers=",".join(leaves),
        keep=keep is not None,
        shrinks=shrinks,
    )
    task = common.Task(common.bucket("evict", dict(b=b, c=c), settings), evict, asked | arguments)
    chosen = common.choose("evict", implementation, limits, platform=platform, interpret=interpret, task=task)
    if chosen == "xla":
        return reference.evict(scores, position, new_position, buffers, added, pairs=pairs, **arguments)
    found = pallas_tpu.evict(scores, position, new_position, buffers, added, interpret=interpret, **arguments)
    return found if pairs else (*found[:2], None, *found[3:])


def limit(position: Array, buffers: Any, form: str) -> str | None:
    """Return what these arguments need that the Pallas kernel cannot do, or None."""
    c = position.shape[2]
    leaves = jax.tree.leaves(buffers)
    narrow = [leaf.dtype for leaf in leaves if leaf.ndim == 3 and leaf.dtype not in (*WORDS, "bool")]
    several = [leaf for leaf in leaves if leaf.ndim != 3]
    planes = [leaf for leaf in several if leaf.ndim == 4 and pallas_tpu.in_planes(leaf)]
    # Buffers with slots along the lanes are read and written as whole blocks: too much for keys and values.
    turned = [leaf.shape[3] for leaf in planes if leaf.dtype not in WORDS or leaf.shape[3] > 16]
    large = [leaf.shape[3] for leaf in planes if common.padded(leaf.shape[3], common.SUBLANES) * c > PLANES]
    kinds = all(leaf.ndim == 4 and leaf.dtype in (*WIDE, *WORDS) for leaf in several)
    return common.first_limit(
        (form == "tpu", "it is written for tpu alone"),
        (c % pallas_tpu.UNIT == 0 and c <= 16384, f"c={c} slots are not a multiple of {pallas_tpu.UNIT} up to 16384"),
        (not narrow, f"a buffer [b h c] holds {narrow and narrow[0]}, not one of {', '.join(WORDS)}, bool"),
        (kinds, f"a buffer of several numbers per slot is not [b h c w] of {', '.join(dict.fromkeys(WIDE + WORDS))}"),
        (all(leaf.shape[3] <= 256 for leaf in several), "a buffer holds more than 256 numbers per slot"),
        (not turned, f"w={turned and turned[0]} numbers in each of c={c} slots lie slots-innermost on a TPU"),
        (not large, f"w={large and large[0]} words, in eights, of c={c} slots are more than {PLANES}"),
    )
