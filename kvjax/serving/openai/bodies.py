"""Request bodies: parsed, checked and turned into requests to the engine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from kvjax.generation.prompts import chat_ids, check_settings, render, token_ids
from kvjax.generation.sampling import sampling_of
from kvjax.model import Model
from kvjax.serving.openai.fields import CHAT, COMPLETION, MOST_CHOICES, Refused, checked, invalid, shown
from kvjax.serving.requests import Request, Serving
from kvjax.utils.files import parse_json
from kvjax.utils.settings import conversation

TEMPERATURE = 1.0
"""OpenAI's temperature, where neither a request nor the model has one."""
Value = TypeVar("Value")


class Asked(NamedTuple):
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
        raise Refused(str(error)) from None
    if not isinstance(value, dict):
        raise Refused(f"the body is {shown(value)}, not an object of JSON.")
    return value


def completion(serving: Serving, body: Mapping[str, Any]) -> Asked:
    """Parse a body of `/v1/completions`."""
    given = checked(body, COMPLETION)
    check_model(serving, given.get("model", serving.model.name))
    n = given.get("n", 1)
    if given.get("best_of", n) != n:
        raise Refused(f"best_of={given['best_of']} is not supported; leave it out, and ask for n texts.", "best_of")
    prompts = _prompts(serving, given.get("prompt"))
    if len(prompts) * n > MOST_CHOICES:
        raise Refused(f"{len(prompts)} prompts and n={n} are more than {MOST_CHOICES} texts; ask for fewer.", "n")
    requests = [each for ids in prompts for each in _requests(serving, given, ids, 16, n)]
    return Asked(tuple(requests), n, False, given.get("stream", False), given.get("stream_options", False))


def chat(serving: Serving, body: Mapping[str, Any], usual_tokens: int) -> Asked:
    """Parse a body of `/v1/chat/completions`; `usual_tokens` limits an answer if the body sets no limit."""
    given = checked(body, CHAT)
    model = serving.model
    check_model(serving, given.get("model", model.name))
    if "max_completion_tokens" in given:
        given["max_tokens"] = given["max_completion_tokens"]
    for name, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if given.get(name) and given.get(choice) != "none":
            raise Refused(f'{name} are not supported; leave them out, or give {choice}="none".', name)
    if given.get("top_logprobs") and not given.get("logprobs"):
        raise Refused("top_logprobs needs logprobs=true.", "top_logprobs")
    given["logprobs"] = given.get("top_logprobs", 0) if given.get("logprobs") else None
    if "messages" not in given:
        raise Refused("there are no messages; give a list of them.", "messages")
    messages = [_message(number, each) for number, each in enumerate(given["messages"])]
    if not getattr(model.tokenizer, "chat_template", None):
        raise Refused(f"the model {model.name!r} has no chat template; ask /v1/completions.", "messages")
    settings = given.get("chat_template_kwargs", {})
    _call("chat_template_kwargs", lambda: check_settings(model, settings))
    text = _call("messages", lambda: render(model, conversation(messages), settings=settings))
    ids = _encoded(serving, "messages", text, chat_ids)
    n = given.get("n", 1)
    requests = _requests(serving, given, ids, usual_tokens, n, chat=True)
    return Asked(tuple(requests), n, True, given.get("stream", False), given.get("stream_options", False))


def check_model(serving: Serving, name: str) -> None:
    """Refuse a request to another model."""
    if name != serving.model.name:
        text = f"there is no model {shown(name)} here; ask for {serving.model.name!r}."
        raise Refused(text, "model", 404, "model_not_found")


def _prompts(serving: Serving, given: Any) -> list[tuple[int, ...]]:
    """Return the ids of each prompt, given as a text, a list of texts, ids, or a list of lists of ids."""
    several = given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    if len(several) > MOST_CHOICES:
        raise Refused(f"{len(several)} prompts are too many; give {MOST_CHOICES} at most.", "prompt")
    vocabulary = serving.model.config.vocab_size
    found: list[tuple[int, ...]] = []
    for each in several:
        if isinstance(each, str):
            ids = _encoded(serving, "prompt", each, token_ids)
        elif isinstance(each, list) and all(type(token) is int and 0 <= token < vocabulary for token in each):
            ids = tuple(each)
        else:
            what = f"a text, token ids from 0 to {vocabulary - 1}, nor a list of one kind of these"
            raise invalid("prompt", each, what)
        if not ids:
            raise Refused("the prompt is empty; give some text.", "prompt")
        found.append(ids)
    return found


