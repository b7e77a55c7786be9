"""A decode step over slots: the new token replaces the lowest-ranked one, and its queries attend to all of them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import noise
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import Survey, Unsupported, platform_of
from pallas_kernels.decode_attention import Gumbel, Sinks
from pallas_kernels.decode_attention.api import (
    DecodeAttention,
    kind_of,
    operand_limits,
    operand_settings,
    refuse_turned,
    sinks_limit,
    width_limits,
)
from pallas_kernels.decode_attention.kernel_parts import stored
from pallas_kernels.decode_step import reference
from pallas_kernels.decode_step.types import Hashed, Stepped
from pallas_kernels.evict.api import Evict
from pallas_kernels.hamming.api import Hamming, words_limits
from pallas_kernels.op import Limit, Op, Options
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
        added: the new token's key and value, which are quantized here if the slots' are, and its buffers [b h ...].
        q: the new token's queries; the g queries of a group share one KV head.
        spec: the layer's scale, soft cap, window and slopes.
        protection: sinks, recent window and limit of each head.
        keep: slots that are never evicted, or None.
        shrinks: True if live slots may be beyond the limit, as under policies whose budget decreases.
        pairs: True to return the evicted pair.
        sinks: first tokens that use another query, as in `decode_attention`, or None.
        scores: as in `decode_attention`: `each`, `sum`, a `Gumbel`, or None.
        adds: True to return `standing` with the sums added, starting at 0 for the new token.
        rounds: True to return attention's output in the queries' dtype, if nothing else is merged with it.
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
    if kind_of(scores) not in (noise.KINDS if isinstance(scores, Gumbel) else ("sum", "each", None)):
        raise ValueError(f"scores={scores!r} is not None, 'each', 'sum' or a Gumbel with a noise of `noise.KINDS`.")
    held = None if isinstance(standing, Hashed) else standing
    if adds and (scores in (None, "each") or held is None or held.dtype != jnp.float32):
        onto = type(standing).__name__ if held is None else held.dtype.name
        raise ValueError(f"adds=True adds sums to standing in float32, not scores={scores!r} to {onto}; leave it out.")
    refuse_turned(v)
    step = DecodeStep(
        standing,
        position,
        new_position,
        k,
        v,
        buffers,
        added,
        q,
        spec,
        protection=protection,
        keep=keep,
        shrinks=shrinks,
        pairs=pairs,
        sinks=sinks,
        scores=scores,
        adds=adds,
        rounds=rounds,
    )
    stepped = step(implementation, interpret, platform)
    if isinstance(implementation, Survey):
        step.survey_parts(implementation, platform)
    return stepped


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
    """Return whether `decode_step` runs as one kernel for these arguments here; if not, two calls are better."""
    unused: Any = None  # no other argument decides
    step = DecodeStep(
        hashed, unused, unused, k, v, unused, unused, q, spec, protection=unused, sinks=sinks, scores=scores
    )
    asked = "pallas" if isinstance(implementation, Survey) else implementation
    try:
        return step.choose(Options(asked, interpret, platform_of(platform))) == "pallas"
    except Unsupported:
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeStep(Op[Stepped]):
    """See `decode_step`."""

    standing: Float[Array, "b h c"] | Hashed | None
    position: Int[Array, "b h c"]
    new_position: Int[Array, " b"]
    k: Operand
    v: Operand
    buffers: Any
    added: tuple[Float[Array, "b h d"], Float[Array, "b h e"], Any]
    q: Float[Array, "b h g d"]
    spec: AttentionSpec
    _: dataclasses.KW_ONLY
    protection: Protection
    keep: Bool[Array, "b h c"] | None = None
    shrinks: bool = False
    pairs: bool = False
    sinks: Sinks | None = None
    scores: str | Gumbel | None = None
    adds: bool = False
    rounds: bool = False

    name = "decode_step"
    backends = ("pallas_tpu",)
    in_place = MappingProxyType({name: operator.attrgetter(name) for name in ("position", "k", "v", "buffers")})

    def reference(self, options: Options) -> Stepped:
        return reference.decode_step(**self.arguments(), platform=options.platform)

    def kernel(self, backend: str, options: Options) -> Stepped:
        return self.module(backend).decode_step(**self.arguments(), interpret=options.interpret)

    def limits(self, backend: str) -> Iterator[Limit]:
        q, k, v = self.q, self.k, self.v
        yield from operand_limits(q, k, v, self.spec, None)
        yield from width_limits(k, v, backend)
        yield sinks_limit(self.sinks)
        c, hashed = k.shape[2], self.standing if isinstance(self.standing, Hashed) else None
        planes = () if hashed is None else hashed.hashing.planes.shape
        yield len(planes) < 4, f"it hashes by the same planes in all rows, not by {list(planes)} [b h bits d]"
        yield from words_limits(q.shape[2], 0 if hashed is None else len(hashed.codes), c)
        kernel = self.module(backend)
        unit = math.lcm(*(kernel.unit(stored(x)[0]) for x in (k, v)))
        yield c % unit == 0 and c <= 16384, f"c={c} slots are not a multiple of {unit} up to 16384"
        needed = kernel.block_bytes(q, k, v, self.scores, planes[-2] if planes else 0)
        most = kernel.VMEM_BYTES * kernel.room()
        yield needed <= most, f"its blocks take {needed} bytes of the chip's memory, not {most}"

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        settings = operand_settings(self.q, self.k, self.v, self.spec)
        settings |= dict(scores=kind_of(self.scores), sinks=self.sinks is not None)
        if isinstance(self.standing, Hashed):
            settings["bits"] = self.standing.hashing.planes.shape[-2]
        return dict(b=self.q.shape[0], c=self.k.shape[2]), settings

    def survey_parts(self, survey: Survey, platform: str | None) -> None:
        """Record the two calls that are made if one pass does not win."""
        positions, protection, keep = (self.position, self.new_position), self.protection, self.keep
        if isinstance(self.standing, Hashed):
            query, codes = self.standing.hashing.of_queries(), self.standing.codes
            found = Hamming(query, codes, *positions, protection, keep)
        else:
            slots = (self.k, self.v, self.buffers)
            found = Evict(self.standing, *positions, slots, self.added, protection, keep, self.shrinks)
        found(survey, platform=platform)
        settings: dict[str, Any] = dict(sinks=self.sinks, scores=self.scores)
        DecodeAttention(self.q, self.k, self.v, *positions, self.spec, **settings)(survey, platform=platform)
