"""A decode step over slots: the new token takes the least important one, and its queries attend to all of them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import common, noise
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import Unsupported
from pallas_kernels.decode_attention import Gumbel, Sinks, decode_attention
from pallas_kernels.decode_attention.api import (
    operand_limits,
    operand_settings,
    refuse_turned,
    sinks_limit,
    width_limits,
)
from pallas_kernels.decode_attention.kernel_parts import stored
from pallas_kernels.decode_step import reference
from pallas_kernels.decode_step.types import Hashed, Stepped
from pallas_kernels.evict import evict
from pallas_kernels.hamming import hamming
from pallas_kernels.hamming.api import words_limits
from pallas_kernels.operands import Operand
from pallas_kernels.ranking import Protection


def decode_step(
    standing: Float[Array, "b h c"] | Hashed | None,
    position: Int[Array, "b h c"],
    new_position: Int[Array, " b"],
    k: Operand,
    v: Operand,
    buffers: Any,
    added: tuple[Float[Array, "b h d"], Float[Array, "b h e"], Any],
    q: Float[Array, "b h g d"],
    spec: AttentionSpec,
    *,
    protection: Protection,
    keep: Bool[Array, "b h c"] | None = None,
    shrinks: bool = False,
    pairs: bool = False,
    sinks: Sinks | None = None,
    scores: str | Gumbel | None = None,
    adds: bool = False,
    rounds: bool = False,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> Stepped:
    """Run exactly `evict`, then `decode_attention`, in one pass over keys and values.

    The update is in place if the caller donates `position`, `k`, `v`, `buffers`, and the written parts of `standing`.

    Args:
        standing: importance of each slot before the step: numbers, or codes that rank slots by their distance from the
            queries' codes (`hamming`); None to evict the oldest first.
        position: position of the token in each slot, -1 if empty.
        new_position: position of each row's new token; -1 for a row of padding, which writes and attends to nothing.
        k: keys [b h c d] of the slots: an array, or codes.
        v: values [b h c e].
        buffers: other contents of the slots, a tree of arrays [b h c ...], without the codes of `standing`.
        added: the new token's key and value, which are quantised here if the slots' are, and its buffers [b h ...].
        q: the new token's queries; the g queries of a group share one KV head.
        spec: the layer's scale, soft cap, window and slopes.
        protection: sinks, recent window and limit of each head.
        keep: slots that are never evicted, or None.
        shrinks: live slots may be beyond the limit, as for policies whose budget falls.
        pairs: whether to return the evicted pair.
        sinks: first tokens that use another query, as in `decode_attention`, or None.
        scores: as in `decode_attention`: `each`, `sum`, a `Gumbel`, or None.
        adds: whether to return sums added to `standing`, in which the new token starts at 0.
        rounds: whether to return attention's output in the queries' dtype, if nothing else is merged with it.
        implementation: `auto`, `xla` or `pallas`. `xla` takes everything. `pallas` is for TPU; it takes what both
            kernels that it replaces take, c a multiple of 16 (of 128 where XLA stores slots innermost), and blocks
            that fit in VMEM. It compiles and has run in interpreters, never on a chip. There is no form for GPU.
        interpret: `True`, or `pltpu.InterpretParams()`, to run `pallas` without an accelerator.
        platform: target of compilation; None for that of `jax.set_mesh`, else of `jax.default_backend()`.

    Raises:
        Unsupported: the requested implementation cannot run these arguments here.
        ValueError: `scores` or `implementation` is unknown, values are `Turned`, or `adds` is set without sums or
            without numbers of float32 in `standing`.
    """
    kinds = noise.KINDS if isinstance(scores, Gumbel) else ("sum", "each", None)
    kind = scores.noise if isinstance(scores, Gumbel) else scores
    if kind not in kinds:
        raise ValueError(f"scores={scores!r} is not None, 'each', 'sum' or a Gumbel with a noise of `noise.KINDS`.")
    hashed, held = (standing, None) if isinstance(standing, Hashed) else (None, standing)
    if adds and (scores in (None, "each") or held is None or held.dtype != jnp.float32):
        onto = type(standing).__name__ if held is None else held.dtype.name
        raise ValueError(f"adds=True adds sums to standing in float32, not scores={scores!r} to {onto}; leave it out.")
    refuse_turned(v)
    limits = {"pallas": limit(q, k, v, spec, sinks, scores, common.pallas_form(platform), hashed)}
    arguments: dict[str, Any] = dict(protection=protection, keep=keep, shrinks=shrinks, pairs=pairs)
    arguments |= dict(sinks=sinks, scores=scores, adds=adds, rounds=rounds)
    arrays = (standing, position, new_position, k, v, buffers, added, q, spec)
    names = ("standing", "position", "new_position", "k", "v", "buffers", "added", "q", "spec")
    given = dict(zip(names, arrays, strict=True)) | arguments
    task = common.Task(_bucket(q, k, v, spec, sinks, scores, hashed), decode_step, given)
    chosen = common.choose("decode_step", implementation, limits, platform=platform, interpret=interpret, task=task)
    if isinstance(implementation, common.Survey):  # also records the two calls that are made if one pass does not win
        how: dict[str, Any] = dict(implementation=implementation, platform=platform)
        bounds: dict[str, Any] = dict(protection=protection, keep=keep)
        if hashed is not None:
            hamming(hashed.hashing.of_queries(), hashed.codes, position, new_position, **bounds, **how)
        else:
            evict(held, position, new_position, (k, v, buffers), added, shrinks=shrinks, **bounds, **how)
        decode_attention(q, k, v, position, new_position, spec, sinks=sinks, scores=scores, **how)
    if chosen == "xla":
        return reference.decode_step(*arrays, **arguments, platform=common.platform_of(platform))
    from pallas_kernels.decode_step import pallas_tpu  # slow to import

    return pallas_tpu.decode_step(*arrays, **arguments, interpret=interpret)


def one_pass(
    q: Array,
    k: Operand,
    v: Operand,
    spec: AttentionSpec,
    sinks: Sinks | None,
    scores: str | Gumbel | None,
    hashed: Hashed | None = None,
    *,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> bool:
    """Return whether `decode_step` is one kernel for these arguments here; if not, two calls leave more choice."""
    limits = {"pallas": limit(q, k, v, spec, sinks, scores, common.pallas_form(platform), hashed)}
    if isinstance(implementation, common.Survey):
        implementation = "pallas"
    task = common.Task(_bucket(q, k, v, spec, sinks, scores, hashed), decode_step, {})
    try:
        chosen = common.choose("decode_step", implementation, limits, platform=platform, interpret=interpret, task=task)
    except Unsupported:
        return False
    return chosen == "pallas"


def _bucket(
    q: Array,
    k: Operand,
    v: Operand,
    spec: AttentionSpec,
    sinks: Sinks | None,
    scores: str | Gumbel | None,
    hashed: Hashed | None,
) -> str:
    settings = operand_settings(q, k, v, spec)
    settings |= dict(scores=scores.noise if isinstance(scores, Gumbel) else scores, sinks=sinks is not None)
    if hashed is not None:
        settings["bits"] = hashed.hashing.planes.shape[-2]
    return common.bucket("decode_step", dict(b=q.shape[0], c=k.shape[2]), settings)


def limit(
    q: Array,
    k: Operand,
    v: Operand,
    spec: AttentionSpec,
    sinks: Sinks | None,
    scores: str | Gumbel | None,
    form: str,
    hashed: Hashed | None = None,
) -> str | None:
    """Return what these arguments need that the Pallas kernel cannot do, or None."""
    refused = common.first_limit(
        (form == "tpu", "it is written for tpu alone"),
        *operand_limits(q, k, v, spec, None),
        *width_limits(k, v, "tpu"),
        sinks_limit(sinks),
    )
    if refused is not None:
        return refused
    from pallas_kernels.decode_step import pallas_tpu

    c, planes = k.shape[2], () if hashed is None else hashed.hashing.planes.shape
    words = 0 if hashed is None else len(hashed.codes)
    unit = math.lcm(*(pallas_tpu.unit(stored(x)[0]) for x in (k, v)))
    needed, most = (
        pallas_tpu.block_bytes(q, k, v, scores, planes[-2] if planes else 0),
        pallas_tpu.VMEM_BYTES * pallas_tpu.room(),
    )
    return common.first_limit(
        (len(planes) < 4, f"it hashes by the same planes in all rows, not by {list(planes)} [b h bits d]"),
        *words_limits(q.shape[2], words, c),
        (c % unit == 0 and c <= 16384, f"c={c} slots are not a multiple of {unit} up to 16384"),
        (needed <= most, f"its blocks take {needed} bytes of the chip's memory, not {most}"),
    )
