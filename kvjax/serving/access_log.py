"""Access log with one line per request."""

from __future__ import annotations

import sys
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

OUTCOME = "kvjax.outcome"
"""Scope key of a mapping with the `status`, and the tokens `read` and `written` of an answer."""


class AccessLog:
    """Middleware that writes one line per answered request to standard error."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, then write the line."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope.setdefault(OUTCOME, {"status": message["status"]})
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            print(_line(scope, time.perf_counter() - began), file=sys.stderr, flush=True)


def _line(scope: Scope, seconds: float) -> str:
    outcome: dict[str, Any] = scope.get(OUTCOME, {"status": 500})
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    client = (scope.get("client") or ("-",))[0]
    path = scope["raw_path"].decode("ascii", "backslashreplace")[:200]  # the raw path has no line breaks
    tokens = f"{outcome['read']} tokens in, {outcome['written']} out, " if "read" in outcome else ""
    return f"{now} {client} {scope['method']} {path} {outcome['status']} {tokens}{seconds:.3f} s"
