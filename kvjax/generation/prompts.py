"""Texts and conversations as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.generation.detokenize import Spelling
from kvjax.models.tokenizer import adds_bos
from kvjax.utils.settings import Messages

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


def encode(model: LanguageModel, prompt: str | Messages, chat: bool = False, system: str | None = None) -> list[int]:
    """Return the ids of a prompt, with those that the tokenizer puts before all texts; see `generate_texts`."""
    if not isinstance(prompt, str):
        return chat_ids(model, render(model, with_system(prompt, system)))
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text.")
    if chat:
        return encode(model, [{"role": "user", "content": prompt}], system=system)
    if system is not None:
        raise ValueError(f"system={system!r} is a turn of a conversation; give chat=True, too.")
    return token_ids(model, prompt)


def token_ids(model: LanguageModel, text: str, begins: bool = True) -> list[int]:
    """Return the checked ids of a text, including those that the tokenizer puts before all texts if `begins`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = error.start
        raise ValueError(
            f"the prompt is not valid text: character {lone} is {text[lone]!a}, half of a surrogate pair."
        ) from None
    ids = list(model.tokenizer.encode(text, add_special_tokens=begins))
    if max(ids, default=0) >= model.config.vocab_size:
        raise ValueError(
            f"the tokenizer of {model.name!r} gives token {max(ids)}, but the model has {model.config.vocab_size}: "
            "they do not belong together."
        )
    return ids


def chat_ids(model: LanguageModel, text: str) -> list[int]:
    """Return the ids of a text that a chat template wrote, with a bos if there should be one.

    If the template writes no bos, one is added if `add_bos_token` is true in tokenizer_config.json. If the file does
    not set it, one is added if the tokenizer puts one before all texts.
    """
    ids, begins = token_ids(model, text, begins=False), _beginning(model)
    return ids if ids[: len(begins)] == begins else begins + ids


def _beginning(model: LanguageModel) -> list[int]:
    """Return the ids before a conversation."""
    directory: Path | None = getattr(model, "directory", None)
    said = None if directory is None else adds_bos(directory)
    if said is not None:
        bos = model.tokenizer.bos_token_id
        return [bos] if said and bos is not None else []
    alone, usual = token_ids(model, "a", begins=False), token_ids(model, "a")
    return usual[: next((i for i in range(len(usual)) if usual[i : i + len(alone)] == alone), 0)]


def end_ids(model: LanguageModel, chat: bool = False) -> tuple[int, ...]:
    """Return the ids that end a text.

    Args:
        model: its config has the ids of generation_config.json, or else of config.json or the GGUF file. They end any
            text.
        chat: True for answers of a chat. The tokenizer's `eos_token` and the special token that the chat template
            writes after an answer end these, too.
    """
    ends = list(model.config.eos)
    if chat:
        own = getattr(model.tokenizer, "eos_token_id", None), _template_end(model)
        ends += [token for token in own if isinstance(token, int) and token < model.config.vocab_size]
    return tuple(dict.fromkeys(ends))


def _template_end(model: LanguageModel) -> int | None:
    """Return the special token that the chat template writes after an answer; None if it writes none."""
    if not getattr(model.tokenizer, "chat_template", None):
        return None
    turn, reply = "Qzjx", "Xjqz"
    turns = [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
    try:
        after = render(model, turns, answers=False).rpartition(reply)[2].lstrip()
    except ValueError:  # the template requires other turns
        return None
    ids = token_ids(model, after, begins=False)[:1]
    return ids[0] if ids and ids[0] in Spelling(model.tokenizer).special else None


def with_system(messages: Messages, system: str | None) -> Messages:
    """Return the conversation with a system turn before all others; refuse a conversation that has one already."""
    if system is None:
        return messages
    if messages and messages[0]["role"] == "system":
        raise ValueError("the messages begin with a system's turn; leave out the other one.")
    return [{"role": "system", "content": system}, *messages]


def render(model: LanguageModel, messages: Messages, answers: bool = True, unfinished: bool = False) -> str:
    """Render a conversation with the model's chat template, up to the beginning of the next answer.

    Args:
        answers: True to add the template's text before an answer.
        unfinished: True if the next tokens continue the last turn; the text ends with that turn.
    """
    if not getattr(model.tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer of {model.name!r} has no chat template; leave out --chat.")
    try:
        return model.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answers, continue_final_message=unfinished
        )
    except Exception as error:  # a template can raise any error
        raise ValueError(f"the chat template of {model.name!r} refuses the prompt: {error}.") from error
