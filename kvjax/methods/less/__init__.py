"""LESS (arXiv 2402.09398): a trained low-rank memory of evicted tokens, and a control with as many bytes of slots."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.methods.less.memory import LowRankMemory
from kvjax.methods.register import register
from kvjax.methods.registry import base_policy, replaced
from kvjax.policies.policy import Policy
from kvjax.types import check


@register(paper="LESS, eq. 1-5", group="over another policy")
def less(
    *,
    base: str | Policy = "h2o",
    checkpoint: str = LowRankMemory.checkpoint,
    kernels: Any = LowRankMemory.kernels,
    features: int = LowRankMemory.features,
    kernel_seed: int = LowRankMemory.kernel_seed,
    **settings: Any,
) -> Policy:
    """Any policy, with evicted pairs accumulated in R x d + R numbers per KV head; further settings are the base's.

    When: with a small budget and kernels trained for the model. Over `h2o`, perplexity falls from 23.8 to 21.2 with 5%
    of the slots and from 49.5 to 32.1 with 2% (SmolLM2 on WikiText-2). With half of the slots it gains nothing.

    Args:
        base: the policy that evicts: a name or a `Policy`.
    """
    memory = dict(checkpoint=checkpoint, kernels=kernels, features=features, kernel_seed=kernel_seed)
    return replaced(base_policy(base, settings), residual="less", settings={"residual": memory})


@register(paper="LESS, 4", group="over another policy")
def baseline_plus(*, base: str | Policy = "h2o", features: int = 8, **settings: Any) -> Policy:
    r"""Any policy with R/2 more slots per head: R x d numbers are R/2 keys and as many values.

    .. math:: C^+ = C + R / 2

    When: as the control for `less` at equal memory. With 5 and 10% of the slots, the extra slots close 2 to 8% of the
    gap to the full cache, and LESS's kernels 32 to 59% (embedded model).

    Args:
        base: the policy that evicts: a name or a `Policy`.
        features: R, an even number, at least 2.
    """
    even = isinstance(features, int) and features >= 2 and features % 2 == 0
    check(even, "features", features, "an even number from 2")
    chosen = base_policy(base, settings)
    return dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, extra_slots=features // 2))
