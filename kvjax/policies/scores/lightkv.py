"""LightKV: the strongest tokens of the middle, by the attention of the last queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.asks import Sums
from kvjax.policies.score import Score
from kvjax.types import Heads, New, PyTree, View, check, nothing, setting, wide

if TYPE_CHECKING:
    from kvjax.model import Model


class Windows(NamedTuple):
    """Where windows of alpha queries lie in a text."""

    prompt_end: Int[Array, "b h"]
    """Where one of them ends: with the first text that was given; -1 before there is any."""
    newest: Int[Array, "b h"]
    """The one that is being filled, counted from there."""


@struct.dataclass
class LastQueries(Score):
    r"""Attention summed over the last queries.

    .. math:: s_i = \sum_{j = n - \alpha}^{n} A_{ij} \quad \text{(eq. 4)}

    After a prompt s sums its last alpha queries exactly. Later, be it written or given, it slides in memory of fixed
    size: of two sums over alpha queries each, the newer one replaces the older one every alpha tokens, so that the last
    alpha to 2 alpha - 1 queries count.

    Args:
        alpha: queries of the observation window; None for a head's slots C_l, as the report has it.
        offload: keep s in host memory between steps (section 3.4), which costs a transfer each way per step and layer.
    """

    paper = "LightKV, equations 1 to 6"

    alpha: int | None = setting(None)
    offload: bool = setting(False)

    def __post_init__(self) -> None:
        queries = self.alpha is None or (isinstance(self.alpha, int) and self.alpha >= 1)
        check(queries, "alpha", self.alpha, "a number of queries from 1, or None")

    @property
    def offloads(self) -> bool:  # type: ignore[override]
        """Whether s waits in host memory."""
        return self.offload

    def bind(self, model: Model) -> LastQueries:
        """The score itself, if there is host memory to offload to."""
        device = next(iter(model.weights.embedding.devices()))
        if self.offload and "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
            raise ValueError(
                f"offload=True needs memory of the kind 'pinned_host', which {device.platform} does not have; "
                "leave offload out."
            )
        return self

    def check_prompt(self, shortest: int) -> None:
        """The observation window must fit."""
        if self.alpha is not None and self.alpha > shortest:
            raise ValueError(
                f"alpha={self.alpha} queries do not fit in a prompt of {shortest} tokens; use alpha up to {shortest}."
            )

    def init(self, shape: New) -> Windows:
        """There is no window yet."""
        heads = shape.k.shape[:2]
        return Windows(jnp.full(heads, -1, jnp.int32), jnp.full(heads, -(2**30), jnp.int32))

    def slot(self, new: New, state: PyTree) -> tuple[Float[Array, "b h t"], Float[Array, "b h t"]]:
        """Attention in the older and in the newer window, none yet."""
        return nothing(new), nothing(new)

    def _windows(self, heads: Heads, new: New) -> tuple[Windows, Int[Array, "b h t"]]:
        # Where windows lie once the new tokens are read, and how many windows ago each of these came.
        alpha = heads.limit if self.alpha is None else jnp.full_like(heads.limit, self.alpha)
        known = heads.state.score.prompt_end
        end = jnp.where(known < 0, new.prompt_length[:, None], known)
        window = (new.read[:, None] - end) // alpha
        return Windows(end, window), window[..., None] - (new.position[:, None] - end[..., None]) // alpha[..., None]

    def asks(self, heads: Heads, new: New) -> tuple[Sums, Sums]:
        """Equation 4 for each of the two windows."""
        back = self._windows(heads, new)[1]
        kind = wide(new.q.dtype)
        return tuple(Sums((new.valid[:, None] & (back == ago)).astype(kind)) for ago in (1, 0))  # type: ignore[return-value]

    def fold(self, answers: tuple[Array, Array], view: View, new: New) -> tuple[Array, Array]:
        """The older window's sum, and the newer one's; those that have passed are forgotten."""
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
