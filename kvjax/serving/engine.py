"""Engine thread, which alone uses the device and alternates prefill of chunks with decoding of all rows."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from kvjax.generation.detokenize import Pieces, stop_strings
from kvjax.generation.generate import logprob_at
from kvjax.generation.loop import Drawn
from kvjax.inference.speculation import MOST_DRAFT_TOKENS
from kvjax.inference.verify import check_used
from kvjax.methods.registry import name_of
from kvjax.model import Model
from kvjax.policies.policy import Policy
from kvjax.serving import requests
from kvjax.serving.batch import UNDEFINED, Planned, Text, Written
from kvjax.serving.prefix_cache import Key, PrefixCache
from kvjax.serving.scheduler import Device
from kvjax.utils.compilation import Compiling
from kvjax.utils.settings import whole_number

BLOCK_SECONDS = 0.1
"""Time limit of a dispatch of several steps, in seconds; no request can join or leave during a dispatch."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Work:
    """A request from its acceptance to its last event."""

    request: requests.Request
    tell: requests.Tell
    planned: Planned
    keys: list[Key]
    """Keys of the prompt's prefixes, from the shortest."""
    pieces: Pieces
    changed: threading.Condition
    cancelled: bool = False
    text: Text | None = None
    """State during prefill, otherwise None."""
    position: int = 0
    """Tokens of the prompt that have been read."""
    reused: int = 0
    tokens: int = 0
    """Tokens sent to the client."""
    drawn: int = 0
    """Tokens drawn, of which a stop string may cut the last ones."""
    rounds: int = 0
    """Passes of the model that drew them."""
    usage: requests.Held | None = None
    began: float = 0.0

    def cancel(self) -> None:
        with self.changed:
            self.cancelled = True
            self.changed.notify_all()


