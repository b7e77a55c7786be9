"""Texts in pieces: whole characters, nothing of a stop string, and nothing that is taken back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.generation.detokenize import Pieces, Spelling, before_stop, stop_strings
from tests import tokenizing


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


@given(
    text=st.text("ab é東", max_size=12),
    stop=st.lists(st.text("ab é", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=12, max_size=40),
)
def test_pieces_are_the_text_before_the_first_stop(text: str, stop: list[str], cuts: list[int]) -> None:
    pieces, ids, shown = Pieces(Bytes(), stop), list(text.encode()), ""
    wanted = before_stop(text, stop)
    for cut in cuts:
        shown += pieces.add(ids[:cut])
        ids = ids[cut:]
        assert wanted.startswith(shown)
    shown += pieces.add(ids) + pieces.finish()
    assert shown == wanted
    assert pieces.stopped == (wanted != text)


def test_what_is_certain_is_told_at_once() -> None:
    pieces = Pieces(Bytes(), ["abc"])
    assert [pieces.add(list(text)) for text in (b"xa", b"b", b"d", b"\xc3", b"\xa9a")] == ["x", "", "abd", "", "é"]
    assert pieces.finish() == "a"


@pytest.mark.parametrize(
    ("stop", "message"),
    [(5, "stop=5 is not a text"), (["a", 5], "is not a text, nor a list"), (["a", ""], "stop='' would end every text")],
)
def test_stops_are_texts(stop: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stop_strings(stop)


TOKENIZERS = {
    "llama": lambda: tokenizing.sentencepiece(),
    "gemma": lambda: tokenizing.sentencepiece(strips=False),
    "metaspace": lambda: tokenizing.sentencepiece(metaspace=True),
    "bytes": lambda: tokenizing.byte_level(),
    "words": lambda: tokenizing.words(),
}
TEXT = "Once upon a time, 東 😀 a time!"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_completion_is_what_it_adds_to_its_prompt(name: str, at_once: int) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("w7 w9 w9 w12 w3" if name == "words" else TEXT)
    whole, found = tokenizer.decode(ids, skip_special_tokens=True), 0
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut], skip_special_tokens=True)
        if before.endswith("\ufffd"):
            continue
        pieces = Pieces(tokenizer, context=ids[:cut])
        made = [pieces.add(ids[place : place + at_once]) for place in range(cut, len(ids), at_once)]
        assert "".join(made) + pieces.finish() == whole[len(before) :]
        assert not any("\ufffd" in piece for piece in made)
        found += whole[len(before) :].startswith(" ")
    assert found


@pytest.mark.parametrize("name", ["llama", "gemma", "bytes"])
def test_a_stop_string_may_begin_with_a_space_or_hold_a_special_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    prompt = tokenizer.encode("Once upon a")
    time = tokenizer.encode("Once upon a time")[len(prompt) :]
    pieces = Pieces(tokenizer, [" time"], prompt)
    assert (pieces.add(time), pieces.stopped) == ("", True)
    (end,) = tokenizer.encode("<|end|>", add_special_tokens=False)
    (other,) = tokenizer.encode("</s>", add_special_tokens=False)
    for stop, text in (
        ("<|end|>", " time time"),
        ("time<|end|>", " time "),
        ("e</s> t", " tim"),
        ("e time t", " tim"),
        ("zzz", " time time time"),
    ):
        pieces = Pieces(tokenizer, [stop], prompt)
        given = [*time, other, *time, end, *time]
        assert "".join(pieces.add([token]) for token in given) + pieces.finish() == text, stop
        assert pieces.stopped == (stop != "zzz")


class Counted:
    """A tokenizer that counts the tokens it is given to decode."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def decode(self, ids: list[int], **settings: Any) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@pytest.mark.parametrize("name", ["llama", "bytes", "other"])
def test_bytes_that_are_no_characters_take_no_longer_each(name: str) -> None:
    tokenizer = Counted(Bytes() if name == "other" else TOKENIZERS[name]())
    wrong, *right = {
        "llama": lambda: tokenizer.convert_tokens_to_ids(["<0xFF>", "<0xC3>", "<0xA9>"]),
        "bytes": lambda: [*tokenizer.convert_tokens_to_ids(["ÿ"]), *tokenizer.encode("é")],
        "other": lambda: b"\xff\xc3\xa9",
    }[name]()
    pieces = Pieces(tokenizer)
    made = [pieces.add([wrong]) for _ in range(2000)] + [pieces.add(right), pieces.finish()]
    assert tokenizer.decoded < 100 * 2000
    assert "".join(made) == "\ufffd" * 2000 + "é"
    assert made[-1] == "" and sum(map(bool, made)) > 1900


@pytest.mark.parametrize("name", ["llama", "gemma", "bytes"])
def test_names_of_tokens_are_told_apart_and_their_bytes_are_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    spelling = Spelling(tokenizer)
    found = [spelling.bytes_of(token) or b"" for token in tokenizer.encode(TEXT, add_special_tokens=False)]
    assert b"".join(found).decode().removeprefix(" ") == TEXT
    assert any(byte in (b"\xf0", b"\xf0\x9f") for byte in found)
    time, end = (tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("a time", "<|end|>"))
    assert (spelling.name(time), spelling.name(end)) == (" time", "<|end|>")
    # Bytes that SentencePiece falls back to have the names of the letters that they are.
    names = [spelling.name(token) for token in range(len(tokenizer)) if token >= 4 + 128 or name == "bytes"]
    assert len(set(names)) == len(names) and "bytes:\\xf0" in names


def test_words_are_named_as_they_stand_behind_others() -> None:
    spelling = Spelling(tokenizing.words())
    assert [(spelling.name(token), spelling.bytes_of(token)) for token in (7, 9)] == [(" w7", b" w7"), (" w9", b" w9")]
