"""Text generation from prompts, with timings, and streaming."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from kvjax.generation.adaptive import drafting
from kvjax.generation.beam import beam_search
from kvjax.generation.detokenize import Pieces, stop_strings
from kvjax.generation.detokenize import Stream as Stream
from kvjax.generation.keywords import BeginKeywords, TextKeywords, TextsKeywords
from kvjax.generation.loop import Drawn, PrefilledBatch
from kvjax.generation.prompts import encode, end_ids, has_turns
from kvjax.generation.sampling import GREEDY, sampling_of
from kvjax.inference.cache import policy_seeds
from kvjax.inference.decoder import decoder
from kvjax.inference.extend import lower_prefill
from kvjax.inference.padding import bucket_rows
from kvjax.inference.prefill import draws
from kvjax.inference.prepare import bind_policy, check_vocabulary, instead, longest_text, prepare
from kvjax.inference.state import State, held_positions, take_rows
from kvjax.inference.verify import check_used
from kvjax.methods.registry import policy as policy_by_name
from kvjax.policies.allocation import Plan
from kvjax.policies.policy import Policy
from kvjax.utils.compilation import Compiling
from kvjax.utils.modes import on_the_host
from kvjax.utils.settings import Chat, Messages, seed_number, template_settings, whole_number

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


class Logprob(NamedTuple):
    """Log-probability of a generated token, before filters and penalties."""

    token: int
    logprob: float
    """Natural logarithm of the token's probability."""
    likeliest: tuple[tuple[int, float], ...]
    """Likeliest tokens at this position with their log-probabilities, the likeliest first."""


@dataclasses.dataclass
class Generation:
    """Texts generated from a batch of prompts, with timings in seconds; compilation is timed separately."""

    prompts: list[list[int]]
    """Prompt ids of each text; a prompt is repeated for each of its samples."""
    tokens: list[list[int]]
    """Generated ids of each text, up to the token that completes a stop string."""
    padded: State
    """State after the last step, including the inactive rows that fill up the batch."""
    cache_positions: list[np.ndarray]
    """Positions in the cache after prefill, for each layer [b, h, c]."""
    compile_seconds: float
    """Time to trace, lower, compile or load programs; zero if all were ready."""
    prefill_seconds: float
    decode_seconds: float
    """Time to generate `timed_tokens`."""
    timed_tokens: int
    """Tokens of all dispatches that did not wait for a program."""
    logprobs: list[list[Logprob]] | None = None
    """Log-probabilities of each token of each text, if requested."""
    beams: int = 1
    """Rows of the state per text."""
    rounds: list[int] = dataclasses.field(default_factory=list)
    """Verifications of drafted tokens in each text, all 0 without a draft."""
    verified_tokens: int = 0
    """Tokens that they added to all texts."""

    @functools.cached_property
    def state(self) -> State:
        """State after the last step, without the rows that only filled the batch."""
        rows = len(self.prompts) * self.beams
        return self.padded if len(self.padded.position) == rows else take_rows(self.padded, range(rows))

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Generated tokens of all rows per second; None if none were timed."""
        return self.timed_tokens / self.decode_seconds if self.timed_tokens else None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens that a verification adds to a text on average; None without a draft."""
        return self.verified_tokens / sum(self.rounds) if any(self.rounds) else None


def check_room(longest: int, max_new_tokens: int, policy: Policy, model: LanguageModel) -> None:
    """Refuse a text longer than the model's positions, unless the policy uses positions in the cache."""
    room = longest_text(policy, model.config)
    if longest + max_new_tokens > room:
        raise ValueError(
            f"a text of {longest} tokens and {max_new_tokens} new ones do not fit the model's {room} positions; "
            f"ask for fewer{instead(model.config)}."
        )


