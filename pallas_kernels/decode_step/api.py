"""A decode step over slots: the new token replaces the lowest-ranked one, and its queries attend to all of them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, Unpack

import jax.numpy as jnp

from pallas_kernels import noise
from pallas_kernels.common import Survey, Unsupported
from pallas_kernels.decode_attention import Gumbel
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
from pallas_kernels.decode_step.types import Hashed, Query, Ranking, Slots, StepInputs, Stepped, Token
from pallas_kernels.evict.api import Evict
from pallas_kernels.hamming.api import Hamming, words_limits
from pallas_kernels.op import How, Limit, Op, Options, options_of
from pallas_kernels.operands import Operand


def decode_step(
    slots: Slots,
    token: Token,
    ranking: Ranking,
    query: Query,
    *,
    pairs: bool = False,
    adds: bool = False,
    rounds: bool = False,
    **how: Unpack[How],
) -> Stepped:
    """Run exactly `evict`, then `decode_attention`, in one pass over keys and values.

    The update is in place if the caller donates the slots and the written parts of the standing.

    Args:
        slots: contents of the slots.
        token: the new token.
        ranking: choice of the slot that it takes.
        query: its attention.
        pairs: True to return the evicted pair.
        adds: True to return the standing with the sums added, starting at 0 for the new token.
        rounds: True to return attention's output in the queries' dtype, if nothing else is merged with it.
        how: see `pallas_kernels.op.How`. `xla` takes everything. `pallas` is for TPU; it takes what both kernels that
            it replaces take, c a multiple of 16 (of 128 where XLA stores slots innermost), and blocks that fit in VMEM.

    Raises:
        ValueError: `scores` is unknown, values are `Turned`, or `adds` is set without sums or
            without numbers of float32 in `standing`.
    """
    scores, standing = query.scores, ranking.standing
    if kind_of(scores) not in (noise.KINDS if isinstance(scores, Gumbel) else ("sum", "each", None)):
        raise ValueError(f"scores={scores!r} is not None, 'each', 'sum' or a Gumbel with a noise of `noise.KINDS`.")
    held = None if isinstance(standing, Hashed) else standing
    if adds and (scores in (None, "each") or held is None or held.dtype != jnp.float32):
        onto = type(standing).__name__ if held is None else held.dtype.name
        raise ValueError(f"adds=True adds sums to standing in float32, not scores={scores!r} to {onto}; leave it out.")
    refuse_turned(slots.v)
    step = DecodeStep(slots, token, ranking, query, pairs, adds, rounds)
    stepped = step(**how)
    asked = how.get("implementation")
    if isinstance(asked, Survey):
        step.survey_parts(asked, how.get("platform"))
    return stepped


def one_pass(query: Query, k: Operand, v: Operand, hashed: Hashed | None = None, **how: Unpack[How]) -> bool:
    """Return whether `decode_step` runs as one kernel for these arguments here; if not, two calls are better."""
    unused: Any = None  # no other argument decides
    step = DecodeStep(Slots(unused, k, v, unused), unused, Ranking(hashed, unused), query)
    options = options_of(**how)
    if isinstance(options.implementation, Survey):
        options = options._replace(implementation="pallas")
    try:
        return step.choose(options) == "pallas"
    except Unsupported:
        return False


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeStep(StepInputs, Op[Stepped]):
    """See `decode_step`."""

    name = "decode_step"
    backends = ("pallas_tpu",)
    in_place = MappingProxyType({"slots": operator.attrgetter("slots")})

    def reference(self, options: Options) -> Stepped:
        return reference.decode_step(self, options.platform)

    def kernel(self, backend: str, options: Options) -> Stepped:
        return self.module(backend).decode_step(self, interpret=options.interpret)

    def limits(self, backend: str) -> Iterator[Limit]:
        (q, spec, sinks, scores), (_, k, v, _), standing = self.query, self.slots, self.ranking.standing
        yield from operand_limits(q, k, v, spec, None)
        yield from width_limits(k, v, backend)
        yield sinks_limit(sinks)
        c, hashed = k.shape[2], standing if isinstance(standing, Hashed) else None
        planes = () if hashed is None else hashed.hashing.planes.shape
        yield len(planes) < 4, f"it hashes by the same planes in all rows, not by {list(planes)} [b h bits d]"
        yield from words_limits(q.shape[2], 0 if hashed is None else len(hashed.codes), c)
        kernel = self.module(backend)
        unit = math.lcm(*(kernel.unit(stored(x)[0]) for x in (k, v)))
        yield c % unit == 0 and c <= 16384, f"c={c} slots are not a multiple of {unit} up to 16384"
        needed = kernel.block_bytes(q, k, v, scores, planes[-2] if planes else 0)
        most = kernel.VMEM_BYTES * kernel.room()
        yield needed <= most, f"its blocks take {needed} bytes of the chip's memory, not {most}"

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        (q, spec, sinks, scores), (_, k, v, _), standing = self.query, self.slots, self.ranking.standing
        settings = operand_settings(q, k, v, spec) | dict(scores=kind_of(scores), sinks=sinks is not None)
        if isinstance(standing, Hashed):
            settings["bits"] = standing.hashing.planes.shape[-2]
        return dict(b=q.shape[0], c=k.shape[2]), settings

    def survey_parts(self, survey: Survey, platform: str | None) -> None:
        """Record the two calls that are made if one pass does not win."""
        (position, k, v, buffers), (newest, *new), ranking = self.slots, self.token, self.ranking
        added = tuple(new)
        standing, protection, keep = ranking.standing, ranking.protection, ranking.keep
        if isinstance(standing, Hashed):
            found = Hamming(standing.hashing.of_queries(), standing.codes, position, newest, protection, keep)
        else:
            found = Evict(standing, position, newest, (k, v, buffers), added, protection, keep, ranking.shrinks)
        found(implementation=survey, platform=platform)
        q, spec, sinks, scores = self.query
        attention = DecodeAttention(q, k, v, position, newest, spec, sinks=sinks, scores=scores)
        attention(implementation=survey, platform=platform)
