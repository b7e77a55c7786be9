"""What is asked of a server's engine, and what it tells while it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from kvjax.generation.generate import Logprob
from kvjax.generation.sampling import Sampling

if TYPE_CHECKING:
    from kvjax.model import Model


@dataclasses.dataclass(frozen=True)
class Request:
    """A text to continue.

    Args:
        prompt: its token ids, at least one.
        max_tokens: to write at most, at least 1.
        sampling: how they are drawn.
        presence_penalty: taken off the logits of tokens that have been written, -2 to 2.
        frequency_penalty: the same, times how often each has been.
        seed: of the text's randomness, which nothing else has a part in.
        stop: texts that end it before them.
        stop_ids: tokens that end it, beside those of the model.
        ignore_eos: whether the model's own end nothing.
        chat: whether it is an answer of a chat, which all that ends a turn ends.
        budget: slots of each head, at most the engine's; None for that.
        logprobs: how many likeliest tokens to tell of beside each one, 0 for the token alone; None for no telling.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 128
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
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
    """What is new of an answer."""

    text: str
    """Whole characters, and nothing of what may turn out to be a stop string."""
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None


class Held(NamedTuple):
    """What a row's cache has of a text."""

    seen: int
    """Tokens read."""
    kept: float
    """Slots that hold a token, on average over layers and heads."""
    bytes: int
    """Of the row's buffers, whatever they hold."""
    policy: str


class Finished(NamedTuple):
    """The end of an answer, told once, whatever became of it."""

    reason: Literal["stop", "length", "cancelled", "failed"]
    prompt_tokens: int
    tokens: int
    """That were written."""
    reused: int
    """Of the prompt, read from a snapshot of an earlier one that begins alike."""
    held: Held | None
    """None where the row had not been read yet."""
    error: str | None = None
    """One sentence, of what failed."""


Tell = Callable[[Piece | Finished], None]
"""Called from the engine's thread; must not wait."""


class Ticket(Protocol):
    """A request that was taken."""

    def cancel(self) -> None:
        """Free its row at the next dispatch; from any thread, and as often as one likes."""
        ...


class FullError(Exception):
    """The queue has no place for another request; `retry_after` seconds are a fair guess of when it has."""

    def __init__(self, waiting: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again later.")
        self.retry_after = retry_after


class StoppingError(Exception):
    """The engine takes nothing any more."""


class Serving(Protocol):
    """An engine, as whoever speaks HTTP sees it."""

    @property
    def model(self) -> Model:
        """What writes."""
        ...

    @property
    def policy_name(self) -> str:
        """What stays in its caches."""
        ...

    @property
    def budget(self) -> int:
        """Slots of each head that a request may use."""
        ...

    @property
    def context(self) -> int:
        """Tokens that a text may come to."""
        ...

    def submit(self, request: Request, tell: Tell) -> Ticket:
        """Take a request; from any thread.

        Raises:
            ValueError: it cannot be served: one sentence.
            FullError: the queue is full.
            StoppingError: the engine takes nothing any more.
        """
        ...

    def stop(self, grace: float) -> None:
        """Refuse what is new, give what runs so many seconds to end, and cancel the rest; returns when all is told."""
        ...

    def numbers(self) -> Mapping[str, float]:
        """Gauges and counters by name: `rows`, `rows_busy`, `waiting`, `cache_bytes`, `cache_device_bytes`,
        `snapshot_bytes`, `snapshot_device_bytes`, `compilations`, `requests_total`, `prompt_tokens_total`,
        `tokens_total`, `reused_tokens_total`, `dispatches_total`, `failed_dispatches_total`."""
        ...
