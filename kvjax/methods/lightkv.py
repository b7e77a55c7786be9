"""LightKV: sinks and streaming tokens by a mask, and middle tokens by the attention of the last queries."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from kvjax.methods.last_queries import no_queries, positions_of_queries, with_newest_queries
from kvjax.methods.register import combine, register, register_part
from kvjax.methods.step_windows import shifted
from kvjax.models.model import LanguageModel
from kvjax.policies import AttentionSum, Plan, Policy, ReplayedQueries, Requirements, Score, Sizing, StoredScore
from kvjax.policies.protection import Protection, one_slot_in
from kvjax.types import Heads, LayerTokens, PyTree, View, at_least, check, nothing, number, one_of, setting, wide
from kvjax.utils.host_memory import check_host_memory


@register_part("arithmetic")
class Arithmetic(Plan):
    r"""Budgets that decrease by equal steps from the first layer to the last.

    .. math:: C_l = C_L + (C_1 - C_L) \frac{L - l}{L - 1}, \quad \sum_l C_l = C_{total}

    From: LightKV, eq. 1, 2.

    When: with `lightkv`, whose plan it is. With `h2o` it is worse than `uniform`: perplexity 15.4 instead of 14.9 with
    a quarter of the slots, 19.0 instead of 18.0 with a tenth (SmolLM2 on WikiText-2).

    Args:
        ratio: C_1 / C_L, at least 1.
    """

    ratio: float = number(3.0, at_least(1, "a ratio of the first layer's slots to the last's"))

    def layer_budgets(self, budget: int, layers: int) -> np.ndarray:
        last = 2 * budget / (1 + self.ratio)
        return np.linspace(self.ratio * last, last, layers) if layers > 1 else np.full(1, float(budget))


class AfterLimit(Plan):
    r"""Cache sizes of LightKV: no eviction up to a context limit, then at most C_l slots per head.

    The length of a prompt is known before it is read. A prompt longer than the limit is compressed immediately, and its
    buffers have only the slots of the compressed cache. No layer ever holds more tokens than the limit; a limit below
    C_1 raises an error.

    .. math::
        C_{sink} = C_{streaming} = \frac{C_l}{2 \omega}, \quad C_k = C_l - C_{sink} - C_{streaming}
        \quad \text{(eq. 5, 6)}

    Args:
        plan: plan with the C_l (equations 1 and 2).
        context_limit: length in tokens up to which nothing is evicted, at least C_1; buffers have as many slots unless
            the prompt is longer. None for C_l.
        mask: sinks and streaming tokens of the policy.
        middle: `rest` to use all of C_l, `mask` to keep only as many middle tokens as sinks (the example of section 4).
    """

    plan: Plan = Arithmetic()
    context_limit: int | None = setting(None, at_least(1, "a number of tokens"))
    mask: Protection = Protection()
    middle: str = setting("rest", one_of("rest", "mask"))

    @property
    def sizing(self) -> Sizing:
        """A cache that shrinks when the text exceeds the context limit."""
        return Sizing(may_shrink=self.context_limit is not None)

    def layer_budgets(self, budget: int, layers: int) -> np.ndarray:
        return self.plan.layer_budgets(budget, layers)

    def spread_by(self, allocation: Plan) -> Plan:
        """Return a copy with the C_l of another plan."""
        return super().spread_by(allocation) if allocation.sizing.per_head else self.replace(plan=allocation)

    def slots_at(self, limit: Int[Array, "b h"], length: Int[Array, " b"]) -> Int[Array, "b h"]:
        """Return all slots up to the context limit; beyond it C_l, or the mask and C_sink middle tokens.

        Raises:
            ValueError: the context limit is below C_1.
        """
        slots = limit  # beyond the context limit
        if self.middle == "mask" and self.mask.one_in is not None:
            middle = one_slot_in(self.mask.one_in, limit)
            slots = jnp.minimum(limit, self.mask.sink_slots(limit) + self.mask.recent_slots(limit) + middle)
        if self.context_limit is None:
            return slots
        if not isinstance(limit, Tracer) and self.context_limit < limit.max():
            raise ValueError(
                f"context_limit={self.context_limit} is below the C_1 = {limit.max()} slots of the first layer, and no "
                "layer may hold more than the limit; use a higher limit, a smaller budget or a smaller ratio."
            )
        return jnp.where(length[:, None] <= self.context_limit, self.context_limit, slots)


class _Observed(Score):
    # What both forms of the observation window share.

    alpha: int | None = setting(None, at_least(1, "a number of queries"))
    offload: bool = setting(False)

    @property
    def requires(self) -> Requirements:
        return Requirements(min_prompt=self.alpha or 0, host_memory=self.offload)

    def bind(self, model: LanguageModel) -> Self:
        """Return the score unchanged, after a check that `offload` finds host memory."""
        if self.offload:
            check_host_memory(model.weights, "offload=True", "offload")
        return self

    def _alpha(self, heads: Heads) -> Int[Array, "b h"]:
        return heads.limit if self.alpha is None else jnp.full_like(heads.limit, self.alpha)


class LastQueries(_Observed, StoredScore):
    r"""Attention of exactly the last alpha queries, recomputed before each possible eviction.

    .. math:: s_i = \sum_{j = n - \alpha + 1}^{n} A_{ij}, \quad
        A_{\cdot j} = \mathrm{softmax}(q_j K^\top / \sqrt d) \quad \text{(eq. 3, 4)}

    K are the keys cached when s is computed, without those after j. The softmax of each query is therefore computed
    over the tokens that are still cached, and evicted tokens get no attention. Right after a prompt without chunks, K
    are all of its keys. The token being read has no query yet when its slot is chosen. Its query counts afterwards, as
    in the report, which evicts after attention. Equation 4 sums from n - alpha, which are alpha + 1 queries; this class
    sums alpha queries, as the report's text says.

    The stored queries take alpha x g x d numbers for each KV head and count in `cache_bytes`; with alpha = C_l they
    take g/2 times the memory of keys and values. A step computes alpha times as many products of queries and keys.

    Args:
        alpha: number of queries in the observation window; None for a layer's slots C_l, as in the report.
        offload: True to keep s, the queries and the mask of special tokens in host memory between steps (section 3.4:
            scores, masks and weights), at the cost of a transfer each way per step and layer. Positions, which
            determine sinks and streaming tokens, stay on the device because attention needs them.
        lines: largest number of slots of each layer, for alpha=None; set by `sized`.
    """

    window: ClassVar[str] = "exact"

    lines: tuple[int, ...] = setting(())

    @property
    def requires(self) -> Requirements:
        return dataclasses.replace(super().requires, keeps_idle_rows=True)

    def sized(self, slots: tuple[int, ...]) -> LastQueries:
        """Return a copy that stores as many queries as a layer has slots, if alpha is C_l."""
        return self if self.alpha is not None else self.replace(lines=slots)

    def layer(self, index: int) -> LastQueries:
        return self.replace(lines=self.lines[index : index + 1])

    def init_head(self, shape: LayerTokens) -> PyTree:
        if self.alpha is None and not self.lines:
            raise ValueError("alpha=None is as many queries as a layer has slots: call `Policy.sized` first.")
        return no_queries(shape, self.lines[0] if self.alpha is None else self.alpha)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> PyTree:
        """Request equation 4 for the last queries, including the new ones."""
        queries = self.update_head(heads, new)
        position = positions_of_queries(queries.shape[2], new, self._alpha(heads)[:, :1])
        counts = jnp.broadcast_to(position[:, None] >= 0, queries.shape[:3])
        return ReplayedQueries(queries, position, counts.astype(wide(new.q.dtype)))

    def update_head(self, heads: Heads, new: LayerTokens) -> PyTree:
        return with_newest_queries(heads.state.score, new, self._alpha(heads)[:, :1])


class Windows(NamedTuple):
    """Boundaries of the windows of alpha queries in a text."""

    prompt_end: Int[Array, "b h"]
    """End of one window: the end of the first prompt; -1 before any prompt."""
    newest: Int[Array, "b h"]
    """Number of the current window, counted from that end."""


class RunningQueries(_Observed):
    r"""Attention summed over about the last alpha queries, in constant memory and without recomputation.

    After a prompt, s is the exact sum over its last alpha queries. Later there are two sums over alpha queries each,
    and every alpha tokens the newer one replaces the older one. So s covers the last alpha to 2 alpha - 1 queries, each
    with its attention at the time when it was read.

    Args:
        alpha: number of queries in the observation window; None for a head's slots C_l, as in the report.
        offload: as in `LastQueries`, for both sums.
    """

    window: ClassVar[str] = "running"

    def init_head(self, shape: LayerTokens) -> Windows:
        heads = shape.k.shape[:2]
        return Windows(jnp.full(heads, -1, jnp.int32), jnp.full(heads, -(2**30), jnp.int32))

    def init_slot(self, new: LayerTokens, state: PyTree) -> tuple[Float[Array, "b h t"], Float[Array, "b h t"]]:
        """Return zeros, the initial attention in the older and the newer window."""
        return nothing(new), nothing(new)

    def _windows(self, heads: Heads, new: LayerTokens) -> tuple[Windows, Int[Array, "b h t"]]:
        # Where windows lie once the new tokens are read, and how many windows ago each of these came.
        alpha, prompt_end = self._alpha(heads), heads.state.score.prompt_end
        end = jnp.where(prompt_end < 0, new.prompt_length[:, None], prompt_end)
        window = (new.read[:, None] - end) // alpha
        return Windows(end, window), window[..., None] - (new.position[:, None] - end[..., None]) // alpha[..., None]

    def attention_stats(self, heads: Heads, new: LayerTokens) -> tuple[AttentionSum, AttentionSum]:
        """Request equation 4 for each of the two windows."""
        back = self._windows(heads, new)[1]
        kind = wide(new.q.dtype)
        return tuple(AttentionSum((new.valid[:, None] & (back == ago)).astype(kind)) for ago in (1, 0))  # type: ignore[return-value]

    def update_slot(self, stats: tuple[Array, Array], view: View, new: LayerTokens) -> tuple[Array, Array]:
        """Return the sums of the older and the newer window; a completed window replaces the older one."""
        turns = (self._windows(view, new)[0].newest - view.state.score.newest)[..., None]
        older, newer = shifted(view.slots.score, turns)
        return older + stats[0], newer + stats[1]

    def update_head(self, heads: Heads, new: LayerTokens) -> Windows:
        return self._windows(heads, new)[0]

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        return view.slots.score[0] + view.slots.score[1]


WINDOWS: dict[str, type[LastQueries | RunningQueries]] = {"exact": LastQueries, "running": RunningQueries}


@register(paper="LightKV, eq. 1-6", group="ranked by attention at every token")
def lightkv(
    *,
    omega: float = 4.0,
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
    """Sinks and streaming tokens by a mask, middle tokens by the last queries' attention, fewer slots in higher layers.

    When: on text like books, where `window="running"` equals `h2o` at a tenth of the slots; on WikiText-2 `h2o` is
    better (perplexity 14.9 against 15.9 at a quarter). The exact window stores queries and computes their attention at
    every step.

    Args:
        omega: C_l divided by the width of the whole mask, at least 1.
        window: `exact` to recompute the attention of the last alpha queries, which are stored; `running` for two
            running sums.
        middle: `rest` (eq. 6), or `mask` for as many middle tokens as sinks (the example of section 4).
        ratio: slots of the first layer divided by those of the last, at least 1.
    """
    check(window in WINDOWS, "window", window, "'exact' or 'running'")
    check(omega >= 1, "omega", omega, "a number from 1")
    mask = Protection(sinks, recent, special, one_in=2 * omega)
    plan = AfterLimit(Arithmetic(ratio), context_limit, mask, middle)
    return combine(WINDOWS[window](alpha, offload), protection=mask, plan=plan, **common)