class Engine:
    """Engine with continuous batching on rows of one budget, so its memory is known before the first request.

    A text waits for a free row. The engine reads its prompt in chunks, between dispatches for the other rows, and then
    generates it together with them. The generated text depends only on the request, not on other rows or on cached
    prefixes.

    Args:
        budget: slots per head that a text may use; policies that keep all tokens ignore it.
        rows: texts that are generated together; on a mesh, a multiple of the devices along `data`.
        context: maximal tokens of a text; policies that keep all tokens allocate slots for it. None for the model's
            positions.
        chunk: prompt tokens that are read between two dispatches, at least 16.
        steps: maximal tokens per row and dispatch; fewer if they would take longer than `BLOCK_SECONDS`, and while
            texts wait or are read.
        queue: maximal number of waiting texts.
        snapshot_bytes: maximal bytes of the prefix cache; 0 for no prefix cache.
        lossless: generate the texts of the full cache, for which each row has slots for `context` tokens; the policy
            drafts them on its `budget`.
        draft_tokens: tokens to draft before they are verified, if `lossless`.
        verifier: policy of the full cache, if `lossless`; see `kvjax.speculation`.
        refresh: choose the draft's slots anew after each verification, if `lossless`; see `kvjax.speculation`.

    Raises:
        ValueError: a setting is out of range, the policy's memory is not known before a text is read, the model has no
            tokenizer, the mesh cannot shard the rows evenly, or it has several processes.
    """

    def __init__(
        self,
        model: Model,
        policy: str | Policy = "h2o",
        budget: int = 512,
        rows: int = 8,
        context: int | None = None,
        chunk: int = requests.CHUNK,
        steps: int = requests.STEPS,
        queue: int = 64,
        snapshot_bytes: int = requests.SNAPSHOT_BYTES,
        lossless: bool = False,
        draft_tokens: int = 4,
        verifier: str | Policy = "full",
        refresh: bool = False,
    ) -> None:
        self._tokenizer = model.tokenizer
        self.queue = whole_number("queue", queue)
        self.prefix_cache = PrefixCache(
            whole_number("snapshot_bytes", snapshot_bytes, *requests.SIZES["snapshot_bytes"])
        )
        count = whole_number("draft_tokens", draft_tokens, 1, MOST_DRAFT_TOKENS) if lossless else 0
        check_used(verifier, refresh, lossless)
        self.device = Device(model, policy, budget, rows, context, chunk, steps, count, verifier, refresh)
        """Device side; only the engine's thread uses it once that thread runs."""
        self.model, self.policy_name = model, name_of(self.device.policy)
        self.budget, self.context = self.device.budget, self.device.context
        self.changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._waiting: collections.deque[_Work] = collections.deque()
        self._reading: _Work | None = None
        self._busy: dict[int, _Work] = {}
        """Requests by row."""
        self._seconds = 1.0
        """Running average of the seconds from the start of a text's prefill to its end."""
        self._wrote = 0.0
        """Time at the end of the last dispatch; 0 if no row continues."""
        self._pace = 0.0
        """Running average of the seconds per step; 0 before the first one."""
        names = "requests", "prompt_tokens", "tokens", "rounds", "reused_tokens", "dispatches", "failed_dispatches"
        self._counts = dict.fromkeys((f"{name}_total" for name in names), 0)
        self._longest = 0.0
        self._listening = contextlib.ExitStack()
        self._compiling = self._listening.enter_context(Compiling())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0.0)

    def warm_up(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile all programs in parallel, so that no request waits for one.

        Args:
            on_progress: called with the number of compiled programs and of all programs, first with 0.
        """
        if self._thread is not None:
            raise RuntimeError("the engine serves already; warm it up before the first request.")
        self.device.warm_up(on_progress)

    def submit(self, request: requests.Request, tell: requests.Tell) -> requests.Ticket:
        """Accept a request, from any thread; see `kvjax.serving.requests.Serving`."""
        planned = self.device.plan(request)
        keys = self.device.prefix_keys(request, planned) if self.prefix_cache.limit else []
        pieces = Pieces(self._tokenizer, stop_strings(request.stop), request.prompt)
        work = _Work(request, tell, planned, keys, pieces, self.changed)
        with self.changed:
            if self._stopping:
                raise requests.StoppingError("the server is stopping and takes no more requests.")
            if len(self._waiting) >= self.queue:
                raise requests.FullError(
                    len(self._waiting), max(1.0, len(self._waiting) * self._seconds / self.device.rows)
                )
            self._waiting.append(work)
            self._counts["requests_total"] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvjax engine", daemon=True)
                self._thread.start()
            self.changed.notify_all()
        return work

    def stop(self, grace: float) -> None:
        """See `kvjax.serving.requests.Serving`."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._all_work(), grace)
            for work in self._all_work():
                work.cancelled = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._listening.close()

    def numbers(self) -> Mapping[str, float]:
        """Return the numbers of `Serving`; `longest_gap_seconds` is the longest time between two dispatches' ends."""
        with self.changed:
            return {
                "rows": self.device.rows,
                "rows_busy": len(self._busy) + (self._reading is not None),
                "waiting": len(self._waiting),
                "cache_bytes": self.device.bytes,
                "cache_device_bytes": self.device.device_bytes,
                "snapshot_bytes": self.prefix_cache.bytes,
                "snapshot_device_bytes": self.prefix_cache.device_bytes,
                "compilations": self._compiling.programs,
                "longest_gap_seconds": self._longest,
                **self._counts,
            }

    def _all_work(self) -> list[_Work]:
        return [*self._waiting, *([] if self._reading is None else [self._reading]), *self._busy.values()]

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._all_work() or self._stopping)
                if not self._all_work():
                    return
                cancelled = [work for work in self._all_work() if work.cancelled]
            for work in cancelled:
                self._finish(work, "cancelled")
            has_read = self._read_chunk()
            if self._busy:
                self._write(has_read)
            else:
                self._wrote = 0.0

    def _read_chunk(self) -> bool:
        """Read one chunk of the current prompt, or of the next one if a row is free; return whether there is one."""
        with self.changed:
            if self._reading is None and self._waiting and len(self._busy) < self.device.rows:
                self._reading = self._waiting.popleft()
                self._reading.began = time.perf_counter()
        work = self._reading
        if work is None:
            return False
        try:
            logits = self._read_on(work)
        except Exception as error:
            _log.exception("a prompt could not be read")
            self._finish(work, "failed", _sentence("reading the prompt", error))
            return True
        if work.position < len(work.request.prompt):
            return True
        row = next(row for row in range(self.device.rows) if row not in self._busy)
        with self.changed:
            self._reading, self._busy[row] = None, work
        text, work.text = work.text, None
        assert text is not None
        try:
            self.device.put(row, text, logits, work.request)
        except Exception as error:
            self._fail(error)
        return True

    def _read_on(self, work: _Work) -> Any:
        prompt, size = work.request.prompt, self.device.chunk
        text = work.text
        if text is None:
            chunks, prefix = self.prefix_cache.longest(work.keys)
            text = self.device.begin(work.planned, prefix)
            work.position = work.reused = chunks * size
            with self.changed:
                self._counts["prompt_tokens_total"] += len(prompt)
                self._counts["reused_tokens_total"] += work.reused
        chunk = prompt[work.position : work.position + size]
        text, logits = self.device.read(text, chunk)
        work.text = text
        work.position += len(chunk)
        if work.position <= len(work.keys) * size:
            self.prefix_cache.put(work.keys[work.position // size - 1], text)
        return logits

    def _write(self, has_read: bool) -> None:
        """Run one dispatch for all rows and send its results to the clients."""
        # Take few steps if the next chunk waits; if a text waits for a row, stop when one ends.
        with self.changed:
            room = len(self._busy) < self.device.rows
            hurried = self._reading is not None or (room and bool(self._waiting))
            leave = bool(self._waiting) and not room
        steps = self.device.steps
        steps = min(steps, int(BLOCK_SECONDS / self._pace)) if self._pace else steps
        logprobs = any(work.request.logprobs is not None for work in self._busy.values())
        began = time.perf_counter()
        try:
            steps = max(1, steps // 8 if hurried else steps)
            output, samples = self.device.write(self._busy, steps, leave, logprobs)
        except Exception as error:
            self._fail(error)
            return
        now = time.perf_counter()
        if not has_read:  # otherwise, the time includes the chunk's prefill
            pace = (now - began) / max(1, output.counts.max())
            self._pace += (pace - self._pace) / (4 if self._pace else 1)
        with self.changed:
            self._counts["dispatches_total"] += 1
            self._longest = max(self._longest, now - self._wrote if self._wrote else 0.0)
        for row, work in sorted(self._busy.items()):
            try:
                self._send_output(row, work, output, samples)
            except Exception as error:
                _log.exception("what was written could not be told")
                self._finish(work, "failed", _sentence("making text of tokens", error))
        self._wrote = now if self._busy else 0.0

    def _send_output(self, row: int, work: _Work, output: Written, samples: Drawn | None) -> None:
        tokens, request = output.tokens[row, : output.counts[row]].tolist(), work.request
        ends, text = not output.active[row], work.pieces.add(tokens)
        tokens = tokens[: work.pieces.used - work.tokens]
        if ends:
            text += work.pieces.finish()
        logprobs = None
        if request.logprobs is not None:
            assert samples is not None
            entries = [logprob_at(samples, row, place) for place in range(len(tokens))]
            logprobs = tuple(entry._replace(likeliest=entry.likeliest[: request.logprobs]) for entry in entries)
        work.tokens += len(tokens)
        length, bytes_ = min(int(output.position[row]), len(request.prompt) + work.tokens), self.device.bytes
        slots = min(float(output.live_slots[row]), length)
        work.drawn += int(output.counts[row])
        work.rounds += int(output.rounds[row])
        per_round = round(work.drawn / max(work.rounds, 1), 2)
        work.usage = requests.Held(length, slots, bytes_ // self.device.rows, self.policy_name, per_round)
        with self.changed:
            self._counts["tokens_total"] += len(tokens)
            self._counts["rounds_total"] += int(output.rounds[row])
        if text or tokens:
            self._tell(work, requests.Piece(text, tuple(tokens), logprobs))
        if output.remaining[row] == UNDEFINED:
            self._finish(work, "failed", "the model's logits are not numbers (NaN), so no token can be drawn.")
        elif work.pieces.stopped:
            self._finish(work, "stop")
        elif ends:
            self._finish(work, "stop" if output.remaining[row] else "length")

    def _tell(self, work: _Work, news: requests.Piece | requests.Finished) -> None:
        try:
            work.tell(news)
        except Exception:  # an error in one client's callback must not stop the other requests
            _log.exception("nobody could be told")
            work.cancelled = True

    def _finish(self, work: _Work, reason: Any, error: str | None = None) -> None:
        with self.changed:
            if work in self._waiting:
                self._waiting.remove(work)
            self._reading = None if self._reading is work else self._reading
            self._busy = {row: running for row, running in self._busy.items() if running is not work}
            if reason in ("stop", "length"):
                self._seconds += (time.perf_counter() - work.began - self._seconds) / 8
        self._tell(
            work, requests.Finished(reason, len(work.request.prompt), work.tokens, work.reused, work.usage, error)
        )
        with self.changed:
            self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """End all rows, since their arrays may be deleted; continue with empty rows and an empty prefix cache."""
        _log.error("a dispatch failed", exc_info=error)
        with self.changed:
            self._counts["failed_dispatches_total"] += 1
            failed = list(self._busy.values())
        for work in failed:
            self._finish(work, "failed", _sentence("a step of the model", error))
        self.device.state = None
        self.prefix_cache.clear()


def _sentence(what: str, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0].rstrip(".")
    return f"{what} failed: {type(error).__name__}{': ' if first else ''}{first}."
