"""LightKV: sinks and streaming tokens by a mask, the strongest of the middle by attention of the last queries."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from kvjax.methods.combine import combine
from kvjax.methods.last_queries import no_queries, positions_of_queries, with_newest_queries
from kvjax.methods.register import register, register_part
from kvjax.policies.allocation import Plan, Sizing
from kvjax.policies.policy import Policy
from kvjax.policies.protection import Protection
from kvjax.policies.score import Requirements, Score
from kvjax.policies.stats import Again, Sums
from kvjax.types import Heads, New, PyTree, View, check, nothing, number, setting, wide, written

if TYPE_CHECKING:
    from typing import Self

    from kvjax.models.model import LanguageModel


@register_part("arithmetic")
@struct.dataclass
class Arithmetic(Plan):
    r"""Budgets fall by equal steps from the first layer to the last.

    .. math:: C_l = C_L + (C_1 - C_L) \frac{L - l}{L - 1}, \quad \sum_l C_l = C_{total}

    From: LightKV, eq. 1, 2.

    When: with `lightkv`, whose plan it is. Over `h2o` it costs: 15.4 instead of 14.9 in perplexity with a quarter of
    the slots, 19.0 instead of 18.0 with a tenth (SmolLM2 on WikiText-2).

    Args:
        ratio: C_1 / C_L, at least 1.
    """

    ratio: float = number(3.0)

    def __post_init__(self) -> None:
        if written(self.ratio) and self.ratio < 1:
            raise ValueError(f"ratio={self.ratio!r} is not a ratio of the first layer's slots to the last's from 1.")

    def layer_budgets(self, budget: int, layers: int) -> np.ndarray:
        last = 2 * budget / (1 + self.ratio)
        return np.linspace(self.ratio * last, last, layers) if layers > 1 else np.full(1, float(budget))


@struct.dataclass
class LambdaMask(Protection):
    r"""Sinks and streaming tokens that are a share of a head's slots, as in LightKV.

    .. math:: C_{sink} = C_{streaming} = \frac{C_l}{2 \omega} \quad \text{(eq. 5)}

    Args:
        omega: C_l over the width of the whole mask, at least 1.
        sinks: the least number of sinks.
        recent: the least recent window.
    """

    omega: float = number(4.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(not written(self.omega) or self.omega >= 1, "omega", self.omega, "a number from 1")

    def sink_slots(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """C_sink, or `sinks` if that is more."""
        return jnp.maximum(mask_width(limit, self.omega), self.sinks)

    def recent_slots(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """C_streaming, or `recent` if that is more."""
        return jnp.maximum(mask_width(limit, self.omega), super().recent_slots(limit))


@struct.dataclass
class AfterLimit(Plan):
    r"""LightKV's sizes of caches: nothing leaves before a context limit, then C_l slots, or fewer, are left.

    A prompt that is longer than the limit, whose length is known before it is read, is compressed at once, and its
    buffers have no more slots than are left. No layer ever holds more than the limit: one that is below C_1 is refused.

    .. math:: C_k = C_l - C_{sink} - C_{streaming} \quad \text{(eq. 6)}

    Args:
        plan: gives C_l (equations 1 and 2).
        context_limit: length up to which nothing is evicted, in tokens, at least C_1; the buffers hold as many if a
            prompt is no longer than that. None for C_l.
        mask: sinks and streaming tokens, where no more middle tokens than sinks are kept (the example of section 4);
            None for all of C_l.
    """

    plan: Plan = Arithmetic()
    context_limit: int | None = setting(None)
    mask: LambdaMask | None = None

    def __post_init__(self) -> None:
        tokens = self.context_limit is None or (isinstance(self.context_limit, int) and self.context_limit >= 1)
        check(tokens, "context_limit", self.context_limit, "a number of tokens from 1, or None")

    @property
    def middle(self) -> str:
        """`mask` for as many middle tokens as there are sinks, `rest` for all that C_l leaves."""
        return "rest" if self.mask is None else "mask"

    @property
    def sizing(self) -> Sizing:
        """A cache gets smaller once the context limit is passed."""
        return Sizing(may_shrink=self.context_limit is not None)

    def layer_budgets(self, budget: int, layers: int) -> np.ndarray:
        """Return those of the other plan."""
        return self.plan.layer_budgets(budget, layers)

    def spread_by(self, other: Plan) -> Plan:
        """C_l as the other plan has it."""
        return super().spread_by(other) if other.sizing.per_head else dataclasses.replace(self, plan=other)

    def _left(self, limit: Int[Array, "*b"]) -> Int[Array, "*b"]:
        # What is left of a text beyond the context limit.
        if self.mask is None:
            return limit
        middle = mask_width(limit, self.mask.omega)
        return jnp.minimum(limit, self.mask.sink_slots(limit) + self.mask.recent_slots(limit) + middle)

    def slots_at(self, limit: Int[Array, "b h"], length: Int[Array, " b"]) -> Int[Array, "b h"]:
        """Return C_l, or the mask and C_sink middle tokens, beyond the context limit, and everything up to it."""
        left = self._left(limit)
        if self.context_limit is None:
            return left
        if not isinstance(limit, Tracer) and self.context_limit < limit.max():
            raise ValueError(
                f"context_limit={self.context_limit} is below the C_1 = {limit.max()} slots of the first layer, and no "
                "layer may hold more than the limit; use a higher limit, a smaller budget or a smaller ratio."
            )
        return jnp.where(length[:, None] <= self.context_limit, self.context_limit, left)


def mask_width(limit: Int[Array, "*b"], omega: float) -> Int[Array, "*b"]:
    """LightKV's equation 5, at least one slot."""
    return jnp.maximum(1, jnp.floor(limit / (2 * omega) + 1e-6)).astype(jnp.int32)


