"""Device side of the engine: plans, prefills and inserts rows and generates their tokens, one call at a time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.cache.buffers import allocated_bytes, device_bytes
from kvjax.generation.loop import Drawn
from kvjax.generation.prompts import end_ids
from kvjax.generation.sampling import Sampling, sampling_of
from kvjax.inference.budget import lines_of, plan_slots
from kvjax.inference.decoder import Decoder, decoder, read_more, step_shapes
from kvjax.inference.padding import among_devices, bucket, check_rows
from kvjax.inference.prepare import bind_policy, check_prompt, check_tokens, check_vocabulary, instead, longest_text
from kvjax.inference.speculation import speculation
from kvjax.methods.registry import name_of
from kvjax.model import Model
from kvjax.policies.policy import Policy
from kvjax.serving import batch, speculative
from kvjax.serving.batch import Planned, Rows, Sizes, Text, Wishes, Written
from kvjax.serving.prefix_cache import Key, dependencies, prefix_keys
from kvjax.serving.requests import SIZES, Request
from kvjax.types import Kernels
from kvjax.utils.autotune import settle_before
from kvjax.utils.modes import on_the_host
from kvjax.utils.settings import seed_number, whole_number
from pallas_kernels.common import Survey

ENDS = 64
"""Maximal number of ids that end a row, including the model's."""
LOGPROBS = 20
"""Maximal number of likeliest tokens per request."""


class PlannedSlots(NamedTuple):
    """Slots of one text in one cache, from `plan_slots`."""

    limits: list[Int[np.ndarray, "1 h"]]
    """Slots that each head may use, by layer."""
    buffers: tuple[int, ...]
    """Slots of the buffers, by layer."""


