"""One thread that owns the device: reads prompts in chunks, and writes to all rows between them."""

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
from kvjax.methods.registry import name_of
from kvjax.model import Model
from kvjax.policies.policy import Policy
from kvjax.serving.batch import UNDEFINED, Planned, Text, Written
from kvjax.serving.prefix_cache import Key, Snapshots
from kvjax.serving.requests import Finished, FullError, Held, Piece, Request, StoppingError, Tell, Ticket
from kvjax.serving.scheduler import Device
from kvjax.utils.compilation import Compiling
from kvjax.utils.settings import whole_number

SNAPSHOT_BYTES = 256 * 2**20
BLOCK_SECONDS = 0.1
"""That a dispatch may take, where several steps do not take longer: nobody joins or leaves meanwhile."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Work:
    """A request from when it was taken until its end was told."""

    request: Request
    tell: Tell
    planned: Planned
    keys: list[Key]
    """Of its beginnings, from the shortest."""
    pieces: Pieces
    changed: threading.Condition
    cancelled: bool = False
    text: Text | None = None
    """While it is being read."""
    position: int = 0
    """Tokens of the prompt that have been read."""
    reused: int = 0
    tokens: int = 0
    """Told."""
    held: Held | None = None
    began: float = 0.0

    def cancel(self) -> None:
        """See `Ticket`."""
        with self.changed:
            self.cancelled = True
            self.changed.notify_all()


class Engine:
    """Serves many texts on rows of one budget, whose memory is known before the first one comes.

    A text waits for a free row, is read in chunks of its own between two dispatches of the others, and is written with
    them. What is written of it depends on the request alone: neither on its neighbours nor on snapshots.

    Args:
        model: from `kvjax.load`, with a tokenizer.
        policy: which tokens stay; a name or a `Policy`.
        budget: slots of each head that a text may use; means nothing to policies that keep everything.
        rows: texts that are written at once; on a mesh as many on each device along `data`.
        context: tokens that a text may come to, for which policies that keep everything have slots; None for the
            model's positions.
        chunk: tokens of a prompt that are read between two dispatches, at least 16.
        steps: tokens of each row that a dispatch writes at most; fewer where they would take longer than
            `BLOCK_SECONDS`, and while texts wait or are read.
        queue: texts that may wait.
        snapshot_bytes: that beginnings of texts may take, to be read once; 0 for none.

    Raises:
        ValueError: a setting is out of range, the policy is not one whose memory is known before a text is read, the
            model has no tokenizer, or its devices cannot share the rows or are of several processes.
    """

    def __init__(
        self,
        model: Model,
        policy: str | Policy = "h2o",
        budget: int = 512,
        rows: int = 8,
        context: int | None = None,
        chunk: int = 256,
        steps: int = 16,
        queue: int = 64,
        snapshot_bytes: int = SNAPSHOT_BYTES,
    ) -> None:
        self._tokenizer = model.tokenizer
        self.queue = whole_number("queue", queue)
        self._snapshots = Snapshots(whole_number("snapshot_bytes", snapshot_bytes, 0))
        self.device = Device(model, policy, budget, rows, context, chunk, steps)
        """Of the engine's thread, once there is one."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._waiting: collections.deque[_Work] = collections.deque()
        self._reading: _Work | None = None
        self._busy: dict[int, _Work] = {}
        """By row."""
        self._leaving: set[int] = set()
        """Rows that have ended on this side and not on the device's."""
        self._seconds = 1.0
        """That a text takes once it is being read, of late."""
        self._wrote = 0.0
        """When the last dispatch ended; 0 where no row went on."""
        self._pace = 0.0
        """Seconds of a step, of late; 0 before the first one."""
        counted = "requests", "prompt_tokens", "tokens", "reused_tokens", "dispatches", "failed_dispatches"
        self._counts = dict.fromkeys((f"{name}_total" for name in counted), 0)
        self._longest = 0.0
        self._listening = contextlib.ExitStack()
        self._compiling = self._listening.enter_context(Compiling())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(0.0)

    @property
    def model(self) -> Model:
        """What writes."""
        return self.device.model

    @property
    def policy_name(self) -> str:
        """What stays in the caches."""
        return name_of(self.device.policy)

    @property
    def budget(self) -> int:
        """Slots of each head that a request may use."""
        return self.device.budget

    @property
    def context(self) -> int:
        """Tokens that a text may come to."""
        return self.device.context

    def warm_up(self, told: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile all programs, several at a time, so that no request waits for one.

        Args:
            told: called with the programs that are done and all there are, first with none.

        Raises:
            RuntimeError: requests have been taken already.
        """
        if self._thread is not None:
            raise RuntimeError("the engine serves already; warm it up before the first request.")
        self.device.warm_up(told)

    def submit(self, request: Request, tell: Tell) -> Ticket:
        """Take a request, from any thread; see `kvjax.serving.requests.Serving`.

        Raises:
            ValueError: it cannot be served.
            FullError: the queue is full.
            StoppingError: the engine stops.
        """
        planned = self.device.plan(request)
        keys = self.device.beginnings(request, planned) if self._snapshots.limit else []
        pieces = Pieces(self._tokenizer, stop_strings(request.stop), request.prompt)
        work = _Work(request, tell, planned, keys, pieces, self._changed)
        with self._changed:
            if self._stopping:
                raise StoppingError("the server is stopping and takes no more requests.")
            if len(self._waiting) >= self.queue:
                raise FullError(len(self._waiting), max(1.0, len(self._waiting) * self._seconds / self.device.rows))
            self._waiting.append(work)
            self._counts["requests_total"] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvjax engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return work

    def stop(self, grace: float) -> None:
        """Refuse what is new, give what runs so many seconds to end, cancel the rest, and wait until all is told."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._has_work(), grace)
            for work in self._all_work():
                work.cancelled = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._listening.close()

    def numbers(self) -> Mapping[str, float]:
        """Gauges and counters, see `Serving`; and `longest_gap_seconds` between two tokens of a row, or two blocks of
        them that one dispatch wrote."""
        with self._changed:
            return {
                "rows": self.device.rows,
                "rows_busy": len(self._busy) + (self._reading is not None),
                "waiting": len(self._waiting),
                "cache_bytes": self.device.bytes,
                "cache_device_bytes": self.device.device_bytes,
                "snapshot_bytes": self._snapshots.bytes,
                "snapshot_device_bytes": self._snapshots.device_bytes,
                "compilations": self._compiling.programs,
                "longest_gap_seconds": self._longest,
                **self._counts,
            }

    def _all_work(self) -> list[_Work]:
        return [*self._waiting, *([] if self._reading is None else [self._reading]), *self._busy.values()]

    def _has_work(self) -> bool:
        return bool(self._waiting or self._reading or self._busy)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work() or self._stopping)
                if not self._has_work():
                    return
            self._drop_cancelled()
            has_read = self._read_chunk()
            if self._busy:
                self._write(has_read)
            else:
                self._wrote = 0.0

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [work for work in self._all_work() if work.cancelled]
        for work in gone:
            self._leaving |= {row for row, other in self._busy.items() if other is work}
            self._finish(work, "cancelled")
        if self._leaving:
            leaving, self._leaving = self._leaving, set()
            try:
                self.device.free(leaving)
            except Exception as error:
                self._fail(error)

    def _read_chunk(self) -> bool:
        """One chunk of the prompt that is being read, or of the next one for which there is a row; whether there is."""
        with self._changed:
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
        with self._changed:
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
            chunks, held = self._snapshots.longest(work.keys)
            text = self.device.begin(work.planned, held)
            work.position = work.reused = chunks * size
            with self._changed:
                self._counts["prompt_tokens_total"] += len(prompt)
                self._counts["reused_tokens_total"] += work.reused
        chunk = prompt[work.position : work.position + size]
        text, logits = self.device.read(text, chunk)
        work.text = text
        work.position += len(chunk)
        if work.position <= len(work.keys) * size:
            self._snapshots.put(work.keys[work.position // size - 1], text)
        return logits

    def _write(self, has_read: bool) -> None:
        """One dispatch for all rows, and what came of it to those who wait."""
        # Few steps where the next chunk waits for them; where a row is waited for, until one ends.
        with self._changed:
            room = len(self._busy) < self.device.rows
            hurried = self._reading is not None or (room and bool(self._waiting))
            leave = bool(self._waiting) and not room
        steps = self.device.steps
        steps = min(steps, int(BLOCK_SECONDS / self._pace)) if self._pace else steps
        asked = any(work.request.logprobs is not None for work in self._busy.values())
        began = time.perf_counter()
        try:
            written, drawn = self.device.write(max(1, steps // 8 if hurried else steps), leave, asked)
        except Exception as error:
            self._fail(error)
            return
        now = time.perf_counter()
        if not has_read:  # or the chunk's time would be in it
            pace = (now - began) / max(1, written.counts.max())
            self._pace += (pace - self._pace) / (4 if self._pace else 1)
        with self._changed:
            self._counts["dispatches_total"] += 1
            self._longest = max(self._longest, now - self._wrote if self._wrote else 0.0)
        for row, work in sorted(self._busy.items()):
            try:
                self._tell_written(row, work, written, drawn)
            except Exception as error:
                _log.exception("what was written could not be told")
                self._leaving.add(row)
                self._finish(work, "failed", _sentence("making text of tokens", error))
        self._wrote = now if self._busy else 0.0

    def _tell_written(self, row: int, work: _Work, written: Written, drawn: Drawn | None) -> None:
        tokens, request = written.tokens[row, : written.counts[row]].tolist(), work.request
        ends, text = not written.active[row], ""
        if request.stop:
            # One by one: nothing is told of those beyond the one that completes a stop string.
            told = 0
            while told < len(tokens) and not work.pieces.stopped:
                text += work.pieces.add(tokens[told : told + 1])
                told += 1
            tokens = tokens[:told]
        elif tokens:
            text = work.pieces.add(tokens)
        if ends:
            text += work.pieces.finish()
        logprobs = None
        if request.logprobs is not None:
            assert drawn is not None
            found = [logprob_at(drawn, row, place) for place in range(len(tokens))]
            logprobs = tuple(each._replace(likeliest=each.likeliest[: request.logprobs]) for each in found)
        work.tokens += len(tokens)
        each = self.device.bytes // self.device.rows
        work.held = Held(int(written.position[row]), float(written.kept[row]), each, self.policy_name)
        with self._changed:
            self._counts["tokens_total"] += len(tokens)
        if text or tokens:
            self._tell(work, Piece(text, tuple(tokens), logprobs))
        if written.left[row] == UNDEFINED:
            self._finish(work, "failed", "the model's logits are not numbers (NaN), so no token can be drawn.")
        elif work.pieces.stopped:
            self._leaving |= set() if ends else {row}
            self._finish(work, "stop")
        elif ends:
            self._finish(work, "stop" if written.left[row] else "length")

    def _tell(self, work: _Work, news: Piece | Finished) -> None:
        try:
            work.tell(news)
        except Exception:  # whoever asked is not to stop the others
            _log.exception("nobody could be told")
            work.cancelled = True

    def _finish(self, work: _Work, reason: Any, error: str | None = None) -> None:
        with self._changed:
            if work in self._waiting:
                self._waiting.remove(work)
            self._reading = None if self._reading is work else self._reading
            self._busy = {row: other for row, other in self._busy.items() if other is not work}
            if reason in ("stop", "length"):
                self._seconds += (time.perf_counter() - work.began - self._seconds) / 8
        self._tell(work, Finished(reason, len(work.request.prompt), work.tokens, work.reused, work.held, error))
        with self._changed:
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """End all rows, whose arrays may be gone, and go on with empty ones and no beginnings of texts."""
        _log.error("a dispatch failed", exc_info=error)
        with self._changed:
            self._counts["failed_dispatches_total"] += 1
            failed = list(self._busy.values())
        for work in failed:
            self._finish(work, "failed", _sentence("a step of the model", error))
        self._leaving = set()
        self.device.state = None
        self._snapshots.clear()


def _sentence(what: str, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0].rstrip(".")
    return f"{what} failed: {type(error).__name__}{': ' if first else ''}{first}."