def _encoded(serving: Serving, param: str, text: str, encode: Callable[[Model, str], Sequence[int]]) -> tuple[int, ...]:
    """Return the ids of a text; one that cannot fit the context is refused without encoding, which takes seconds."""
    least = serving.model.least_tokens(text)
    if least >= serving.context:
        raise _too_long(serving, f"of at least {least} tokens ({len(text)} characters)", param)
    return tuple(_call(param, lambda: encode(serving.model, text)))


def _call(param: str, function: Callable[[], Value]) -> Value:
    """Call a function, and return its errors to the client as those of a field."""
    try:
        return function()
    except ValueError as error:
        raise Refused(" ".join(str(error).split()), param) from None


def _too_long(serving: Serving, what: str, param: str) -> Refused:
    text = f"a prompt {what} does not fit the context of {serving.context}; ask for less."
    return Refused(text, param, code="context_length_exceeded")


def _message(number: int, given: Any) -> dict[str, Any]:
    """Check a turn, and return its role and its content, a text or a list of parts with texts."""
    name = f"messages[{number}]"
    if not isinstance(given, dict):
        raise Refused(f"{name} is {shown(given)}, not an object with role and content.", "messages")
    # Clients send back all fields of an answer, many of them empty; templates get only role and content.
    for key, value in given.items():
        if key in ("name", "reasoning_content", "reasoning") and isinstance(value, str):
            continue
        if key not in ("role", "content") and value not in (None, [], "", {}):
            raise Refused(f"{name}.{key[:40]} is not supported; give role and content alone.", "messages")
    role, content = given.get("role"), given.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise Refused(f"{name}.role={shown(role)} is not system, developer, user or assistant.", "messages")
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise Refused(f"{name}.content has {shown(part)}, which is no text.", "messages")
        content = [{"type": "text", "text": part["text"]} for part in content]
    elif not isinstance(content, str):
        raise Refused(f"{name}.content={shown(content)} is not a text, nor a list of texts.", "messages")
    return {"role": "system" if role == "developer" else role, "content": content}


def _requests(
    serving: Serving, given: Mapping[str, Any], ids: tuple[int, ...], usual_tokens: int, n: int, chat: bool = False
) -> list[Request]:
    """Return the requests for `n` texts from one prompt, each with its own seed."""
    left = serving.context - len(ids)
    if left < given.get("max_tokens", 1):
        wanted = f" and max_tokens={given['max_tokens']}" if "max_tokens" in given else ""
        raise _too_long(serving, f"of {len(ids)} tokens{wanted}", "messages" if chat else "prompt")
    if given.get("kv_budget", 1) > serving.budget:
        raise Refused(f"kv_budget={given['kv_budget']} is more than the server's {serving.budget}.", "kv_budget")
    if any(not 0 <= each < serving.model.config.vocab_size for each in given.get("stop_token_ids", ())):
        raise Refused("stop_token_ids has ids that the model does not have.", "stop_token_ids")
    first = Request(
        prompt=ids,
        max_tokens=given.get("max_tokens", min(usual_tokens, left)),
        sampling=sampling_of(serving.model.sampling_defaults, given, TEMPERATURE),
        presence_penalty=given.get("presence_penalty", 0.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        stop=given.get("stop", ()),
        stop_ids=given.get("stop_token_ids", ()),
        ignore_eos=given.get("ignore_eos", False),
        chat=chat,
        budget=given.get("kv_budget"),
        logprobs=given.get("logprobs"),
    )
    seed = given.get("seed", secrets.randbits(32))
    return [dataclasses.replace(first, seed=(seed + i) % 2**32) for i in range(n)]
