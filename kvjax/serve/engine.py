"""One thread that owns the device: reads prompts in chunks, and writes to all rows between them."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.cache.ledger import allocated_bytes
from kvjax.compilation import Compiling
from kvjax.engine.prepare import bucket, check_tokens, check_vocabulary, instead, lines_of, plan_slots, ready
from kvjax.model import Model
from kvjax.policies.policy import Policy
from kvjax.policies.registry import name_of
from kvjax.sampling.loop import Drawn
from kvjax.sampling.pieces import Pieces, stop_strings
from kvjax.sampling.sample import Sampling
from kvjax.sampling.texts import logprob_at
from kvjax.serve.requests import Finished, FullError, Held, Piece, Request, StoppingError, Tell, Ticket
from kvjax.serve.rows import (
    UNDEFINED,
    Planned,
    Rows,
    Sizes,
    Text,
    Wishes,
    Written,
    begin,
    empty_rows,
    free,
    generate,
    insert,
    read,
)
from kvjax.serve.snapshots import Key, Snapshots, beginnings, dependencies
from kvjax.settings import seed_number, whole_number

ENDS = 64
"""Ids that may end a row, the model's own among them."""
LOGPROBS = 20
"""Likeliest tokens that a request may ask about."""
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
        rows: texts that are written at once.
        context: tokens that a text may come to, for which policies that keep everything have slots; None for the
            model's positions.
        chunk: tokens of a prompt that are read between two dispatches, at least 16.
        steps: tokens of each row that a dispatch writes at most; fewer where they would take longer than
            `BLOCK_SECONDS`, and while texts wait or are read.
        queue: texts that may wait.
        snapshot_bytes: that beginnings of texts may take, to be read once; 0 for none.

    Raises:
        ValueError: a setting is out of range, the policy is not one whose memory is known before a text is read, or the
            model has no tokenizer.
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
        self.model, config = model, model.config
        budget = whole_number("budget", budget)
        self.rows = whole_number("rows", rows)
        self.chunk, self.steps = whole_number("chunk", chunk, 16), whole_number("steps", steps)
        self.queue = whole_number("queue", queue)
        self._tokenizer = model.tokenizer
        self.policy = _served(ready(model, policy, budget, None), model)
        self.context = config.max_positions if context is None else whole_number("context", context, 2)
        if self.context > config.max_positions and self.policy.codec.positions == "original":
            raise ValueError(
                f"context={self.context} does not fit the model's {config.max_positions} positions; ask for fewer"
                f"{instead(config)}."
            )
        self.budget = budget if self.policy.plan.bounded else self.context
        planned = [self._slots(1, end, budget) for end in {2, self.context}]
        limits, capacities = zip(*planned, strict=True)
        self._sizes = Sizes(
            config=config,
            capacities=tuple(map(max, zip(*capacities, strict=True))),
            lines=tuple(map(max, zip(*map(lines_of, limits), strict=True))),
            dtype=model.weights.embedding.dtype,
        )
        self._placed = jax.tree.map(jnp.asarray, self.policy)  # numbers would travel to the device at every step
        self._idle = self._planned(planned[0][0], rows=self.rows)
        rows_made = self._emptied()
        self._device: Rows | None = rows_made
        self._bytes = allocated_bytes(rows_made.state.storage)
        self._snapshots = Snapshots(whole_number("snapshot_bytes", snapshot_bytes, 0))
        text = begin(self._placed, self._planned(planned[0][0]), sizes=self._sizes)
        self._depends = dependencies(model.weights, self._placed, text, self.chunk)

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
    def policy_name(self) -> str:
        """What stays in the caches."""
        return name_of(self.policy)

    def warm_up(self) -> None:
        """Compile all programs, several at a time, so that no request waits for one.

        Raises:
            RuntimeError: requests have been taken already.
        """
        if self._thread is not None:
            raise RuntimeError("the engine serves already; warm it up before the first request.")
        sizes = sorted({self._padded(length) for length in range(1, self.chunk + 1)})

        def reads(size: int) -> tuple[Text, Any]:
            text = begin(self._placed, self._planned(self._idle.limits), sizes=self._sizes)
            found = read(self.model.weights, self._placed, text, np.zeros((1, size), np.int32), np.ones(1, np.int32))
            return jax.block_until_ready(found)

        def writes() -> None:
            wishes = self._wishes(Request((0,), max_tokens=1))
            self._put(0, *reads(sizes[0]), wishes)
            self._dispatch(1, leave=False)
            self._free({0})
            jax.block_until_ready(self._device)

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for job in [pool.submit(writes), *(pool.submit(reads, size) for size in sizes[1:])]:
                job.result()

    def submit(self, request: Request, tell: Tell) -> Ticket:
        """Take a request, from any thread; see `kvjax.serve.requests.Serving`.

        Raises:
            ValueError: it cannot be served.
            FullError: the queue is full.
            StoppingError: the engine stops.
        """
        work = self._taken(request, tell)
        with self._changed:
            if self._stopping:
                raise StoppingError("the server is stopping and takes no more requests.")
            if len(self._waiting) >= self.queue:
                raise FullError(len(self._waiting), max(1.0, len(self._waiting) * self._seconds / self.rows))
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
                "rows": self.rows,
                "rows_busy": len(self._busy) + (self._reading is not None),
                "waiting": len(self._waiting),
                "cache_bytes": self._bytes,
                "snapshot_bytes": self._snapshots.bytes,
                "compilations": self._compiling.programs,
                "longest_gap_seconds": self._longest,
                **self._counts,
            }

    # Requests, on the threads of those who ask.

    def _taken(self, request: Request, tell: Tell) -> _Work:
        prompt, config = request.prompt, self.model.config
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token.")
        check_tokens(np.asarray([prompt]), np.asarray([len(prompt)]), config)
        self.policy.score.check_prompt(len(prompt))
        end = len(prompt) + whole_number("max_tokens", request.max_tokens)
        if end > self.context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens={request.max_tokens} come to more than the "
                f"{self.context} that a text may have; ask for fewer."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= (penalty := getattr(request, name)) <= 2:
                raise ValueError(f"{name}={penalty} is not a number from -2 to 2.")
        if request.logprobs is not None:
            whole_number("logprobs", request.logprobs, 0, self._logprobs)
        check_vocabulary(np.asarray(request.stop_ids, np.int64), config)
        if len(self._ends(request)) > ENDS:
            raise ValueError(f"{len(self._ends(request))} ids that end a text are more than {ENDS}; give fewer.")
        budget = self.budget if request.budget is None else whole_number("budget", request.budget)
        if request.budget is not None and not self.policy.plan.bounded:
            raise ValueError(f"budget={budget} means nothing to policy {self.policy_name}; leave it out.")
        if budget > self.budget:
            raise ValueError(f"budget={budget} is more than the {self.budget} slots that there are; ask for fewer.")
        # Where nothing leaves, all texts are planned for as many tokens.
        end = self.context if self.policy.plan.ends else end
        limits, _ = self._slots(len(prompt), end, budget)
        if any(limit.max() > room for limit, room in zip(limits, self._sizes.capacities, strict=True)):
            raise ValueError(f"budget={budget} gives a layer more slots than there are; leave it out.")
        planned = self._planned(limits, seed_number(request.seed), end - len(prompt), end)
        known = [(name, getattr(planned, name).tolist()) for name in sorted(self._depends)]
        depends = repr((known, [limit.tolist() for limit in planned.limits])).encode()
        keys = beginnings(depends, prompt, self.chunk) if self._snapshots.limit else []
        pieces = Pieces(self._tokenizer, stop_strings(request.stop))
        return _Work(request, tell, planned, keys, pieces, self._changed)

    @property
    def _logprobs(self) -> int:
        return min(LOGPROBS, self.model.config.vocab_size)

    def _ends(self, request: Request) -> tuple[int, ...]:
        return tuple({*request.stop_ids, *(() if request.ignore_eos else self.model.config.eos)})

    def _slots(self, prompt: int, end: int, budget: int) -> tuple[list[Int[np.ndarray, "1 h"]], tuple[int, ...]]:
        return plan_slots(self.policy, budget, np.asarray([prompt]), end - prompt, self.model.config, prompt)

    def _planned(self, limits: Any, seed: int = 0, horizon: int = 1, end: int = 2, rows: int = 1) -> Planned:
        each = tuple(np.repeat(limit[:1].astype(np.int32), rows, axis=0) for limit in limits)
        fields = np.full(rows, seed, np.uint32), np.full(rows, horizon, np.int32), np.full(rows, end, np.int32)
        return Planned(each, *fields)  # type: ignore[arg-type]

    def _padded(self, length: int) -> int:
        return min(bucket(length), self.chunk)

    def _wishes(self, request: Request) -> Wishes:
        temperature, top_k, top_p, min_p, repetition = jax.tree.leaves(request.sampling)
        if not temperature:  # what filters the others would only take time
            top_k, top_p = jax.tree.leaves(Sampling(0.0))[1:3]

        def real(number: float) -> Any:
            return np.asarray([number], np.float32)

        numbers = real(temperature), np.asarray([top_k], np.int32), real(top_p), real(min_p), real(repetition)
        ends = np.full((1, ENDS), -1, np.int32)
        own = self._ends(request)
        ends[0, : len(own)] = own
        left: Any = np.asarray([request.max_tokens], np.int32)
        tells: Any = np.asarray([request.logprobs is not None])
        penalties = real(request.presence_penalty), real(request.frequency_penalty)
        return Wishes(Sampling.tree_unflatten(None, numbers), *penalties, ends, left, tells)  # type: ignore[arg-type]

    # The device, on the thread that owns it.

    def _emptied(self) -> Rows:
        return empty_rows(self._placed, self._idle, ends=ENDS, sizes=self._sizes)

    def _put(self, row: int, text: Text, logits: Any, wishes: Wishes) -> None:
        rows = self._emptied() if self._device is None else self._device
        self._device = insert(rows, np.int32(row), text, logits, wishes)

    def _dispatch(self, steps: int, leave: bool) -> tuple[Written, Drawn]:
        assert self._device is not None
        numbers = np.int32(steps), np.bool_(leave)
        self._device, written, drawn = generate(
            self.model.weights, self._placed, self._device, *numbers, most=self.steps, logprobs=self._logprobs
        )
        return written, drawn

    def _free(self, rows: set[int]) -> None:
        assert self._device is not None
        kept: Any = np.asarray([row not in rows for row in range(self.rows)])
        self._device = free(self._device, kept)

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
        if self._leaving and self._device is not None:
            leaving, self._leaving = self._leaving, set()
            try:
                self._free(leaving)
            except Exception as error:
                self._fail(error)

    def _read_chunk(self) -> bool:
        """One chunk of the prompt that is being read, or of the next one for which there is a row; whether there is."""
        with self._changed:
            if self._reading is None and self._waiting and len(self._busy) < self.rows:
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
        row = next(row for row in range(self.rows) if row not in self._busy)
        with self._changed:
            self._reading, self._busy[row] = None, work
        text, work.text = work.text, None
        assert text is not None
        try:
            self._put(row, text, logits, self._wishes(work.request))
        except Exception as error:
            self._fail(error)
        return True

    def _read_on(self, work: _Work) -> Any:
        prompt = work.request.prompt
        text = work.text
        if text is None:
            text = begin(self._placed, work.planned, sizes=self._sizes)
            chunks, held = self._snapshots.longest(work.keys)
            if held is not None:
                work.position = work.reused = chunks * self.chunk
                storage, position, length = held.state.storage, held.state.position, held.state.prompt_length
                state = text.state.replace(storage=storage, position=position, prompt_length=length)
                text = Text(state, held.seen)
            with self._changed:
                self._counts["prompt_tokens_total"] += len(prompt)
                self._counts["reused_tokens_total"] += work.reused
        chunk = prompt[work.position : work.position + self.chunk]
        tokens = np.zeros((1, self._padded(len(chunk))), np.int32)
        tokens[0, : len(chunk)] = chunk
        lengths: Any = np.asarray([len(chunk)], np.int32)
        text, logits = read(self.model.weights, self._placed, text, tokens, lengths)
        work.text = text
        work.position += len(chunk)
        if work.position <= len(work.keys) * self.chunk:
            self._snapshots.put(work.keys[work.position // self.chunk - 1], text)
        return logits

    def _write(self, has_read: bool) -> None:
        """One dispatch for all rows, and what came of it to those who wait."""
        # Few steps where the next chunk waits for them; where a row is waited for, until one ends.
        with self._changed:
            room = len(self._busy) < self.rows
            hurried = self._reading is not None or (room and bool(self._waiting))
            leave = bool(self._waiting) and not room
        steps = min(self.steps, int(BLOCK_SECONDS / self._pace)) if self._pace else self.steps
        asked = any(work.request.logprobs is not None for work in self._busy.values())
        began = time.perf_counter()
        try:
            written, drawn = self._dispatch(max(1, steps // 8 if hurried else steps), leave)
            written, drawn = jax.device_get((written, drawn if asked else None))
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
        self._wrote = now
        for row, work in sorted(self._busy.items()):
            try:
                self._tell_written(row, work, written, drawn)
            except Exception as error:
                _log.exception("what was written could not be told")
                self._leaving.add(row)
                self._finish(work, "failed", _sentence("making text of tokens", error))

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
        work.held = Held(
            int(written.position[row]), float(written.kept[row]), self._bytes // self.rows, self.policy_name
        )
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
        """End all rows, whose arrays may be gone, and go on with empty ones."""
        _log.error("a dispatch failed", exc_info=error)
        with self._changed:
            self._counts["failed_dispatches_total"] += 1
            failed = list(self._busy.values())
        for work in failed:
            self._finish(work, "failed", _sentence("a step of the model", error))
        self._leaving = set()
        self._device = None  # the next text that is put into a row makes them anew


def _sentence(what: str, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0].rstrip(".")
    return f"{what} failed: {type(error).__name__}{': ' if first else ''}{first}."


def _served(policy: Policy, model: Model) -> Policy:
    """A policy whose rows take the same memory whatever is read, if it is one.

    Raises:
        ValueError: naming the remedy.
    """
    name = name_of(policy)
    if model.devices is not None:
        raise ValueError("a server's rows lie on one device; load the model without a mesh.")
    if policy.plan.per_head or policy.plan.decides:
        raise ValueError(
            f"{name} gives each head slots of its own once a prompt has been read, so that a row's memory is not known "
            "before; serve another policy, or another plan."
        )
    if policy.score.prefill_chunk is not None:
        raise ValueError(
            f"{name} reads prompts {policy.score.prefill_chunk} token at a time, not in chunks; use prompt='one_shot'."
        )
    if policy.score.offloads:
        raise ValueError(f"{name} keeps scores in host memory, where rows cannot come and go; leave offload out.")
    return policy
