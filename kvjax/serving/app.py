"""Web application of an engine, with checks of requests, and the HTTP server: timeouts, and a shutdown that drains."""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import math
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
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
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvjax.serving.metrics import Metrics, Outcomes
from kvjax.serving.openai import bodies
from kvjax.serving.openai.fields import APIError
from kvjax.serving.requests import Serving
from kvjax.serving.responses import CLIENT_CLOSED, EngineResponse, JsonResponse, json_bytes, stopping_error

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


class Service:
    """Web application in front of an engine.

    Args:
        keys: valid API keys; if there are none, keys are not checked.
        hosts: accepted host names in addition to loopback; None for any. The check protects a server without keys from
            DNS rebinding.
        max_body: maximum size of a request's body in bytes.
        chat_tokens: maximum tokens of a chat answer if the request sets no limit.
        read_timeout: seconds that a request may take to arrive.
        origins: origins that CORS allows, `*` for any.
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
        self.serving, self.max_body, self.read_timeout = serving, max_body, read_timeout
        self.keys = [key.encode() for key in keys]
        self.hosts = None if hosts is None else [host.strip("[]").lower() for host in hosts]
        self.metrics = Metrics(serving)
        self.stopping = False
        """True if new requests are refused."""
        # One thread, since tokenizers are not thread-safe; not the loop's, since a long text would delay the streams.
        self.reader = ThreadPoolExecutor(1, "kvjax-reader")
        self.created = int(time.time())
        self.page_html = Path(__file__).with_name("page.html").read_bytes()
        middleware = [Middleware(Outcomes, metrics=self.metrics, log=log)]
        if origins:
            allowed: dict[str, Any] = dict(allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["*"])
            middleware.append(Middleware(CORSMiddleware, allow_origins=origins, **allowed))
        chat = functools.partial(bodies.chat, default_tokens=chat_tokens)
        self.app = Starlette(
            middleware=middleware,
            routes=[
                self._route("/", self._page, needs_key=False),
                self._route("/health", self._health, needs_key=False),
                self._route("/metrics", self._metrics),
                self._route("/v1/models", self._models),
                self._route("/v1/models/{name:path}", self._model),
                self._route("/v1/completions", lambda request: self._answer(request, bodies.completion), "POST"),
                self._route("/v1/chat/completions", lambda request: self._answer(request, chat), "POST"),
            ],
            exception_handlers=dict.fromkeys((APIError, ClientDisconnect, HTTPException, Exception), self._error),
        )
        self.app.router.redirect_slashes = False

    def _route(
        self, path: str, answer: Callable[[Request], Awaitable[Response]], method: str = "GET", needs_key: bool = True
    ) -> Route:
        """Return a route that checks the host and the key before it answers."""

        async def guarded(request: Request) -> Response:
            self._check_host(request)
            if needs_key:
                self._check_key(request)
            return await answer(request)

        return Route(path, guarded, methods=[method])

    def _check_host(self, request: Request) -> None:
        if self.hosts is None:
            return
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name and not is_loopback(name) and name.strip("[]").lower() not in self.hosts:
            raise APIError(
                f"{host[:60]!r} is not a name of this server; use the address on which it listens.", status=403
            )

    def _check_key(self, request: Request) -> None:
        if not self.keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Compare all keys, so that the time reveals nothing about them.
        fits = [hmac.compare_digest(key.strip().encode("latin-1"), accepted) for accepted in self.keys]
        if scheme.lower() != "bearer" or not any(fits):
            reason = "the API key is wrong" if key else "there is no API key"
            text, headers = f"{reason}; send it as `Authorization: Bearer KEY`.", {"www-authenticate": "Bearer"}
            raise APIError(text, status=401, code="invalid_api_key", headers=headers)

    async def _page(self, request: Request) -> Response:
        return Response(self.page_html, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    async def _health(self, request: Request) -> Response:
        serving, stopping = self.serving, self.stopping
        numbers = await asyncio.to_thread(serving.numbers)
        names = "rows", "rows_busy", "waiting", "cache_bytes", "cache_device_bytes"
        fields = {"model": serving.model.name, "policy": serving.policy_name, "budget": serving.budget}
        fields |= {"context": serving.context} | {name: numbers[name] for name in names if name in numbers}
        return JsonResponse({"status": "stopping" if stopping else "ok"} | fields, 503 if stopping else 200)

    async def _metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    def _model_card(self) -> dict[str, Any]:
        serving = self.serving
        return {
            "id": serving.model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvjax",
            "max_model_len": serving.context,
            "kv": {"policy": serving.policy_name, "budget": serving.budget},
        }

    async def _models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        bodies.check_model(self.serving, request.path_params["name"])
        return JsonResponse(self._model_card())

    async def _answer(self, request: Request, read: Callable[[Serving, dict[str, Any]], bodies.ParsedBody]) -> Response:
        if self.stopping:
            raise stopping_error()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # this also refuses forms of other sites' pages
            raise APIError("the body must be JSON; send the header `Content-Type: application/json`.", status=415)
        body = await self._body(request)
        reply = EngineResponse(self.serving, self.metrics)
        await reply.loop.run_in_executor(self.reader, lambda: reply.submit(read(self.serving, bodies.parse(body))))
        return reply

    async def _body(self, request: Request) -> bytes:
        """Read the body, and check its length while it arrives."""
        length = request.headers.get("content-length", "")
        too_long = APIError(f"the body has more than {self.max_body} bytes; send less.", status=413)
        if length.isdecimal() and int(length[:20]) > self.max_body:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.read_timeout):
                async for part in request.stream():
                    body += part
                    if len(body) > self.max_body:
                        raise too_long
        except TimeoutError:
            text = f"the body did not arrive within {self.read_timeout:g} seconds."
            raise APIError(text, status=408, headers={"connection": "close"}) from None
        return bytes(body)

    async def _error(self, request: Request, error: Exception) -> Response:
        """Return the response for an error."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED)  # never received
        if isinstance(error, HTTPException):
            words = {404: "there is nothing at", 405: f"{request.method} is not for"}
            message = f"{words.get(error.status_code, error.detail)} {request.scope['path'][:200]}."
            error = APIError(message, status=error.status_code, headers=error.headers)
        if not isinstance(error, APIError):  # Uvicorn logs the error; the client gets no details.
            error = APIError("the server failed; its log says why.", status=500)
        return JsonResponse(error.body(), error.status, error.headers)


