"""Tokenizers: reading them, their special tokens and punctuation, and a lower bound on the tokens of a text."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import re
import unicodedata
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.models.tokenizer_files import ROLES, check_files, read_tokenizer_settings
from kvjax.utils.files import damage_named, is_panic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARKERS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")
"""Instruction markers that a tokenizer may spell with several tokens."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Transformers classes that are defined by tokenizer.json alone."""


def read_tokenizer(directory: Path) -> Any:
    """Read the transformers tokenizer of a directory, whose methods raise a ValueError where it is damaged.

    If tokenizer.json is enough to encode and decode, transformers is imported only when another method is used.
    That import takes a second, or several with torch installed.
    """
    file, config = directory / "tokenizer.json", check_files(directory)
    if config.get("tokenizer_class") not in _PLAIN:
        from transformers import AutoTokenizer

        return _eager(AutoTokenizer.from_pretrained(str(directory), local_files_only=True), directory)
    if not file.exists() or config.get("clean_up_tokenization_spaces") or "added_tokens_decoder" in config:
        return _eager(_of_directory(directory), directory)
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(file))
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = bool(config.get("split_special_tokens"))
    special = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
    extra = config.get("extra_special_tokens") or []
    config_tokens = [config.get(role) for role in ROLES] + list(config.get("additional_special_tokens") or [])
    config_tokens += extra.values() if isinstance(extra, dict) else extra
    # Transformers adds special tokens that the file lacks or that the config gives in another form.
    if all(token is None or (isinstance(token, str) and token in special) for token in config_tokens):
        return LazyTokenizer(fast, functools.partial(_of_directory, directory), directory)
    return _eager(_of_directory(directory), directory)


def adds_bos(directory: Path) -> bool | None:
    """Return `add_bos_token` of a directory's tokenizer_config.json; None if it is not set.

    Transformers ignores this setting if there is a tokenizer.json, which has its own rule.
    """
    value = read_tokenizer_settings(directory).get("add_bos_token")
    return value if isinstance(value, bool) else None


def _of_directory(directory: Path) -> Any:
    # AutoTokenizer would choose this class, too, but would import torch if it is installed.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)


def _eager(tokenizer: Any, place: Path) -> LazyTokenizer:
    return LazyTokenizer(None, lambda: tokenizer, place)


def lazy_tokenizer(fast: Tokenizer, settings: Mapping[str, Any], place: str | Path = "a GGUF file") -> LazyTokenizer:
    """Make a tokenizer that has no directory, from the arguments of PreTrainedTokenizerFast."""

    def make() -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=fast, **settings)

    return LazyTokenizer(fast, make, place)


