"""Types of the keywords of functions that generate texts, for type checkers; `begin` documents and defaults them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from kvjax.utils.settings import Chat

if TYPE_CHECKING:
    from kvjax.policies.allocation import Plan
    from kvjax.policies.policy import Policy


class TextKeywords(TypedDict, total=False):
    """Keywords for one text or conversation: those of `begin` without samples, chats and the length for RoPE."""

    policy: str | Policy
    budget: int | float | Sequence[int]
    plan: str | Plan | None
    budget_of: str
    prefill_chunk: int | None
    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | Sequence[int]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    stop_at_eos: bool
    logprobs: int | None
    lossless: bool
    verifier: str | Policy
    draft_tokens: int | str
    refresh: bool


class BeginKeywords(TextKeywords, total=False):
    """Keywords of `begin`."""

    num_samples: int
    chat: bool
    rope_length: int | None


class TextsKeywords(TextKeywords, total=False):
    """Keywords of `generate_texts` that it passes on: samples, and those of `generate_ids`."""

    num_samples: int
    rope_length: int | None
    beams: int
    length_penalty: float
    on_tokens: Callable[[np.ndarray, np.ndarray], None] | None


class GenerateKeywords(TextsKeywords, total=False):
    """Keywords of `Model.generate`."""

    chat: Chat
    system: str | None


class StreamKeywords(TextKeywords, total=False):
    """Keywords of `Model.stream`."""

    chat: Chat
    system: str | None
