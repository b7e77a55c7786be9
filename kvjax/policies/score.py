"""Scores: ranking of cached tokens by importance, the choice in which most papers differ."""

from __future__ import annotations

import abc
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.policies.base import Part
from kvjax.policies.rankings import OldestFirst, Ranking
from kvjax.policies.stats import AttentionSum
from kvjax.types import Heads, LayerTokens, PyTree, View, check, nothing, setting
from kvjax.utils.fields import check_fields


@dataclasses.dataclass(frozen=True)
class Replay:
    """Second reading of a text, over a cache that holds all of it.

    Its tokens attend to the cache and to each other, and get no slots. `attention_stats`, `update_slot` and
    `update_head` are called with `new.replayed`; `update_slot` sees only the slots of the cache.

    Args:
        prompt: ids of the tokens that are read before each chunk, a request for example.
        chunk: number of tokens of the text that are read together; fewer at the end of the model's positions.
        later: ids that replace `prompt` before all chunks but the first; None for the same.
        overlap: number of tokens of the text before each later chunk that are read again between request and chunk.
    """

    prompt: tuple[int, ...] = ()
    chunk: int = 2048
    later: tuple[int, ...] | None = None
    overlap: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "chunk", "overlap")
        check(self.chunk >= 1, "chunk", self.chunk, "a number of tokens from 1")
        check(self.overlap >= 0, "overlap", self.overlap, "a number of tokens from 0")

    def before(self, text: Sequence[int]) -> list[int]:
        """Return the tokens that are read before a chunk, given the text in front of it."""
        if not text:
            return list(self.prompt)
        request = self.prompt if self.later is None else self.later
        return [*request, *text[max(len(text) - self.overlap, 0) :]]

    @property
    def most_before(self) -> int:
        """Most tokens that are read before a chunk."""
        later = self.prompt if self.later is None else self.later
        return max(len(self.prompt), len(later) + self.overlap)


@dataclasses.dataclass(frozen=True)
class Requirements:
    """Rare needs of a score.

    Args:
        shared_slots: `heads` if slots must hold the same tokens in all heads of a layer, `layers` if also in all
            layers, else `none`.
        whole_heads: True if `score` compares the slots of a head with each other, so that it must see all of them.
        prompt_chunk: tokens of a prompt or turn read between two compressions; None for all, 1 for decode steps.
        whole_prompt: True if the end of a prompt decides which of its tokens stay, so that chunks are refused.
        min_prompt: tokens that each prompt must have.
        replay: how each prompt is read again before any of its tokens is evicted; None if it is not.
        host_memory: True to keep state of slots and heads in host memory from one token to the next.
        keeps_idle_rows: True if `update_head` does not change rows without new tokens; otherwise steps copy state to
            restore them.
    """

    shared_slots: str = "none"
    whole_heads: bool = False
    prompt_chunk: int | None = None
    whole_prompt: bool = False
    min_prompt: int = 0
    replay: Replay | None = None
    host_memory: bool = False
    keeps_idle_rows: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        kinds = ("none", "heads", "layers")
        check(self.shared_slots in kinds, "shared_slots", self.shared_slots, f"one of {', '.join(kinds)}")


NO_REQUIREMENTS = Requirements()


