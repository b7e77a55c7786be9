"""Settings and prompts: parsing and checking of users' input from command lines, config files and calls."""

from __future__ import annotations

import ast
import importlib.resources
import inspect
import json
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.utils.files import read_text
from kvjax.utils.suggest import choices

PART_KEYS = ("plan", "residual", "codec", "selection")
"""Parts of a policy that a user can replace by name."""
CONFIG_KEYS = ("policy", *PART_KEYS, "budget", "budget_of", "prefill_chunk", "settings")


def parse_pairs(option: str, words: Iterable[str]) -> dict[str, Any]:
    """Parse the `key=value` words of an option into a dictionary; values are read by `parse_value`."""
    pairs: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name.strip() and equals):
            raise ValueError(f"{option} {word!r} is not of the form key=value.")
        pairs[name.strip()] = parse_value(text.strip())
    return pairs


def parse_settings(words: Iterable[str]) -> dict[str, Any]:
    """Parse the words of `--set`.

    Settings of a part are written as `residual.kernels=performer`; a part itself is refused.
    """
    return _without_parts({name.replace("-", "_"): value for name, value in parse_pairs("--set", words).items()})


def _without_parts(settings: dict[str, Any]) -> dict[str, Any]:
    for name in settings:
        if name in ("name", *PART_KEYS):
            raise ValueError(f"{name}={settings[name]!r} is no setting of a policy; name policies and parts apart.")
    return settings


def parse_value(text: str) -> Any:
    """Parse true, false, none or a Python literal (a list becomes a tuple); return any other text unchanged."""
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the latter two for deeply nested brackets
        return text
    return tuple(value) if isinstance(value, list) else value


def parse_budget(text: str) -> int | float:
    """Parse a budget: a whole number of slots, or a fraction."""
    value = parse_value(text)
    slots = type(value) is int and value >= 1
    if not (slots or (type(value) is float and 0 < value <= 1)):
        raise ValueError(f"budget={value!r} is not a number of slots from 1, nor a fraction such as 0.25.")
    return value


def parse_budgets(text: str) -> int | float | tuple[int, ...]:
    """Parse a budget, or comma-separated numbers of slots for each layer."""
    if "," not in text:
        return parse_budget(text)
    value = parse_value(text)
    if not _is_budget(value):
        raise ValueError(f"budget={text!r} is not a whole number of slots for each layer, such as 64,48,32,16.")
    return value


def _is_budget(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(slots, int) and not isinstance(slots, bool) for slots in value)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def config_directories() -> list[Path]:
    """Return the directories of shipped configs: in the package if installed, beside it in a checkout."""
    package = Path(str(importlib.resources.files("kvjax")))
    return [package / "configs", package.parent / "configs"]


def read_config(path_or_name: str) -> dict[str, Any]:
    """Read a TOML file, or a shipped config by name; its table `settings` holds the settings of `--set`.

    TOML reads `residual.kernels = "performer"` as a nested table; this function returns it under its dotted name.
    """
    shipped = [directory / f"{path_or_name}.toml" for directory in config_directories()]
    file = next((path for path in (Path(path_or_name), *shipped) if path.is_file()), None)
    if file is None:
        names = sorted(path.stem for directory in config_directories() for path in directory.glob("*.toml"))
        raise ValueError(
            f"there is no config {path_or_name!r}; {choices(path_or_name, names, lead='give a file, or one of')}"
        )
    text = read_text(file)
    try:
        config = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not TOML: {error}.") from None
    for key in config:
        if key not in CONFIG_KEYS:
            raise ValueError(f"{file} has an unknown key {key!r}; {choices(key, CONFIG_KEYS, lead='a config takes')}")
    if isinstance(config.get("budget"), list):
        config["budget"] = tuple(config["budget"])
    for key, value in config.items():
        fits, what = _CONFIG_TYPES.get(key, _TEXT)
        if not fits(value):
            raise ValueError(f"{file}: {key}={value!r} is not {what}.")
    return config | {"settings": _without_parts(_flat(config.get("settings", {})))}


_TEXT: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, str), "text in quotes")
_CONFIG_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "budget": (_is_budget, "a whole number of slots, a fraction such as 0.25, nor a list of slots by layer"),
    "prefill_chunk": (lambda value: type(value) is int, "a whole number of tokens"),
    "settings": (lambda value: isinstance(value, dict), "a table of settings"),
}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    # Nested tables become dotted names, lists become tuples.
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": part for inner, part in _flat(value).items()}
        else:
            flat[name] = tuple(value) if isinstance(value, list) else value
    return flat


def whole_number(name: str, value: Any, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
    """Return a whole number of Python or NumPy as an int; check its type (TypeError) and range (ValueError)."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}={value!r} is not a whole number.")
    if not minimum <= value <= maximum:
        raise ValueError(f"{name}={value} is not a whole number from {minimum} to {maximum}.")
    return int(value)


def check_options(options: Any, *names: str, minimum: int = 1) -> None:
    """Refuse options of a command line that are below a number; those that are None pass."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < minimum:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not a whole number from {minimum}.")