class Device:
    """Rows of one budget; see `kvjax.serving.engine.Engine` for the settings.

    Any thread may call `plan` and `prefix_keys`; only one thread may use the rest.
    """

    @on_the_host
    def __init__(
        self,
        model: Model,
        policy: str | Policy,
        budget: int,
        rows: int,
        context: int | None,
        chunk: int,
        steps: int,
        draft_tokens: int = 0,
        verifier: str | Policy = "full",
        refresh: bool = False,
    ) -> None:
        self.model, config = model, model.config
        self._end_ids = functools.cache(functools.partial(end_ids, model))
        budget = whole_number("budget", budget)
        self.rows = whole_number("rows", rows)
        check_rows(self.rows, model.mesh)
        self.chunk = whole_number("chunk", chunk, *SIZES["chunk"])
        self.steps = whole_number("steps", steps, *SIZES["steps"])
        self.logprobs = min(LOGPROBS, config.vocab_size)
        if model.mesh is not None and model.mesh.is_multi_process:
            raise ValueError("requests reach only one of several processes; give the server a mesh of one process.")
        self.policy = bind_policy(model, policy, budget, None)
        of_policy = model, self.policy, budget if self.policy.bounded else 1.0
        drafts = dict[str, Any](verifier=verifier, draft_tokens=draft_tokens, refresh=refresh)
        bound = speculation(*of_policy, **drafts) if draft_tokens else decoder(*of_policy)
        self._policies = [_check_servable(_policy_of(each), self.chunk) for each in bound.decoders]
        self.decoder = bound.for_steps()
        self.writing: dict[str, Any] = dict(
            buffer_size=self.steps + draft_tokens,
            logprobs=self.logprobs,
            advance=speculative.draft_and_verify if draft_tokens else batch.draw_and_read,
        )
        """Static arguments of `batch.generate`."""
        self.context = config.max_positions if context is None else whole_number("context", context, *SIZES["context"])
        if self.context > min(longest_text(policy, config) for policy in self._policies):
            raise ValueError(
                f"context={self.context} does not fit the model's {config.max_positions} positions; ask for fewer"
                f"{instead(config)}."
            )
        self.budget = budget if self.policy.plan.sizing.mode != "unbounded" else self.context
        shortest, longest = (self._slots(1, end, budget) for end in (2, self.context))
        both = list(zip(shortest, longest, strict=True))
        self._sizes = Sizes(
            config=config,
            capacities=tuple(among_devices(_largest(each.buffers for each in ends), model.mesh) for ends in both),
            lines=tuple(_largest(lines_of(each.limits) for each in ends) for ends in both),
            dtype=model.weights.dtype,
            mesh=model.mesh,
        )
        self.reader = self.decoder.replace(mesh=batch.reading_mesh(model.mesh))
        self._one = _planned(shortest, config.rope_length(np.asarray([2])))
        state = self._empty_rows()
        self.state: Rows | None = state
        """Rows of the batch; None after a failure, until `put` creates new ones."""
        self.bytes = allocated_bytes(state.cache.memory)
        """Bytes of the caches of all rows."""
        self.device_bytes = device_bytes(state.cache.memory)
        self._depends = dependencies(self.reader, self.begin(self._one), self.chunk)

    @on_the_host
    def plan(self, request: Request) -> Planned:
        """Check a request and plan the limits of its text."""
        prompt, config = request.prompt, self.model.config
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token.")
        check_tokens(np.asarray([prompt]), np.asarray([len(prompt)]), config)
        check_prompt(self.policy, len(prompt))
        end = len(prompt) + whole_number("max_tokens", request.max_tokens)
        if end > self.context:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and max_tokens={request.max_tokens} come to more than the "
                f"{self.context} that a text may have; ask for fewer."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= (penalty := getattr(request, name)) <= 2:
                raise ValueError(f"{name}={penalty} is not a number from -2 to 2.")
        self._sampling(request)  # checks the model's defaults
        if request.logprobs is not None:
            whole_number("logprobs", request.logprobs, 0, self.logprobs)
        check_vocabulary(np.asarray(request.stop_ids, np.int64), config)
        if len(self._ends(request)) > ENDS:
            raise ValueError(f"{len(self._ends(request))} ids that end a text are more than {ENDS}; give fewer.")
        budget = self.budget if request.budget is None else whole_number("budget", request.budget)
        if request.budget is not None and self.policy.plan.sizing.mode == "unbounded":
            raise ValueError(f"budget={budget} has no effect under policy {name_of(self.policy)}; leave it out.")
        if budget > self.budget:
            raise ValueError(f"budget={budget} is more than the {self.budget} slots that there are; ask for fewer.")
        rope = config.rope_length(np.asarray([end]))
        # If the slots suffice only for the planned length, all texts are planned for the whole context.
        end = self.context if any(policy.plan.sizing.fixed_length for policy in self._policies) else end
        slots = self._slots(len(prompt), end, budget)
        for each, rooms in zip(slots, self._sizes.capacities, strict=True):
            if any(limit.max() > room for limit, room in zip(each.limits, rooms, strict=True)):
                raise ValueError(f"budget={budget} gives a layer more slots than there are; leave it out.")
        return _planned(slots, rope, seed_number(request.seed), end - len(prompt), end)

    @on_the_host
    def prefix_keys(self, request: Request, planned: Planned) -> list[Key]:
        """Return the keys of a request's prefixes in the prefix cache, see `prefix_cache.prefix_keys`."""
        inputs = [(name, getattr(planned, name).tolist()) for name in sorted(self._depends)]
        depends = repr((inputs, jax.tree.map(np.ndarray.tolist, planned.limits))).encode()
        return prefix_keys(depends, request.prompt, self.chunk)

    @on_the_host
    def begin(self, planned: Planned, prefix: Text | None = None) -> Text:
        """Create a text with an empty cache, or with the cache of a stored prefix."""
        text = batch.begin(self.decoder, planned, sizes=self._sizes)
        if prefix is None:
            return text
        names, pairs = ("layers", "position", "prompt_length"), zip(text.cache.caches, prefix.cache.caches, strict=True)
        caches = [empty.replace(**{name: getattr(filled, name) for name in names}) for empty, filled in pairs]
        return Text(text.cache.with_caches(caches), prefix.token_mask)

    @on_the_host
    def read(self, text: Text, chunk: Sequence[int]) -> tuple[Text, Float[Array, "1 vocab"]]:
        """Read the next chunk of a text, and return the logits for the token after it."""
        return batch.read(*self._reading(text, chunk))

    @on_the_host
    def put(self, row: int, text: Text, logits: Float[Array, "1 vocab"], request: Request) -> None:
        """Put a prefilled text into a row."""
        rows = self._empty_rows() if self.state is None else self.state
        self.state = batch.insert(rows, np.int32(row), text, logits, self._wishes(request), sizes=self._sizes)

    @on_the_host
    def write(
        self, rows: Collection[int], steps: int, leave: bool = False, logprobs: bool = False
    ) -> tuple[Written, Drawn | None]:
        """Generate tokens for some rows, free the others, and return the tokens on the host; see `batch.generate`."""
        assert self.state is not None
        active = np.isin(np.arange(self.rows), list(rows))
        numbers = np.int32(steps), np.bool_(leave)
        self.state, output, samples = batch.generate(self.decoder, self.state, active, *numbers, **self.writing)
        return jax.device_get((output, samples if logprobs else None))

    @on_the_host
    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Compile all programs in parallel, as `Engine.warm_up` does; this overwrites the first row."""
        sizes = sorted({self._padded(length) for length in range(1, self.chunk + 1)})
        self._autotune(sizes)
        text = self.begin(self._one)

        def compiles(size: int) -> None:
            batch.read.lower(*self._reading(text, [0] * size)).compile()

        def writes() -> None:
            self.put(0, *self.read(text, [0] * sizes[0]), Request((0,), max_tokens=1, sampling=Sampling()))
            self.write({0}, 1)
            jax.block_until_ready(self.state)

        # On a mesh, programs started by two threads can deadlock; only the first job runs any, the others compile.
        pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        try:
            jobs = [pool.submit(writes), *(pool.submit(compiles, size) for size in sizes[1:])]
            on_progress(0, len(jobs))
            for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
                job.result()
                on_progress(done, len(jobs))
        finally:  # an interruption does not wait for programs, which take minutes
            pool.shutdown(wait=False, cancel_futures=True)
        for size in sizes[1:]:
            jax.block_until_ready(self.read(text, [0] * size))

    def _autotune(self, sizes: Sequence[int]) -> None:
        """Autotune the kernels for chunks of these sizes and for decode steps, if they need it."""

        def trace(survey: Survey) -> None:
            kernels, length = Kernels(survey), jax.ShapeDtypeStruct((1,), jnp.int32)
            texts, rows = (jax.eval_shape(begin).cache for begin in (lambda: self.begin(self._one), self._empty_rows))
            for reader, text in zip(self.reader.replace(kernels=kernels).decoders, texts.caches, strict=True):
                for size in sizes:
                    tokens = jax.ShapeDtypeStruct((1, size), jnp.int32)
                    read_more.eval_shape(reader, text, tokens, length, all_logits=False)
            step_shapes(self.decoder.replace(kernels=kernels), rows)

        settle_before(trace, self.decoder.kernels.implementation)

    def _reading(self, text: Text, chunk: Sequence[int]) -> tuple[Any, ...]:
        tokens = np.zeros((1, self._padded(len(chunk))), np.int32)
        tokens[0, : len(chunk)] = chunk
        return self.reader, text, tokens, np.asarray([len(chunk)], np.int32)

    def _empty_rows(self) -> Rows:
        one = self._one, self._wishes(Request((0,), sampling=Sampling(0.0), ignore_eos=True))
        planned, wishes = jax.tree.map(lambda leaf: np.repeat(leaf, self.rows, axis=0), one)
        return batch.empty_rows(self.decoder, planned, wishes, sizes=self._sizes)

    def _padded(self, length: int) -> int:
        return min(bucket(length), self.chunk)

    def _slots(self, prompt: int, end: int, budget: int) -> list[PlannedSlots]:
        """Return the slots of a text for each of the decoders."""
        text = np.asarray([prompt]), end - prompt, self.model.config, prompt
        return [
            PlannedSlots(*plan_slots(policy, budget, *text, beyond_window=each.beyond_window))
            for policy, each in zip(self._policies, self.decoder.decoders, strict=True)
        ]

    def _ends(self, request: Request) -> tuple[int, ...]:
        return tuple({*request.stop_ids, *(() if request.ignore_eos else self._end_ids(request.chat))})

    def _sampling(self, request: Request) -> Sampling:
        return sampling_of(self.model.sampling_defaults, {}) if request.sampling is None else request.sampling

    def _wishes(self, request: Request) -> Wishes:
        sampling = self._sampling(request)
        if not sampling.temperature:  # greedy decoding needs no filters, and they take time
            sampling = dataclasses.replace(sampling, top_k=None, top_p=None)
        ends = self._ends(request)
        return Wishes(
            jax.tree.map(_row, sampling),
            _row(float(request.presence_penalty)),
            _row(float(request.frequency_penalty)),
            _row((*ends, *[-1] * (ENDS - len(ends)))),
            _row(request.max_tokens),
            _row(request.logprobs is not None),
        )


def _policy_of(decoder: Decoder) -> Policy:
    """Return the policy of a decoder with concrete numbers, from which slots are planned."""
    assert decoder.policy_and_budget is not None
    return decoder.policy_and_budget[0]


def _largest(numbers: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the largest number of each layer."""
    return tuple(map(max, zip(*numbers, strict=True)))


