"""Adapter that runs EleutherAI's lm-evaluation-harness (`lm_eval`) on a model with a compressed cache.

`kvjax.prefill` reads and compresses each context except its last token. Decode steps then read that token and the
continuation one by one, so every token is predicted from the compressed cache while eviction goes on. The logits of the
prompt itself precede eviction: a choice of one letter that is scored by them would show no loss.

    lm = adapter(kvjax.load("smollm2"), policy="h2o", budget=256)
    lm_eval.simple_evaluate(lm, tasks=["hellaswag"], limit=100)
"""

from __future__ import annotations

import collections
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.evaluation.perplexity import stream
from kvjax.generation.detokenize import before_stop
from kvjax.generation.generate import generate_ids, lower_begin
from kvjax.generation.prompts import render, token_ids
from kvjax.generation.questions import answer_each
from kvjax.inference.budget import Budget
from kvjax.inference.extend import lower_prefill, prefill
from kvjax.inference.padding import bucket_rows
from kvjax.inference.prepare import bind_policy, check_length
from kvjax.inference.state import State, cache_bytes, full_cache_bytes, take_rows
from kvjax.methods.registry import name_of
from kvjax.model import Model
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.utils.compilation import Compiling, temporary_bytes
from kvjax.utils.settings import Messages, seed_number, whole_number

FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Generation settings of a task that only matter for sampling, with the values that have no effect."""
GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", *FILTERS, "repetition_penalty")
"""Generation settings of a task that are supported; `max_new_tokens` and others are aliases of `max_gen_toks`."""


def required(module: str) -> Any:
    """Import a module of lm-evaluation-harness or of its dependencies, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"lm-evaluation-harness cannot be imported ({error}): pip install 'kvjax[harness]'.") from None


def adapter(model: Model, **settings: Any) -> CompressedLM:
    """Return a `CompressedLM`, with its settings, that is an `lm_eval.api.model.LM`."""
    base = required("lm_eval.api.model").TemplateLM
    cls = type(CompressedLM.__name__, (CompressedLM, base), {"__module__": __name__, "__doc__": CompressedLM.__doc__})
    return cls(model, **settings)


class _Text(NamedTuple):
    """A context and its continuation."""

    prefix: tuple[int, ...]
    """Tokens of the prefill, which are then compressed."""
    suffix: tuple[int, ...]
    """Tokens that decode steps read."""
    scored: int
    """Number of tokens at the end of `suffix` that are the continuation."""


