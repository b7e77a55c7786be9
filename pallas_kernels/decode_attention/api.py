"""Decode attention: one new token per row over the slots of a bounded cache."""

from __future__ import annotations

import importlib
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import common, noise
from pallas_kernels.attention import AttentionSpec, Partial, merge
from pallas_kernels.decode_attention import reference
from pallas_kernels.decode_attention.types import Decoded, Gumbel, LowRank, Places, Sinks
from pallas_kernels.operands import Operand, Quantised, Turned, cut

DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))

Limits = list[tuple[bool, str]]
"""Pairs of whether arguments are within a limit, and the text to report if they are not."""


def decode_attention(
    q: Float[Array, "b h g d"],
    k: Operand,
    v: Operand,
    position: Int[Array, "b h c"],
    query_position: Int[Array, " b"],
    spec: AttentionSpec,
    *,
    places: Places | None = None,
    low_rank: LowRank | None = None,
    sinks: Sinks | None = None,
    scores: str | Gumbel | None = None,
    implementation: str = "auto",
    interpret: Any = False,
    platform: str | None = None,
) -> Decoded:
    """Compute softmax attention over slots in one pass over keys and values, with the scores that policies request.

    Args:
        q: queries of one token per row; the g queries of a group share one KV head.
        k: keys [b h c d], in any order: an array, codes, or keys that are rotated when they are read.
        v: values [b h c e] of any width: an array, or codes. Codes are never decoded, except for queries of float64.
            `xla` on CPU and TPU, and `pallas` on TPU, split queries and weights into two digits of 8 bits; their error
            is about 1e-4 of the largest result.
        position: position of the token in each slot, -1 if empty; slots after the query's position are masked, too.
        query_position: position of each row's token; -1 for a row of padding, which attends to nothing.
        spec: the layer's scale, soft cap, window and slopes.
        places: model positions of the query [b h] and the keys [b h c], if they are not `position`; only slopes use
            them.
        low_rank: low-rank attention to evicted tokens (LESS, equation 3), or None.
        sinks: first tokens that use another query than the rest, or that slopes place nearer, or None.
        scores: probabilities to return: of `each` query head, their `sum` over the group, or a `Gumbel` (Keyformer,
            equation 9, summed over the group); None for none.
        implementation: `auto`, `xla`, `pallas`, `triton` or `mosaic`; `pallas_kernels.common.choose` explains `auto`.
            `xla` takes everything. The others take queries of float32 and bfloat16 and arrays of the same dtype, g up
            to 16, c up to 65536 and R up to 128. They take no rotated keys, and no places together with slopes. They
            take up to 128 sinks on TPU; on GPU they take sinks only without scores. `pallas` on TPU takes d and e that
            are multiples of 8 up to 256 (of 16 with four bits). `pallas` on GPU takes powers of two from 16 to 256
            (from 32 with four bits), and less than 2^31 numbers in k and in v. `triton` is for GPU, needs jax-triton,
            and takes any d and e up to 256, but neither gaussian noise nor codes of four bits. `mosaic` is for Hopper,
            and takes queries and arrays of bfloat16, d and e that are multiples of 64 up to 256, and c that is a
            multiple of 8. All compile for their chips and have run in interpreters, none on a chip.
        interpret: `True`, or `pltpu.InterpretParams()`, to run `pallas` without an accelerator; `True`, or the
            parameters of jax's interpreter for Mosaic GPU, to run `mosaic`.
        platform: target of compilation; None for that of `jax.set_mesh`, else of `jax.default_backend()`.

    Raises:
        Unsupported: the requested implementation cannot run these arguments here.
        ValueError: `scores` or `implementation` is unknown, or values are `Turned`.
    """
    if isinstance(scores, Gumbel):
        if scores.noise not in noise.KINDS:
            raise ValueError(f"noise={scores.noise!r} is not one of {', '.join(noise.KINDS)}.")
    elif scores not in (None, "each", "sum"):
        raise ValueError(f"scores={scores!r} is not None, 'each', 'sum' or a Gumbel.")
    refuse_turned(v)
    limits = {
        "pallas": limit(q, k, v, spec, places, low_rank, sinks, scores, common.pallas_form(platform)),
        "triton": triton_limit(q, k, v, spec, places, low_rank, sinks, scores),
        "mosaic": mosaic_limit(q, k, v, spec, places, low_rank, sinks, scores),
    }
    arguments: dict[str, Any] = dict(low_rank=low_rank, scores=scores)
    arrays = dict(q=q, k=k, v=v, position=position, query_position=query_position)
    asked = arrays | dict(spec=spec, places=places, sinks=sinks)
    settings: dict[str, Any] = dict(
        operand_settings(q, k, v, spec),
        scores=scores.noise if isinstance(scores, Gumbel) else scores,
        rank=None if low_rank is None else low_rank.features.shape[-1],
        sinks=sinks is not None,
    )
    sizes = dict(b=q.shape[0], c=k.shape[2])
    task = common.Task(common.bucket("decode_attention", sizes, settings), decode_attention, asked | arguments)
    chosen = common.choose(
        "decode_attention", implementation, limits, platform=platform, interpret=interpret, task=task
    )
    if chosen == "xla":
        arguments |= dict(places=places, sinks=sinks, platform=common.platform_of(platform))
        return reference.decode_attention(q, k, v, position, query_position, spec, **arguments)
    # A kernel is imported when it runs: Pallas imports slowly, and jax-triton may be missing.
    if chosen in ("pallas", "mosaic"):
        arguments["interpret"] = interpret
    file = {"pallas": f"pallas_{common.pallas_form(platform)}", "mosaic": "mosaic_gpu", "triton": "triton"}[chosen]
    form = importlib.import_module(f"pallas_kernels.decode_attention.{file}")
    if file == "pallas_tpu":
        return form.decode_attention(q, k, v, position, query_position, spec, sinks=sinks, **arguments)
    if sinks is None:
        return form.decode_attention(q, k, v, position, query_position, spec, **arguments)
    # These kernels take one query per head, so sinks are a separate part.
    first = position[:, :, : sinks.count]
    here = first < sinks.count
    rest = position.at[:, :, : sinks.count].set(jnp.where(here, -1, first))
    found = form.decode_attention(q, k, v, rest, query_position, spec, **arguments)
    near_k, near_v = (cut(x, 0, first.shape[2], 2) for x in (k, v))
    held = jnp.where(here, first, -1)
    places = jnp.broadcast_to(query_position[:, None], held.shape[:2]), sinks.seen(held)
    near = decode_attention(
        sinks.q, near_k, near_v, held, query_position, spec, places=places, implementation="xla", platform=platform
    )
    whole = merge(*(Partial(part.out[:, :, :, None], part.lse[..., None]) for part in (found, near)))
    return Decoded(whole.out[:, :, :, 0], whole.lse[..., 0], None)


