"""OpenAI's API: request bodies become engine requests, and engine events become answers."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import reprlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.generation.generate import Logprob
from kvjax.generation.prompts import chat_ids, render, token_ids
from kvjax.generation.sampling import Sampling
from kvjax.generation.token_bytes import Characters, Spelling, characters
from kvjax.serving.requests import Finished, Held, Piece, Request, Serving
from kvjax.utils.settings import conversation

MOST_CHOICES = 128
"""Maximal texts per body: prompts times `n`."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Maximal number of stop strings and characters of each, since all are searched after every token."""


class Refused(Exception):
    """Error that a client gets instead of an answer.

    Args:
        message: one sentence.
        param: name of the invalid field, if there is one.
        status: HTTP status.
        code: OpenAI's error code, if there is one.
        headers: headers of the response.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code, self.headers = message, param, status, code, headers

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


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


Check = Callable[[str, Any], Any]
"""Function of a field's name and value; it returns the parsed value, or raises `Refused` if it is invalid."""


def _shown(value: Any) -> str:
    """Format a value for a message, in at most 100 characters."""
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _refused(name: str, value: Any, what: str) -> Refused:
    return Refused(f"{name}={_shown(value)} is not {what}.", name)


def _of(kind: type, what: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise _refused(name, value, what)
        return value

    return check


_flag, _text, _object = _of(bool, "true or false"), _of(str, "a text"), _of(dict, "an object")


def _whole(least: int, most: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _refused(name, value, f"a whole number from {least} to {most}")
        return value

    return check


def _real(least: float, most: float, above: bool = False) -> Check:
    """Return a check for numbers in a range; `above` excludes the lower end."""

    def check(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most or (above and value == least):
            raise _refused(name, value, f"a number {'above' if above else 'from'} {least} {'up ' * above}to {most}")
        return float(value)

    return check


def _only(*values: Any) -> Check:
    """Return a check for an unsupported field, which accepts only the given values without an effect."""

    def check(name: str, value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in values):
            allowed = "".join(f", or give {json.dumps(each)}" for each in values)
            raise Refused(f"{name}={_shown(value)} is not supported; leave it out{allowed}.", name)
        return value

    return check


def _no_bias(name: str, value: Any) -> None:
    """Check that all token biases are zero."""
    if not isinstance(value, dict) or any(type(bias) not in (int, float) or bias != 0 for bias in value.values()):
        raise Refused(f"{name}={_shown(value)} is not supported; leave it out, or give {{}}.", name)


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise _refused(name, value, "a text, nor a list of texts, none of them empty")
    if len(stops) > MOST_STOPS or any(len(each) > LONGEST_STOP for each in stops):
        raise Refused(f"{name} takes {MOST_STOPS} texts of {LONGEST_STOP} characters at most.", name)
    return tuple(stops)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_CHOICES or not all(type(each) is int for each in value):
        raise _refused(name, value, f"a list of at most {MOST_CHOICES} token ids")
    return tuple(value)


def _stream_options(name: str, value: Any) -> bool:
    """Return whether the end of a stream includes the usage."""
    known = {"include_usage": _flag, "include_obfuscation": _flag, "continuous_usage_stats": _only(False)}
    return _checked(_object(name, value), known, f"{name}.").get("include_usage", False)


COMMON: Mapping[str, Check] = {
    "model": _text,
    "max_tokens": _whole(1, 2**31 - 1),
    "temperature": _real(0, 2),
    "top_p": _real(0, 1, above=True),
    "n": _whole(1, MOST_CHOICES),
    "stop": _stops,
    "seed": _whole(-(2**63), 2**64 - 1),
    "stream": _flag,
    "stream_options": _stream_options,
    "presence_penalty": _real(-2, 2),
    "frequency_penalty": _real(-2, 2),
    "logit_bias": _no_bias,
    "user": _text,
    "safety_identifier": _text,
    "prompt_cache_key": _text,
    "prompt_cache_retention": _text,
    "prompt_cache_options": _object,
    "metadata": _object,
    "store": _flag,
    "service_tier": _only("auto", "default", "flex", "scale", "priority", "fast"),
    "top_k": _whole(-1, 2**31 - 1),
    "min_p": _real(0, 1),
    "repetition_penalty": _real(0, 1000, above=True),
    "ignore_eos": _flag,
    "stop_token_ids": _ids,
    "kv_budget": _whole(1, 2**31 - 1),
    "moderation": _only(),
    "echo": _only(False),
    "use_beam_search": _only(False),
    "length_penalty": _only(1, 1.0),
    "min_tokens": _only(0),
    "bad_words": _only([]),
    "allowed_token_ids": _only(),
    "prompt_logprobs": _only(),
    "truncate_prompt_tokens": _only(),
    "include_stop_str_in_output": _only(False),
    "skip_special_tokens": _only(True),
    "spaces_between_special_tokens": _only(True),
    "priority": _only(0),
}
"""Checks of the fields of both kinds of bodies: OpenAI's, vLLM's and kvjax's own."""

COMPLETION: Mapping[str, Check] = COMMON | {
    "prompt": lambda name, value: value,
    "logprobs": _whole(0, 20),
    "add_special_tokens": _only(True),
    "suffix": _only(""),
    "best_of": _whole(1, MOST_CHOICES),
}
CHAT: Mapping[str, Check] = COMMON | {
    "messages": _of(list, "a list of messages"),
    "max_completion_tokens": COMMON["max_tokens"],
    "logprobs": _flag,
    "top_logprobs": _whole(0, 20),
    "tools": _of(list, "a list of tools"),
    "functions": _of(list, "a list of functions"),
    "tool_choice": _only("none", "auto"),
    "function_call": _only("none", "auto"),
    "parallel_tool_calls": _flag,
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
    "reasoning_effort": _only("none", "medium"),
    "verbosity": _only("medium"),
    "audio": _only(),
    "prediction": _only(),
    "web_search_options": _only(),
    "add_generation_prompt": _only(True),
    "continue_final_message": _only(False),
    "add_special_tokens": _only(False),
    "chat_template": _only(),
    "chat_template_kwargs": _only({}),
    "documents": _only([]),
}


def parse(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object.

    Raises:
        Refused: the body is not a JSON object.
    """

    def constant(word: str) -> None:
        raise ValueError(f"{word} is no number of JSON")

    try:
        value = json.loads(body, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise Refused(f"the body is not JSON: {reason.rstrip('.')}.") from None
    if not isinstance(value, dict):
        raise Refused(f"the body is {_shown(value)}, not an object of JSON.")
    return value


def _checked(given: Mapping[str, Any], known: Mapping[str, Check], prefix: str = "") -> dict[str, Any]:
    """Check the fields, and return those that are not null.

    Raises:
        Refused: a field is unknown or has an invalid value.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known and value is None:
            continue  # null has no effect in any field
        if name not in known:
            near = difflib.get_close_matches(name[:40], known, 1)
            meant = f"did you mean {prefix}{near[0]}?" if near else "leave it out."
            shown = f"{prefix}{name[:40]}"
            raise Refused(f"there is no field {shown!r}; {meant}", shown, code="unknown_parameter")
        if value is not None:
            found[name] = known[name](f"{prefix}{name}", value)
    return found


def completion(serving: Serving, body: Mapping[str, Any]) -> Asked:
    """Parse a body of `/v1/completions`.

    Raises:
        Refused: the body is invalid or not supported.
    """
    given = _checked(body, COMPLETION)
    _check_model(serving, given)
    n = given.get("n", 1)
    if given.get("best_of", n) != n:
        raise Refused(f"best_of={given['best_of']} is not supported; leave it out, and ask for n texts.", "best_of")
    prompts = _prompts(serving, given.get("prompt"))
    if len(prompts) * n > MOST_CHOICES:
        raise Refused(f"{len(prompts)} prompts and n={n} are more than {MOST_CHOICES} texts; ask for fewer.", "n")
    requests = [each for ids in prompts for each in _requests(serving, given, ids, "prompt", 16, n)]
    return Asked(tuple(requests), n, False, given.get("stream", False), given.get("stream_options", False))


def chat(serving: Serving, body: Mapping[str, Any], usual_tokens: int) -> Asked:
    """Parse a body of `/v1/chat/completions`.

    Args:
        serving: the engine.
        body: from `parse`.
        usual_tokens: maximal number of new tokens if the body does not set it.

    Raises:
        Refused: the body is invalid or not supported.
    """
    given = _checked(body, CHAT)
    model = serving.model
    _check_model(serving, given)
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
    ids = _encoded("messages", lambda: chat_ids(model, render(model, conversation(messages))))
    n = given.get("n", 1)
    asked = _requests(serving, given, ids, "messages", usual_tokens, n)
    requests = [dataclasses.replace(each, chat=True) for each in asked]
    return Asked(tuple(requests), n, True, given.get("stream", False), given.get("stream_options", False))


def _check_model(serving: Serving, given: Mapping[str, Any]) -> None:
    name = given.get("model", serving.model.name)
    if name != serving.model.name:
        raise no_model(name, serving)


def no_model(name: str, serving: Serving) -> Refused:
    """Return the error for a request to an unknown model."""
    text = f"there is no model {_shown(name)} here; ask for {serving.model.name!r}."
    return Refused(text, "model", 404, "model_not_found")


def _prompts(serving: Serving, given: Any) -> list[tuple[int, ...]]:
    """Return the ids of each prompt, given as a text, a list of texts, ids, or a list of lists of ids."""
    several = given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    if len(several) > MOST_CHOICES:
        raise Refused(f"{len(several)} prompts are too many; give {MOST_CHOICES} at most.", "prompt")
    vocabulary = serving.model.config.vocab_size
    found: list[tuple[int, ...]] = []
    for each in several:
        if isinstance(each, str):
            ids = _encoded("prompt", lambda text=each: token_ids(serving.model, text))
        elif isinstance(each, list) and all(type(token) is int and 0 <= token < vocabulary for token in each):
            ids = tuple(each)
        else:
            what = f"a text, token ids from 0 to {vocabulary - 1}, nor a list of one kind of these"
            raise _refused("prompt", each, what)
        if not ids:
            raise Refused("the prompt is empty; give some text.", "prompt")
        found.append(ids)
    return found


def _encoded(param: str, encode: Callable[[], Sequence[int]]) -> tuple[int, ...]:
    try:
        return tuple(encode())
    except ValueError as error:
        raise Refused(" ".join(str(error).split()), param) from None


def _message(number: int, given: Any) -> dict[str, str]:
    """Check a turn, and return its role and its text with all parts joined."""
    name = f"messages[{number}]"
    if not isinstance(given, dict):
        raise Refused(f"{name} is {_shown(given)}, not an object with role and content.", "messages")
    # Clients send back all fields of an answer, many of them empty; templates get only role and content.
    for key, value in given.items():
        if key in ("name", "reasoning_content", "reasoning") and isinstance(value, str):
            continue
        if key not in ("role", "content") and value not in (None, [], "", {}):
            raise Refused(f"{name}.{key[:40]} is not supported; give role and content alone.", "messages")
    role, content = given.get("role"), given.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise Refused(f"{name}.role={_shown(role)} is not system, developer, user or assistant.", "messages")
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise Refused(f"{name}.content has {_shown(part)}, which is no text.", "messages")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused(f"{name}.content={_shown(content)} is not a text, nor a list of texts.", "messages")
    return {"role": "system" if role == "developer" else role, "content": content}


def _requests(
    serving: Serving, given: Mapping[str, Any], ids: tuple[int, ...], param: str, usual_tokens: int, n: int
) -> list[Request]:
    """Return the requests for `n` texts from one prompt, each with its own seed."""
    left = serving.context - len(ids)
    if left < given.get("max_tokens", 1):
        wanted = f" and max_tokens={given['max_tokens']}" if "max_tokens" in given else ""
        raise Refused(
            f"a prompt of {len(ids)} tokens{wanted} does not fit the context of {serving.context}; ask for less.",
            param,
            code="context_length_exceeded",
        )
    if given.get("kv_budget", 1) > serving.budget:
        raise Refused(f"kv_budget={given['kv_budget']} is more than the server's {serving.budget}.", "kv_budget")
    if any(not 0 <= each < serving.model.config.vocab_size for each in given.get("stop_token_ids", ())):
        raise Refused("stop_token_ids has ids that the model does not have.", "stop_token_ids")
    top_k = given.get("top_k", 0)
    first = Request(
        prompt=ids,
        max_tokens=given.get("max_tokens", min(usual_tokens, left)),
        sampling=Sampling(
            temperature=given.get("temperature", 1.0),
            top_k=top_k if top_k > 0 else None,
            top_p=given.get("top_p"),
            min_p=given.get("min_p"),
            repetition_penalty=given.get("repetition_penalty"),
        ),
        presence_penalty=given.get("presence_penalty", 0.0),
        frequency_penalty=given.get("frequency_penalty", 0.0),
        stop=given.get("stop", ()),
        stop_ids=given.get("stop_token_ids", ()),
        ignore_eos=given.get("ignore_eos", False),
        budget=given.get("kv_budget"),
        logprobs=given.get("logprobs"),
    )
    seed = given.get("seed", secrets.randbits(32))
    return [dataclasses.replace(first, seed=(seed + i) % 2**32) for i in range(n)]


@dataclasses.dataclass
class _Choice:
    """Output sent so far for one text."""

    characters: Characters
    """Decoder of the tokens with log-probabilities, for text offsets."""
    text: str = ""
    offset: int = 0
    """Number of characters decoded by `characters`."""
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    finished: Finished | None = None


class Answer:
    """Answer in OpenAI's format, as one chunk per piece or whole at the end.

    Args:
        serving: the engine.
        asked: the parsed body.
    """

    def __init__(self, serving: Serving, asked: Asked) -> None:
        self.serving, self.asked = serving, asked
        tokenizer = serving.model.tokenizer
        self.choices = [_Choice(characters(tokenizer, each.prompt)) for each in asked.requests]
        self._spelling = Spelling(tokenizer)
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    @property
    def unfinished(self) -> bool:
        """True if a text has not ended."""
        return any(choice.finished is None for choice in self.choices)

    def begin(self) -> list[dict[str, Any]]:
        """Return the chunks before all others."""
        if not self.asked.chat:
            return []
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self.choices))]

    def piece(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """Record a piece of a text, and return its chunk, or None if it is empty."""
        choice = self.choices[index]
        choice.text += piece.text
        logprobs = None if piece.logprobs is None else self._logprobs(choice, piece.logprobs)
        if logprobs is not None:
            choice.logprobs.append(logprobs)
        if not piece.text and not piece.logprobs:
            return None
        return self._chunk(index, {"content": piece.text} if self.asked.chat else piece.text, logprobs)

    def finish(self, index: int, finished: Finished) -> dict[str, Any]:
        """Record the end of a text, and return its chunk."""
        self.choices[index].finished = finished
        chunk = self._chunk(index, {} if self.asked.chat else "", None, finished.reason)
        kv = _kv(finished.held)
        chunk["choices"][0]["kv"] = kv
        return chunk | {"kv": kv}

    def end(self) -> list[dict[str, Any]]:
        """Return the chunks after all others."""
        if not self.asked.include_usage:
            return []
        return [self._head("chat.completion.chunk") | {"choices": [], "usage": self.usage()}]

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, once all texts have ended."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self.choices):
            assert choice.finished is not None
            content: dict[str, Any] = {"text": choice.text}
            if self.asked.chat:
                content = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            choices.append(
                {"index": index}
                | content
                | {
                    "logprobs": _joined(choice.logprobs) if choice.logprobs else None,
                    "finish_reason": choice.finished.reason,
                    "kv": _kv(choice.finished.held),
                }
            )
        return self._head("chat.completion") | {"choices": choices, "usage": self.usage(), "kv": choices[0]["kv"]}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of prompt tokens, counting each prompt once, and of generated tokens."""
        ends = [choice.finished for choice in self.choices if choice.finished is not None]
        firsts = ends[:: self.asked.n]
        read, written = sum(each.prompt_tokens for each in firsts), sum(each.tokens for each in ends)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(each.reused for each in firsts)},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        kind = kind if self.asked.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.serving.model.name}

    def _chunk(self, index: int, new: Any, logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        new = {"delta" if self.asked.chat else "text": new}
        choice = {"index": index, **new, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self.asked.include_usage else {}
        return self._head("chat.completion.chunk") | {"choices": [choice]} | usage

    def _logprobs(self, choice: _Choice, told: Sequence[Logprob]) -> dict[str, Any]:
        tokens = [self._token(each.token, each.logprob) for each in told]
        likeliest = [[self._token(*other) for other in each.likeliest] for each in told]
        if self.asked.chat:
            pairs = zip(tokens, likeliest, strict=True)
            return {"content": [token | {"top_logprobs": others} for token, others in pairs]}
        offsets: list[int] = []
        for each in told:
            offsets.append(choice.offset)
            choice.offset += len(choice.characters.add(each.token))
        tables: list[dict[str, float]] = []
        for token, others in zip(tokens, likeliest, strict=True):
            tables.append({})
            for other in [*others, token]:  # among tokens with equal text, keep the likeliest
                tables[-1].setdefault(other["token"], other["logprob"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": tables,
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        known = self._spelling.bytes_of(token)
        least = -9999.0  # JSON has no infinity
        return {
            "token": self._spelling.name(token),
            "logprob": max(logprob, least) if math.isfinite(logprob) else least,
            "bytes": None if known is None else list(known),
        }


def _joined(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [each for part in parts for each in part[name]] for name in parts[0]}


def _kv(held: Held | None) -> dict[str, Any] | None:
    if held is None:
        return None
    kept = round(float(held.kept), 2)  # the mean over layers and heads; an integer if it is whole
    return held._asdict() | {"kept": int(kept) if kept.is_integer() else kept}