@on_the_host
def begin(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    policy: str | Policy = "full",
    budget: int | float | Sequence[int] = 1.0,
    plan: str | Plan | None = None,
    budget_of: str = "text",
    prefill_chunk: int | None = None,
    max_new_tokens: int = 128,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | Sequence[int] = 0,
    num_samples: int = 1,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    stop_at_eos: bool = True,
    chat: bool = False,
    logprobs: int | None = None,
    rope_length: int | None = None,
    lossless: bool = False,
    verifier: str | Policy = "full",
    draft_tokens: int | str = 4,
    refresh: bool = False,
) -> PrefilledBatch:
    """Prefill prompts for generation; see `generate_texts` for the settings and errors.

    With `chat`, the ids are those of conversations, and any of the `end_ids` of a chat ends an answer. `rope_length` is
    as in `kvjax.prefill`.
    """
    chosen = policy_by_name(policy)
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
    num_samples = whole_number("num_samples", num_samples)
    logprobs = None if logprobs is None else whole_number("logprobs", logprobs, 0, model.config.vocab_size)
    filters = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sampling = sampling_of(model.sampling_defaults, filters | {"repetition_penalty": repetition_penalty})
    stop, several = stop_strings(stop), isinstance(stop_token_ids, (list, tuple, np.ndarray))
    if not several or any(isinstance(id, bool) or not isinstance(id, (int, np.integer)) for id in stop_token_ids):
        raise TypeError(f"stop_token_ids={stop_token_ids!r} is not a list of token ids.")
    check_vocabulary(np.asarray(stop_token_ids, object), model.config)
    check_room(max((len(prompt) for prompt in prompts), default=0), max_new_tokens, chosen, model)
    numbers = [seed_number(value) for value in (seed if isinstance(seed, (list, tuple, np.ndarray)) else [seed])]
    if not len(prompts):
        raise ValueError("there is no prompt; give the ids of at least one.")
    rows, seeds = len(prompts), numbers if np.ndim(seed) else numbers * len(prompts)
    if len(seeds) != rows:
        raise ValueError(f"{len(seeds)} seeds do not fit {rows} prompts; give one seed, or one for each.")
    chosen = bind_policy(model, chosen, budget, plan)
    check_used(verifier, refresh, lossless)
    if lossless:
        drafts = dict[str, Any](draft_tokens=draft_tokens, verifier=verifier, refresh=refresh)
        reader, batch_kind = drafting(model, chosen, budget, **drafts)
        check_room(max(map(len, prompts)), max_new_tokens, reader.policy, model)
    else:
        reader, batch_kind = decoder(model, chosen, budget), PrefilledBatch
    arguments: dict[str, Any] = dict(max_new_tokens=max_new_tokens, budget_of=budget_of)
    first = [list(prompt) for prompt in prompts[:1]]
    with Compiling() as compiling:
        reading: dict[str, Any] = dict(key=None, plan=None, chunk=prefill_chunk, **arguments)
        # Without loss, samples start from the full cache, which is the same for all.
        draws_cache = not lossless and num_samples > 1
        if draws_cache and draws(model, prepare(model, chosen, first, budget, None, **reading)):
            # The policy also draws the cache's contents, so each sample reads the prompt with its own seed.
            prompts = [prompt for prompt in prompts for _ in range(num_samples)]
            seeds = [(number + i) % 2**32 for number in seeds for i in range(num_samples)]
            rows, num_samples = len(prompts), 1
        index = _prompt_of_rows(prompts, model)
        keys = _keys(np.asarray([seeds[row] for row in index], np.int64))
        compiling.lap()
        batch = [list(prompts[row]) for row in index]
        arguments |= dict(key=keys, prefill_chunk=prefill_chunk, rope_length=rope_length)
        cache, logits = reader.prefill(batch, **arguments)
        state = State(reader.for_steps(), cache)
        jax.block_until_ready(logits)
        seconds = compiling.lap()
    if num_samples > 1:
        # Each prompt is read once; all its samples continue from copies of the same cache.
        copied = np.repeat(np.arange(rows), num_samples)
        rows = len(copied)
        copied = np.pad(copied, (0, bucket_rows(rows, model.mesh) - rows))
        keys = _keys(np.asarray([(seeds[row] + i % num_samples) % 2**32 for i, row in enumerate(copied)], np.int64))
        state, logits = take_rows(state, copied).replace(key=keys, seed=policy_seeds(keys)), logits[copied]
    state = state.replace(active=jnp.asarray(np.arange(len(state.position)) < rows))
    return batch_kind(
        model=model,
        prompts=[list(prompt) for prompt in prompts for _ in range(num_samples)],
        state=state,
        logits=logits,
        cache_positions=[positions[:rows] for positions in held_positions(state.evicting)],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        eos=(*(end_ids(model, chat) if stop_at_eos else ()), *map(int, stop_token_ids)),
        stop=stop,
        logprobs=logprobs,
        compile_seconds=compiling.seconds,
        seconds=seconds,
    )


@on_the_host
def lower_begin(
    model: LanguageModel, prompts: Sequence[Sequence[int]], *, policy: str | Policy, **reading: Any
) -> list[jax.stages.Lowered]:
    """Lower the programs of `begin`, to read their `memory_analysis()`; `reading` is of `kvjax.prefill`."""
    return lower_prefill(model, policy, [list(prompts[row]) for row in _prompt_of_rows(prompts, model)], **reading)


