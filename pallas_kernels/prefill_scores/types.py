"""Inputs and result of a prompt's attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import AttentionSpec, static
from pallas_kernels.operands import Joined, Operand


@functools.partial(jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["of"])
@dataclasses.dataclass(frozen=True)
class Own:
    """Tokens of the queries, if they are only some of the tokens that are being read."""

    token: Int[Array, " n"]
    """Rising token numbers from 0."""
    of: int
    """Number of tokens that are being read: their keys are the last, in the order of the text."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrefillInputs:
    """Arguments of a prompt's attention; see `api.prefill_scores`."""

    q: Float[Array, "b h g n d"]
    k: Operand | Joined
    """Keys [b h c d]."""
    v: Operand | Joined
    """Values [b h c e]."""
    query_position: Int[Array, "b n"]
    key_position: Int[Array, "b #h c"]
    spec: AttentionSpec
    scores: bool = static(True)
    weights: Float[Array, "b #h m n"] | None = None
    noise: Float[Array, "b h c"] | None = None
    tau: float = static(1.0)
    places: tuple[Int[Array, "b #h n"], Int[Array, "b #h c"]] | None = None
    own: Own | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that are being read."""
        return self.q.shape[3] if self.own is None else self.own.of


class PromptAttention(NamedTuple):
    """Attention of a prompt's queries, and the attention each key received; float32, or float64 for float64."""

    out: Float[Array, "b h g n e"]
    lse: Float[Array, "b h g n"]
    """Logarithm of each query's sum of exponentials; -inf, with output 0, if a query attends to nothing."""
    scores: Float[Array, "b h m c"] | None
    """Column sums of the probabilities over queries and the heads of a group, one for each row of weights; None if
    not requested."""