def limit(
    q: Array,
    k: Operand,
    v: Operand,
    spec: AttentionSpec,
    places: Places | None,
    low_rank: LowRank | None,
    sinks: Sinks | None,
    scores: str | Gumbel | None,
    form: str,
) -> str | None:
    """Return what these arguments need that the Pallas kernel for `tpu` or `gpu` cannot do, or None."""
    of_sinks = sinks_limit(sinks) if form == "tpu" else _one_query(sinks, scores)
    limits = [*operand_limits(q, k, v, spec, places), *_limits(k, low_rank), of_sinks]
    return common.first_limit(*limits, *width_limits(k, v, form))


def triton_limit(
    q: Array,
    k: Operand,
    v: Operand,
    spec: AttentionSpec,
    places: Places | None,
    low_rank: LowRank | None,
    sinks: Sinks | None,
    scores: str | Gumbel | None,
) -> str | None:
    """Return what these arguments need that the Triton kernel cannot do, or None."""
    gaussian = isinstance(scores, Gumbel) and scores.noise == "gaussian"
    four = any(isinstance(x, Quantised) and x.bits == 4 for x in (k, v))
    return common.first_limit(
        *operand_limits(q, k, v, spec, places),
        *_limits(k, low_rank),
        *((x.shape[-1] <= 256, f"{name}={x.shape[-1]} is more than 256") for name, x in (("d", k), ("e", v))),
        (not four, "it has no codes of four bits"),
        (not gaussian, "it has no gaussian noise"),
        _one_query(sinks, scores),
    )


