"""Prompts in, texts out: encoding, generation with what it cost, and text that appears as it is made."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from kvjax.compilation import Compiling
from kvjax.engine.extend import prefill
from kvjax.engine.prepare import bucket_rows, instead, ready
from kvjax.engine.state import State, held_positions, take_rows
from kvjax.policies.plan import Plan
from kvjax.policies.policy import Policy
from kvjax.policies.registry import policy as policy_by_name
from kvjax.sampling.loop import generate_tokens
from kvjax.sampling.sample import Sampling
from kvjax.settings import seed_number, whole_number

if TYPE_CHECKING:
    from kvjax.model import Model


@dataclasses.dataclass
class Generation:
    """What came out of a batch of prompts, and what it cost; times are in seconds and hold no compilation."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    padded: State
    """After the last step, with rows beyond the prompts that fill the batch and are not active."""
    cache_positions: list[np.ndarray]
    """For each layer [b, h, c]: positions held when the prompt had been read."""
    compile_seconds: float
    """Spent on programs: tracing, lowering, compiling or fetching them; nothing where all were there."""
    prefill_seconds: float
    """Reading the prompts."""
    decode_seconds: float
    """Making `timed_tokens`: the tokens of all dispatches that did not wait for a program."""
    timed_tokens: int

    @functools.cached_property
    def state(self) -> State:
        """After the last step, with the prompts' rows."""
        rows = len(self.prompts)
        return self.padded if len(self.padded.position) == rows else take_rows(self.padded, range(rows))

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens of all rows per second; None if too few were made to tell."""
        return self.timed_tokens / self.decode_seconds if self.timed_tokens else None


def encode(model: Model, prompt: str, chat: bool = False) -> list[int]:
    """A prompt's token ids, as the model's tokenizer starts a text; as one turn of a conversation if `chat`.

    Raises:
        ValueError: the prompt is empty or no text, the tokenizer has no chat template or one that refuses it, or has
            tokens that the model does not have.
    """
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text.")
    lone = next((i for i, character in enumerate(prompt) if "\ud800" <= character <= "\udfff"), None)
    if lone is not None:
        raise ValueError(f"the prompt is no text: character {lone} is {prompt[lone]!a}, half of a surrogate pair.")
    ids = _turn(model, prompt) if chat else list(model.tokenizer.encode(prompt))
    if max(ids, default=0) >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {model.name!r} gives token {max(ids)}, but the model has {model.config.vocab_size}: "
            "they do not belong together."
        )
    return ids


def _turn(model: Model, prompt: str) -> list[int]:
    if not getattr(model.tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer of {model.name!r} has no chat template; leave out --chat.")
    turns = [{"role": "user", "content": prompt}]
    try:
        text = model.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever the template's author has it raise
        raise ValueError(f"the chat template of {model.name!r} refuses the prompt: {error}.") from error
    return list(model.tokenizer.encode(text, add_special_tokens=False))


def generate_ids(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    policy: str | Policy = "full",
    budget: int | float | Sequence[int] = 1.0,
    plan: str | Plan | None = None,
    budget_of: str = "text",
    prefill_chunk: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | Sequence[int] = 0,
    stop_at_eos: bool = True,
    on_tokens: Callable[[np.ndarray, np.ndarray], None] | None = None,
) -> Generation:
    """Continue token ids; see `generate_texts` for the settings.

    Args:
        on_tokens: called with each new block of tokens [b, n] and which of them belong to their row's text.
    """
    chosen = policy_by_name(policy)
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
    sampling = Sampling(temperature, top_k, top_p)
    longest, room = max((len(prompt) for prompt in prompts), default=0), model.config.max_positions
    if longest + max_new_tokens > room and chosen.codec.positions == "original":
        raise ValueError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit the model's {room} positions; "
            f"ask for fewer{instead(model.config)}."
        )
    given = [seed_number(each) for each in (seed if isinstance(seed, (list, tuple, np.ndarray)) else [seed])]
    rows, seeds = len(prompts), given if np.ndim(seed) else given * len(prompts)
    if len(seeds) != rows:
        raise ValueError(f"{len(seeds)} seeds do not fit {rows} prompts; give one seed, or one for each.")
    # Rows do not know of each other: copies of the shortest prompt fill the batch to a size that has a program.
    filling = [min(range(rows), key=lambda row: len(prompts[row]))] * (bucket_rows(rows) - rows) if rows else []
    chosen = ready(model, chosen, budget, plan)
    arguments: dict[str, Any] = dict(max_new_tokens=max_new_tokens, prefill_chunk=prefill_chunk, budget_of=budget_of)
    with Compiling() as compiling:
        keys = _keys(np.asarray([seeds[row] for row in [*range(rows), *filling]], np.int64))
        before, began = compiling.seconds, time.perf_counter()
        batch = [list(prompts[row]) for row in [*range(rows), *filling]]
        state, logits = prefill(model, chosen, batch, budget, key=keys, **arguments)
        jax.block_until_ready(logits)
        prefill_seconds = time.perf_counter() - began - (compiling.seconds - before)
        state = state.replace(active=jnp.asarray(np.arange(len(batch)) < rows))
        held = [positions[:rows] for positions in held_positions(state)]
        eos = model.config.eos if stop_at_eos else ()
        tokens: list[list[int]] = [[] for _ in prompts]
        seconds, timed, last, compiled = 0.0, 0, time.perf_counter(), compiling.seconds
        blocks = generate_tokens(state, logits, max_new_tokens, sampling, eos)
        for index, (block, belongs, after) in enumerate(blocks):
            now, state, block, belongs = time.perf_counter(), after, block[:rows], belongs[:rows]
            if index and compiling.seconds == compiled:  # the first token took no step
                seconds, timed = seconds + now - last, timed + block.size
            for row, ids, keep in zip(tokens, block, belongs, strict=True):
                row += ids[keep].tolist()
            if on_tokens is not None:
                on_tokens(block, belongs)
            last, compiled = time.perf_counter(), compiling.seconds
    made = [list(prompt) for prompt in prompts], tokens, state, held
    return Generation(*made, compiling.seconds, prefill_seconds, seconds, timed)


@jax.jit
def _keys(seeds: Int[Array, " b"]) -> Key[Array, " b"]:
    return jax.vmap(jax.random.key)(seeds)


def generate_texts(model: Model, prompts: str | Sequence[str], *, chat: bool = False, **settings: Any) -> list[str]:
    """Texts that continue prompts.

    Args:
        model: from `kvjax.load`.
        prompts: texts; one text counts as a list of one.
        chat: wrap each prompt as a user's turn with the tokenizer's chat template.
        settings: `policy` ("full"), `budget` (1.0), `budget_of`, `plan`, `prefill_chunk`: see `kvjax.prefill`;
            `max_new_tokens` (128); `temperature` (0.8, 0 is greedy), `top_k`, `top_p`: see `Sampling`;
            `seed` (0): one number, or one for each prompt; the same seed gives a prompt the same text in any batch;
            `stop_at_eos` (True).

    A batch is filled up to 1, 2, 3, 4, 6, 8, 12, 16, ... rows, for which there is a program and memory; what compiles
    once more is in docs/compilation.md.

    Raises:
        ValueError: a prompt is empty or too long, or a setting is out of range.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    made = generate_ids(model, [encode(model, text, chat) for text in texts], **settings)
    return [model.tokenizer.decode(ids, skip_special_tokens=True) for ids in made.tokens]


class Stream:
    """Prints a row's text as its tokens arrive, holding back a character whose bytes are not all there yet."""

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] = []
        # Text up to `shown` has been printed; tokens from `context` are decoded with what follows, not the whole text.
        self.context, self.shown = 0, 0

    def __call__(self, block: np.ndarray, belongs: np.ndarray) -> None:
        self.ids += block[0][belongs[0]].tolist()
        if not self._decode(self.ids[self.context :]).endswith("\ufffd"):
            self.flush()

    def flush(self) -> None:
        """Print what has not been printed of the text so far."""
        if len(self.ids) == self.shown:
            return
        before = self._decode(self.ids[self.context : self.shown])
        self.write(self._decode(self.ids[self.context :])[len(before) :])
        self.context, self.shown = self.shown, len(self.ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)
