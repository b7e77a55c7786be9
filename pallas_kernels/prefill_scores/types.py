"""What a prompt's attention takes and returns."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.operands import Operand


@functools.partial(jax.tree_util.register_dataclass, data_fields=["old", "new"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Joined:
    """Keys or values in two places: the slots of `old`, then those of `new`; each block is read from where it lies."""

    old: Operand
    new: Operand

    @property
    def shape(self) -> tuple[int, ...]:
        """Of both together."""
        b, h, c, d = self.old.shape
        return b, h, c + self.new.shape[2], d


class Own(NamedTuple):
    """Which tokens of a text queries are of, where they are not of all that are being read."""

    token: Int[Array, " n"]
    """Numbers from 0 that rise."""
    of: int
    """Tokens being read: their keys are the last, in the order of the text."""


class PromptAttention(NamedTuple):
    """Attention of a prompt's queries, and what each key received; float32, or float64 for float64."""

    out: Float[Array, "b h g n e"]
    lse: Float[Array, "b h g n"]
    """Logarithm of each query's sum of exponentials; -inf where a query saw nothing, its output then is 0."""
    scores: Float[Array, "b h m c"] | None
    """Column sums of the probabilities over queries and the heads of a group, one for each row of weights; None if
    they were not asked for."""