class Score(Part, interface=True):
    """Importance of each slot. The rest of eviction is the same for all scores.

    A decode step makes these calls in each layer:

    - `score`; the new token takes the slot that ranks lowest, or an empty slot if there is one.
    - `init_slot` of the new token; the result is stored beside its key and value.
    - After attention `update_head` and `update_slot`, with the statistics that `attention_stats` requests; neither is
      called if it returns None.

    A prompt, a turn or a chunk is read as a whole: `init_slot`, attention, `update_head` and `update_slot`. Then the
    slots that rank highest are kept.

    Example:
        >>> class Oldest(kvjax.Score):
        ...     def score(self, view, new):
        ...         return -view.position.astype("float32")
        >>> model = kvjax.load("tiny")
        >>> state, _ = kvjax.prefill(model, kvjax.Policy(Oldest()), [range(5, 45)], budget=16)
        >>> sorted(kvjax.held_positions(state)[0][0, 0].tolist())[:8]
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init_subclass__(cls, *, interface: bool = False, **options: Any) -> None:
        super().__init_subclass__(interface=interface, **options)
        if "settle" in vars(cls):
            raise TypeError(f"{cls.__name__}.settle is now part of update_slot, which sees whole heads of a block.")
        old = {"aligned": "heads", "aligned_layers": "layers"}
        for name in old.keys() & vars(cls).keys():
            needs = Requirements(shared_slots=old[name])
            warnings.warn(
                f"{cls.__name__}.{name} is now a property `requires` that returns kvjax.{needs}.", DeprecationWarning, 2
            )
            if vars(cls)[name] is True:
                cls.requires = needs  # type: ignore[assignment]

    def __new__(cls, *values: Any, **keywords: Any) -> Self:
        """Check that a class that requests statistics has a method that uses them."""
        requests = cls.attention_stats is not Part.attention_stats
        if requests and not takes_attention(cls):
            raise TypeError(
                f"{cls.__name__} requests attention statistics and never uses them; override update_slot, which gets "
                "them."
            )
        return super().__new__(cls, *values, **keywords)

    @property
    def requires(self) -> Requirements:
        """Rare needs of the score."""
        return NO_REQUIREMENTS

    def update_slot(self, stats: PyTree, view: View, new: LayerTokens) -> PyTree:
        """Return the new state of each slot, `view.slots.score`, after attention.

        The state after a block of tokens must be that after the same tokens, read one by one: see `new.age`,
        `new.counts` and `new.valid`. Otherwise the score is another method for prompts than for generated tokens.

        Each slot is updated independently, except after a block of tokens: then `view` has all slots of a head, and the
        state of one may depend on the others.

        Args:
            stats: attention statistics, in the structure of `attention_stats`; () if that is not overridden.
            view: the slots, those of the new tokens included.
            new: the tokens that attended.
        """
        return view.slots.score

    def update_head(self, heads: Heads, new: LayerTokens) -> PyTree:
        """Return the new state of whole heads, `heads.state.score`, after attention; `update_slot` gets the old one."""
        return heads.state.score

    @abc.abstractmethod
    def score(self, view: View, new: LayerTokens) -> Ranking:
        """Return the importance of each slot [b h c]: the lowest is evicted first, -inf immediately, +inf never.

        For a ranking by age or by hash codes, return a `kvjax.OldestFirst` or a `kvjax.HammingDistance`. Kernels then
        find the victim without computing scores. A `kvjax.SplitRanking` has other scores where heads compete for slots.

        Args:
            view: the slots; scores of empty slots are ignored. Of equal scores the oldest token is evicted.
            new: tokens being read: a token that needs a slot, or a block whose tokens have slots.
        """


def takes_attention(kind: type[Score]) -> bool:
    """Return whether a class of scores changes its state after attention."""
    return kind.update_slot is not Score.update_slot or kind.update_head is not Score.update_head


class AgeScore(Score):
    """Ranking by age: except for protected tokens, a head holds the newest tokens without a gap."""

    def score(self, view: View, new: LayerTokens) -> OldestFirst:
        return OldestFirst()


class StoredScore(Score, interface=True):
    """Score that slots store: one statistic of attention to each, which a subclass requests in `attention_stats`."""

    def init_slot(self, new: LayerTokens, state: PyTree) -> PyTree:
        return nothing(new)

    def update_slot(self, stats: PyTree, view: View, new: LayerTokens) -> PyTree:
        return stats

    def score(self, view: View, new: LayerTokens) -> Ranking:
        return view.slots.score


class AccumulatedScore(StoredScore, interface=True):
    """Score that sums one statistic of attention, which a subclass requests in `attention_stats`.

    Kernels may add it in place.
    """

    def retained(self, new: LayerTokens) -> Float[Array, " b"] | None:
        """Return the factor by which sums are multiplied before new attention is added; None for 1."""
        return None

    def update_slot(self, stats: PyTree, view: View, new: LayerTokens) -> PyTree:
        factor, before = self.retained(new), view.slots.score
        return stats + (before if factor is None else factor.astype(stats.dtype)[:, None, None] * before)

    def only_adds(self, requests: PyTree, new: LayerTokens) -> bool:
        """Return whether sums change only by adding a statistic of one query group, which kernels can do.

        A subclass that overrides `init_slot`, `update_slot` or `score` is treated like any other score.
        """
        base, kind = AccumulatedScore, type(self)
        as_here = kind.init_slot is base.init_slot and kind.update_slot is base.update_slot and kind.score is base.score
        return (
            as_here and self.retained(new) is None and isinstance(requests, AttentionSum) and requests.over == "group"
        )


UNRANKED = -1e30
"""Score of generated tokens, below all others."""


def is_ranked(scores: Float[Array, "*n"]) -> Bool[Array, "*n"]:
    """Return whether scores are numbers to calculate with: other ones only say which tokens are first or last."""
    return jnp.abs(scores) < -UNRANKED


class PromptScore(StoredScore):
    """Score that is computed once for each prompt, chunk or turn, from the slots of a head and without attention.

    Generated tokens are not ranked. Unless they are protected, they are evicted first, the oldest before the others.
    The next turn ranks those that remain. Tokens of a text that is read token by token count as generated ones.
    """

    def init_slot(self, new: LayerTokens, state: PyTree) -> Float[Array, "b h t"]:
        return jnp.full_like(nothing(new), UNRANKED)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> PyTree:
        """Return no requests, and None for generated tokens, which change no score."""
        return () if new.given else None

    def update_slot(self, stats: PyTree, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        """Return new scores of all slots at the end of given text."""
        return self._ranked(view, new).astype(view.slots.score.dtype) if new.token.shape[1] > 1 else view.slots.score

    @abc.abstractmethod
    def _ranked(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        """Return the score of each slot at the end of given text.

        Args:
            view: all slots of a head; those of the new tokens are the last ones. Its state is that before the text.
            new: the text, a block of tokens.
        """


class ScoreOver(Score, interface=True):
    """Score that extends another one: a subclass defines `init_slot`, `update_slot` and `score` by `base_score`'s.

    Args:
        base_score: the other score.
        base: name of the policy to which the other score belongs.
    """

    base_score: Score
    base: str = setting("")

    @property
    def requires(self) -> Requirements:
        return self.base_score.requires

    def init_head(self, shape: LayerTokens) -> PyTree:
        return self.base_score.init_head(shape)

    def attention_stats(self, heads: Heads, new: LayerTokens) -> PyTree:
        return self.base_score.attention_stats(heads, new)

    def update_head(self, heads: Heads, new: LayerTokens) -> PyTree:
        return self.base_score.update_head(heads, new)
