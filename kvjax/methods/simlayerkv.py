"""SimLayerKV: layers that attend mostly to the first and newest tokens keep only these."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.methods.combine import combine
from kvjax.methods.register import register
from kvjax.methods.window import Recency
from kvjax.policies.allocation import Plan, Sizing, Uniform
from kvjax.policies.policy import Policy
from kvjax.policies.stats import Sums
from kvjax.types import Heads, New, PyTree, View, check, number, setting, wide, written


@struct.dataclass
class LazyLayers(Uniform):
    r"""Full caches except in lazy layers, where the prompt's last query gives the first and newest tokens more than t.

    .. math:: C = \begin{cases} s + w & \text{if}\ \bar a_n(\{i < s\} \cup \{i > n - w\}) > t \\ N & \text{else}
        \end{cases}

    with the attention averaged over all query heads of the layer, the s first and w newest tokens, and N = prompt +
    `max_new_tokens`, beyond which logits are NaN. Each row has its own lazy layers, and none if its prompt has at most
    s + w tokens. Special tokens of the prompt get additional slots; a generated one replaces the oldest.

    Args:
        threshold: t, in [0, 1]; 1 for no lazy layer. The authors use 0.9 for Llama 3, 0.65 for Llama 2, 0.8 for Mistral
            and 0.85 for Qwen.
        initial: s, first tokens that lazy layers keep.
        newest: w, newest tokens that lazy layers keep, the one being read included.
    """

    threshold: float = number(0.9)
    initial: int = setting(4)
    newest: int = setting(1024)

    def __post_init__(self) -> None:
        if written(self.threshold):
            check(0 <= self.threshold <= 1, "threshold", self.threshold, "a share of attention in [0, 1]")
        check(self.initial >= 0, "sinks", self.initial, "a number of tokens from 0")
        check(self.newest >= 1, "recent", self.newest, "a number of tokens from 1")

    @property
    def sizing(self) -> Sizing:
        """Slots computed from the prompt, for a text of the planned length."""
        return Sizing(mode="profiled", per_head=True, fixed_length=True)

    def spread_by(self, other: Plan) -> Plan:
        """Refuse another plan: there is no budget to distribute."""
        raise ValueError(
            f"simlayerkv decides itself how many slots each layer gets, so budget and plan={type(other).__name__} mean "
            "nothing to it; leave both out and change its settings."
        )

    def asks(self, heads: Heads, new: New) -> Sums:
        """Request the attention of the last query, a mean over the layer's heads."""
        last = new.position == new.newest[:, None]
        return Sums(last[:, None].astype(wide(new.q.dtype)), over="layer")

    def head_budgets(
        self, answers: Float[Array, "b h c"], view: View, ranks: Float[Array, "b h c"] | None, new: New
    ) -> tuple[Int[Array, "b h"], PyTree]:
        """Return s + w slots and those of special tokens in lazy layers, and slots for the whole text in the others."""
        ends = (view.position < self.initial) | (view.position > new.newest[:, None, None] - self.newest)
        mass = jnp.where(view.live & ends, answers, 0.0).sum(-1) / new.q.shape[2]
        few, every, special = self.initial + self.newest, new.end[:, None], view.slots.protection
        lazy = (mass > self.threshold) & (self.threshold < 1) & (new.read > few)[:, None]
        if special is not None:
            few += (view.live & special & (view.position >= self.initial)).sum(-1)
        return jnp.where(lazy, jnp.minimum(few, every), every).astype(jnp.int32), view.state.plan


@register(paper="SimLayerKV, 2024", group="ranked once for each prompt or turn")
def simlayerkv(
    *,
    threshold: float = LazyLayers.threshold,
    sinks: int = LazyLayers.initial,
    recent: int = LazyLayers.newest,
    special: tuple[int, ...] = (),
    **common: Any,
) -> Policy:
    """Keep the first `sinks` and the newest `recent` tokens in lazy layers, and everything in the others.

    When: with prompts much longer than `recent`, and budgets close to the full cache. It has not been measured on many
    models yet.
    """
    check(isinstance(recent, int), "recent", recent, "a number of tokens from 1")
    plan = LazyLayers(threshold, sinks, recent)
    return combine(Recency(), plan=plan, sinks=sinks, recent=recent, special=special, **common)
