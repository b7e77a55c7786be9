"""Texts and conversations as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvjax.generation.detokenize import Spelling
from kvjax.generation.templates import LimitError, TemplateError, renderer
from kvjax.generation.turns import probe, shapes
from kvjax.models.tokenizer import adds_bos
from kvjax.utils.settings import TEMPLATE_VARIABLES, Chat, Messages, template_settings, text_of

if TYPE_CHECKING:
    from kvjax.models.model import LanguageModel


def has_turns(prompt: Any) -> bool:
    """Return whether a prompt is a conversation, not a text or token ids."""
    return len(prompt) > 0 and isinstance(prompt[0], dict)


def encode(
    model: LanguageModel, prompt: str | Messages | list[int], chat: Chat = False, system: str | None = None
) -> list[int]:
    """Return the ids of a prompt, with those that the tokenizer puts before all texts; see `generate_texts`.

    Token ids are returned as they are.
    """
    settings = template_settings(chat)
    if not isinstance(prompt, str) and not has_turns(prompt):
        if system is not None:
            raise ValueError(f"system={system!r} cannot be added to token ids; give a text or messages.")
        return cast("list[int]", prompt)
    if not isinstance(prompt, str):
        return chat_ids(model, render(model, with_system(cast("Messages", prompt), system), settings=settings))
    if not prompt.strip():
        raise ValueError("the prompt is empty; give some text.")
    if settings is not None:
        return encode(model, [{"role": "user", "content": prompt}], settings, system)
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
    flag = None if directory is None else adds_bos(directory)
    if flag is not None:
        bos = model.tokenizer.bos_token_id
        return [bos] if flag and bos is not None else []
    bare_ids, full_ids = token_ids(model, "a", begins=False), token_ids(model, "a")
    return full_ids[: next((i for i in range(len(full_ids)) if full_ids[i : i + len(bare_ids)] == bare_ids), 0)]


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
        candidates = getattr(model.tokenizer, "eos_token_id", None), _template_end(model)
        ends += [token for token in candidates if isinstance(token, int) and token < model.config.vocab_size]
    return tuple(dict.fromkeys(ends))


def _template_end(model: LanguageModel) -> int | None:
    """Return the special token that the chat template writes after an answer; None if it writes none."""
    if not getattr(model.tokenizer, "chat_template", None):
        return None
    turn, reply = "Qzjx", "Xjqz"
    turns = [{"role": "user", "content": turn}, {"role": "assistant", "content": reply}]
    try:
        _, separator, after = render(model, turns, add_generation_prompt=False).rpartition(reply)
    except ValueError:  # the template requires other turns
        return None
    after = after.lstrip() if separator else ""
    ids = token_ids(model, after, begins=False)[:1]
    return ids[0] if ids and ids[0] in Spelling(model.tokenizer).special else None


def with_system(messages: Messages, system: str | None) -> Messages:
    """Return the conversation with a system turn before all others; refuse a conversation that has one already."""
    if system is None:
        return messages
    if messages and messages[0]["role"] == "system":
        raise ValueError("the messages begin with a system's turn; leave out the other one.")
    return [{"role": "system", "content": system}, *messages]


def render(
    model: LanguageModel,
    messages: Messages,
    add_generation_prompt: bool = True,
    unfinished: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with the model's chat template, up to the beginning of the next answer.

    Args:
        add_generation_prompt: True to add the template's text before an answer.
        unfinished: True if the next tokens continue the last turn; the text ends with that turn.
        settings: variables that the template reads, such as `enable_thinking`.

    Raises:
        ValueError: there is no template; it refuses the conversation, leaves out a turn's text, exceeds a limit of
            `kvjax.generation.templates` or has no such setting.
    """
    template, settings = _chat_template(model), settings or {}
    check_settings(model, settings)
    special = getattr(model.tokenizer, "special_tokens_map", {})
    variables: dict[str, Any] = {"tools": None, "documents": None, **special, **settings}
    variables["add_generation_prompt"] = add_generation_prompt
    try:
        return _render_checked(template, messages, variables, unfinished)
    except TemplateError as error:
        raise _refusal(model, error) from None


def _chat_template(model: LanguageModel) -> str:
    template: str | dict[str, str] | None = getattr(model.tokenizer, "chat_template", None)
    if not template:
        raise ValueError(f"the tokenizer of {model.name!r} has no chat template; leave out --chat.")
    if isinstance(template, str):
        return template
    if "default" not in template:  # of several templates by name
        raise ValueError(f"the chat templates of {model.name!r} are {', '.join(template)}; one must be `default`.")
    return template["default"]


def _refusal(model: LanguageModel, reason: Exception | str) -> ValueError:
    """Return an error about the chat template, with the name of its file."""
    directory: Path | None = getattr(model, "directory", None)
    names = () if directory is None else ("chat_template.jinja", "tokenizer_config.json")
    file = next((f" ({name})" for name in names if directory is not None and (directory / name).exists()), "")
    return ValueError(f"the chat template of {model.name!r}{file} {reason}.")


def check_settings(model: LanguageModel, settings: Mapping[str, Any]) -> None:
    """Refuse a setting that the model's chat template does not read, since it would change nothing."""
    if not settings:
        return
    try:
        names = renderer().names(_chat_template(model))
    except TemplateError as error:
        raise _refusal(model, error) from None
    for name in settings:
        if name not in names:
            available = [key for key in names if key not in ("bos_token", "eos_token", *TEMPLATE_VARIABLES)]
            hint = f"it has {', '.join(available)}" if available else "it has none"
            raise _refusal(model, f"has no setting {name!r}; {hint}")


def _render_checked(template: str, messages: Messages, variables: Mapping[str, Any], unfinished: bool) -> str:
    """Render a conversation in the first shape whose texts the template writes."""

    def write(turns: Messages) -> str:
        return renderer().render(template, {**variables, "messages": turns})

    lost: int | None = None
    for turns in shapes(messages):
        sample = probe(turns)
        try:
            text = write(sample.messages)
        except LimitError:
            raise
        except TemplateError:
            continue
        if sample.misread(text):
            continue
        turn = sample.lost_turn(text)
        if turn is None:
            return _cut_at_mark(write(_mark_end(turns))) if unfinished else write(turns)
        lost = max(turn, lost or 0)
    if lost is None:  # it refuses these turns, or the words of a probe
        text = _cut_at_mark(write(_mark_end(messages))) if unfinished else write(messages)
        texts = (text_of(message["content"]).strip() for message in messages)
        lost = next((turn for turn, content in enumerate(texts) if content not in text), None)
        if lost is None:
            return text
    raise TemplateError(f"leaves out the text of turn {lost + 1} ({messages[lost]['role']}); ask without that turn")


_MARK = "Qzendjx "
"""End of an unfinished turn, with a space that shows whether the template trims texts."""


def _mark_end(turns: Messages) -> Messages:
    """Add the mark to the last turn."""
    *before, last = turns
    content: Any = last["content"]
    if isinstance(content, str):
        content += _MARK
    elif content:
        content = [*content[:-1], content[-1] | {"text": content[-1]["text"] + _MARK}]
    return [*before, last | {"content": content}]


def _cut_at_mark(text: str) -> str:
    """Return a text up to the mark at the end of the last turn."""
    text, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise TemplateError("leaves out the end of the last turn, which cannot be continued")
    return text if after.startswith(" ") else text.rstrip()
