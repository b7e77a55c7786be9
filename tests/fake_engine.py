"""An engine that writes letters instead of running a model, and a server before it, for tests of HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

from kvjax.generation.generate import Logprob
from kvjax.models.model import SamplingDefaults
from kvjax.serving.app import Server, Service
from kvjax.serving.requests import Finished, FullError, Held, Piece, Request, StoppingError, Tell


class Letters:
    """A tokenizer whose tokens are bytes."""

    chat_template: str | None = (
        "{% for m in messages %}"
        "{% if 'refused' in m.content %}{{ raise_exception('the author wants it so') }}{% endif %}"
        "{{ m.role + ': ' + m.content }}\n{% endfor %}"
    )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(ids).decode(errors="replace")


class Ticket:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class FakeEngine:
    """Continues any prompt with the alphabet, from the letter that the seed says.

    Attributes:
        delay: seconds before each letter.
        fails_after: letters before the dispatch that fails; None for no failure.
        full: seconds that it asks to wait once its queue is full; None where it never is.
        places: of that queue.
        letters: that it may write, each once; None for any number.
        wide: how often it writes each letter.
        raises: what `submit` stumbles over.
    """

    def __init__(self) -> None:
        self.tokenizer = Letters()
        self.model: Any = SimpleNamespace(
            name="letters",
            tokenizer=self.tokenizer,
            mesh=None,
            config=SimpleNamespace(vocab_size=256),
            sampling_defaults=SamplingDefaults(),
        )
        self.model.least_tokens = len
        self.policy_name, self.budget, self.context = "h2o", 64, 256
        self.told = threading.Condition()
        self.rows: list[threading.Thread] = []
        self.reset()

    def reset(self) -> None:
        self.stopped = False
        self.delay, self.wide = 0.0, 1
        self.letters: threading.Semaphore | None = None
        self.fails_after: int | None = None
        self.full: float | None = None
        self.places = 0
        self.raises: Exception | None = None
        self.requests: list[Request] = []
        self.tickets: list[Ticket] = []
        self.ends: list[Finished] = []

    def submit(self, request: Request, tell: Tell) -> Ticket:
        with self.told:
            if self.stopped:
                raise StoppingError
            if self.full is not None and len(self.requests) >= self.places:
                raise FullError(7, self.full)
            if self.raises is not None:
                raise self.raises
            ticket = Ticket()
            self.tickets.append(ticket)
            self.rows = [row for row in self.rows if row.is_alive()]
            self.rows.append(threading.Thread(target=self._write, args=(request, tell, ticket), daemon=True))
            self.rows[-1].start()
            self.requests.append(request)
            self.told.notify_all()
        return ticket

    def _write(self, request: Request, tell: Tell, ticket: Ticket) -> None:
        text, reason, error, count, wide = "", "length", None, 0, self.wide
        for count in range(request.max_tokens):
            if self.delay:
                ticket.cancelled.wait(self.delay)
            while self.letters is not None and not self.letters.acquire(timeout=0.05) and not ticket.cancelled.is_set():
                pass
            if ticket.cancelled.is_set():
                reason = "cancelled"
                break
            if self.fails_after is not None and count >= self.fails_after:
                reason, error = "failed", "the dispatch failed."
                break
            token = 97 + (request.seed + count) % 26
            text += chr(token)
            if any(text.endswith(stop) for stop in request.stop):
                reason = "stop"
                break
            likeliest = tuple((token + i, -0.5 - i) for i in range(request.logprobs or 0))
            logprobs = None if request.logprobs is None else (Logprob(token, -0.5, likeliest),)
            tell(Piece(chr(token) * wide, (token,), logprobs))
        else:
            count = request.max_tokens
        seen = len(request.prompt) + count
        held = Held(seen, min(seen, request.budget or self.budget), 4096, self.policy_name, 1.0)
        finished = Finished(reason, len(request.prompt), count, 0, held, error)
        tell(finished)
        with self.told:
            self.ends.append(finished)
            self.told.notify_all()

    def begun(self, seconds: float = 10.0) -> bool:
        """Whether a text has been taken, waited for."""
        with self.told:
            return self.told.wait_for(lambda: bool(self.requests), seconds)

    def ended(self, count: int, seconds: float = 10.0) -> bool:
        """Whether so many texts have come to their end, waited for."""
        with self.told:
            return self.told.wait_for(lambda: len(self.ends) >= count, seconds)

    def stop(self, grace: float) -> None:
        with self.told:
            self.stopped = True
        end = time.monotonic() + grace
        for row in self.rows:
            row.join(max(0.0, end - time.monotonic()))
        for ticket in self.tickets:
            ticket.cancel()
        for row in self.rows:
            row.join()

    def numbers(self) -> dict[str, float]:
        busy = sum(row.is_alive() for row in self.rows)
        tokens = sum(end.tokens for end in self.ends)
        return {"rows": 8, "rows_busy": busy, "waiting": 0, "cache_bytes": 32768, "tokens_total": tokens}


@contextlib.contextmanager
def served(engine: FakeEngine, write_timeout: float = 30.0, grace: float = 5.0, **settings: Any) -> Generator[int]:
    """The port of a server before an engine, in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(Service(engine, **settings), grace, write_timeout)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.end()
        thread.join(20)
        assert not thread.is_alive()


def events(lines: Iterator[str]) -> Iterator[str]:
    """What server-sent events say."""
    for line in lines:
        if line:
            name, _, data = line.partition(": ")
            assert name == "data", line
            yield data
