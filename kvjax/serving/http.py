"""HTTP server of an engine: routes, checks of requests, streams, and a shutdown that finishes running requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import math
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvjax.serving import openai
from kvjax.serving.access_log import OUTCOME, AccessLog
from kvjax.serving.metrics import Latency, Metrics
from kvjax.serving.openai import Answer, Asked, Refused
from kvjax.serving.requests import Finished, FullError, Piece, Serving, StoppingError, Tell, Ticket

GONE = 499
"""Status in metrics and logs if the client disconnects, as in nginx."""
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback one, without resolving it."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


class _Json(JSONResponse):
    """JSON in ASCII, since lone surrogates are not valid UTF-8 and some clients break lines at U+2028."""

    def render(self, content: Any) -> bytes:
        return _json(content)


def _json(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def _of_error(refused: Refused) -> Response:
    return _Json(refused.body(), refused.status, refused.headers)


class Service:
    """Web application in front of an engine.

    Args:
        serving: the engine.
        keys: valid API keys; if there are none, keys are not checked.
        hosts: accepted host names in addition to loopback; None for any. The check protects a server without keys from
            pages of other sites that resolve their own name to its address.
        max_body: maximal bytes of a request's body.
        chat_tokens: maximal tokens of a chat answer if the request does not set them.
        read_timeout: seconds that a request may take to arrive.
        origins: origins of other sites' pages that may send requests, `*` for any; browsers refuse all others.
        log: True to log each request.
    """

    def __init__(
        self,
        serving: Serving,
        keys: Sequence[str] = (),
        hosts: Sequence[str] | None = (),
        max_body: int = 4 * 2**20,
        chat_tokens: int = 512,
        read_timeout: float = 30.0,
        origins: Sequence[str] = (),
        log: bool = False,
    ) -> None:
        self.serving, self.max_body, self.chat_tokens, self.read_timeout = serving, max_body, chat_tokens, read_timeout
        self.keys = [key.encode() for key in keys]
        self.hosts = None if hosts is None else [host.strip("[]").lower() for host in hosts]
        self.metrics = Metrics(serving)
        self.stopping = False
        """True if new requests are refused."""
        # One thread, since tokenizers are not thread-safe; not the loop's, since a long text would delay the streams.
        self.reader = ThreadPoolExecutor(1, "kvjax-reader")
        self.created = int(time.time())
        self.page_html = Path(__file__).with_name("page.html").read_bytes()
        get, post = ["GET"], ["POST"]
        middleware = [Middleware(AccessLog)] if log else []
        if origins:
            allowed: dict[str, Any] = dict(allow_methods=[*get, *post], allow_headers=["*"], expose_headers=["*"])
            middleware.append(Middleware(CORSMiddleware, allow_origins=origins, **allowed))
        self.app = Starlette(
            middleware=middleware,
            routes=[
                Route("/", self._guarded(self._page, needs_key=False), methods=get),
                Route("/health", self._guarded(self._health, needs_key=False), methods=get),
                Route("/metrics", self._guarded(self._metrics), methods=get),
                Route("/v1/models", self._guarded(self._models), methods=get),
                Route("/v1/models/{name:path}", self._guarded(self._model), methods=get),
                Route("/v1/completions", self._guarded(self._completions), methods=post),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=post),
            ],
            exception_handlers={HTTPException: self._no_route, Exception: self._broken},
        )
        self.app.router.redirect_slashes = False

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]], needs_key: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a route with the checks of host and key, and turn refusals into responses."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_host(request)
                if needs_key:
                    self._check_key(request)
                response = await answer(request)
            except Refused as refused:
                response = _of_error(refused)
            except ClientDisconnect:
                self.metrics.responses.labels(GONE).inc()
                request.scope[OUTCOME] = {"status": GONE}
                return Response()  # never received
            if not isinstance(response, _Told):
                self.metrics.responses.labels(response.status_code).inc()
            return response

        return guarded

    def _check_host(self, request: Request) -> None:
        if self.hosts is None:
            return
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name and not is_loopback(name) and name.strip("[]").lower() not in self.hosts:
            raise Refused(f"this server is not {host[:60]!r}; ask it by the address that it listens on.", status=403)

    def _check_key(self, request: Request) -> None:
        if not self.keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Compare all keys, so that the time reveals nothing about them.
        fits = [hmac.compare_digest(key.strip().encode("latin-1"), each) for each in self.keys]
        if scheme.lower() != "bearer" or not any(fits):
            said = "the API key is wrong" if key else "there is no API key"
            raise Refused(
                f"{said}; send it as `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _page(self, request: Request) -> Response:
        return Response(self.page_html, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    async def _health(self, request: Request) -> Response:
        serving = self.serving
        numbers = await asyncio.to_thread(serving.numbers)
        names = "rows", "rows_busy", "waiting", "cache_bytes", "cache_device_bytes"
        told = {name: numbers[name] for name in names if name in numbers}
        status = "stopping" if self.stopping else "ok"
        about = {"model": serving.model.name, "policy": serving.policy_name, "budget": serving.budget}
        return _Json({"status": status, **about, "context": serving.context, **told}, 503 if self.stopping else 200)

    async def _metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    def _described(self) -> dict[str, Any]:
        serving = self.serving
        about = {"id": serving.model.name, "object": "model", "created": self.created, "owned_by": "kvjax"}
        return about | {
            "max_model_len": serving.context,
            "kv": {"policy": serving.policy_name, "budget": serving.budget},
        }

    async def _models(self, request: Request) -> Response:
        return _Json({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self.serving.model.name:
            raise openai.no_model(request.path_params["name"], self.serving)
        return _Json(self._described())

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, lambda body: openai.completion(self.serving, body))

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, lambda body: openai.chat(self.serving, body, self.chat_tokens))

    async def _answer(self, request: Request, read: Callable[[Mapping[str, Any]], Asked]) -> Response:
        if self.stopping:
            raise _stopping()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # this also refuses forms of other sites' pages
            raise Refused("the body must be JSON; send the header `Content-Type: application/json`.", status=415)
        body = await self._body(request)
        told = _Told(self.serving, self.metrics)

        def begin() -> None:
            told.submit(read(openai.parse(body)))

        await asyncio.get_running_loop().run_in_executor(self.reader, begin)
        return told

    async def _body(self, request: Request) -> bytes:
        """Read the body, and check its length while it arrives."""
        length = request.headers.get("content-length", "")
        too_long = Refused(f"the body has more than {self.max_body} bytes; send less.", status=413)
        if length.isdecimal() and int(length[:20]) > self.max_body:
            raise too_long
        found = bytearray()
        try:
            async with asyncio.timeout(self.read_timeout):
                async for part in request.stream():
                    found += part
                    if len(found) > self.max_body:
                        raise too_long
        except TimeoutError:
            text = f"the body did not arrive within {self.read_timeout:g} seconds."
            raise Refused(text, status=408, headers={"connection": "close"}) from None
        return bytes(found)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = {404: "there is nothing at", 405: f"{request.method} is not for"}
        said = words.get(error.status_code, error.detail)
        response = _of_error(Refused(f"{said} {request.scope['path'][:200]}.", status=error.status_code))
        response.headers.update(error.headers or {})
        self.metrics.responses.labels(error.status_code).inc()
        return response

    async def _broken(self, request: Request, error: Exception) -> Response:
        # Uvicorn logs the error; the client gets no details.
        self.metrics.responses.labels(500).inc()
        return _of_error(Refused("the server failed; its log says why.", status=500))


def _stopping() -> Refused:
    return Refused("the server is stopping; ask another one, or later.", status=503, headers={"retry-after": "5"})


class _Gone(Exception):
    """The client disconnected."""


class _Told(Response):
    """Response with the engine's events for one body, streamed or sent at the end.

    Args:
        serving: the engine.
        metrics: records the latencies.
    """

    def __init__(self, serving: Serving, metrics: Metrics) -> None:
        super().__init__()
        self.serving, self.metrics = serving, metrics
        self.loop = asyncio.get_running_loop()
        self.arrived = time.perf_counter()
        self.events: asyncio.Queue[tuple[int, Piece | Finished] | None] = asyncio.Queue()
        """Events from the engine, or None if the client disconnected; the queue is at most as long as the answer."""
        self.tickets: list[Ticket] = []
        self.written = 0
        """Number of tokens sent so far."""
        self.answer: Answer

    def submit(self, asked: Asked) -> None:
        """Submit all requests to the engine, or none if it refuses one; safe in any thread.

        Raises:
            Refused: the engine refuses a request.
        """
        self.answer = Answer(self.serving, asked)
        try:
            for index, request in enumerate(asked.requests):
                self.tickets.append(self.serving.submit(request, self._tell(index)))
        except BaseException as error:
            self._cancel()
            if isinstance(error, FullError):
                wait = {"retry-after": str(max(1, math.ceil(error.retry_after)))}
                raise Refused(str(error), status=429, code="rate_limit_exceeded", headers=wait) from None
            if isinstance(error, StoppingError):
                raise _stopping() from None
            if isinstance(error, ValueError):
                raise Refused(" ".join(str(error).split())) from None
            raise

    def _tell(self, index: int) -> Tell:
        latency = Latency(self.metrics, self.arrived)

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
        watch = asyncio.create_task(self._watch(receive))
        status = GONE
        try:
            status = await self._respond(scope, receive, send)
        except _Gone:
            pass
        except Refused as refused:
            status = refused.status
            await _of_error(refused)(scope, receive, send)
        finally:
            self._cancel()
            watch.cancel()
            self.metrics.responses.labels(status).inc()
            scope[OUTCOME] = {"status": status, "read": self.answer.asked.read, "written": self.written}

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.events.put_nowait(None)

    async def _next(self) -> tuple[int, Piece | Finished]:
        """Return the next event.

        Raises:
            _Gone: the client disconnected.
            Refused: a text failed or was cancelled.
        """
        event = await self.events.get()
        if event is None:
            raise _Gone
        if isinstance(event[1], Finished) and event[1].reason == "failed":
            said = " ".join((event[1].error or "the engine failed").split())
            raise Refused(said, status=500)
        if isinstance(event[1], Finished) and event[1].reason == "cancelled":
            raise _stopping()
        return event

    def _note(self, index: int, event: Piece | Finished) -> dict[str, Any] | None:
        if isinstance(event, Piece):
            self.written += len(event.tokens)
            return self.answer.piece(index, event)
        return self.answer.finish(index, event)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> int:
        if self.answer.asked.stream:
            return await self._stream(send)
        while self.answer.unfinished:
            self._note(*await self._next())
        await _Json(self.answer.whole())(scope, receive, send)
        return 200

    async def _stream(self, send: Send) -> int:
        """Send server-sent events, one `data:` line per chunk."""

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more})

        event = await self._next()  # wait before sending the status, since this may raise an error
        kinds = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        # Prevents buffering in proxies such as nginx.
        headers = [*kinds, (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for chunk in self.answer.begin():
            await write(_json(chunk))
        try:
            while True:
                chunk = self._note(*event)
                if chunk is not None:
                    await write(_json(chunk))
                if not self.answer.unfinished:
                    break
                event = await self._next()
        except Refused as refused:
            await write(_json(refused.body()), more=False)
            return refused.status
        for chunk in self.answer.end():
            await write(_json(chunk))
        await write(b"[DONE]", more=False)
        return 200


def _connection(read_timeout: float, write_timeout: float) -> type[H11Protocol]:
    """Return a class of connections that close if the client is too slow.

    Args:
        read_timeout: seconds for a request to arrive, from the opening of the connection or the first byte of a later
            request.
        write_timeout: seconds for the client to accept written data.
    """

    class Connection(H11Protocol):
        reading: asyncio.TimerHandle | None = None
        writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            # With limit 0, `pause_writing` is called when the system accepts no more data.
            transport.set_write_buffer_limits(0)
            self.reading = self.loop.call_later(read_timeout, self._late)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self.reading = _stopped(self.reading)
            elif self.reading is None:
                self.reading = self.loop.call_later(read_timeout, self._late)

        def _late(self) -> None:
            self.reading = None
            # While `Service` reads a body, its own timeout answers with status 408.
            if not self.cycle or self.cycle.response_complete:
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.writing = self.loop.call_later(write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.writing = _stopped(self.writing)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.reading, self.writing = _stopped(self.reading), _stopped(self.writing)

    return Connection


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """Uvicorn server that, at a signal, refuses new requests and first lets the engine finish running ones.

    Args:
        service: the application.
        grace: seconds for running requests to finish.
        write_timeout: seconds after which a client that reads nothing is disconnected.
        ready: called once the server answers requests.
    """

    def __init__(
        self, service: Service, grace: float, write_timeout: float = 30.0, ready: Callable[[], None] = lambda: None
    ) -> None:
        self.service, self.grace, self.ready = service, grace, ready
        self.interrupted = False
        """True after SIGINT, as from a terminal."""
        super().__init__(
            uvicorn.Config(
                service.app,
                http=_connection(service.read_timeout, write_timeout),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=math.ceil(write_timeout),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer requests."""
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown at the first signal, and exit immediately at the second one."""
        self.interrupted |= sig == signal.SIGINT
        if self.service.stopping:
            self.should_exit = self.force_exit = True
            return
        self.end()

    def end(self) -> None:
        """Shut down once the engine has stopped; this method does not wait."""
        self.service.stopping = True
        threading.Thread(target=self._stop, name="kvjax-stop", daemon=True).start()

    def _stop(self) -> None:
        try:
            self.service.serving.stop(self.grace)
        finally:
            self.should_exit = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on sockets until a signal."""
        try:
            super().run(sockets)
        finally:
            self.service.reader.shutdown(wait=False, cancel_futures=True)