class LazyTokenizer:
    """A tokenizer that encodes and decodes without transformers and imports it for everything else.

    Where the library behind it fails on a text, as damaged files make it, a ValueError names `place`.

    Args:
        fast: encodes and decodes like the transformers tokenizer; None if only that can.
        make: function that makes the transformers tokenizer.
        place: the file or directory that it comes from.
    """

    fast: Tokenizer | None
    place: str | Path
    _make: Callable[[], Any]

    def __init__(self, fast: Tokenizer | None, make: Callable[[], Any], place: str | Path) -> None:
        vars(self).update(fast=fast, _make=make, place=place)

    @functools.cached_property
    def transformers(self) -> Any:
        """The transformers tokenizer."""
        with damage_named(unreadable(self.place)):
            return self._make()

    @contextlib.contextmanager
    def _failures_named(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            # The library raises nothing more special than `Exception`, and panics; other errors are of a caller.
            if type(error) is not Exception and not is_panic(error):
                raise
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise ValueError(f"the tokenizer in {self.place} fails on a text ({reason}): it is damaged.") from error

    def encode(self, text: str, *, add_special_tokens: bool = True, **settings: Any) -> list[int]:
        """Encode a text into token ids."""
        with self._failures_named():
            if self.fast is None or settings or not isinstance(text, str):
                return self.transformers.encode(text, add_special_tokens=add_special_tokens, **settings)
            return self.fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Any, *, skip_special_tokens: bool = False, **settings: Any) -> Any:
        """Decode token ids into text."""
        plain = not settings and isinstance(ids, list) and all(isinstance(token, int) for token in ids)
        with self._failures_named():
            if self.fast is None or not plain:
                return self.transformers.decode(ids, skip_special_tokens=skip_special_tokens, **settings)
            return self.fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def __call__(self, *texts: Any, **settings: Any) -> Any:
        """Call the transformers tokenizer."""
        with self._failures_named():
            return self.transformers(*texts, **settings)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.transformers, name, value)

    def __len__(self) -> int:
        return len(self.transformers)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, not counting added ones."""
        return self.transformers.vocab_size if self.fast is None else self.fast.get_vocab_size(with_added_tokens=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("fast", "place", "_make"):
            raise AttributeError(name)
        value = getattr(self.transformers, name)
        if not inspect.ismethod(value):
            return value

        @functools.wraps(value)
        def method(*arguments: Any, **settings: Any) -> Any:
            with self._failures_named():
                return value(*arguments, **settings)

        return method


def unreadable(place: str | Path) -> str:
    """Return the sentence for `damage_named` about a tokenizer that cannot be read."""
    return f"the tokenizer in {place} cannot be read ({{reason}}); it is damaged or of an unknown kind."


@dataclasses.dataclass(frozen=True)
class TokenClassIds:
    """Ids of special tokens and of punctuation, and markers that take several tokens each."""

    special: tuple[int, ...]
    punctuation: tuple[int, ...]
    markers: tuple[tuple[int, ...], ...]


def token_classes(tokenizer: Any) -> TokenClassIds:
    """Find the special tokens and the punctuation of a transformers tokenizer.

    Special tokens are those of the tokenizer, and those of `MARKERS` that are one token. A token is punctuation if its
    text, without leading spaces, is not empty and all of its characters are in Unicode's category P. Markers are
    recognized at the start of a text and after a space, a line break, a letter, or the token that begins or ends a
    text. Punctuation right before a marker may change its tokens.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {int(i) for i in tokenizer.all_special_ids} | {int(i) for i, token in added.items() if token.special}
    spellings = {spelling for marker in MARKERS for spelling in _spellings(tokenizer, marker)}
    special |= {spelling[0] for spelling in spellings if len(spelling) == 1}
    names = {int(i): name for name, i in tokenizer.get_vocab().items()}
    ids = sorted(set(names) - special)
    texts = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    punctuation = (i for i, text in zip(ids, texts, strict=True) if is_punctuation(_text(names[i], text)))
    several = sorted(spelling for spelling in spellings if len(spelling) > 1)
    return TokenClassIds(tuple(sorted(special)), tuple(punctuation), tuple(several))


def is_punctuation(text: str) -> bool:
    """Return whether a token's text is punctuation, ignoring leading spaces."""
    text = text.lstrip(" \u2581")
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)


def _text(name: str, decoded: str) -> str:
    # SentencePiece's byte fallback writes a byte as <0x2E>, which some decoders do not convert.
    byte = _BYTE.fullmatch(name)
    return chr(int(byte[1], 16)) if byte and int(byte[1], 16) < 128 else decoded


def _spellings(tokenizer: Any, marker: str) -> set[tuple[int, ...]]:
    """Return a marker's tokens at the start of a text, and after a space, a line break, a word, a special token."""
    before = ["", " ", "\n", "a", "a ", ". ", "\n\n"]
    before += [token + space for token in (tokenizer.bos_token, tokenizer.eos_token) if token for space in ("", " ")]
    spellings = set()
    for text in before:
        ids = tokenizer.encode(text + marker, add_special_tokens=False)
        for start in range(len(ids) - 1, -1, -1):  # the shortest suffix that contains all of the marker
            if tokenizer.decode(ids[start:], clean_up_tokenization_spaces=False).strip() == marker:
                spellings.add(tuple(int(i) for i in ids[start:]))
                break
    return spellings


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
    parts = (part for part in (fast.normalizer, fast.pre_tokenizer) if part is not None)
    rules = [rule for part in parts for rule in _rules(json.loads(part.__getstate__()))]
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


def _rules(rule: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rules of a normalizer or pre-tokenizer, those of a sequence one after the other."""
    inner = rule.get("normalizers", rule.get("pretokenizers"))
    return [rule] if inner is None else [leaf for one in inner for leaf in _rules(one)]


def _factor(rule: Mapping[str, Any]) -> float | None:
    """Return the factor by which a rule reduces characters, at most; None if there is no bound."""
    kind = rule.get("type")
    if kind in ("Split", "Punctuation"):
        return None if rule.get("behavior") == "Removed" else 1.0
    if kind == "Replace":
        text, content = rule["pattern"].get("String"), rule["content"]
        return max(1.0, len(text) / len(content)) if text and content else None
    return _RULES.get(str(kind))
