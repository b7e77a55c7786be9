"""The full cache: no token is evicted."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.methods.register import combine, register
from kvjax.methods.window import Recency
from kvjax.policies import Policy, Sizing, Uniform
from kvjax.types import check


class Unbounded(Uniform):
    r"""No eviction: every head has slots for the prompt and `max_new_tokens`.

    .. math:: o = \mathrm{softmax}(q K^\top / \sqrt d) V \quad \text{over all tokens}
    """

    @property
    def sizing(self) -> Sizing:
        """No eviction, and slots for the planned text only."""
        return Sizing(mode="unbounded", fixed_length=True)


class HostMemory(Unbounded):
    """No eviction, and prompts in host memory, from which each layer copies its own to the device while it runs.

    From: VeriCache (arXiv 2605.17613), which streams a full cache that verifies drafts.
    """

    @property
    def sizing(self) -> Sizing:
        """No eviction, slots for the planned text only, and prompts in host memory."""
        return dataclasses.replace(super().sizing, host_memory=True)


MEMORIES: dict[str, type[Unbounded]] = {"device": Unbounded, "host": HostMemory}
"""Plans by the memory that keeps prompts."""


@register(paper="the reference", group="nothing is evicted")
def full(*, memory: str = "device", **common: Any) -> Policy:
    """Keep every token of the prompt and of `max_new_tokens`; beyond that, logits are NaN.

    Args:
        memory: `device`, or `host` to keep prompts in host memory, from which each layer copies its own while it runs:
            for texts that outgrow the device, verified after drafts.

    When: if it fits in memory. With half of the slots most policies lose 5 to 10% in perplexity (SmolLM2 on
    WikiText-2).
    """
    check(memory in MEMORIES, "memory", memory, f"one of {', '.join(MEMORIES)}")
    return combine(Recency(), plan=MEMORIES[memory](), **common)
