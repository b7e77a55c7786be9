"""Residuals, the constant-size memory of evicted pairs, and selections, the cached tokens to which a query attends."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple, Self

from jaxtyping import Array, Bool, Float

from kvjax.policies.base import Part
from kvjax.types import Evicted, LayerTokens, Partial, PyTree, View, nothing
from pallas_kernels.attention import LowRank, merge, share_of_evicted


class Queries(NamedTuple):
    """Queries that stand for those of later tokens."""

    q: Float[Array, "b h g t d"]
    valid: Bool[Array, "b t"]


class Rewritten(NamedTuple):
    """Slots that have been changed to stand for evicted ones, too."""

    values: Float[Array, "b h c e"]
    bias: Float[Array, "b h c"]


class Residual(Part, interface=True):
    """Memory of constant size that absorbs evicted pairs and that queries attend to."""

    @abc.abstractmethod
    def absorb(self, state: Any, evicted: Evicted) -> Any:
        """Return the layer's state with some evicted pairs added to it."""

    @abc.abstractmethod
    def share(self, state: Any, new: LayerTokens) -> LowRank | Partial | None:
        """Return the attention of `new.q` to evicted pairs; kernels merge one of low rank in the same pass.

        None if slots are all that queries attend to.
        """

    def step(self, state: Any, evicted: Evicted, new: LayerTokens, attended: Partial) -> tuple[Any, Array]:
        """Absorb the pairs that one token per row evicted, and merge `share` into its attention [b h g 1 e]."""
        state = self.absorb(state, evicted)
        share = self.share(state, new)
        return state, (attended if share is None else merge(attended, share_of_evicted(share))).out


class SlotResidual(Residual, interface=True):
    """Changes of the slots that stay of a text: a bias of their logits, and new values. It has no memory of its own."""

    @abc.abstractmethod
    def rewrite(self, before: View, after: View, queries: Queries, new: LayerTokens) -> Rewritten | None:
        """Return new values and biases of the slots that stay of a text that is read in blocks; None to keep them.

        Args:
            before: the slots before eviction, with their biases in `slots.residual`.
            after: the slots that stay.
            queries: queries of the text, or of another one that `kvjax.compress` is given.
            new: the tokens that are being read.
        """

    def bind(self, model: Any) -> Self:
        """Refuse a model whose values are its keys, too, and cannot change alone."""
        if any(layer.keys_are_values for layer in model.config.layer_configs):
            raise ValueError(
                f"residual {type(self).__name__} changes values, but latent attention stores keys and values in one; "
                "use another residual, such as less."
            )
        return super().bind(model)

    def init_slot(self, new: LayerTokens, state: PyTree) -> Float[Array, "b h t"]:
        return nothing(new)

    def absorb(self, state: Any, evicted: Evicted) -> Any:
        """Return the state, which is none: pairs that one token evicts are dropped."""
        return state

    def share(self, state: Any, new: LayerTokens) -> None:
        """Return nothing: slots are all that queries attend to."""

    def step(self, state: Any, evicted: Evicted, new: LayerTokens, attended: Partial) -> tuple[Any, Array]:
        return state, attended.out


class Selection(Part, interface=True):
    """Choice of the tokens that a query attends to, among those it sees."""

    @abc.abstractmethod
    def pick(self, probs: Float[Array, "b h g t c"], new: LayerTokens) -> Bool[Array, "b h g t c"]:
        """Return a mask of the chosen tokens, given the attention of some queries; 0 means unseen."""
