"""Attention statistics that a part of a policy can request; each request is replaced by an array."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from kvjax.types import LayerTokens, check, setting
from kvjax.utils.moved import RENAMED_STATS, renamed
from kvjax.utils.settings import whole_number

NOISES, GROUPS, OVER = ("gumbel", "gaussian"), ("sum", "max"), ("group", "layer", "device", "model")


class Noise(struct.PyTreeNode):
    """Noise added to the logits, a function of row, layer, head and the key's position.

    Args:
        kind: `gumbel`, or `gaussian` with the same mean and standard deviation.
        fresh: True if the noise also depends on the query's position, so that each query has its own.
    """

    kind: str = setting("gumbel")
    fresh: bool = setting(False)

    def __post_init__(self) -> None:
        check(self.kind in NOISES, "kind", self.kind, f"one of {', '.join(NOISES)}")
        check(isinstance(self.fresh, bool), "fresh", self.fresh, "true or false")


class AttentionSum(struct.PyTreeNode):
    r"""Attention that each slot receives, summed over the new queries: [b h c].

    The softmax is that over the slots, without evicted pairs and without a learned sink (gpt-oss).

    .. math:: s_j = \sum_t w_t \, \mathrm{group}_g \, \mathrm{softmax}_j((x_{gtj} + \zeta_j) / \tau)

    Args:
        weights: w [b #h t], the weight of each query; None for 1.
        tau: temperature above 0, one number or [b t].
        noise: zeta; None for none.
        group: `sum` or `max` over the query heads of a KV head.
        over: `group` for a separate sum per KV head; `layer` for the mean over the layer's heads; `device` for the mean
            over those of its heads that are on one device; `model` for the sum over all layers, which is available
            after the last layer.
    """

    weights: Float[Array, "b #h t"] | None = None
    tau: Any = 1.0
    noise: Noise | None = None
    group: str = setting("sum")
    over: str = setting("group")

    def __post_init__(self) -> None:
        if isinstance(self.noise, str):
            raise ValueError(f"noise={self.noise!r} is not a kvjax.Noise, or None.")
        if isinstance(self.tau, (int, float)) and self.tau <= 0:
            raise ValueError(f"tau={self.tau!r} is not a temperature above 0.")
        for name, value, words in (("group", self.group, GROUPS), ("over", self.over, OVER)):
            if value not in words:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(words)}.")

    @property
    def plain(self) -> bool:
        """True if the sum is over the attention itself, without noise or temperature."""
        return self.noise is None and isinstance(self.tau, float) and self.tau == 1.0


class LocalAttention(struct.PyTreeNode):
    """Attention that each token receives from itself and the queries soon after it, in a whole prompt: [b h c].

    Args:
        width: [b t], number of newest tokens that count for each query, itself included; None for itself alone.
        most: upper bound of all widths.
    """

    width: Int[Array, "b t"] | None = None
    most: int = setting(1)

    def __post_init__(self) -> None:
        whole_number("most", self.most)


class AttentionProbs(struct.PyTreeNode):
    """Attention probabilities of the newest queries, returned as a `Seen`.

    Args:
        newest: number of queries of a block; a decode step has one.
    """

    newest: int = setting(1)

    def __post_init__(self) -> None:
        whole_number("newest", self.newest)


class ReplayedQueries(struct.PyTreeNode):
    r"""Attention that each slot receives when stored queries attend again, over the tokens cached now: [b h c].

    .. math:: s_j = \sum_a w_a \sum_g \mathrm{softmax}_j(x_{gaj}), \quad j \text{ held and not after } a

    The softmax excludes every evicted token, even if the query attended to it when it was read. All heads of a layer
    must have the same number of slots.

    Args:
        raw_q: the queries before rotation.
        position: positions of the queries; -1 for no query.
        weights: w, the weight of each query.
        newest: position of the newest token in the softmax of each row; None for the query's own.
        group: `sum` for the formula; `max` for one softmax of the largest logits of a KV head's query heads.
    """

    raw_q: Float[Array, "b h a g d"]
    position: Int[Array, "b a"]
    weights: Float[Array, "b h a"]
    newest: Int[Array, " b"] | None = None
    group: str = setting("sum")

    def __post_init__(self) -> None:
        check(self.group in GROUPS, "group", self.group, f"one of {', '.join(GROUPS)}")


class Damage(struct.PyTreeNode):
    r"""Change of the new queries' outputs if a slot were evicted, summed over these queries: [b h c].

    .. math:: s_j = \sum_t w_t \sum_g \left( \frac{p_{gtj}}{1 - p_{gtj}} \right)^2 \lVert v_j - o_{gt} \rVert^2

    with the attention p of query t, the values v and the query's output o over the slots. If a query sees only one
    slot, its output without that slot is 0. XLA computes this from the attention that kernels return.

    Args:
        weights: w [b #h t], the weight of each query; None for 1.
    """

    weights: Float[Array, "b #h t"] | None = None


class Peak(struct.PyTreeNode):
    r"""Largest attention that each slot receives from one of the new queries, for each query head: [b h g c].

    .. math:: s_{gj} = \max_t w_t \, p_{gtj}

    The softmax is that of `AttentionSum`. XLA computes this from the attention.

    Args:
        weights: w [b #h t], the nonnegative weight of each query; None for 1.
    """

    weights: Float[Array, "b #h t"] | None = None


class Seen(NamedTuple):
    """Result of a `AttentionProbs` request."""

    probs: Float[Array, "b h g n c"]
    position: Int[Array, "b n"]
    """Positions of the queries; -1 for no query, whose probabilities are zero."""
    visible: Int[Array, "b h n"]
    """Number of keys of the whole head that each query saw."""
    seen: Bool[Array, "b h n c"]
    """Mask of the slots that each query saw; probabilities of those may round to 0, too."""


StatRequest = AttentionSum | LocalAttention | AttentionProbs | ReplayedQueries | Damage | Peak


def is_request(x: Any) -> bool:
    """Return whether a node of a tree is a request; used as `is_leaf`, since some requests have no leaves."""
    return isinstance(x, StatRequest)


def flatten_requests(requests: Any) -> tuple[list[StatRequest], Any]:
    """Return the requests in a tree, and the tree's structure; raise a TypeError for a leaf that is no request."""
    leaves, tree = jax.tree.flatten(requests, is_leaf=is_request)
    for leaf in leaves:
        if not is_request(leaf):
            kinds = ", ".join(f"kvjax.{kind.__name__}" for kind in get_args(StatRequest))
            raise TypeError(f"attention_stats returned {leaf!r}, no attention statistic; there are {kinds}.")
    return leaves, tree


def of_own_heads(requests: Any) -> Any:
    """Replace means over a layer's heads by means over the heads of one device; the caller combines the devices."""

    def on_device(request: StatRequest) -> StatRequest:
        return (
            request.replace(over="device") if isinstance(request, AttentionSum) and request.over == "layer" else request
        )

    return jax.tree.map(on_device, requests, is_leaf=is_request)


def sums_over(requests: Any, *over: str) -> bool:
    """Return whether any request in a tree is a sum over `model`, which follows the last layer, or over `device`."""
    return any(isinstance(request, AttentionSum) and request.over in over for request in flatten_requests(requests)[0])


def over_heads(request: StatRequest, sums: Float[Array, "b h c"], new: LayerTokens) -> Float[Array, "b h c"]:
    """Reduce a sum over a KV head's queries over heads, as the request specifies."""
    if not isinstance(request, AttentionSum) or request.over not in ("layer", "device"):
        return sums
    mean = sums.mean(1, keepdims=True)
    if request.over == "layer":
        mean = new.spread.over_heads(mean) / new.spread.heads
    return jnp.broadcast_to(mean, sums.shape)


__getattr__ = renamed(__name__, RENAMED_STATS)