def _connection(read_timeout: float, write_timeout: float) -> type[H11Protocol]:
    """Return a class of connections that close if the client is too slow, with the timeouts of `Server`."""

    class Connection(H11Protocol):
        reading: asyncio.TimerHandle | None = None
        writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            # With limit 0, `pause_writing` is called when the system accepts no more data.
            transport.set_write_buffer_limits(0)
            self.reading = self.loop.call_later(read_timeout, self._expire)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self.reading = _cancel(self.reading)
            elif self.reading is None:
                self.reading = self.loop.call_later(read_timeout, self._expire)

        def send_400_response(self, msg: str) -> None:
            # Uvicorn calls this for bytes that are not HTTP. `Service` never sees them, or waits for more of a body.
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.abort()
                return
            error = APIError("the request is not valid HTTP/1.1; check its first line, headers and length.")
            body = json_bytes(error.body())
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            events = h11.Response(status_code=error.status, headers=headers, reason=b"Bad Request"), h11.Data(data=body)
            for event in (*events, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _expire(self) -> None:
            self.reading = None
            # While `Service` reads a body, its own timeout answers with status 408.
            if not self.cycle or self.cycle.response_complete:
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.writing = self.loop.call_later(write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.writing = _cancel(self.writing)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.reading, self.writing = _cancel(self.reading), _cancel(self.writing)

    return Connection


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Server(uvicorn.Server):
    """Uvicorn server that, at a signal, refuses new requests and first lets the engine finish running ones.

    Args:
        grace: seconds for running requests to finish.
        write_timeout: seconds for a client to accept written data. The service's `read_timeout` counts from the opening
            of a connection, or the first byte of a later request.
        on_ready: called once the server answers requests.
    """

    def __init__(
        self, service: Service, grace: float, write_timeout: float = 30.0, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self.service, self.grace, self.on_ready = service, grace, on_ready
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
        self.on_ready()

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
