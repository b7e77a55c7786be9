"""Requests to the engine, and the events that it sends in response."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from kvjax.generation.generate import Logprob
from kvjax.generation.sampling import Sampling

if TYPE_CHECKING:
    from kvjax.model import Model


_MOST = 2**31 - 1
SIZES = {"context": (2, _MOST), "chunk": (16, _MOST), "steps": (1, _MOST), "snapshot_bytes": (0, 2**63 - 1)}
"""Least and largest values of settings of the engine."""
CHUNK, STEPS, SNAPSHOT_BYTES = 256, 16, 256 * 2**20
"""Default values of these settings."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A text to continue.

    Args:
        prompt: token ids, at least one.
        max_tokens: maximal number of new tokens, at least 1.
        sampling: sampling settings; None for the model's defaults, see `LanguageModel`.
        presence_penalty: subtracted from the logits of tokens that have been generated, -2 to 2.
        frequency_penalty: subtracted once for each time that a token has been generated, -2 to 2.
        seed: the only source of the text's randomness.
        stop: strings that end the text before them.
        stop_ids: ids that end the text, in addition to the model's.
        ignore_eos: True to ignore the end ids of the model and the chat.
        chat: True for an answer of a chat; any end id of a turn ends it.
        budget: slots per head, at most the engine's; None for the engine's.
        logprobs: number of likeliest tokens to return with each one, 0 for the token alone; None for no
            log-probabilities.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 128
    sampling: Sampling | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    chat: bool = False
    budget: int | None = None
    logprobs: int | None = None


class Piece(NamedTuple):
    """New text and tokens of an answer."""

    text: str
    """Whole characters, without a possible beginning of a stop string."""
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None


class Held(NamedTuple):
    """Cache usage of one row."""

    seen: int
    """Tokens read, without those after a stop string."""
    kept: float
    """Occupied slots, averaged over layers and heads; those of the draft if the server is lossless."""
    bytes: int
    """Size of the row's buffers, including free slots."""
    policy: str
    tokens_per_round: float
    """Tokens that a pass of the model adds to the text: 1, or more where the full cache accepts those of a draft."""


class Finished(NamedTuple):
    """Last event of an answer, sent exactly once for any outcome."""

    reason: Literal["stop", "length", "cancelled", "failed"]
    prompt_tokens: int
    tokens: int
    reused: int
    """Prompt tokens taken from the prefix cache."""
    held: Held | None
    """Cache usage; None before the row's first dispatch."""
    error: str | None = None
    """One sentence about the failure."""


Tell = Callable[[Piece | Finished], None]
"""Callback for events; the engine calls it from its thread, so it must not block."""


class Ticket(Protocol):
    """An accepted request."""

    def cancel(self) -> None:
        """Cancel the request and free its row at the next dispatch; safe to repeat, from any thread."""
        ...


class FullError(Exception):
    """The queue is full; `retry_after` estimates the seconds until it has room."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again later.")
        self.retry_after = retry_after


class StoppingError(Exception):
    """The engine accepts no more requests."""


class Serving(Protocol):
    """Interface of an engine for the HTTP server; `context` is the maximal length of a text, in tokens."""

    model: Model
    policy_name: str
    budget: int
    """Slots per head that a request may use."""
    context: int

    def submit(self, request: Request, tell: Tell) -> Ticket:
        """Accept a request, from any thread.

        Raises:
            ValueError: the request cannot be served; the message is one sentence.
            FullError: the queue is full.
            StoppingError: the engine accepts no more requests.
        """
        ...

    def stop(self, grace: float) -> None:
        """Stop accepting requests, drain for `grace` seconds, cancel the rest, and return after all events are sent."""
        ...

    def numbers(self) -> Mapping[str, float]:
        """Return gauges and counters by name, without the `kvjax_` of the metrics in docs/serving.md."""
        ...