def seed_number(value: Any) -> int:
    """Return a seed after checking that it has at most 32 bits."""
    return whole_number("seed", value, 0, 2**32 - 1)


Messages = list[dict[str, Any]]
"""Conversation: turns with a `role` (system, user, assistant) and a `content`, a text or a list of parts with texts."""
Chat = bool | Mapping[str, Any]
"""True for a chat, or settings of its template, which may be empty."""
TEMPLATE_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "tools")
"""Variables of a chat template that are not settings of it."""


def conversation(messages: Any, waits: bool = True) -> Messages:
    """Return a copy of a conversation after checking it; if it `waits`, the last message must not be an answer."""
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages={messages!r} are no list of messages with role and content.")
    for number, message in enumerate(messages, 1):
        keys = set(message) if isinstance(message, dict) else None
        kinds = {"role": str, "content": (str, list, tuple)}
        if keys != set(kinds) or not all(isinstance(message[key], kind) for key, kind in kinds.items()):
            raise ValueError(
                f'message {number} is {message!r}; give {{"role": "user", "content": "..."}}, both texts, or a list of '
                'parts {"type": "text", "text": "..."} as content.'
            )
        for part in () if isinstance(message["content"], str) else message["content"]:
            what = f'message {number} has the part {part!r}; give {{"type": "text", "text": "..."}}'
            if not isinstance(part, dict):
                raise ValueError(f"{what}.")
            if part.get("type") != "text":
                raise ValueError(
                    f"message {number} has a part of type {part.get('type')!r}; the model reads only text."
                )
            if set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise ValueError(f"{what} alone.")
    if not messages:
        raise ValueError("there is no message; give at least a user's turn.")
    if waits and messages[-1]["role"] == "assistant":
        raise ValueError("the last message is an answer already; end with a user's turn.")
    contents = (message["content"] for message in messages)
    copies = (content if isinstance(content, str) else [dict(part) for part in content] for content in contents)
    return [message | {"content": content} for message, content in zip(messages, copies, strict=True)]


def text_of(content: str | list[dict[str, str]]) -> str:
    """Return the text of a turn, with that of all its parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def template_settings(chat: Any) -> dict[str, Any] | None:
    """Return the settings of the chat template from an argument `chat`, or None if it is False."""
    if isinstance(chat, (bool, np.bool_)):
        return {} if chat else None
    if not isinstance(chat, Mapping):
        example = {"enable_thinking": False}
        raise TypeError(f"chat={chat!r} is neither True, False nor settings of the chat template, such as {example}.")
    for name, value in chat.items():
        if not isinstance(name, str) or name in TEMPLATE_VARIABLES:
            raise ValueError(f"{name!r} is no setting of a chat template; leave it out.")
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise ValueError(f"the template setting {name}={value!r} is no value of JSON.") from None
    return dict(chat)


def prompt_texts(prompts: Any, chat: Any = False) -> list[str | Messages | list[int]]:
    """Return a list of texts, of token ids, and of conversations if it is a `chat`; one prompt becomes a list of one.

    Token ids are a list or an array [n], or [b, n] for several prompts.
    """
    chat = template_settings(chat) is not None
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "__array__"):
        prompts = np.asarray(prompts).tolist()
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts={prompts!r} is not a text, nor a list of texts or of token ids.")
    if not prompts:
        raise ValueError("there is no prompt; give at least one text.")
    single = _is_id(prompts[0]) or (chat and isinstance(prompts[0], dict))
    return [_prompt(prompt, chat) for prompt in ([prompts] if single else prompts)]


def _prompt(prompt: Any, chat: bool) -> str | Messages | list[int]:
    if chat and isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
        return conversation(prompt)
    if isinstance(prompt, dict):
        raise TypeError(
            "prompts are texts, not messages; give the text of a user's turn, and chat=True, or with it messages."
        )
    if hasattr(prompt, "__array__"):
        prompt = np.asarray(prompt).tolist()
    if not isinstance(prompt, (str, list, tuple)):
        raise TypeError(f"prompts are texts or token ids, not {prompt!r}.")
    if isinstance(prompt, str):
        return prompt
    if not all(map(_is_id, prompt)):
        raise TypeError(f"a prompt is a text or a list of token ids, not {reprlib.repr(prompt)}.")
    return [int(token) for token in prompt]


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def keywords(*functions: Callable[..., Any]) -> list[str]:
    """Return the names of the keyword-only arguments of functions."""
    parameters = (p for function in functions for p in inspect.signature(function).parameters.values())
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def check_keywords(function: str, keywords: Iterable[str], accepted: Iterable[str]) -> None:
    """Raise a TypeError that names the first unknown keyword of a function, and suggests a similar one."""
    names = list(accepted)
    for name in keywords:
        if name not in names:
            raise TypeError(f"{function} has no keyword {name!r}; {choices(name, names, lead='it takes')}")
