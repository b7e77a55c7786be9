"""Request bodies: parsed, checked and turned into requests to the engine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from kvjax.generation.prompts import chat_ids, check_settings, render, token_ids
from kvjax.generation.sampling import sampling_of
from kvjax.model import Model
from kvjax.serving.openai.fields import CHAT, COMPLETION, MOST_CHOICES, APIError, check_fields, invalid, shown
from kvjax.serving.requests import Request, Serving
from kvjax.utils.files import parse_json
from kvjax.utils.settings import conversation

TEMPERATURE = 1.0
"""OpenAI's temperature, where neither a request nor the model has one."""
_OPTIONAL = {name: name for name in ("presence_penalty", "frequency_penalty", "stop", "ignore_eos", "logprobs")}
_OPTIONAL |= {"stop_token_ids": "stop_ids", "kv_budget": "budget"}
"""Fields of bodies that a request takes as they are, and their names there."""
Value = TypeVar("Value")


class ParsedBody(NamedTuple):
    """Parsed contents of a body."""

    requests: tuple[Request, ...]
    """One request per choice: `n` for the first prompt, then `n` for the next."""
    n: int
    chat: bool
    stream: bool
    include_usage: bool
    """True to send the usage at the end of a stream."""

    @property
    def read(self) -> int:
        """Number of prompt tokens, counting each prompt once."""
        return sum(len(request.prompt) for request in self.requests[:: self.n])


