"""Prefill of prompts into an empty cache, and of chunks and turns on top of a filled one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from kvjax.inference.budget import Budget
from kvjax.inference.decoder import decoder
from kvjax.inference.prefill import lower_prompts
from kvjax.inference.prepare import Tokens, prepare
from kvjax.inference.state import State, check_state
from kvjax.models.model import LanguageModel
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.types import Kernels
from kvjax.utils.modes import on_the_host


@on_the_host
def prefill(
    model: LanguageModel,
    policy: Policy | str,
    tokens: Tokens,
    budget: Budget = 1.0,
    *,
    lengths: ArrayLike | Sequence[int] | None = None,
    max_new_tokens: int = 256,
    key: Key[Array, ""] | Key[Array, " b"] | None = None,
    plan: Plan | str | None = None,
    prefill_chunk: int | None = None,
    budget_of: str = "text",
    rope_length: int | None = None,
    implementation: str | Kernels = "auto",
) -> tuple[State, Float[Array, "b vocab"]]:
    """Read prompts into a cache that holds no more than its budget.

    Args:
        model: from `kvjax.load`.
        policy: eviction policy; a name or a `Policy`.
        tokens: prompts [b, n], padded on the right; or a list of lists of unequal lengths.
        budget: slots per KV head, including that of the token being read; or a fraction, for each row; or slots for
            each layer. A paper that attends over budget + 1 slots and then evicts has one slot more at the same number.
            Omit the budget for policies that decide how many slots each head needs. In a model whose other layers
            attend further back, a layer with a sliding window keeps that window under any policy if the planned text
            (prompt + `max_new_tokens`) exceeds it, and the budget applies to the other layers.
        lengths: tokens of each prompt [b], 1 to n; None if none is padded.
        max_new_tokens: planned number of later tokens, generated or given; fractions, schedules, the full cache,
            windows of layers and length-dependent RoPE depend on it.
        key: random key for sampling and random policies, one for all rows or one each; None is `jax.random.key(0)`.
        plan: distribution of the budget over layers or heads; a name, a `Plan`, or None for the policy's own.
        prefill_chunk: compress after each chunk of this many prompt tokens, so that memory never exceeds budget +
            chunk; None for the policy's default, mostly the whole prompt; 1 reads it by decode steps.
        budget_of: base of a fractional budget: `text` (prompt + `max_new_tokens`), `prompt`, or `context` (the
            model's positions).
        rope_length: length of the texts, in tokens, for RoPE whose frequencies depend on it; None for the planned
            length of each. Set it if texts are much shorter than `max_new_tokens` allows.
        implementation: implementation of every operation: `auto`, `xla`, `pallas`, `triton`, or a list such as
            `pallas,xla` for the first that can run; see `pallas_kernels.op.choose`.

    Returns:
        The state to decode from, and the logits for the first new token [b, vocab].

    Raises:
        ValueError: if a prompt is empty or does not fit the model, or the budget does not fit the policy; or if a
            user's score returns NaN, or not one number for each slot.
        TypeError: if the tokens are not rows of ids, or a class is given instead of an instance.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> state.position.tolist(), logits.shape
        ([3], (1, 2048))
    """
    reader = decoder(model, policy, budget, plan=plan, implementation=implementation)
    settings: dict[str, Any] = dict(
        max_new_tokens=max_new_tokens, key=key, prefill_chunk=prefill_chunk, rope_length=rope_length
    )
    cache, logits = reader.prefill(tokens, lengths, budget_of=budget_of, **settings)
    return State(reader.for_steps(), cache), logits


@on_the_host
def lower_prefill(
    model: LanguageModel,
    policy: Policy | str,
    tokens: Tokens,
    budget: Budget = 1.0,
    *,
    lengths: ArrayLike | Sequence[int] | None = None,
    max_new_tokens: int = 256,
    plan: Plan | str | None = None,
    prefill_chunk: int | None = None,
    budget_of: str = "text",
) -> list[jax.stages.Lowered]:
    """Lower the programs of `prefill` for these arguments, to compile them and read their `memory_analysis()`."""
    settings: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=None, plan=plan, chunk=prefill_chunk)
    prompts = prepare(model, policy, tokens, budget, lengths, budget_of=budget_of, **settings)
    return lower_prompts(model, prompts)


@on_the_host
def extend(
    state: State,
    tokens: ArrayLike | Sequence[Sequence[int]],
    lengths: ArrayLike | Sequence[int] | None = None,
    logits: str = "last",
    *,
    prefill_chunk: int | None = None,
) -> tuple[State, Float[Array, "b vocab"] | Float[Array, "b n vocab"]]:
    """Read more text on top of a cache: a second turn, or the next chunk of a text.

    All tokens, or those of a chunk, attend to the cache and to each other before any of them is evicted; memory is that
    of the cache and of these tokens. Slots stay those that `prefill` planned, also where the text outgrows its plan;
    `kvjax.compress` plans them again. Only a layer whose own window is outgrown, too, gets the slots of that window, as
    it would have had from a longer plan. Use `decode_step` for generated tokens.

    Args:
        state: from `prefill` or a later call; it stays valid.
        tokens: [b, n], padded on the right; or a list of lists, some of which may be empty.
        lengths: tokens of each row [b], 0 to n; None if none is padded.
        logits: `last` for logits after each row's last token, `all` for logits after every token.
        prefill_chunk: evict after each chunk of this many tokens, 1 to read them by decode steps; None for the
            policy's default, mostly all tokens together.

    Returns:
        The state to decode from, and logits [b, vocab] or [b, n, vocab]; NaN for rows without new tokens.

    Raises:
        TypeError: if the tokens are a list of anything but rows.
        ValueError: if the tokens do not fit the state or the model; or if the text exceeds its planned length, under
            policies that reserve slots for all of it.

    Example:
        >>> model = kvjax.load("tiny")
        >>> state, logits = kvjax.prefill(model, "h2o", [[5, 17, 42]], budget=16, max_new_tokens=8)
        >>> state, logits = kvjax.extend(state, [[8, 15, 99]])
        >>> state.position.tolist(), logits.shape
        ([6], (1, 2048))
    """
    check_state(state)
    cache, next_logits = state.decoder.extend(state.cache, tokens, lengths, logits, prefill_chunk=prefill_chunk)
    return State(state.decoder, cache), next_logits
