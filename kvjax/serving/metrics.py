"""Prometheus metrics and access log of the server."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvjax.serving.requests import Serving

OUTCOME = "kvjax.outcome"
"""Scope key of a mapping with the `status`, and the tokens `read` and `written` of an answer."""
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Metrics of an engine, and latencies of its clients."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        seconds = functools.partial(Histogram, buckets=_SECONDS, registry=self.registry)
        first = "From the last byte of a request to the first piece of its text"
        between = "From a token to the next; tokens that come together share the time"
        statuses = "Answers by status; 499 for clients that went away"
        self.first = seconds("kvjax_time_to_first_token_seconds", first)
        self.between = seconds("kvjax_time_between_tokens_seconds", between)
        self.responses = Counter("kvjax_http_responses", statuses, ["status"], registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's current metrics; prometheus_client calls this method."""
        for name, value in self.serving.numbers().items():
            words = name.removesuffix("_total").replace("_", " ")
            if name.endswith("_total"):
                yield CounterMetricFamily(f"kvjax_{name}", f"{words.capitalize()} since the start", value)
            else:
                yield GaugeMetricFamily(f"kvjax_{name}", f"{words.capitalize()} now", value)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Latency:
    """Times of one text's tokens, for metrics; `arrival` is the `perf_counter()` at the last byte of the request."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics, self._before, self._first = metrics, arrival, True

    def observe(self, tokens: int) -> None:
        """Record that tokens, at least one, have just come together."""
        now = time.perf_counter()
        passed, self._before = now - self._before, now
        if self._first:
            self._first = False
            self._metrics.first.observe(passed)
            return
        for _ in range(tokens):
            self._metrics.between.observe(passed / tokens)


class Outcomes:
    """Middleware that counts each answered request, and with `log` writes a line to standard error."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: bool) -> None:
        self.app, self.metrics, self.log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, then count it and write the line."""
        began = time.perf_counter()
        outcome: dict[str, Any] = {"status": 500}
        scope[OUTCOME] = outcome

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                outcome["status"] = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        finally:
            self.metrics.responses.labels(outcome["status"]).inc()
            if self.log:
                print(_line(scope, outcome, time.perf_counter() - began), file=sys.stderr, flush=True)


def _line(scope: Scope, outcome: dict[str, Any], seconds: float) -> str:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    client = (scope.get("client") or ("-",))[0]
    path = scope["raw_path"].decode("ascii", "backslashreplace")[:200]  # the raw path has no line breaks
    tokens = f"{outcome['read']} tokens in, {outcome['written']} out, " if "read" in outcome else ""
    return f"{now} {client} {scope['method']} {path} {outcome['status']} {tokens}{seconds:.3f} s"