def parse(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object."""
    try:
        value = parse_json(body, "the body")
    except ValueError as error:
        raise APIError(str(error)) from None
    if not isinstance(value, dict):
        raise APIError(f"the body is {shown(value)}, not an object of JSON.")
    return value


def completion(serving: Serving, body: Mapping[str, Any]) -> ParsedBody:
    """Parse a body of `/v1/completions`."""
    fields = check_fields(body, COMPLETION)
    check_model(serving, fields.get("model", serving.model.name))
    n = fields.get("n", 1)
    if fields.get("best_of", n) != n:
        raise APIError(f"best_of={fields['best_of']} is not supported; leave it out, and ask for n texts.", "best_of")
    prompts = _prompts(serving, fields.get("prompt"))
    if len(prompts) * n > MOST_CHOICES:
        raise APIError(f"{len(prompts)} prompts and n={n} are more than {MOST_CHOICES} texts; ask for fewer.", "n")
    requests = [request for ids in prompts for request in _requests(serving, fields, ids, 16, n)]
    return ParsedBody(tuple(requests), n, False, fields.get("stream", False), fields.get("stream_options", False))


def chat(serving: Serving, body: Mapping[str, Any], default_tokens: int) -> ParsedBody:
    """Parse a body of `/v1/chat/completions`; `default_tokens` limits an answer if the body sets no limit."""
    fields = check_fields(body, CHAT)
    model = serving.model
    check_model(serving, fields.get("model", model.name))
    if "max_completion_tokens" in fields:
        fields["max_tokens"] = fields["max_completion_tokens"]
    for name, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if fields.get(name) and fields.get(choice) != "none":
            raise APIError(f'{name} are not supported; leave them out, or give {choice}="none".', name)
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        raise APIError("top_logprobs needs logprobs=true.", "top_logprobs")
    fields["logprobs"] = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
    if "messages" not in fields:
        raise APIError("there are no messages; give a list of them.", "messages")
    messages = [_message(number, message) for number, message in enumerate(fields["messages"])]
    if not getattr(model.tokenizer, "chat_template", None):
        raise APIError(f"the model {model.name!r} has no chat template; ask /v1/completions.", "messages")
    settings = fields.get("chat_template_kwargs", {})
    _call("chat_template_kwargs", lambda: check_settings(model, settings))
    text = _call("messages", lambda: render(model, conversation(messages), settings=settings))
    ids = _encoded(serving, "messages", text, chat_ids)
    n = fields.get("n", 1)
    requests = _requests(serving, fields, ids, default_tokens, n, chat=True)
    return ParsedBody(tuple(requests), n, True, fields.get("stream", False), fields.get("stream_options", False))


def check_model(serving: Serving, name: str) -> None:
    """Refuse a request to another model."""
    if name != serving.model.name:
        text = f"there is no model {shown(name)} here; ask for {serving.model.name!r}."
        raise APIError(text, "model", 404, "model_not_found")


def _prompts(serving: Serving, value: Any) -> list[tuple[int, ...]]:
    """Return the ids of each prompt, given as a text, a list of texts, ids, or a list of lists of ids."""
    several = value if isinstance(value, list) and value and isinstance(value[0], (str, list)) else [value]
    if len(several) > MOST_CHOICES:
        raise APIError(f"{len(several)} prompts are too many; give {MOST_CHOICES} at most.", "prompt")
    vocabulary = serving.model.config.vocab_size
    prompts: list[tuple[int, ...]] = []
    for prompt in several:
        if isinstance(prompt, str):
            ids = _encoded(serving, "prompt", prompt, token_ids)
        elif isinstance(prompt, list) and all(type(token) is int and 0 <= token < vocabulary for token in prompt):
            ids = tuple(prompt)
        else:
            what = f"a text, token ids from 0 to {vocabulary - 1}, nor a list of one kind of these"
            raise invalid("prompt", prompt, what)
        if not ids:
            raise APIError("the prompt is empty; give some text.", "prompt")
        prompts.append(ids)
    return prompts


def _encoded(serving: Serving, param: str, text: str, encode: Callable[[Model, str], Sequence[int]]) -> tuple[int, ...]:
    """Return the ids of a text; one that cannot fit the context is refused without encoding, which takes seconds."""
    minimum = serving.model.least_tokens(text)
    if minimum >= serving.context:
        raise _too_long(serving, f"of at least {minimum} tokens ({len(text)} characters)", param)
    return tuple(_call(param, lambda: encode(serving.model, text)))


def _call(param: str, function: Callable[[], Value]) -> Value:
    """Call a function, and return its errors to the client as those of a field."""
    try:
        return function()
    except ValueError as error:
        raise APIError(" ".join(str(error).split()), param) from None


def _too_long(serving: Serving, what: str, param: str) -> APIError:
    text = f"a prompt {what} does not fit the context of {serving.context}; ask for less."
    return APIError(text, param, code="context_length_exceeded")


def _message(number: int, message: Any) -> dict[str, Any]:
    """Check a turn, and return its role and its content, a text or a list of parts with texts."""
    name = f"messages[{number}]"
    if not isinstance(message, dict):
        raise APIError(f"{name} is {shown(message)}, not an object with role and content.", "messages")
    # Clients send back all fields of an answer, many of them empty; templates get only role and content.
    for key, value in message.items():
        if key in ("name", "reasoning_content", "reasoning") and isinstance(value, str):
            continue
        if key not in ("role", "content") and value not in (None, [], "", {}):
            raise APIError(f"{name}.{key[:40]} is not supported; give role and content alone.", "messages")
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise APIError(f"{name}.role={shown(role)} is not system, developer, user or assistant.", "messages")
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise APIError(f"{name}.content has {shown(part)}, which is no text.", "messages")
        content = [{"type": "text", "text": part["text"]} for part in content]
    elif not isinstance(content, str):
        raise APIError(f"{name}.content={shown(content)} is not a text, nor a list of texts.", "messages")
    return {"role": "system" if role == "developer" else role, "content": content}


def _requests(
    serving: Serving, fields: Mapping[str, Any], ids: tuple[int, ...], default_tokens: int, n: int, chat: bool = False
) -> list[Request]:
    """Return the requests for `n` texts from one prompt, each with its own seed."""
    room = serving.context - len(ids)
    if room < fields.get("max_tokens", 1):
        limit = f" and max_tokens={fields['max_tokens']}" if "max_tokens" in fields else ""
        raise _too_long(serving, f"of {len(ids)} tokens{limit}", "messages" if chat else "prompt")
    if fields.get("kv_budget", 1) > serving.budget:
        raise APIError(f"kv_budget={fields['kv_budget']} is more than the server's {serving.budget}.", "kv_budget")
    if any(not 0 <= token < serving.model.config.vocab_size for token in fields.get("stop_token_ids", ())):
        raise APIError("stop_token_ids has ids that the model does not have.", "stop_token_ids")
    tokens = fields.get("max_tokens", min(default_tokens, room))
    sampling = sampling_of(serving.model.sampling_defaults, fields, TEMPERATURE)
    optional = {attribute: fields[name] for name, attribute in _OPTIONAL.items() if name in fields}
    first = Request(ids, tokens, sampling, chat=chat, **optional)
    seed = fields.get("seed", secrets.randbits(32))
    return [dataclasses.replace(first, seed=(seed + i) % 2**32) for i in range(n)]
