"""A log line for each request to a server."""

from __future__ import annotations

import sys
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OUTCOME = "kvjax.outcome"
"""Key of a request's scope: a mapping with its `status`, if not the one sent, and tokens `read` and `written`."""


class AccessLog:
    """Middleware that writes one line a request to standard error, once it has been answered.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then write the line."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            print(_line(scope, status, time.perf_counter() - began), file=sys.stderr, flush=True)


def _line(scope: Scope, status: int, seconds: float) -> str:
    outcome: dict[str, Any] = scope.get(OUTCOME, {})
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    client = (scope.get("client") or ("-",))[0]
    path = scope["raw_path"].decode("ascii", "backslashreplace")[:200]  # as it was sent, in which no line ends
    tokens = f"{outcome['read']} tokens in, {outcome['written']} out, " if "read" in outcome else ""
    return f"{now} {client} {scope['method']} {path} {outcome.get('status', status)} {tokens}{seconds:.3f} s"
