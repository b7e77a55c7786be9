"""Selection: the cached tokens to which a query attends."""

from __future__ import annotations

import abc

from jaxtyping import Array, Bool, Float

from kvjax.policies.base import Part
from kvjax.types import New


class Selection(Part, interface=True):
    """Choice of the tokens that a query attends to, among those it sees."""

    @abc.abstractmethod
    def pick(self, probs: Float[Array, "b h g t c"], new: New) -> Bool[Array, "b h g t c"]:
        """Return a mask of the chosen tokens, given the attention of some queries; 0 means unseen."""
