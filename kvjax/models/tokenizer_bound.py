"""Lower bound on the number of tokens of a text, from the longest token of the vocabulary."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

_RULES: Mapping[str, float] = {
    "NFC": 4.0,  # characters that compose to one, at most
    "NFKC": 4.0,
    **dict.fromkeys(("NFD", "NFKD", "Lowercase", "Prepend", "Strip", "ByteLevel", "Metaspace", "Digits"), 1.0),
    **dict.fromkeys(("UnicodeScripts", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"), 1.0),
}
"""Factors by which normalizers and pre-tokenizers reduce the characters that are no whitespace, at most."""
_DROP_SPACES = ("Strip", "Whitespace", "WhitespaceSplit", "BertPreTokenizer")
_UTF8 = [byte for byte in range(256) if byte not in (0xC0, 0xC1, *range(0xF5, 0x100))]
"""Bytes that occur in UTF-8."""


@dataclasses.dataclass(frozen=True)
class TextBound:
    """Bound of a tokenizer.

    Args:
        characters: most characters of a text that become one token.
        spaces: False if any amount of whitespace may become no token; then only other characters count.
        missing: characters that no token has, which the tokenizer drops.
    """

    characters: float
    spaces: bool
    missing: str = ""

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        text = text.translate(dict.fromkeys(map(ord, self.missing))) if self.missing else text
        return int((len(text) if self.spaces else sum(map(len, text.split()))) / self.characters)


def text_bound(tokenizer: Any) -> TextBound | None:
    """Return the bound of a tokenizer with BPE and tokens for bytes; None for all others.

    Others may turn a word of any length into one unknown token. Rules that remove texts, or replace what a regular
    expression matches, have no bound either.
    """
    fast = backend(tokenizer)
    if fast is None or type(fast.model).__name__ != "BPE":
        return None
    rules = [rule for part in (fast.normalizer, fast.pre_tokenizer) for rule in _rules(part)]
    factors = [_factor(rule) for rule in rules]
    names = set(fast.get_vocab(with_added_tokens=False))
    of_bytes = any(rule.get("type") == "ByteLevel" for rule in rules)
    letters = {byte: letter if of_bytes else f"<0x{byte:02X}>" for letter, byte in byte_letters().items()}
    missing = [byte for byte in _UTF8 if letters[byte] not in names]
    # A character of several bytes is dropped if none of them has a token, or is one unknown token if one has none.
    sound = not any(0x80 <= byte < 0xC0 for byte in missing) if of_bytes else fast.model.byte_fallback and not missing
    if None in factors or not sound:
        return None
    added = fast.get_added_tokens_decoder().values()
    drops = any(rule.get("type") in _DROP_SPACES for rule in rules) or any(x.lstrip or x.rstrip for x in added)
    longest = max(map(len, (*names, *(token.content for token in added))))
    for factor in factors:
        longest *= factor or 1.0
    return TextBound(longest, not drops, "".join(chr(byte) for byte in missing if byte < 0x80))


def backend(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` behind a tokenizer; None if there is none."""
    from tokenizers import Tokenizer

    candidates = (getattr(tokenizer, name, None) for name in ("fast", "backend_tokenizer"))
    return next((candidate for candidate in candidates if isinstance(candidate, Tokenizer)), None)


@functools.cache
def byte_letters() -> dict[str, int]:
    """Return the byte of each letter of GPT-2: printable bytes are themselves, others map to the next free letters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


def _rules(part: Any) -> list[dict[str, Any]]:
    """Return the rules of a normalizer or pre-tokenizer, those of a sequence one after the other."""

    def flat(rule: dict[str, Any]) -> list[dict[str, Any]]:
        inner = rule.get("normalizers", rule.get("pretokenizers"))
        return [rule] if inner is None else [leaf for one in inner for leaf in flat(one)]

    return [] if part is None else flat(json.loads(part.__getstate__()))


def _factor(rule: Mapping[str, Any]) -> float | None:
    """Return the factor by which a rule reduces characters, at most; None if there is no bound."""
    kind = rule.get("type")
    if kind in ("Split", "Punctuation"):
        return None if rule.get("behavior") == "Removed" else 1.0
    if kind == "Replace":
        text, content = rule["pattern"].get("String"), rule["content"]
        return max(1.0, len(text) / len(content)) if text and content else None
    return _RULES.get(str(kind))
