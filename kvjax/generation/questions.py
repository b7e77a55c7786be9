"""Many questions about one prompt, which the model reads and compresses once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import jax.numpy as jnp
import numpy as np

from kvjax.generation.generate import Generation, begin, check_beams, decode_batch
from kvjax.generation.keywords import BeginKeywords
from kvjax.generation.loop import PrefilledBatch
from kvjax.generation.prompts import chat_ids, encode, render, token_ids, with_system
from kvjax.generation.sampling import GREEDY
from kvjax.inference.extend import extend
from kvjax.inference.padding import bucket, bucket_rows
from kvjax.inference.state import take_rows
from kvjax.utils.settings import Chat, Messages, template_settings, whole_number

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


def encode_questions(
    model: LanguageModel,
    prompt: str | Messages,
    questions: Sequence[str],
    chat: Chat = False,
    system: str | None = None,
) -> tuple[list[int], list[list[int]]]:
    """Return the ids of a prompt, and of each question that follows it.

    Args:
        prompt: a text or a conversation. Each question continues a text; with `chat`, text and question form one user
            turn with an empty line between them. In a conversation, each question is the next user turn.
        chat: True, or settings of the chat template.
    """
    settings = template_settings(chat)
    if isinstance(prompt, str) and settings is None:
        return encode(model, prompt, system=system), [token_ids(model, text, begins=False) for text in questions]
    if isinstance(prompt, str):
        encode(model, prompt)  # refuses a prompt that is not valid text
        turns = [[{"role": "user", "content": f"{prompt}\n\n{question}"}] for question in questions]
    else:
        turns = [[*prompt, {"role": "user", "content": question}] for question in questions]
    texts = [render(model, with_system(turn, system), settings=settings) for turn in turns]
    if isinstance(prompt, str):
        before = texts[0][: texts[0].find(prompt) + len(prompt)] if prompt in texts[0] else None
    else:
        before = render(model, with_system(prompt, system), add_generation_prompt=False, settings=settings)
    if before is None or not all(text.startswith(before) for text in texts):
        raise ValueError(
            f"the chat template of {model.name!r} does not leave a prompt as it is when a question follows, so it "
            "cannot be read once for all of them; ask them one by one."
        )
    return chat_ids(model, before), [token_ids(model, text[len(before) :], begins=False) for text in texts]


def answer(
    model: LanguageModel,
    prompt: Sequence[int],
    questions: Sequence[Sequence[int]],
    *,
    batch_size: int = 8,
    longest: int = 0,
    beams: int = 1,
    length_penalty: float = 1.0,
    **settings: Unpack[BeginKeywords],
) -> Iterator[Generation]:
    """Answer independent questions about a prompt that is read once.

    Each batch of questions continues copies of the prompt's state, made with `kvjax.take_rows` and `kvjax.extend`.
    Fractional budgets, and schedules, count the prompt, `max_new_tokens`, and the longest question rounded up to 16,
    24, 32, 48, ... tokens.

    Args:
        questions: ids of each, at least one.
        longest: tokens of the longest question of all calls, if other calls have longer ones.
        settings: those of `begin`.

    Yields:
        The generation of each batch, in order; the samples of a question are adjacent.

    Raises:
        ValueError: a question is empty, the text becomes too long, or a setting is out of range; raised with the first
            batch.
    """
    batch_size = whole_number("batch_size", batch_size)
    check_beams(beams, length_penalty, settings)
    if not questions or not all(questions):
        raise ValueError("a question is empty; give at least one token.")
    new = whole_number("max_new_tokens", settings.get("max_new_tokens", 128))
    longest = max(longest, *map(len, questions))
    longest = min(bucket(longest), max(longest, model.config.max_positions - len(prompt) - new))
    planned: dict[str, Any] = {**settings, "max_new_tokens": longest + new, **(GREEDY if beams > 1 else {})}
    batch = begin(model, [prompt], **planned)
    samples = len(batch.prompts)
    for start in range(0, len(questions), batch_size):
        batch_questions = [question for question in questions[start : start + batch_size] for _ in range(samples)]
        rows = len(batch_questions)
        index = np.pad(np.arange(rows) % samples, (0, bucket_rows(rows, batch.state.mesh) - rows))
        state = take_rows(batch.state, index).replace(active=jnp.asarray(np.arange(len(index)) < rows))
        cache_positions = [positions[:1].repeat(rows, axis=0) for positions in batch.cache_positions]
        copies = dataclasses.replace(batch, state=state, prompts=[list(prompt)] * rows, cache_positions=cache_positions)
        yield decode_batch(_read_questions(copies, batch_questions, new), beams, length_penalty)


def answer_each(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]],
    *,
    batch_size: int = 8,
    **settings: Unpack[BeginKeywords],
) -> Iterator[Generation]:
    """Answer one question about each prompt, after the prompt has been compressed.

    Args:
        settings: those of `begin`; fractional budgets count the longest question, too.

    Yields:
        The generation of each batch, in order.
    """
    if len(prompts) != len(questions) or not all(questions):
        raise ValueError(f"{len(questions)} questions, none of them empty, are not there for {len(prompts)} prompts.")
    new = whole_number("max_new_tokens", settings.get("max_new_tokens", 128))
    planned: dict[str, Any] = {**settings, "max_new_tokens": max(map(len, questions), default=0) + new}
    for start in range(0, len(prompts), whole_number("batch_size", batch_size)):
        batch = begin(model, prompts[start : start + batch_size], **planned)
        yield decode_batch(_read_questions(batch, questions[start : start + batch_size], new))


def _read_questions(batch: PrefilledBatch, questions: Sequence[Sequence[int]], new: int) -> PrefilledBatch:
    """Extend each prefilled prompt by its question."""
    filling = len(batch.state.position) - len(questions)
    state, logits = extend(batch.state, [*map(list, questions), *[[0]] * filling])
    prompts = [[*prompt, *question] for prompt, question in zip(batch.prompts, questions, strict=True)]
    return dataclasses.replace(batch, state=state, logits=logits, prompts=prompts, max_new_tokens=new)