def mosaic_limit(
    q: Array,
    k: Operand,
    v: Operand,
    spec: AttentionSpec,
    places: Places | None,
    low_rank: LowRank | None,
    sinks: Sinks | None,
    scores: str | Gumbel | None,
) -> str | None:
    """Return what these arguments need that the Mosaic GPU kernel cannot do, or None."""
    c = k.shape[2]
    widths = (("d", k.shape[-1]), ("e", v.shape[-1]))
    return common.first_limit(
        *operand_limits(q, k, v, spec, places),
        *_limits(k, low_rank),
        (not isinstance(k, Quantised) and not isinstance(v, Quantised), "it has no codes"),
        (q.dtype == jnp.bfloat16, f"q, k, v are of {q.dtype}, and it multiplies bfloat16 alone"),
        *((x % 64 == 0 and x <= 256, f"{name}={x} is not a multiple of 64 up to 256") for name, x in widths),
        (c % 8 == 0, f"c={c} slots are not a multiple of 8"),
        _one_query(sinks, scores),
    )


def refuse_turned(v: Operand) -> None:
    """Raise an error if values are `Turned`, which only keys can be."""
    if isinstance(v, Turned):
        raise ValueError("v is Turned, but only keys are rotated; give an array or Quantised.")


def operand_settings(q: Array, k: Operand, v: Operand, spec: AttentionSpec) -> dict[str, Any]:
    """Return the settings that separate benchmark verdicts on attention over slots or pages."""
    _, h, g, d = q.shape
    numbers = dict(dtype=q.dtype.name, keys=common.numbers_of(k), values=common.numbers_of(v))
    return dict(h=h, g=g, d=d, e=v.shape[-1], **numbers, **spec.described())


def operand_limits(q: Array, k: Operand, v: Operand, spec: AttentionSpec, places: Any) -> Limits:
    """Return the limits that all kernels share, for slots or for pages."""
    g, arrays = q.shape[2], [x for x in (q, k, v) if not isinstance(x, Quantised | Turned)]
    same = q.dtype in DTYPES and all(x.dtype == q.dtype for x in arrays)
    dtypes = ", ".join(str(x.codes.dtype if isinstance(x, Quantised) else x.dtype) for x in (q, *arrays[1:]))
    return [
        (not isinstance(k, Turned), "keys are rotated when they are read (Turned)"),
        (spec.slopes is None or places is None, "places that are not positions, together with slopes"),
        (same, f"{'q, k, v'[: 3 * len(arrays) - 2]} of {dtypes} are not all float32 or all bfloat16"),
        (g <= 16, f"g={g} query heads share a KV head, more than 16"),
    ]


def width_limits(k: Operand, v: Operand, form: str) -> Limits:
    """Return the limits of a Pallas kernel for `tpu` or `gpu` on the widths of keys and values."""
    found: Limits = []
    for name, x, operand in (("d", "k", k), ("e", "v", v)):
        width, four = operand.shape[-1], isinstance(operand, Quantised) and operand.bits == 4
        if form == "tpu":
            unit = 16 if four else 8
            within = width <= 256 and width % unit == 0
            found.append((within, f"{name}={width} is not a multiple of {unit} up to 256"))
        else:
            least = 32 if four else 16
            within = least <= width <= 256 and width & (width - 1) == 0
            found.append((within, f"{name}={width} is not a power of two from {least} to 256"))
            numbers = math.prod(operand.shape)
            found.append((numbers < 2**31, f"{x} holds {numbers} numbers, more than 32 bits can count"))
    return found


def sinks_limit(sinks: Sinks | None) -> tuple[bool, str]:
    """Return the limit of the kernels for TPU on the number of sinks."""
    count = 0 if sinks is None else sinks.count
    return count <= common.LANES, f"{count} sinks are more than {common.LANES}"


def _one_query(sinks: Sinks | None, scores: str | Gumbel | None) -> tuple[bool, str]:
    return sinks is None or scores is None, "scores of slots where sinks see a query of their own"


def _limits(k: Operand, low_rank: LowRank | None) -> Limits:
    c, features = k.shape[2], 1 if low_rank is None else low_rank.features.shape[-1]
    return [
        (c <= 65536, f"c={c} slots are more than 65536"),
        (features <= 128, f"R={features} features are more than 128"),
    ]