def _planned(slots: Sequence[PlannedSlots], rope_length: Any, seed: int = 0, horizon: int = 1, end: int = 2) -> Planned:
    limits: Any = tuple(tuple(limit.astype(np.int32) for limit in each.limits) for each in slots)
    return Planned(limits, _row(seed, np.uint32), _row(horizon), _row(end), rope_length)


def _row(value: Any, dtype: Any = None) -> Any:
    """Return a value as the array of one row, with 32 bits."""
    array = np.asarray([value], dtype)
    return array.astype({"i": np.int32, "f": np.float32}.get(array.dtype.kind, array.dtype))


def _check_servable(policy: Policy, chunk: int) -> Policy:
    """Return the policy, after checking that the server can use it."""
    name = name_of(policy)
    if policy.plan.sizing.per_head or policy.plan.sizing.mode == "profiled":
        raise ValueError(
            f"{name} gives each head slots of its own once a prompt has been read, so that a row's memory is not known "
            "before; serve another policy, or another plan."
        )
    size = policy.score.requires.prompt_chunk
    if size is not None and chunk % size:
        nearest = size * max(chunk // size, -(-SIZES["chunk"][0] // size))
        raise ValueError(
            f"{name} evicts after each {size} tokens of a prompt, and chunk={chunk} is not a multiple of that; use "
            f"{nearest}."
        )
    if policy.score.requires.replay is not None:
        raise ValueError(f"{name} reads prompts twice before it evicts, which a server does not; serve another policy.")
    if policy.score.requires.whole_prompt:
        raise ValueError(f"{name} evicts by the end of a prompt, and a server reads chunks; serve another policy.")
    if policy.plan.sizing.host_memory:
        raise ValueError(
            f"{name} with memory='host' moves whole prompts to host memory, and a server reads chunks of them; leave "
            "memory out."
        )
    if policy.score.requires.host_memory:
        raise ValueError(f"{name} keeps scores in host memory and cannot add or remove rows; leave offload out.")
    return policy