def _prompt_of_rows(prompts: Sequence[Sequence[int]], model: LanguageModel) -> list[int]:
    """Return the prompt index of each row of the batch; copies of the shortest prompt fill it up."""
    rows = list(range(len(prompts)))
    shortest = min(rows, key=lambda row: len(prompts[row]), default=0)
    return rows + [shortest] * (bucket_rows(len(rows), model.mesh) - len(rows))


def generate_ids(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    beams: int = 1,
    length_penalty: float = 1.0,
    on_tokens: Callable[[np.ndarray, np.ndarray], None] | None = None,
    **settings: Unpack[BeginKeywords],
) -> Generation:
    """Continue token ids; see `generate_texts` for the settings.

    Args:
        on_tokens: called with each new block of tokens [b, n] and a mask of those that belong to their row's text.
        settings: those of `begin`.
    """
    check_beams(beams, length_penalty, settings)
    if beams > 1 and on_tokens is not None:
        raise ValueError("a beam search knows its text only at the end and cannot stream; leave on_tokens out.")
    applied: dict[str, Any] = {**settings, **(GREEDY if beams > 1 else {})}
    return decode_batch(begin(model, prompts, **applied), beams, length_penalty, on_tokens)


def check_beams(beams: int, length_penalty: float, settings: Mapping[str, Any]) -> None:
    """Refuse sampling settings with a beam search, and settings of a beam search without one."""
    if whole_number("beams", beams) == 1 and length_penalty != 1:
        raise ValueError(f"length_penalty={length_penalty} has no effect without beams; give beams, too.")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty} is not a finite number.")
    idle_values = dict(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, logprobs=None, lossless=False)
    for name, idle in (idle_values | {"num_samples": 1}).items() if beams > 1 else ():
        if settings.get(name) not in (None, idle):
            raise ValueError(f"{name}={settings[name]} has no effect on a beam search; leave it out.")


@on_the_host
def decode_batch(
    batch: PrefilledBatch,
    beams: int = 1,
    length_penalty: float = 1.0,
    on_tokens: Callable[[np.ndarray, np.ndarray], None] | None = None,
) -> Generation:
    """Continue prefilled prompts and consume their caches; see `generate_ids`."""
    if beams > 1:
        return _search(batch, beams, length_penalty)
    with Compiling() as compiling:
        tokens: list[list[int]] = [[] for _ in batch.prompts]
        logprobs: list[list[Logprob]] = [[] for _ in batch.prompts]
        state = batch.state
        seconds, timed, last, compiled = 0.0, 0, time.perf_counter(), compiling.seconds
        rounds, verified = np.zeros(len(tokens), int), 0
        for index, (block, belongs, after, samples, counts, taken) in enumerate(batch.blocks()):
            now, state = time.perf_counter(), after
            if index and compiling.seconds == compiled:  # the first token took no step
                seconds, timed = seconds + now - last, timed + int(counts.sum())
            rounds, verified = rounds + taken, verified + int(counts[taken > 0].sum())
            for row, ids, keep in zip(tokens, block, belongs, strict=True):
                row += ids[keep].tolist()
            if samples.logprob is not None:
                for row, (entries, keep) in enumerate(zip(logprobs, belongs, strict=True)):
                    entries += [logprob_at(samples, row, place) for place in np.flatnonzero(keep).tolist()]
            if on_tokens is not None:
                on_tokens(block, belongs)
            last, compiled = time.perf_counter(), compiling.seconds
    outputs = batch.prompts, tokens, state, batch.cache_positions
    times = batch.compile_seconds + compiling.seconds, batch.seconds, seconds, timed
    rates = dict[str, Any](rounds=rounds.tolist(), verified_tokens=verified)
    return Generation(*outputs, *times, logprobs if batch.logprobs is not None else None, **rates)


def logprob_at(samples: Drawn, row: int, place: int) -> Logprob:
    """Return the log-probability of one token of a block [b n], with those of the likeliest tokens."""
    values: list[Any] = [leaf[row, place].tolist() for leaf in samples if leaf is not None]
    token, logprob, *likeliest = values
    return Logprob(token, logprob, tuple(zip(*likeliest, strict=True)))


def _search(batch: PrefilledBatch, beams: int, length_penalty: float) -> Generation:
    with Compiling() as compiling:
        search = beam_search(batch.state, batch.logits, beams, batch.max_new_tokens, batch.eos, length_penalty)
        seconds = compiling.lap()
    tokens = search.tokens[: len(batch.prompts)]
    for prompt, ids in zip(batch.prompts, tokens if batch.stop else [], strict=False):
        pieces = Pieces(batch.model.tokenizer, batch.stop, prompt)
        pieces.add(ids)
        del ids[pieces.used :]  # the text ends with the token that completes a stop string
    outputs = batch.prompts, tokens, search.state, batch.cache_positions
    times = batch.compile_seconds + compiling.seconds, batch.seconds, seconds, search.steps * len(batch.prompts)
    return Generation(*outputs, *times, beams=beams)


