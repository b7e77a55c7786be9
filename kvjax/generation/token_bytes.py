"""Bytes of each token, and the text of tokens that arrive one by one."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvjax.models.tokenizer import LazyTokenizer

_CONTEXT, _WINDOW, _CHARACTER = (4, 5, 6, 7, 16, 64), 16, 4
"""Context tokens that the text may depend on; tokens decoded together in incomplete text; bytes of a character."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the special tokens by id; decoded text excludes them."""
    fast = _backend(tokenizer)
    if fast is not None:
        return {token: added.content for token, added in fast.get_added_tokens_decoder().items() if added.special}
    ids, texts = getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ())
    return dict(zip(ids, texts, strict=False))


class Spelling:
    """Names and bytes of single tokens that follow other text.

    Args:
        tokenizer: tokenizer of the ids. Bytes of byte-level BPE and SentencePiece tokens are read from the vocabulary.
            A token of any other tokenizer is decoded after a copy of itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = special_tokens(tokenizer)
        self._fast = _backend(tokenizer)
        known = self._fast is not None and not _cleans_up(tokenizer, self._fast)
        decoders = {each["type"]: each for each in _decoders(self._fast)} if known else {}
        self._of_bytes = set(decoders) == {"ByteLevel"}
        self._space = None if self._of_bytes else _space(decoders)
        self._falls_back = "ByteFallback" in decoders
        self.known = self._of_bytes or self._space is not None
        """True if the bytes of all tokens are known and a text is their concatenation."""
        self.strips = self._space is not None and not {"Strip", "Metaspace"}.isdisjoint(decoders)
        """True if decoding drops the space before the first word of a text."""

    def bytes_of(self, token: int) -> bytes | None:
        """Return the token's bytes, which may be a part of a character; None if they are unknown."""
        if token in self.special:
            return self.special[token].encode()
        if not self.known:
            text = self._after_itself(token)
            return None if "\ufffd" in text else text.encode()
        assert self._fast is not None
        name = self._fast.id_to_token(token)
        if name is None:  # the model has more rows than the tokenizer has tokens
            return b""
        if self._of_bytes:
            known = _byte_letters()
            return bytes(known[each] for each in name) if all(each in known for each in name) else name.encode()
        byte = _BYTE.fullmatch(name) if self._falls_back else None
        return bytes([int(byte[1], 16)]) if byte else name.replace(self._space or " ", " ").encode()

    def byte_list(self, token: int) -> list[int] | None:
        """Return `bytes_of` a token in JSON's types."""
        known = self.bytes_of(token)
        return None if known is None else list(known)

    def name(self, token: int) -> str:
        r"""Return the token's text, or `bytes:\xe2\x80` if its bytes are not whole characters."""
        known = self.bytes_of(token)
        if known is None:
            return self._after_itself(token)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    def _after_itself(self, token: int) -> str:
        alone = self.tokenizer.decode([token])
        return self.tokenizer.decode([token, token])[len(alone) :]


def _backend(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` behind a tokenizer; None if there is none."""
    from tokenizers import Tokenizer

    kinds = (getattr(tokenizer, name, None) for name in ("fast", "backend_tokenizer"))
    return next((each for each in kinds if isinstance(each, Tokenizer)), None)


def _cleans_up(tokenizer: Any, fast: Any) -> bool:
    """Return whether decoding drops spaces before punctuation, as transformers does except for BPE."""
    if isinstance(tokenizer, LazyTokenizer) or type(fast.model).__name__ == "BPE":
        return False
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def _decoders(fast: Any) -> Iterator[Mapping[str, Any]]:
    if fast.decoder is not None:
        decoder = json.loads(fast.decoder.__getstate__())
        yield from decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _space(decoders: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the character that SentencePiece's decoders replace by spaces; None if there are other decoders."""
    if not set(decoders) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    if "Metaspace" in decoders:
        return decoders["Metaspace"]["replacement"]
    replaced = decoders.get("Replace", {})
    return replaced["pattern"].get("String") if replaced.get("content") == " " else None


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of GPT-2: printable bytes are themselves, others map to the next free letters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def characters(tokenizer: Any, context: Sequence[int]) -> Characters:
    """Return a decoder for tokens that follow a context; its text is what they add to the context's text.

    It returns each character once: `add` takes a token and returns the text that has become certain, and `finish`
    returns the text held back after the last token.
    """
    spelling = Spelling(tokenizer)
    return _OfBytes(spelling, context) if spelling.known else _Decoded(tokenizer, context)


class _OfBytes:
    def __init__(self, spelling: Spelling, context: Sequence[int]) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = spelling.strips and not any(self._bytes(token) for token in reversed(context))

    def add(self, token: int) -> str:
        found = self._bytes(token)
        if found and self._strips:
            found, self._strips = found.removeprefix(b" "), False
        return self._decoder.decode(found)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._spelling.special else self._spelling.bytes_of(token) or b""


class _Decoded:
    """Decoder of each token together with a few tokens before it."""

    def __init__(self, tokenizer: Any, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] | None = list(context[-max(_CONTEXT) :])
        self._ids: list[int] = []
        # Characters of the decoded ids that have been returned, and the number of ids when all had been.
        self._told, self._whole = 0, 0

    def add(self, token: int) -> str:
        if self._context is not None:  # decoded with the first token, so an error reaches the caller who added it
            self._ids = next(filter(self._begins, (self._context[-size:] for size in _CONTEXT)), [])
            self._told, self._whole, self._context = len(self._decode(self._ids)), len(self._ids), None
        self._ids.append(token)
        text, told = self._decode(self._ids), self._told
        # Hold back a character until all its bytes have arrived. Invalid bytes at the end are held back, too.
        broken = min(len(text) - len(text.rstrip("\ufffd")), _CHARACTER - 1)
        self._told = max(told, len(text) - broken)
        if not broken:
            self._move(len(text) > told)
        elif len(self._ids) > _WINDOW:
            untold = len(text) - self._told
            self._ids, self._whole = self._ids[-_WINDOW // 2 :], 0
            self._told = len(self._decode(self._ids)) - untold
        return text[told : len(text) - broken]

    def finish(self) -> str:
        text, told = self._decode(self._ids), self._told
        self._told = len(text)
        return text[told:]

    def _move(self, grown: bool) -> None:
        """Drop returned tokens from the window, except its end, which the next text depends on."""
        rest = self._ids[self._whole :]
        if told := len(self._decode(rest)):
            self._ids, self._told, self._whole = rest, told, len(rest)
        elif not grown:  # a special token
            del self._ids[self._whole :]

    def _begins(self, ids: list[int]) -> bool:
        text = self._decode(ids)
        return bool(text) and not text.startswith("\ufffd")

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


Characters = _OfBytes | _Decoded