@struct.dataclass
class _Observed(Score):
    # What both forms of the observation window share.
    paper = "LightKV, equations 1 to 6"

    alpha: int | None = setting(None)
    offload: bool = setting(False)

    def __post_init__(self) -> None:
        queries = self.alpha is None or (isinstance(self.alpha, int) and self.alpha >= 1)
        check(queries, "alpha", self.alpha, "a number of queries from 1, or None")

    @property
    def requires(self) -> Requirements:
        """The observation window must fit a prompt; what is remembered may wait in host memory."""
        return Requirements(min_prompt=self.alpha or 0, host_memory=self.offload)

    def bind(self, model: LanguageModel) -> Self:
        """Return the score itself, if there is host memory to offload to."""
        if not self.offload:
            return self
        device = next(iter(model.weights.norm.scale.devices()))
        if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
            raise ValueError(
                f"offload=True needs memory of the kind 'pinned_host', which {device.platform} does not have; "
                "leave offload out."
            )
        return self

    def _alpha(self, heads: Heads) -> Int[Array, "b h"]:
        return heads.limit if self.alpha is None else jnp.full_like(heads.limit, self.alpha)


@struct.dataclass
class LastQueries(_Observed):
    r"""Attention of exactly the last alpha queries, summed anew whenever something may leave.

    .. math:: s_i = \sum_{j = n - \alpha + 1}^{n} A_{ij}, \quad
        A_{\cdot j} = \mathrm{softmax}(q_j K^\top / \sqrt d) \quad \text{(eq. 3, 4)}

    K are the tokens that are held when s is needed, as far as they are not after j: each query's attention is shared
    out anew among them, and what a token that has left once got counts for nothing. Right after a prompt that is read
    whole these are all of its tokens. The token that is being read has no query yet when its slot is chosen; it counts
    from then on, as in the report, which evicts after attention. Where eq. 4 counts from n - alpha, which are alpha + 1
    queries, this counts as many as its text says.

    The queries are kept, alpha x g x d numbers for each KV head, and count in `cache_bytes`; where alpha is C_l that is
    g/2 times what keys and values take. A step costs alpha times the products of queries and keys.

    Args:
        alpha: queries of the observation window; None for a layer's slots C_l, as the report has it.
        offload: keep s, the queries, and which tokens are protected for what they are in host memory between steps
            (section 3.4: scores, masks and weights), which costs a transfer each way per step and layer. Positions,
            from which sinks and streaming tokens are told, stay with the keys: attention needs them.
        lines: most slots of each layer, for alpha=None; made by `sized`.
    """

    window: ClassVar[str] = "exact"

    lines: tuple[int, ...] = setting(())

    @property
    def requires(self) -> Requirements:
        """Queries of rows that read nothing stay where they are."""
        return dataclasses.replace(super().requires, keeps_idle_rows=True)

    def sized(self, slots: tuple[int, ...]) -> LastQueries:
        """With room for as many queries as a layer has slots, where alpha is C_l."""
        return self if self.alpha is not None else dataclasses.replace(self, lines=slots)

    def layer(self, index: int) -> LastQueries:
        """With room for the queries of one layer."""
        return dataclasses.replace(self, lines=self.lines[index : index + 1])

    def init(self, shape: New) -> PyTree:
        """Room for the last queries, before rotation: token i's is number i modulo alpha."""
        if self.alpha is None and not self.lines:
            raise ValueError("alpha=None is as many queries as a layer has slots: call `Policy.sized` first.")
        return no_queries(shape, self.lines[0] if self.alpha is None else self.alpha)

    def slot(self, new: New, state: PyTree) -> PyTree:
        """s, nothing yet."""
        return nothing(new)

    def asks(self, heads: Heads, new: New) -> PyTree:
        """Equation 4, of the last queries, the new ones among them."""
        kept = self.advance(heads, new)
        position = positions_of_queries(kept.shape[2], new, self._alpha(heads)[:, :1])
        counts = jnp.broadcast_to(position[:, None] >= 0, kept.shape[:3])
        return Again(kept, position, counts.astype(wide(new.q.dtype)))

    def fold(self, answers: Any, view: View, new: New) -> PyTree:
        """s as it is now."""
        return answers

    def advance(self, heads: Heads, new: New) -> PyTree:
        """Return the queries with the new ones in the places of the oldest."""
        return with_newest_queries(heads.state.score, new, self._alpha(heads)[:, :1])

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Score = s."""
        return view.slots.score


class Windows(NamedTuple):
    """Where windows of alpha queries lie in a text."""

    prompt_end: Int[Array, "b h"]
    """Where one of them ends: with the first text that was given; -1 before there is any."""
    newest: Int[Array, "b h"]
    """The one that is being filled, counted from there."""


@struct.dataclass
class RunningQueries(_Observed):
    r"""Attention summed over the last queries, about alpha of them, in memory of fixed size and without summing anew.

    After a prompt s sums its last alpha queries exactly. Later, be it written or given, it slides: of two sums over
    alpha queries each, the newer one replaces the older one every alpha tokens, so that the last alpha to 2 alpha - 1
    queries count, each with the attention that it paid when it was read.

    Args:
        alpha: queries of the observation window; None for a head's slots C_l, as the report has it.
        offload: as in `LastQueries`, for both sums.
    """

    window: ClassVar[str] = "running"

    def init(self, shape: New) -> Windows:
        """There is no window yet."""
        heads = shape.k.shape[:2]
        return Windows(jnp.full(heads, -1, jnp.int32), jnp.full(heads, -(2**30), jnp.int32))

    def slot(self, new: New, state: PyTree) -> tuple[Float[Array, "b h t"], Float[Array, "b h t"]]:
        """Attention in the older and in the newer window, none yet."""
        return nothing(new), nothing(new)

    def _windows(self, heads: Heads, new: New) -> tuple[Windows, Int[Array, "b h t"]]:
        # Where windows lie once the new tokens are read, and how many windows ago each of these came.
        alpha, known = self._alpha(heads), heads.state.score.prompt_end
        end = jnp.where(known < 0, new.prompt_length[:, None], known)
        window = (new.read[:, None] - end) // alpha
        return Windows(end, window), window[..., None] - (new.position[:, None] - end[..., None]) // alpha[..., None]

    def asks(self, heads: Heads, new: New) -> tuple[Sums, Sums]:
        """Equation 4 for each of the two windows."""
        back = self._windows(heads, new)[1]
        kind = wide(new.q.dtype)
        return tuple(Sums((new.valid[:, None] & (back == ago)).astype(kind)) for ago in (1, 0))  # type: ignore[return-value]

    def fold(self, answers: tuple[Array, Array], view: View, new: New) -> tuple[Array, Array]:
        """Return the older window's sum, and the newer one's; those that have passed are forgotten."""
        turns = (self._windows(view, new)[0].newest - view.state.score.newest)[..., None]
        older, newer = view.slots.score
        older = jnp.where(turns == 0, older, jnp.where(turns == 1, newer, 0.0))
        return older + answers[0], jnp.where(turns == 0, newer, 0.0) + answers[1]

    def advance(self, heads: Heads, new: New) -> Windows:
        """Where windows lie now."""
        return self._windows(heads, new)[0]

    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Score = s."""
        return view.slots.score[0] + view.slots.score[1]