@jax.jit
def _keys(seeds: Int[Array, " b"]) -> Key[Array, " b"]:
    return jax.vmap(jax.random.key)(seeds)


def texts_of(model: LanguageModel, generation: Generation, stop: str | Sequence[str] = ()) -> list[str]:
    """Return the text that each generation adds to its prompt, up to the first stop string."""

    def text(prompt: list[int], ids: list[int]) -> str:
        pieces = Pieces(model.tokenizer, stop_strings(stop), prompt)
        return pieces.add(ids) + pieces.finish()

    return [text(prompt, ids) for prompt, ids in zip(generation.prompts, generation.tokens, strict=True)]


def generate_texts(
    model: LanguageModel,
    prompts: str | Sequence[str | Messages | list[int]],
    *,
    chat: Chat = False,
    system: str | None = None,
    **settings: Unpack[TextsKeywords],
) -> list[str]:
    """Generate texts that continue prompts.

    Args:
        prompts: texts, token ids, or conversations: lists of messages with `role` and `content`, which is a text or a
            list of parts with texts; one text counts as a list of one.
        chat: wrap each text as a user turn with the tokenizer's chat template; settings of the template count as True,
            such as {"enable_thinking": False}.
        system: the system turn of a chat, before all others.
        settings: `policy` ("full"), `budget` (1.0), `budget_of`, `plan`, `prefill_chunk`, `rope_length`: see
            `kvjax.prefill`;
            `max_new_tokens` (128); `temperature` (0 is greedy), `top_k`, `top_p`, `min_p`, `repetition_penalty`: see
            `Sampling`, by default those of `model.sampling_defaults`, and otherwise a temperature of 0.8 alone;
            `stop`: strings that end a text before them, including texts of special tokens;
            `stop_token_ids`: ids that also end a text; `stop_at_eos` (True): True if the model's end ids end a text,
            and in a chat also those of the tokenizer and the chat template;
            `seed` (0): one number, or one for each prompt; the same seed gives a prompt the same text in any batch;
            `num_samples` (1): texts per prompt, returned one after the other; the i-th one uses seed + i. All samples
            share one prefill, unless the policy uses the seed in it;
            `lossless` (False): return the text of the full cache, which verifies the tokens that the policy drafts on
            its small cache, `draft_tokens` (4) at a time, "auto" for as many as pay; `verifier` ("full") is the policy
            of the full cache, and `refresh` (False) chooses the draft's slots anew after each verification; see
            `kvjax.speculation`;
            `beams` (1), `length_penalty` (1.0): return the likeliest text of a beam search, see `beam_search`;
            `logprobs`, `on_tokens`: see `generate_ids`.

    A batch is filled up to 1, 2, 3, 4, 6, 8, 12, 16, ... rows; each of these sizes has its own program and needs memory
    for all its rows. See docs/compilation.md for other causes of compilation.

    Raises:
        ValueError: a prompt is empty or too long, or a setting is out of range.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    turns = template_settings(chat) is not None or any(map(has_turns, texts))
    generation = generate_ids(model, [encode(model, text, chat, system) for text in texts], chat=turns, **settings)
    return texts_of(model, generation, settings.get("stop", ()))


def stream_text(
    model: LanguageModel,
    prompt: str | Messages | list[int],
    *,
    chat: Chat = False,
    system: str | None = None,
    **settings: Unpack[TextKeywords],
) -> Iterator[str]:
    """Generate the text that continues one prompt, and yield it in pieces.

    Incomplete characters and possible beginnings of a stop string are held back until more tokens arrive.

    Args:
        prompt: a text, token ids, or a conversation.
        settings: those of `begin`, and `chat` and `system` of `generate_texts`; several samples cannot be streamed.

    Raises:
        ValueError: the prompt is empty or too long, or a setting is out of range; raised before the first piece.
    """
    if (samples := dict(settings).get("num_samples", 1)) != 1:
        raise ValueError(f"num_samples={samples}: one text can be streamed; use model.generate.")
    turn = template_settings(chat) is not None or has_turns(prompt)
    batch = begin(model, [encode(model, prompt, chat, system)], chat=turn, **settings)
    return (piece for _, piece in batch.pieces() if piece)
