"""As many draft tokens as pay: chosen by the guesses that are right, and by what drafts and verifications take."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.buffers import allocated_bytes, host_bytes
from kvjax.generation.loop import Dispatch, PrefilledBatch, Running
from kvjax.generation.speculative import SpeculativeBatch, parts_of
from kvjax.inference.budget import Budget
from kvjax.inference.speculation import Speculation, SpeculativeCache, speculation
from kvjax.inference.state import State
from kvjax.models.model import LanguageModel
from kvjax.policies.policy import Policy
from kvjax.utils.compilation import Compiling

CHOICES = 1, 2, 4, 8
"""Numbers of draft tokens to choose from, beside none."""

TRIAL, TRIAL_TOKENS = 8, 4
"""Verifications after which the choice is made, and draft tokens until then."""

LIKELY = 0.95
"""Share of right guesses that is assumed before any is made."""


HOST_COST = 32
"""Bytes of a device's memory that are read in the time of one byte of host memory: about that of PCIe."""


class Cost(NamedTuple):
    """What a step of the full cache and a round of `TRIAL_TOKENS` draft tokens take, in bytes or in seconds."""

    step: float
    round: float


def best_draft_tokens(tokens_per_round: float, cost: Cost) -> int:
    """Return the number of draft tokens that takes least for each token of the text, 0 for no draft.

    A round takes a step of the full cache, and as much again for each draft token.

    Args:
        tokens_per_round: mean that was measured with `TRIAL_TOKENS`.
    """
    grid = np.linspace(0, 1, 1001)[:, None]  # shares of right guesses
    expected = np.cumsum(grid ** np.arange(max(CHOICES) + 1), axis=1)  # tokens of a round, by share and draft tokens
    nearest = int(np.abs(expected[:, TRIAL_TOKENS] - tokens_per_round).argmin())
    of_draft = (cost.round - cost.step) / TRIAL_TOKENS

    def cost_per_token(count: int) -> float:
        return (cost.step + count * of_draft) / expected[nearest, count]

    return min((0, *CHOICES), key=cost_per_token)


def bytes_read(decoder: Speculation, cache: SpeculativeCache) -> Cost:
    """Return the bytes that a step and a round read: each draft token reads the weights and the draft's cache.

    Bytes in host memory count as those that a device reads of its own memory in the same time.
    """
    weights, draft, full = map(allocated_bytes, (decoder.weights, cache.draft.memory, cache.full.memory))
    full += (HOST_COST - 1) * host_bytes(cache.full.memory)
    return Cost(weights + full, TRIAL_TOKENS * (weights + draft) + weights + full)


@dataclasses.dataclass
class Trial:
    """What the first tokens of some texts have taken."""

    step_seconds: float | None = None
    """Time of a step of the full cache; None if its program was compiled meanwhile."""
    round_seconds: float = 0.0
    rounds: int = 0
    """Rounds of which `round_seconds` is the time: those that compiled no program."""
    verifications: int = 0
    """Verifications of all rows."""
    verified: int = 0
    """Tokens that they added."""

    def add(self, dispatch: Dispatch, seconds: float | None) -> None:
        """Add rounds that have taken some time; None if it is not known."""
        if seconds is not None:
            self.round_seconds, self.rounds = self.round_seconds + seconds, self.rounds + int(dispatch.rounds.max())
        self.verifications += int(dispatch.rounds.sum())
        self.verified += int(dispatch.counts.sum())

    def best(self, bytes_: Cost) -> int:
        """Return the best number of draft tokens; by bytes if times are not known, or could differ in processes."""
        cost = bytes_
        if self.step_seconds is not None and self.rounds and jax.process_count() == 1:
            cost = Cost(self.step_seconds, self.round_seconds / self.rounds)
        return best_draft_tokens(self.verified / self.verifications, cost)


@dataclasses.dataclass
class AdaptiveBatch(SpeculativeBatch):
    """Prefilled prompts with as many draft tokens as pay.

    The first tokens are those of steps of the full cache, which are timed, and of rounds of `TRIAL_TOKENS`. Nothing is
    drafted if bytes alone tell that it cannot pay.
    """

    trial: Trial | None = None
    """None before the first token."""

    def dispatch(self, state: State, texts: Running, steps: int) -> Dispatch:
        if not isinstance(state.decoder, Speculation):
            return PrefilledBatch.dispatch(self, state, texts, steps)
        decoder, cache = parts_of(state)
        alone, bytes_ = State(decoder.full, cache.full), bytes_read(decoder, cache)
        if self.trial is None:
            self.trial = Trial()
            if best_draft_tokens(sum(LIKELY**i for i in range(TRIAL_TOKENS + 1)), bytes_) == 0:
                return PrefilledBatch.dispatch(self, alone, texts, steps)
            return self._timed_steps(alone, cache, texts, min(steps, max(CHOICES)), decoder)
        if self.trial.verifications >= TRIAL:
            return super().dispatch(state, texts, steps)
        with Compiling() as compiling:
            dispatch = super().dispatch(State(decoder.replace(draft_tokens=TRIAL_TOKENS), cache), texts, steps)
            self.trial.add(dispatch, None if compiling.seconds else compiling.lap())
        _, cache = parts_of(dispatch.state)
        if self.trial.verifications < TRIAL:
            return dispatch._replace(state=State(decoder, cache))
        count = self.trial.best(bytes_)
        after = State(decoder.replace(draft_tokens=count), cache) if count else State(decoder.full, cache.full)
        return dispatch._replace(state=after)

    def _timed_steps(
        self, alone: State, cache: SpeculativeCache, texts: Running, steps: int, decoder: Speculation
    ) -> Dispatch:
        """Run steps of the full cache alone, whose tokens the draft then has to read."""
        assert self.trial is not None
        with Compiling() as compiling:
            dispatch = PrefilledBatch.dispatch(self, alone, texts, steps)
            self.trial.step_seconds = None if compiling.seconds else compiling.lap() / int(dispatch.counts.max())
        read = jnp.concatenate([texts.token[:, None], dispatch.samples.token], axis=1)[:, : cache.behind.shape[1]]
        after: Any = SpeculativeCache.of(dispatch.state.cache, cache.draft, read)
        return dispatch._replace(state=State(decoder, after))


def drafting(
    model: LanguageModel, policy: Policy, budget: Budget, *, draft_tokens: int | str, **settings: Any
) -> tuple[Speculation, type[SpeculativeBatch]]:
    """Return a decoder with a draft, and the kind of batch that continues its prompts.

    The arguments are those of `kvjax.speculation`; `draft_tokens` may also be "auto" for as many as pay.
    """
    adapts = draft_tokens == "auto"
    count: Any = max(CHOICES) if adapts else draft_tokens
    reader = speculation(model, policy, budget, draft_tokens=count, **settings)
    return reader, AdaptiveBatch if adapts else SpeculativeBatch
