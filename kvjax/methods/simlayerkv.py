"""SimLayerKV: layers that attend mostly to the first and newest tokens keep only these."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.methods.combine import combine
from kvjax.methods.ends import EndsOrAll
from kvjax.methods.register import register
from kvjax.methods.window import Recency
from kvjax.policies.policy import Policy
from kvjax.policies.protection import Protection
from kvjax.policies.stats import Sums
from kvjax.types import Heads, New, PyTree, View, check, number, wide, written


@struct.dataclass
class LazyLayers(EndsOrAll):
    r"""Full caches except in lazy layers, where the prompt's last query gives the first and newest tokens more than t.

    .. math:: C = \begin{cases} s + w & \text{if}\ \bar a_n(\{i < s\} \cup \{i > n - w\}) > t \\ N & \text{else}
        \end{cases}

    with the attention averaged over all query heads of the layer, the s first and w newest tokens, and N = prompt +
    `max_new_tokens`, beyond which logits are NaN. Each row has its own lazy layers, and none if its prompt has at most
    s + w tokens. Special tokens of the prompt get additional slots, generated ones do not.

    Args:
        threshold: t, in [0, 1]; 1 for no lazy layer. The authors use 0.9 for Llama 3, 0.65 for Llama 2, 0.8 for Mistral
            and 0.85 for Qwen.
        initial: s, first tokens that lazy layers keep.
        newest: w, newest tokens that lazy layers keep, the one being read included.
    """

    method = "simlayerkv"

    threshold: float = number(0.9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if written(self.threshold):
            check(0 <= self.threshold <= 1, "threshold", self.threshold, "a share of attention in [0, 1]")

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
        longer = new.read > self.initial + self.newest
        lazy = (mass > self.threshold) & (self.threshold < 1) & longer[:, None]
        return self.slots_of(lazy, view, new), view.state.plan


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
    plan = LazyLayers(sinks, recent, threshold)
    protection = Protection(sinks, recent, special, generated=False)
    return combine(Recency(), plan=plan, protection=protection, **common)
