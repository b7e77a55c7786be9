"""Files of tokenizers, checked before libraries read them that would hang, abort or run out of memory."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvjax.utils.files import check_regular, read_json, read_text

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MOST_GROWTH = 256
"""Maximal factor by which the rules of a tokenizer may lengthen a text; those of real ones stay below 80."""
_OBJECTS = ("special_tokens_map.json", "added_tokens.json", "chat_template.json", "vocab.json")
_READ = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*")


def check_files(directory: Path) -> dict[str, Any]:
    """Check the files of a tokenizer, and return the settings of its tokenizer_config.json, empty if there is none.

    Raises:
        ValueError: a file is a pipe or a device, is not of the kind that its name says, or would lengthen texts without
            bounds. The message names the file.
    """
    for pattern in _READ:
        for file in directory.glob(pattern):
            check_regular(file)
            if file.suffix == ".jinja":
                read_text(file)
    for name in _OBJECTS:
        if (directory / name).exists():
            read_json(directory / name)
    file = directory / "tokenizer.json"
    if file.exists() and (growth := growth_of(read_json(file))) > MOST_GROWTH:
        much = "without bounds" if growth == math.inf else f"up to {growth:.3g} times"
        raise ValueError(f"{file} lengthens texts {much}, more than {MOST_GROWTH} times, and could take all memory.")
    return read_tokenizer_settings(directory)


def read_tokenizer_settings(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and check the types of the settings that are read here or in transformers."""
    file = directory / "tokenizer_config.json"
    settings = read_json(file) if file.exists() else {}
    for name, (fits, what) in _SETTINGS.items():
        if (value := settings.get(name)) is not None and not fits(value):
            shown = repr(value)
            raise ValueError(f"{file}: {name} is {shown[:60]}{'...' if len(shown) > 60 else ''}, not {what}.")
    return settings


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_template(value: Any) -> bool:
    if isinstance(value, list):
        templates = (template if isinstance(template, dict) else {} for template in value)
        return all(isinstance(template.get(key), str) for template in templates for key in ("name", "template"))
    return isinstance(value, str) or (isinstance(value, dict) and all(isinstance(text, str) for text in value.values()))


def _are_added(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isdecimal() and _is_token(token) for key, token in value.items())


def _are_tokens(value: Any) -> bool:
    tokens = value.values() if isinstance(value, dict) else value
    return isinstance(value, list | dict) and all(map(_is_token, tokens))


_SETTINGS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(ROLES, (_is_token, 'a text, nor an object with a text as "content"')),
    "additional_special_tokens": (_are_tokens, "a list of tokens"),
    "extra_special_tokens": (_are_tokens, "a list of tokens, nor an object of them"),
    "added_tokens_decoder": (_are_added, 'an object of tokens by their ids, each with a text as "content"'),
    "chat_template": (_is_template, 'a text, nor a list of objects with texts as "name" and "template"'),
    "tokenizer_class": (lambda value: isinstance(value, str), "a text"),
    "model_max_length": (lambda value: isinstance(value, int | float), "a number"),
}
"""Checks of settings, and what their values are."""


def growth_of(content: Mapping[str, Any]) -> float:
    """Return the factor by which the rules in a tokenizer.json lengthen a text at most, or ids at their ends.

    Rules are known by their keys: the library also reads rules that do not name their type.
    """
    before = _growth(content.get("normalizer")) * _growth(content.get("pre_tokenizer"))
    return max(before * _growth(content.get("post_processor")), _growth(content.get("decoder")))


def _growth(rule: Any) -> float:
    if isinstance(rule, list):
        return math.prod(map(_growth, rule))
    if not isinstance(rule, dict):
        return 1.0
    grown = math.prod(_growth(rule.get(f"{kind}s")) for kind in ("normalizer", "pretokenizer", "decoder", "processor"))
    if rule.get("type") == "ByteLevel":  # writes a byte above 127 as two
        grown *= 2
    if isinstance(rule.get("prepend"), str):
        grown *= 1 + len(rule["prepend"])
    if isinstance(rule.get("content"), str) and isinstance(rule.get("pattern"), dict):
        grown *= _replacement(rule["pattern"], rule["content"])
    if isinstance(rule.get("precompiled_charsmap"), str):
        grown *= _longest_replacement(rule["precompiled_charsmap"])
    if isinstance(rule.get("single"), list):
        grown *= _template(rule["single"], rule.get("special_tokens"))
    return grown


def _replacement(pattern: Mapping[str, Any], content: str) -> float:
    text = pattern.get("String")
    shortest = len(text) if isinstance(text, str) else 1  # a match of a regular expression
    return math.inf if shortest == 0 and content else max(1.0, len(content) / max(1, shortest))


def _longest_replacement(encoded: str) -> float:
    """Return the length of the longest replacement in a map of SentencePiece: a trie after its size, and texts."""
    try:
        content = base64.b64decode(encoded)
    except (binascii.Error, ValueError):
        return 1.0  # the library refuses it
    size = int.from_bytes(content[:4], "little")
    if not content:
        return 1.0
    if size + 4 > len(content):  # the library would allocate as much
        return math.inf
    return float(max(1, *map(len, content[4 + size :].split(b"\0"))))


def _template(parts: list[Any], special: Any) -> float:
    """Return the number of texts and of ids in a template, which bounds how much longer a text becomes."""
    tokens: Mapping[str, Any] = special if isinstance(special, dict) else {}
    count = 0
    for part in parts:
        reference = part.get("SpecialToken") if isinstance(part, dict) else None
        token = tokens.get(str(reference.get("id"))) if isinstance(reference, dict) else None
        ids = token.get("ids") if isinstance(token, dict) else None
        count += len(ids) if isinstance(ids, list) else 1
    return float(max(1, count))
