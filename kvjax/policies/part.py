"""What all parts of a policy have in common."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from kvjax.types import Heads, New, PyTree

if TYPE_CHECKING:
    from typing import Self

    from kvjax.model import Model


class Part(abc.ABC):  # noqa: B024 - no part has to do anything
    """A part of a policy: a pytree whose hyperparameters are static and whose arrays are leaves.

    It sees rows and heads as arrays whose axes it must not mix: [b h ...], [b h c ...] for slots. On pages, b counts
    pages and h is 1.
    """

    def bind(self, model: Model) -> Self:
        """The part with whatever it needs to know of a model; `prefill` calls it first, outside of compilation.

        Raises:
            ValueError: what it has was made for another model.
        """
        return self

    def budgeted(self, budget: Any) -> Self:
        """The part with the budget that the user gave, for those that mean something else by it than slots."""
        return self

    def sized(self, slots: tuple[int, ...]) -> Self:
        """The part whose `init` makes room for as many slots as heads of each layer may use, if it depends on them."""
        return self

    def init(self, shape: New) -> PyTree:
        """What the part remembers of a layer before anything is read: leaves [b ...]; `shape` holds no tokens."""
        return None

    def slot(self, new: New, state: Any) -> PyTree:
        """What the part remembers of each new token: leaves [b h t ...]; `state` is the `Parts` of the layer."""
        return None

    def asks(self, heads: Heads, new: New) -> PyTree:
        """What the part wants to know of the attention of new tokens: a tree of `kvjax.asks`."""
        return ()
