"""HTTP server of an engine: connections with timeouts, and a shutdown that finishes running requests."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvjax.serving.app import Service
from kvjax.serving.openai.fields import APIError
from kvjax.serving.responses import json_bytes


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
