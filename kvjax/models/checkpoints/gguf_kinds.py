"""Types of the metadata in GGUF files, which are checked before anything else reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Kind = tuple[Callable[[Any], bool], str]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _lists(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_TEXT: Kind = (_is_text, "a text")
_ID: Kind = (_is_id, "an integer")
_FLAG: Kind = (lambda value: isinstance(value, bool), "true or false")
_TEXTS: Kind = (_lists(_is_text), "a list of texts")
_NUMBERS: Kind = (_lists(_is_number), "a list of numbers")
_ANY_NUMBERS: Kind = (lambda value: _is_number(value) or _lists(_is_number)(value), "a number nor a list of them")
_WORDS = (
    "general.architecture",
    "general.name",
    "tokenizer.chat_template",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
)
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(_WORDS, _TEXT),
    "split.count": _ID,
    "tokenizer.ggml.tokens": _TEXTS,
    "tokenizer.ggml.merges": _TEXTS,
    "tokenizer.ggml.scores": _NUMBERS,
    "tokenizer.ggml.token_type": (_lists(_is_id), "a list of integers"),
}
_ENDINGS: Mapping[str, Kind] = {
    "_token_id": _ID,
    "add_bos_token": _FLAG,
    "add_eos_token": _FLAG,
    "add_space_prefix": _FLAG,
}
"""Types by the endings of names in `tokenizer.ggml`."""
_TEXTS_OF_MODELS = ("rope.scaling.type", "tensor_data_layout")
"""Metadata of architectures that are texts; all others are numbers, flags or lists of these."""


def check_kinds(metadata: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first metadata of a type that its name does not have."""
    architecture = f"{metadata.get('general.architecture')}."
    for key, value in metadata.items():
        fits, what = _kind(key, architecture)
        if not fits(value):
            shown = repr(value)
            raise ValueError(f"metadata {key} is {shown[:60]}{'...' if len(shown) > 60 else ''}, not {what}.")


def _kind(key: str, architecture: str) -> Kind:
    if key in _KINDS:
        return _KINDS[key]
    if key.startswith("tokenizer.ggml."):
        return next((kind for ending, kind in _ENDINGS.items() if key.endswith(ending)), (lambda _: True, ""))
    if not key.startswith(architecture):
        return (lambda _: True), ""
    return _TEXT if key.removeprefix(architecture) in _TEXTS_OF_MODELS else _ANY_NUMBERS
