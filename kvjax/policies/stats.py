"""What a part of a policy may want to know of attention: it asks with these values and gets arrays in their places."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.types import check, setting
from kvjax.utils.settings import whole_number

NOISES, GROUPS, OVER = ("gumbel", "gaussian"), ("sum", "max"), ("group", "layer", "device", "model")


class Noise(struct.PyTreeNode):
    """Numbers added to logits: a function of row, layer, head and the key's position; `fresh`: of the query's, too.

    Args:
        kind: `gumbel`, or `gaussian` of the same mean and deviation.
        fresh: whether each query has numbers of its own.
    """

    kind: str = setting("gumbel")
    fresh: bool = setting(False)

    def __post_init__(self) -> None:
        check(self.kind in NOISES, "kind", self.kind, f"one of {', '.join(NOISES)}")
        check(isinstance(self.fresh, bool), "fresh", self.fresh, "true or false")


class Sums(struct.PyTreeNode):
    r"""What each slot gets from the new queries together: answered by an array [b h c].

    .. math:: s_j = \sum_t w_t \, \mathrm{group}_g \, \mathrm{softmax}_j((x_{gtj} + \zeta_j) / \tau)

    Args:
        weights: w [b #h t], how much each query counts; None for once each.
        tau: temperature above 0, one number or [b t].
        noise: zeta; None for none.
        group: `sum` or `max` over the query heads of a KV head.
        over: `group` for each KV head's own; `layer` for the mean over the layer's heads; `device` for the mean over
            those of them on one device; `model` for the sum over all layers, which is answered after the last one.
    """

    weights: Float[Array, "b #h t"] | None = None
    tau: Any = 1.0
    noise: Noise | None = None
    group: str = setting("sum")
    over: str = setting("group")

    def __post_init__(self) -> None:
        check(self.group in GROUPS, "group", self.group, f"one of {', '.join(GROUPS)}")
        check(self.over in OVER, "over", self.over, f"one of {', '.join(OVER)}")
        check(not isinstance(self.noise, str), "noise", self.noise, "a kvjax.Noise, or None")
        check(not isinstance(self.tau, (int, float)) or self.tau > 0, "tau", self.tau, "a temperature above 0")

    @property
    def plain(self) -> bool:
        """Whether it is the attention itself that is summed."""
        return self.noise is None and isinstance(self.tau, float) and self.tau == 1.0


class Near(struct.PyTreeNode):
    """What each token gets from the queries that come soon after it, of a prompt read whole: [b h c].

    Args:
        width: [b t], how many of the newest tokens count for each query, itself included; None for itself alone.
        most: what no width exceeds.
    """

    width: Int[Array, "b t"] | None = None
    most: int = setting(1)

    def __post_init__(self) -> None:
        whole_number("most", self.most)


class Probs(struct.PyTreeNode):
    """Every probability of the newest queries: answered by a `Seen`.

    Args:
        newest: how many of a block's queries; a decode step has one.
    """

    newest: int = setting(1)

    def __post_init__(self) -> None:
        whole_number("newest", self.newest)


class Again(struct.PyTreeNode):
    r"""What each slot gets from queries that have been kept, over the tokens that are held now: [b h c].

    .. math:: s_j = \sum_a w_a \sum_g \mathrm{softmax}_j(x_{gaj}), \quad j \text{ held and not after } a

    Tokens that have left do not count in the softmax, whenever the query was read. Of layers whose heads hold the same
    number of slots only.

    Args:
        raw_q: the queries before rotation.
        position: theirs; -1 where there is none.
        weights: w, how much each counts.
    """

    raw_q: Float[Array, "b h a g d"]
    position: Int[Array, "b a"]
    weights: Float[Array, "b h a"]


class Seen(NamedTuple):
    """The answer to `Probs`."""

    probs: Float[Array, "b h g n c"]
    position: Int[Array, "b n"]
    """Of the queries; -1 where there is none, whose probabilities are zero."""
    visible: Int[Array, "b h n"]
    """How many keys of the whole head each query saw."""


Ask = Sums | Near | Probs | Again


def is_ask(x: Any) -> bool:
    """Whether a node of a tree is a question: some have no leaves, and would be lost without asking this."""
    return isinstance(x, Ask)


def questions(asks: Any) -> tuple[list[Ask], Any]:
    """The questions of a tree, and its structure.

    Raises:
        TypeError: something else is among them.
    """
    leaves, tree = jax.tree.flatten(asks, is_leaf=is_ask)
    for leaf in leaves:
        if not is_ask(leaf):
            kinds = "kvjax.Sums, kvjax.Near, kvjax.Probs and kvjax.Again"
            raise TypeError(f"asks gives {leaf!r}, which is no question about attention; there are {kinds}.")
    return leaves, tree


def of_own_heads(asks: Any) -> Any:
    """Return the same questions, those over a layer's heads about the heads of one device: sums over devices follow."""

    def own(ask: Ask) -> Ask:
        return ask.replace(over="device") if isinstance(ask, Sums) and ask.over == "layer" else ask

    return jax.tree.map(own, asks, is_leaf=is_ask)


def of_devices(asks: Any) -> bool:
    """Whether a tree of questions has one whose answer is still to be summed over devices."""
    return any(isinstance(ask, Sums) and ask.over == "device" for ask in questions(asks)[0])


def of_all_layers(asks: Any) -> bool:
    """Whether a tree of questions has one that is answered after the last layer only."""
    return any(isinstance(ask, Sums) and ask.over == "model" for ask in questions(asks)[0])