WINDOWS: dict[str, type[LastQueries | RunningQueries]] = {"exact": LastQueries, "running": RunningQueries}


@register(paper="LightKV, eq. 1-6", group="ranked by attention at every token")
def lightkv(
    *,
    omega: float = LambdaMask.omega,
    alpha: int | None = LastQueries.alpha,
    window: str = "exact",
    middle: str = "rest",
    context_limit: int | None = AfterLimit.context_limit,
    ratio: float = Arithmetic.ratio,
    offload: bool = LastQueries.offload,
    sinks: int = 0,
    recent: int | float = 0,
    special: tuple[int, ...] = (),
    **common: Any,
) -> Policy:
    """Sinks and streaming tokens by a mask, the middle by attention of the last queries, fewer slots in higher layers.

    When: on text like books, where `window="running"` is level with `h2o` at a tenth of the slots; on WikiText-2
    `h2o` is ahead (15.9 against 14.9 in perplexity at a quarter). The exact window keeps queries and looks at them at
    every step.

    Args:
        window: `exact` for the last alpha queries, which are kept and count anew; `running` for two sums instead.
        middle: `rest` (eq. 6), or `mask` for as many middle tokens as there are sinks (the example of section 4).
        ratio: slots of the first layer over those of the last, at least 1.
    """
    check(window in WINDOWS, "window", window, "'exact' or 'running'")
    check(middle in ("rest", "mask"), "middle", middle, "'rest' or 'mask'")
    mask = LambdaMask(sinks, recent, special, omega)
    plan = AfterLimit(Arithmetic(ratio), context_limit, mask if middle == "mask" else None)
    return combine(WINDOWS[window](alpha, offload), protection=mask, plan=plan, **common)
