"""Which tokens of a vocabulary are special and which are punctuation, for policies that keep them for what they are."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

MARKERS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")
"""Instruction markers that a tokenizer may spell with several tokens."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class TokenClasses:
    """Ids of special tokens and of punctuation, and markers that are spelled with several tokens."""

    special: tuple[int, ...]
    punctuation: tuple[int, ...]
    markers: tuple[tuple[int, ...], ...]


def token_classes(tokenizer: Any, markers: Sequence[str] = MARKERS) -> TokenClasses:
    """The special tokens and the punctuation of a transformers tokenizer.

    Special are the tokenizer's own special tokens, and markers such as `[INST]` that are one token. Punctuation are
    tokens whose text, without the spaces in front, is not empty and all of Unicode's category P.

    Args:
        tokenizer: fast or slow.
        markers: texts that count as special however many tokens they take. They are found where they start a text or
            follow a space, a line break, a letter, or the token that begins or ends a text; punctuation right before
            one may change how it is spelled.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {int(i) for i in tokenizer.all_special_ids} | {int(i) for i, token in added.items() if token.special}
    spellings = {spelling for marker in markers for spelling in _spellings(tokenizer, marker)}
    special |= {spelling[0] for spelling in spellings if len(spelling) == 1}
    names = {int(i): name for name, i in tokenizer.get_vocab().items()}
    ids = sorted(set(names) - special)
    texts = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    punctuation = (i for i, text in zip(ids, texts, strict=True) if is_punctuation(_text(names[i], text)))
    several = sorted(spelling for spelling in spellings if len(spelling) > 1)
    return TokenClasses(tuple(sorted(special)), tuple(punctuation), tuple(several))


def is_punctuation(text: str) -> bool:
    """Whether a token's text is punctuation, whatever spaces stand before it."""
    text = text.lstrip(" \u2581")
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)


def _text(name: str, decoded: str) -> str:
    # SentencePiece's fallback spells a byte as <0x2E>, which some decoders leave as it is.
    byte = _BYTE.fullmatch(name)
    return chr(int(byte[1], 16)) if byte and int(byte[1], 16) < 128 else decoded


def _spellings(tokenizer: Any, marker: str) -> set[tuple[int, ...]]:
    """The tokens of a marker at the start of a text, after a space, a line break, a word and a special token."""
    before = ["", " ", "\n", "a", "a ", ". ", "\n\n"]
    before += [token + space for token in (tokenizer.bos_token, tokenizer.eos_token) if token for space in ("", " ")]
    found = set()
    for text in before:
        ids = tokenizer.encode(text + marker, add_special_tokens=False)
        for start in range(len(ids) - 1, -1, -1):  # the shortest end that spells all of the marker
            if tokenizer.decode(ids[start:], clean_up_tokenization_spaces=False).strip() == marker:
                found.add(tuple(int(i) for i in ids[start:]))
                break
    return found
