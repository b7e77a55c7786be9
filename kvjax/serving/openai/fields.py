"""Fields of request bodies: OpenAI's, vLLM's and kvjax's own, with a check for each, and the error of those refused."""

from __future__ import annotations

import dataclasses
import difflib
import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.utils.settings import TEMPLATE_VARIABLES

MOST_CHOICES = 128
"""Maximal texts per body: prompts times `n`."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Maximal number of stop strings and characters of each, since all are searched after every token."""

Check = Callable[[str, Any], Any]
"""Function of a field's name and value; it returns the parsed value, or raises `APIError` if it is invalid."""


@dataclasses.dataclass(eq=False)
class APIError(Exception):
    """Error that a client gets instead of an answer.

    Args:
        param: name of the invalid field, if there is one.
        code: OpenAI's error code, if there is one.
    """

    message: str
    param: str | None = None
    status: int = 400
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shown(value: Any) -> str:
    """Format a value for a message, in at most 100 characters."""
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def invalid(name: str, value: Any, what: str) -> APIError:
    """Return the error for a field with an invalid value."""
    return APIError(f"{name}={shown(value)} is not {what}.", name)


def _where(fits: Callable[[Any], bool], what: str, parse: Callable[[Any], Any] = lambda value: value) -> Check:
    """Return a check that parses the values that fit, and refuses others as not being `what`."""

    def check(name: str, value: Any) -> Any:
        if not fits(value):
            raise invalid(name, value, what)
        return parse(value)

    return check


def _of(kind: type, what: str) -> Check:
    return _where(lambda value: isinstance(value, kind), what)


def _integer(low: int, high: int) -> Check:
    return _where(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def _real(low: float, high: float, above: bool = False) -> Check:
    """Return a check for numbers in a range; `above` excludes the lower end."""
    what = f"a number above {low} up to {high}" if above else f"a number from {low} to {high}"
    return _where(
        lambda value: type(value) in (int, float) and low <= value <= high and not (above and value == low),
        what,
        float,
    )


_flag, _text, _object = _of(bool, "true or false"), _of(str, "a text"), _of(dict, "an object")
_ids = _where(
    lambda value: isinstance(value, list) and len(value) <= MOST_CHOICES and all(type(token) is int for token in value),
    f"a list of at most {MOST_CHOICES} token ids",
    tuple,
)


def _only(*values: Any) -> Check:
    """Return a check for an unsupported field, which accepts only the given values and ignores them."""

    def check(name: str, value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in values):
            allowed = "".join(f", or give {json.dumps(choice)}" for choice in values)
            raise APIError(f"{name}={shown(value)} is not supported; leave it out{allowed}.", name)
        return value

    return check


def _no_bias(name: str, value: Any) -> None:
    """Check that all token biases are zero."""
    if not isinstance(value, dict) or any(type(bias) not in (int, float) or bias != 0 for bias in value.values()):
        raise APIError(f"{name}={shown(value)} is not supported; leave it out, or give {{}}.", name)


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid(name, value, "a text, nor a list of texts, none of them empty")
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        raise APIError(f"{name} takes {MOST_STOPS} texts of {LONGEST_STOP} characters at most.", name)
    return tuple(stops)


def _stream_options(name: str, value: Any) -> bool:
    """Return whether the end of a stream includes the usage."""
    checks = {"include_usage": _flag, "include_obfuscation": _flag, "continuous_usage_stats": _only(False)}
    return check_fields(_object(name, value), checks, f"{name}.").get("include_usage", False)


def _template_settings(name: str, value: Any) -> dict[str, Any]:
    """Check the settings of a chat template by name; the template itself tells which it has."""
    for key in _object(name, value):
        if key in TEMPLATE_VARIABLES:
            raise APIError(f"{name}.{key} is not supported; leave it out.", name)
    return value


COMMON: Mapping[str, Check] = {
    **dict.fromkeys(("model", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), _text),
    **dict.fromkeys(("stream", "store", "ignore_eos"), _flag),
    **dict.fromkeys(("metadata", "prompt_cache_options"), _object),
    **dict.fromkeys(("max_tokens", "kv_budget"), _integer(1, 2**31 - 1)),
    **dict.fromkeys(("top_p", "min_p"), _real(0, 1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _real(-2, 2)),
    "temperature": _real(0, 2),
    "n": _integer(1, MOST_CHOICES),
    "stop": _stops,
    "seed": _integer(-(2**63), 2**64 - 1),
    "stream_options": _stream_options,
    "logit_bias": _no_bias,
    "service_tier": _only("auto", "default", "flex", "scale", "priority", "fast"),
    "top_k": _integer(-1, 2**31 - 1),
    "repetition_penalty": _real(0, 1000, above=True),
    "stop_token_ids": _ids,
    "length_penalty": _only(1, 1.0),
    "bad_words": _only([]),
    **dict.fromkeys(("min_tokens", "priority"), _only(0)),
    **dict.fromkeys(("echo", "use_beam_search", "include_stop_str_in_output"), _only(False)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), _only(True)),
    **dict.fromkeys(("moderation", "allowed_token_ids", "prompt_logprobs", "truncate_prompt_tokens"), _only()),
}
"""Checks of the fields of both kinds of bodies: OpenAI's, vLLM's and kvjax's own."""

COMPLETION: Mapping[str, Check] = COMMON | {
    "prompt": lambda name, value: value,
    "logprobs": _integer(0, 20),
    "add_special_tokens": _only(True),
    "suffix": _only(""),
    "best_of": _integer(1, MOST_CHOICES),
}
CHAT: Mapping[str, Check] = COMMON | {
    "messages": _of(list, "a list of messages"),
    "max_completion_tokens": COMMON["max_tokens"],
    "logprobs": _flag,
    "top_logprobs": _integer(0, 20),
    **{name: _of(list, f"a list of {name}") for name in ("tools", "functions")},
    **dict.fromkeys(("tool_choice", "function_call"), _only("none", "auto")),
    "parallel_tool_calls": _flag,
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
    "reasoning_effort": _only("none", "medium"),
    "verbosity": _only("medium"),
    "add_generation_prompt": _only(True),
    **dict.fromkeys(("continue_final_message", "add_special_tokens"), _only(False)),
    "chat_template_kwargs": _template_settings,
    "documents": _only([]),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "chat_template"), _only()),
}


def check_fields(fields: Mapping[str, Any], checks: Mapping[str, Check], prefix: str = "") -> dict[str, Any]:
    """Check the fields, and return those that are not null, which has no effect in any field."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in checks:
            near = difflib.get_close_matches(name[:40], checks, 1)
            meant = f"did you mean {prefix}{near[0]}?" if near else "leave it out."
            field = f"{prefix}{name[:40]}"
            raise APIError(f"there is no field {field!r}; {meant}", field, code="unknown_parameter")
        values[name] = checks[name](f"{prefix}{name}", value)
    return values
