"""The bytes that each token stands for, and the text of tokens that come one by one."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvjax.models.tokenizer import LazyTokenizer

_CONTEXT, _WINDOW, _CHARACTER = (4, 5, 6, 7, 16, 64), 16, 4
"""Tokens of a context that text may depend on; tokens decoded at once where bytes are no characters; bytes of one."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the texts of the special tokens, which are left out of decoded text, by id."""
    fast = _backend(tokenizer)
    if fast is not None:
        return {token: added.content for token, added in fast.get_added_tokens_decoder().items() if added.special}
    ids, texts = getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ())
    return dict(zip(ids, texts, strict=False))


class Spelling:
    """Names and bytes of single tokens, as they follow other text.

    Args:
        tokenizer: of the ids. Byte-level BPE and SentencePiece's forms are read from the vocabulary; a token of any
            other tokenizer is decoded behind itself.
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
        """Whether the bytes of every token are known, and texts are these bytes one after the other."""
        self.strips = self._space is not None and not {"Strip", "Metaspace"}.isdisjoint(decoders)
        """Whether the space before a text's first word is left out."""

    def bytes_of(self, token: int) -> bytes | None:
        """Return the token's bytes, which may be a part of a character; None where they cannot be known."""
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

    def name(self, token: int) -> str:
        r"""Return the token's text, or `bytes:\xe2\x80` where its bytes are no whole characters."""
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
    """The `tokenizers.Tokenizer` that does the work of a tokenizer; None if another one does."""
    from tokenizers import Tokenizer

    kinds = (getattr(tokenizer, name, None) for name in ("fast", "backend_tokenizer"))
    return next((each for each in kinds if isinstance(each, Tokenizer)), None)


def _cleans_up(tokenizer: Any, fast: Any) -> bool:
    """Whether decoding leaves out spaces before punctuation, as transformers does but for BPE."""
    if isinstance(tokenizer, LazyTokenizer) or type(fast.model).__name__ == "BPE":
        return False
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def _decoders(fast: Any) -> Iterator[Mapping[str, Any]]:
    if fast.decoder is not None:
        decoder = json.loads(fast.decoder.__getstate__())
        yield from decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _space(decoders: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The character that SentencePiece's decoders turn into spaces; None if there are others."""
    if not set(decoders) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    if "Metaspace" in decoders:
        return decoders["Metaspace"]["replacement"]
    replaced = decoders.get("Replace", {})
    return replaced["pattern"].get("String") if replaced.get("content") == " " else None


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The bytes that GPT-2's letters stand for: printable ones for themselves, the others for the next free letters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Characters(Protocol):
    """Makes text of tokens as they come: whole characters, each once."""

    def add(self, token: int) -> str:
        """Return what is certain of the text once this token has come, and was not before."""
        ...

    def finish(self) -> str:
        """Return what has been held back, as no more tokens come."""
        ...


def characters(tokenizer: Any, context: Sequence[int]) -> Characters:
    """Return what makes text of the tokens that follow a context: what they add to its own text."""
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
    """Decodes each token with a few before it."""

    def __init__(self, tokenizer: Any, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] | None = list(context[-max(_CONTEXT) :])
        self._ids: list[int] = []
        # Characters of the decoded ids that have been told, and ids that were there when all had been.
        self._told, self._whole = 0, 0

    def add(self, token: int) -> str:
        if self._context is not None:  # decoded with the first token: whoever gives that hears of what goes wrong
            self._ids = next(filter(self._begins, (self._context[-size:] for size in _CONTEXT)), [])
            self._told, self._whole, self._context = len(self._decode(self._ids)), len(self._ids), None
        self._ids.append(token)
        text, told = self._decode(self._ids), self._told
        # A character whose bytes are not all there yet waits for them, and so does a byte that nothing can complete.
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
        """Leave out what has been told of the window, but the end of it that other text follows."""
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
