"""Acceptance of drafts: how many tokens of the full cache's text a policy guesses, measured without speculation.

A draft reads the full cache's own tokens, so its guesses in a round are those that it makes when it reads the whole
text by decode steps. One reading therefore tells the rounds for every number of draft tokens. Drafts whose slots are
chosen anew after each verification depend on the rounds, which `refreshed_rounds` runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.generation.generate import generate_ids
from kvjax.generation.sampling import GREEDY, Sampling, sample
from kvjax.generation.speculative import speculate
from kvjax.inference.budget import Budget
from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder
from kvjax.inference.extend import prefill
from kvjax.inference.speculation import speculation
from kvjax.inference.state import State, cache_bytes, full_cache_bytes
from kvjax.models.model import LanguageModel
from kvjax.policies.policy import Policy
from kvjax.utils.processes import on_host


class Acceptance(NamedTuple):
    """Guesses of a policy in the full cache's continuations of some prompts."""

    agrees: Bool[np.ndarray, "b n"]
    """True for tokens after the first that the policy would have drawn, too, after those before them."""
    cache_bytes: int
    """Bytes of the policy's cache, of all rows."""
    full_cache_bytes: int
    """Bytes that `full` allocates for them."""

    def tokens_per_round(self, draft_tokens: int) -> list[float]:
        """Return the tokens that a verification of so many guesses adds to each text on average."""
        return [agreeing.size / _rounds(agreeing.tolist(), draft_tokens) for agreeing in self.agrees]


def _rounds(agrees: Sequence[bool], draft_tokens: int) -> int:
    """Return the rounds that a text takes: each adds the guesses up to the first wrong one, and one token more."""
    place = rounds = 0
    while place < len(agrees):
        guesses = agrees[place : place + draft_tokens]
        place += 1 + next((index for index, right in enumerate(guesses) if not right), len(guesses))
        rounds += 1
    return rounds


def continuations(
    model: LanguageModel, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Int[np.ndarray, "b n"]:
    """Return the full cache's continuations of prompts, whether they end or not."""
    settings: dict[str, Any] = dict(temperature=temperature, seed=seed, stop_at_eos=False, **_without_filters())
    return np.asarray(generate_ids(model, prompts, max_new_tokens=new_tokens, **settings).tokens)


def acceptance(
    model: LanguageModel,
    policy: Policy | str,
    prompts: Int[np.ndarray, "b n"],
    texts: Int[np.ndarray, "b m"],
    budget: Budget = 1.0,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> Acceptance:
    """Read the full cache's `continuations` of prompts by decode steps of a policy, and compare what it would draw.

    Args:
        budget: of the policy; a fraction is one of prompt and continuation.
        temperature: that of the continuations, as `seed`.
    """
    key = jax.random.key(seed)
    state, _ = prefill(model, policy, prompts, budget, max_new_tokens=texts.shape[1], key=key)
    cache = state.cache.replace(key=None)
    drawn = _draws(state.decoder, cache, jnp.asarray(texts[:, :-1], jnp.int32), key, Sampling(temperature))
    return Acceptance(np.asarray(drawn) == texts[:, 1:], cache_bytes(state), full_cache_bytes(state))


class Rounds(NamedTuple):
    """Tokens that each round added to each text."""

    counts: Int[np.ndarray, "n b"]
    draft_tokens: int
    cache_bytes: int
    """Bytes of the draft's cache, of all rows."""
    full_cache_bytes: int

    @property
    def tokens_per_round(self) -> list[float]:
        """Tokens that a verification adds to each text on average."""
        return (self.counts.sum(0) / (self.counts > 0).sum(0)).tolist()

    @property
    def acceptance(self) -> list[float]:
        """Share of right guesses in each text, among those that a verification reached."""
        right = np.maximum(self.counts - 1, 0).sum(0)
        goes_on = np.cumsum(self.counts, axis=0) < self.counts.sum(0)  # the text may end before a wrong guess
        wrong = (goes_on & (self.counts <= self.draft_tokens)).sum(0)
        return (right / np.maximum(right + wrong, 1)).tolist()


def refreshed_rounds(
    model: LanguageModel,
    policy: Policy | str,
    prompts: Int[np.ndarray, "b n"],
    texts: Int[np.ndarray, "b m"],
    budget: Budget = 1.0,
    *,
    draft_tokens: int = 4,
    temperature: float = 0.0,
    seed: int = 0,
) -> Rounds:
    """Draft the full cache's `continuations` of prompts on slots that are chosen anew after each verification.

    Args:
        texts: the continuations.
        budget: of the policy; a fraction is one of prompt and continuation.
        temperature: that of the continuations, as `seed`.
    """
    drafts = speculation(model, policy, budget, draft_tokens=draft_tokens, refresh=True)
    key, rows = jax.random.key(seed), np.arange(len(prompts))
    cache, _ = drafts.prefill(prompts, max_new_tokens=texts.shape[1], key=key)
    cache = cache.replace(key=jnp.broadcast_to(key, rows.shape), end=cache.end - 1)
    draft, counts = State(drafts.draft, cache.draft), list[Int[np.ndarray, " b"]]()
    while (read := on_host(cache.position) - prompts.shape[1]).min() < texts.shape[1] - 1:
        newest = jnp.asarray(texts[rows, read], jnp.int32)
        cache, _, added = speculate(drafts, cache, newest, Sampling(temperature))
        counts.append(on_host(added))
    return Rounds(np.stack(counts), draft_tokens, cache_bytes(draft), full_cache_bytes(draft))


@jax.jit
def _draws(
    decoder: Decoder, cache: Cache, tokens: Int[Array, "b n"], key: Any, sampling: Sampling
) -> Int[Array, "b n"]:
    """Return what a policy draws after each token, with the random numbers of `kvjax.generation.loop.draw`."""
    place = cache.position[:, None] + 1 + jnp.arange(tokens.shape[1])
    _, logits = decoder.steps(cache, tokens)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, place.reshape(-1))
    return sample(logits.reshape(len(keys), -1), keys, sampling).reshape(tokens.shape)


def _without_filters() -> dict[str, Any]:
    return {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | {"repetition_penalty": GREEDY["repetition_penalty"]}