class CompressedLM:
    """A model and a policy for `lm_eval.simple_evaluate(model=...)`, made by `adapter`.

    `simple_evaluate(apply_chat_template=True)` applies the model's chat template.

    Args:
        budget: slots per KV head, a fraction, or slots for each layer. Fractions count a context and the tokens that
            may be generated, or its continuation, rounded up to 1, 2, 3, 4, 6, 8, 12, ... tokens.
        plan: allocation of the budget to layers, or to their heads.
        budget_of: what a fraction is of, see `kvjax.prefill`.
        prefill_chunk: see `kvjax.prefill`.
        batch_size: requests per batch; no result depends on it.
        max_new_tokens: maximum tokens of an answer if its task sets no limit, at least 1.
        max_length: maximum tokens of a text; longer contexts lose their beginning, and `cut` counts them. None for the
            model's positions, which only policies with cache positions may exceed.
        seed: seed of policies and tasks that sample; the i-th copy of a request is sampled with seed + i.
    """

    # `lm_eval.api.model.TemplateLM` provides these.
    cache_hook: Any
    loglikelihood: Callable[..., list[tuple[float, bool]]]
    chat_template: Callable[..., str | None]

    def __init__(
        self,
        model: Model,
        *,
        policy: Policy | str = "full",
        budget: Budget = 1.0,
        plan: Plan | str | None = None,
        budget_of: str = "text",
        prefill_chunk: int | None = None,
        batch_size: int = 8,
        max_new_tokens: int = 256,
        max_length: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.policy = model, bind_policy(model, policy, budget, plan)
        self.settings: dict[str, Any] = dict(budget=budget, budget_of=budget_of, prefill_chunk=prefill_chunk)
        self.tokenizer = model.tokenizer
        self.batch_size = whole_number("batch_size", batch_size)
        self.max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        longest = model.config.max_positions if max_length is None else max_length
        self.max_length = whole_number("max_length", longest, 2)
        check_length(self.max_length, self.policy, model.config)
        self.seed = seed_number(seed)
        self.cut = 0
        """Number of requests whose context lost its beginning."""
        self.cache_bytes = 0
        """Bytes of the caches of all batches so far."""
        self.full_cache_bytes = 0
        """Bytes of the same caches with policy `full`."""
        self.peak_temporary_bytes: int | None = None
        """Peak bytes that a prefill program allocates besides its arguments and results."""
        self.prefill_seconds = 0.0
        """Seconds of reading contexts, without compilation."""
        self.decode_seconds = 0.0
        """Seconds of generating `timed_tokens`, without compilation."""
        self.timed_tokens = 0

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        for token in (self.tokenizer.eos_token_id, *self.model.config.eos):
            if token is not None:
                return token
        raise ValueError(f"model {self.model.name!r} has no token that ends a text; give its tokenizer an eos_token.")

    @property
    def prefix_token_id(self) -> int:
        """The token put before texts without a context: the one that begins texts, or else the one that ends them."""
        begins = self.tokenizer.bos_token_id
        return self.eot_token_id if begins is None else begins

    @property
    def tokenizer_name(self) -> str:
        """Name that identifies the tokenizer."""
        return (self.tokenizer.name_or_path or self.model.name).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, with the tokens that the tokenizer puts before all texts if `add_special_tokens`.

        None adds them unless the text begins with `prefix_token_id`.
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return token_ids(self.model, string, begins=add_special_tokens)

    def apply_chat_template(self, chat_history: Messages, add_generation_prompt: bool = True) -> str:
        """Render a conversation; without `add_generation_prompt`, its last turn is left unfinished."""
        return render(self.model, chat_history, add_generation_prompt, unfinished=not add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return log-likelihoods of continuations, and whether greedy decoding would generate exactly these.

        Args:
            requests: key under which the result is cached, or None, and ids of context and continuation.
        """
        texts = [self._split(context, continuation) for _, context, continuation in requests]
        # Depends on the request only, or its budget would depend on other requests.
        planned = [bucket_rows(len(text.suffix)) for text in texts]
        results: dict[int, tuple[float, bool]] = {}
        for batch in self._batches([text.prefix for text in texts], planned, "Scoring continuations", disable_tqdm):
            for i, result in zip(batch, self._score([texts[i] for i in batch], planned[batch[0]]), strict=True):
                results[i] = result
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], result)
        return [results[i] for i in range(len(texts))]

    def _batches(
        self, prompts: Sequence[Sequence[int]], kinds: Sequence[Any], title: str, disable_tqdm: bool
    ) -> Iterator[list[int]]:
        """Yield the indices of prompts in batches of one kind, the longest first, with a progress bar."""
        order = sorted(range(len(prompts)), key=lambda i: (kinds[i], -len(prompts[i]), prompts[i]))
        with required("tqdm").tqdm(total=len(order), desc=title, disable=disable_tqdm) as bar:
            for _, group in itertools.groupby(order, key=kinds.__getitem__):
                while batch := list(itertools.islice(group, self.batch_size)):
                    yield batch
                    bar.update(len(batch))

    def _split(self, context: Sequence[int], continuation: Sequence[int]) -> _Text:
        if not 0 < len(continuation) <= self.max_length:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens, not 1 to {self.max_length}; "
                "change the task, or use a model with more positions."
            )
        surplus = max(0, len(context) + len(continuation) - self.max_length - 1)  # the last token is never read
        self.cut += surplus > 0
        read, last = _but_last(context[surplus:])
        return _Text(tuple(read), (*last, *continuation), len(continuation))

    def _score(self, texts: Sequence[_Text], new: int) -> list[tuple[float, bool]]:
        """Score one batch, streaming up to `new` tokens of each text; a shared context is read once."""
        prompts = list(dict.fromkeys(text.prefix for text in texts))
        shortest = min(prompts, key=len)
        if self.policy.plan.sizing.per_head and len(shortest) == 1:
            raise ValueError(
                f"policy {name_of(self.policy)!r} with a budget for each head decides on a prompt, and here one is a "
                "single token; use another plan, or tasks with longer contexts."
            )
        # Copies fill batches to compiled sizes: rows are independent of each other and of padding.
        room = functools.partial(bucket_rows, mesh=self.model.mesh)
        filled = [list(row) for row in [*prompts, *[shortest] * (room(len(prompts)) - len(prompts))]]
        key = jax.random.key(self.seed)
        reading: dict[str, Any] = self.settings | {"max_new_tokens": new}
        with Compiling() as compiling:
            state, logits = prefill(self.model, self.policy, filled, key=key, **reading)
            jax.block_until_ready(logits)
            self.prefill_seconds += compiling.lap()
        self._note(lower_prefill(self.model, self.policy, filled, **reading))
        index = [prompts.index(text.prefix) for text in texts] + [0] * (room(len(texts)) - len(texts))
        if index != list(range(len(filled))):
            state, logits = take_rows(state, index), logits[np.asarray(index)]
        self._count(state, len(texts))
        tokens = np.zeros((len(index), new), np.int32)
        for row, text in zip(tokens, texts, strict=False):
            row[: len(text.suffix)] = text.suffix
        nats, likeliest = stream(state, logits, tokens)
        parts = [(row, slice(len(text.suffix) - text.scored, len(text.suffix))) for row, text in enumerate(texts)]
        return [(-float(nats[part].sum(dtype=np.float64)), bool((likeliest == tokens)[part].all())) for part in parts]

    def _note(self, programs: Sequence[jax.stages.Lowered]) -> None:
        self.peak_temporary_bytes = max(self.peak_temporary_bytes or 0, temporary_bytes(programs) or 0) or None

    def _count(self, state: State, texts: int) -> None:
        rows = len(state.position)  # those beyond the texts only fill the batch
        self.cache_bytes += cache_bytes(state) * texts // rows
        self.full_cache_bytes += full_cache_bytes(state) * texts // rows

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of whole texts, each token after those before it, the first after `prefix_token_id`.

        A text longer than `max_length` is read in windows.
        """
        utils = required("lm_eval.utils")
        windows, counts = list[tuple[None, list[int], list[int]]](), list[int]()
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            parts = list(utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1))
            windows += [(None, *utils.make_disjoint_window(part)) for part in parts]
            counts.append(len(parts))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(score for score, _ in itertools.islice(scores, count)) for count in counts]
        for request, score in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, score)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate texts that continue contexts, up to their first stop string."""
        jobs = [(request.args[0], _generation(request.args[1], self.max_new_tokens)) for request in requests]
        prompts = [self._prompt(context, settings["max_new_tokens"]) for context, settings in jobs]
        kinds = [(str(settings), len(ids) > 1) for (_, settings), ids in zip(jobs, prompts, strict=True)]
        copies, seeds = collections.Counter[Any](), list[int]()
        for (context, _), kind in zip(jobs, kinds, strict=True):
            seeds.append((self.seed + copies[context, kind]) % 2**32)
            copies[context, kind] += 1
        outputs: dict[int, str] = {}
        for batch in self._batches(prompts, kinds, "Generating", disable_tqdm):
            texts = self._generate([prompts[i] for i in batch], [seeds[i] for i in batch], jobs[batch[0]][1])
            for i, text in zip(batch, texts, strict=True):
                outputs[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return [outputs[i] for i in range(len(prompts))]

    def _prompt(self, context: str, new: int) -> list[int]:
        if new >= self.max_length:
            raise ValueError(
                f"max_gen_toks={new} leaves a context no room in a text of {self.max_length} tokens; ask for fewer."
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        self.cut += len(ids) + new > self.max_length
        return ids[-(self.max_length - new) :]

    def _generate(self, prompts: list[list[int]], seeds: list[int], settings: dict[str, Any]) -> list[str]:
        settings = settings | self.settings | {"policy": self.policy, "seed": seeds, "chat": True}
        read, last = zip(*map(_but_last, prompts), strict=True)
        if last[0]:
            (generation,) = answer_each(self.model, read, last, batch_size=len(prompts), **settings)
        else:
            generation = generate_ids(self.model, read, **settings)
        self._count(generation.padded, len(prompts))
        self.prefill_seconds += generation.prefill_seconds
        self.decode_seconds += generation.decode_seconds
        self.timed_tokens += generation.timed_tokens
        planned = settings["max_new_tokens"] + max(map(len, last))
        self._note(lower_begin(self.model, read, policy=self.policy, max_new_tokens=planned, **self.settings))
        decoded = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in generation.tokens]
        return [before_stop(text, settings["stop"]) for text in decoded]


def _but_last(context: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Split a context into the tokens to prefill, at least one, and those to read after compression."""
    return (context[:-1], context[-1:]) if len(context) > 1 else (context, [])


def _generation(gen_kwargs: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """Translate a task's generation settings to hashable settings of `generate_ids`."""
    settings = required("lm_eval.models.utils").normalize_gen_kwargs(gen_kwargs, max_new_tokens)
    unknown = [name for name in settings if name not in GENERATION]
    if unknown:
        raise ValueError(
            f"the task generates with {unknown[0]}={settings[unknown[0]]!r}, which is none of {', '.join(GENERATION)}; "
            "leave it out of its generation_kwargs."
        )
    do_sample = settings["do_sample"]
    fields: dict[str, Any] = {
        "max_new_tokens": settings["max_gen_toks"],
        "stop": tuple(stop for stop in settings["until"] if stop),
        "temperature": settings.get("temperature", 1.0) if do_sample else 0.0,
        "repetition_penalty": settings.get("repetition_penalty") or 1.0,
    }
    return fields | {name: settings.get(name) or idle for name, idle in FILTERS.items() if do_sample}
