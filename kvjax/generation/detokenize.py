"""Incremental detokenization that holds back incomplete characters and stop strings, and the bytes of each token."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from kvjax.models.tokenizer import backend, byte_letters

_CONTEXT, _WINDOW, _CHARACTER = (4, 5, 6, 7, 16, 64), 16, 4
"""Context tokens that the text may depend on; most tokens decoded together; bytes of a character."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the stop strings as a tuple; one string counts as a list of one."""
    texts = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"stop={stop!r} is not a text, nor a list of texts.")
    if "" in texts:
        raise ValueError("stop='' would end every text before it begins; give some text, or none.")
    return tuple(texts)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before its first stop string, or the whole text if there is none."""
    return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]


class Pieces:
    """Incremental detokenizer of one text, up to the first stop string.

    The text is what the tokens add to the text of the context, so a word keeps the space before it. The text does not
    depend on how many tokens are added per call.

    Args:
        stop: strings that end the text before them. Special tokens are not part of the text, but a stop string that
            contains one is matched at that token.
        context: ids that the text follows, such as the prompt's.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.stop = tuple(stop)
        self.stopped = False
        """True after a stop string; no text follows it."""
        self.used = 0
        """Number of tokens of the text so far; the last one may complete a stop string."""
        spelling = Spelling(tokenizer)
        specials = spelling.special.items()
        self._special = {token: text for token, text in specials if any(text in stop for stop in self.stop)}
        self._with_special = [stop for stop in self.stop if any(text in stop for text in self._special.values())]
        self._characters = _OfBytes(spelling, context) if spelling.known else _Decoded(tokenizer, context)
        self._buffer: list[tuple[str, bool]] = []
        """Characters that may begin a stop string, and True for those of the text, not of a special token."""

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens, and return the text that has become certain."""
        return "".join(map(self._add, ids))

    def finish(self) -> str:
        """Return the text held back so far, after the last token."""
        return self._release(self._characters.finish(), last=True)

    def _add(self, token: int) -> str:
        if self.stopped:
            return ""
        self.used += 1
        if token in self._special:
            return self._release(self._special[token], shown=False)
        return self._release(self._characters.add(token))

    def _release(self, new: str, shown: bool = True, last: bool = False) -> str:
        if self.stopped or not self.stop:
            return "" if self.stopped else new
        characters = self._buffer + [(character, shown) for character in new]
        places = [place for place, (_, shown) in enumerate(characters) if shown]
        views: list[tuple[str, Sequence[int], Sequence[str]]] = [
            ("".join(characters[place][0] for place in places), places, self.stop),
            ("".join(character for character, _ in characters), range(len(characters)), self._with_special),
        ]
        cuts = [places[at] for text, places, stops in views for at in map(text.find, stops) if at >= 0]
        self.stopped = bool(cuts)
        if not cuts and not last:
            cuts = [
                places[len(text) - n]
                for text, places, stops in views
                for stop in stops
                for n in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:n])
            ]
        end = min(cuts, default=len(characters))
        self._buffer = [] if self.stopped else characters[end:]
        return "".join(character for character, shown in characters[:end] if shown)


class Stream:
    """Writer of the text of each block's first row as its tokens arrive; `write` gets each piece of `Pieces`."""

    def __init__(
        self, tokenizer: Any, write: Callable[[str], Any], stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self.pieces, self.write = Pieces(tokenizer, stop, context), write

    def __call__(self, block: Int[np.ndarray, "b n"], belongs: Bool[np.ndarray, "b n"]) -> None:
        if text := self.pieces.add(block[0][belongs[0]].tolist()):
            self.write(text)

    def flush(self) -> None:
        """Write the text held back so far."""
        if text := self.pieces.finish():
            self.write(text)


class Spelling:
    """Names and bytes of single tokens that follow other text.

    Args:
        tokenizer: tokenizer of the ids. Bytes of byte-level BPE and SentencePiece tokens are read from the vocabulary.
            A token of any other tokenizer is decoded after a copy of itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast = backend(tokenizer)
        self.special: dict[int, str]
        """Texts of the special tokens by id; decoded text excludes them."""
        if self._fast is None:
            ids, texts = getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ())
            self.special = dict(zip(ids, texts, strict=False))
        else:
            added = self._fast.get_added_tokens_decoder()
            self.special = {token: entry.content for token, entry in added.items() if entry.special}
        decoder: Any = None if self._fast is None or _cleans_up(tokenizer, self._fast) else self._fast.decoder
        outer: dict[str, Any] = {"decoders": []} if decoder is None else json.loads(decoder.__getstate__())
        decoders = {stage["type"]: stage for stage in outer.get("decoders", [outer])}
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
            letters = byte_letters()
            return bytes(letters[x] for x in name) if all(x in letters for x in name) else name.encode()
        byte = _BYTE.fullmatch(name) if self._falls_back else None
        return bytes([int(byte[1], 16)]) if byte else name.replace(self._space or " ", " ").encode()

    def byte_list(self, token: int) -> list[int] | None:
        """Return `bytes_of` a token in JSON's types."""
        content = self.bytes_of(token)
        return None if content is None else list(content)

    def name(self, token: int) -> str:
        r"""Return the token's text, or `bytes:\xe2\x80` if its bytes are not whole characters."""
        content = self.bytes_of(token)
        if content is None:
            return self._after_itself(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _after_itself(self, token: int) -> str:
        single = self.tokenizer.decode([token])
        return self.tokenizer.decode([token, token])[len(single) :]


def _cleans_up(tokenizer: Any, fast: Any) -> bool:
    """Return whether decoding drops spaces before punctuation, as transformers does except for BPE."""
    if getattr(tokenizer, "fast", None) is not None or type(fast.model).__name__ == "BPE":
        return False
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def _space(decoders: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the character that SentencePiece's decoders replace by spaces; None if there are other decoders."""
    if not set(decoders) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    if "Metaspace" in decoders:
        return decoders["Metaspace"]["replacement"]
    replaced = decoders.get("Replace", {})
    return replaced["pattern"].get("String") if replaced.get("content") == " " else None


class _OfBytes:
    def __init__(self, spelling: Spelling, context: Sequence[int]) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = spelling.strips and not any(self._bytes(token) for token in reversed(context))

    def add(self, token: int) -> str:
        content = self._bytes(token)
        if content and self._strips:
            content, self._strips = content.removeprefix(b" "), False
        return self._decoder.decode(content)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._spelling.special else self._spelling.bytes_of(token) or b""


class _Decoded:
    """Decoder of each token together with a few tokens before it."""

    def __init__(self, tokenizer: Any, context: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(context[-max(_CONTEXT) :])
        self._offset: int | None = None
        """Characters of the decoded ids that have been returned; None before the first token."""

    def add(self, token: int) -> str:
        if self._offset is None:  # decoded with the first token, so an error reaches the caller who added it
            self._ids = self._last_words([])
            self._offset = len(self._decode())
        elif len(self._ids) > _WINDOW:
            pending = len(self._decode()) - self._offset
            self._ids = self._last_words(self._ids[-_WINDOW // 2 :])
            self._offset = len(self._decode()) - pending
        self._ids.append(token)
        text, offset = self._decode(), self._offset
        # Hold back a character until all its bytes have arrived. Invalid bytes at the end are held back, too.
        end = len(text) - min(len(text) - len(text.rstrip("\ufffd")), _CHARACTER - 1)
        self._offset = max(offset, end)
        return text[offset:end]

    def finish(self) -> str:
        text = self._decode()
        offset, self._offset = self._offset, len(text)
        return "" if offset is None else text[offset:]

    def _last_words(self, otherwise: list[int]) -> list[int]:
        """Return the fewest last ids whose text begins with a whole character."""
        texts = ((self._ids[-size:], self._decode(self._ids[-size:])) for size in _CONTEXT)
        return next((ids for ids, text in texts if text and not text.startswith("\ufffd")), otherwise)

    def _decode(self, ids: list[int] | None = None) -> str:
        return self._tokenizer.decode(self._ids if ids is None else ids, skip_special_tokens=True)
