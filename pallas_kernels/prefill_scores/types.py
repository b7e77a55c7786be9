"""Inputs and result of a prompt's attention."""

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
    """Keys or values in two arrays: the slots of `old`, then those of `new`; blocks are read without joining them."""

    old: Operand
    new: Operand

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of both together."""
        b, h, c, d = self.old.shape
        return b, h, c + self.new.shape[2], d


class Own(NamedTuple):
    """Tokens of the queries, if they are only some of the tokens that are being read."""

    token: Int[Array, " n"]
    """Rising token numbers from 0."""
    of: int
    """Number of tokens that are being read: their keys are the last, in the order of the text."""


class PromptAttention(NamedTuple):
    """Attention of a prompt's queries, and the attention each key received; float32, or float64 for float64."""

    out: Float[Array, "b h g n e"]
    lse: Float[Array, "b h g n"]
    """Logarithm of each query's sum of exponentials; -inf, with output 0, if a query attends to nothing."""
    scores: Float[Array, "b h m c"] | None
    """Column sums of the probabilities over queries and the heads of a group, one for each row of weights; None if
    not requested."""
