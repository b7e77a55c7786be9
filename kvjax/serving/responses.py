"""HTTP responses: JSON, errors, and the engine's answer, streamed or sent at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvjax.serving.metrics import OUTCOME, Latency, Metrics
from kvjax.serving.openai.answer import Answer
from kvjax.serving.openai.bodies import ParsedBody
from kvjax.serving.openai.fields import APIError
from kvjax.serving.requests import Finished, FullError, Piece, Serving, StoppingError, Tell, Ticket

CLIENT_CLOSED = 499
"""Status in metrics and logs if the client disconnects, as in nginx."""


class JsonResponse(JSONResponse):
    """JSON in ASCII, since lone surrogates are not valid UTF-8 and some clients break lines at U+2028."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def json_bytes(content: Any) -> bytes:
    """Encode a value as compact JSON in ASCII."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def stopping_error() -> APIError:
    """Return the error for requests during the shutdown."""
    return APIError("the server is stopping; use another one or retry later.", status=503, headers={"retry-after": "5"})


class EngineResponse(Response):
    """Response with the engine's events for one body, streamed or sent at the end."""

    def __init__(self, serving: Serving, metrics: Metrics) -> None:
        super().__init__()
        self.serving, self.metrics = serving, metrics
        self.loop = asyncio.get_running_loop()
        self.arrival = time.perf_counter()
        self.events: asyncio.Queue[tuple[int, Piece | Finished] | None] = asyncio.Queue()
        """Events from the engine, or None if the client disconnected; the queue is at most as long as the answer."""
        self.tickets: list[Ticket] = []
        self.sent_tokens = 0
        """Number of tokens sent so far."""
        self.answer: Answer

    def submit(self, parsed: ParsedBody) -> None:
        """Submit all requests to the engine, or none if it refuses one; safe in any thread."""
        self.answer = Answer(self.serving, parsed)
        try:
            for index, request in enumerate(parsed.requests):
                self.tickets.append(self.serving.submit(request, self._tell(index)))
        except BaseException as error:
            self._cancel()
            if isinstance(error, FullError):
                wait = {"retry-after": str(max(1, math.ceil(error.retry_after)))}
                raise APIError(str(error), status=429, code="rate_limit_exceeded", headers=wait) from None
            if isinstance(error, StoppingError):
                raise stopping_error() from None
            if isinstance(error, ValueError):
                raise APIError(" ".join(str(error).split())) from None
            raise

    def _tell(self, index: int) -> Tell:
        latency = Latency(self.metrics, self.arrival)

        def tell(event: Piece | Finished) -> None:
            if isinstance(event, Piece) and event.tokens:
                latency.observe(len(event.tokens))
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there are no clients
                self.loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

        return tell

    def _cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; the rows are freed in all cases."""
        watch, outcome = asyncio.create_task(self._watch(receive)), scope[OUTCOME]
        try:
            if self.answer.parsed.stream:
                await self._stream(send, outcome)
            else:
                while self.answer.unfinished:
                    self._note(*await self._next())
                await JsonResponse(self.answer.response())(scope, receive, send)
        except (ClientDisconnect, asyncio.CancelledError) as error:
            outcome["status"] = CLIENT_CLOSED
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._cancel()
            watch.cancel()
            outcome |= {"read": self.answer.parsed.read, "written": self.sent_tokens}

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.events.put_nowait(None)

    async def _next(self) -> tuple[int, Piece | Finished]:
        """Return the next event."""
        event = await self.events.get()
        if event is None:
            raise ClientDisconnect
        if isinstance(event[1], Finished) and event[1].reason in ("failed", "cancelled"):
            self._cancel()  # the other texts end now, however slowly the client reads the error
            if event[1].reason == "cancelled":
                raise stopping_error()
            raise APIError(" ".join((event[1].error or "the engine failed").split()), status=500)
        return event

    def _note(self, index: int, event: Piece | Finished) -> list[dict[str, Any]]:
        """Record an event and return its chunk, if it has one."""
        if isinstance(event, Finished):
            return [self.answer.finish(index, event)]
        self.sent_tokens += len(event.tokens)
        chunk = self.answer.piece(index, event)
        return [] if chunk is None else [chunk]

    async def _stream(self, send: Send, outcome: dict[str, Any]) -> None:
        """Send server-sent events, one `data:` line per chunk."""

        async def write(*chunks: dict[str, Any], last: bytes | None = None) -> None:
            lines = [*map(json_bytes, chunks), *([] if last is None else [last])]
            body = b"".join(b"data: " + line + b"\n\n" for line in lines)
            await send({"type": "http.response.body", "body": body, "more_body": last is None})

        event = await self._next()  # wait before sending the status, since this may raise an error
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # prevents buffering in proxies such as nginx
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await write(*self.answer.begin(), *self._note(*event))
            while self.answer.unfinished:
                await write(*self._note(*await self._next()))
        except APIError as refused:
            outcome["status"] = refused.status
            await write(last=json_bytes(refused.body()))
        else:
            await write(*self.answer.end(), last=b"[DONE]")
