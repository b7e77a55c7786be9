"""Selection: which of the tokens that are held a query reads."""

from __future__ import annotations

import abc

from jaxtyping import Array, Bool, Float

from kvjax.policies.base import Part
from kvjax.types import New


class Selection(Part, interface=True):
    """Which tokens each query reads, from its attention to all that are held."""

    @abc.abstractmethod
    def pick(self, probs: Float[Array, "b h g t c"], new: New) -> Bool[Array, "b h g t c"]:
        """The chosen ones, given the attention of a block of queries; zero means unseen."""
