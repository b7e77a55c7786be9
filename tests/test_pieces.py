"""Texts in pieces: whole characters, nothing of a stop string, and nothing that is taken back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.sampling.pieces import Pieces, Stops, before_stop, stop_strings


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


def test_rows_end_with_the_token_that_completes_a_stop() -> None:
    stops = Stops(Bytes(), ["ab"], rows=2)
    tokens, belongs = np.array([list(b"xabx"), list(b"xaxx"), list(b"abab")]), np.ones((3, 4), bool)
    belongs[1, 3] = False
    left, ended = stops(tokens, belongs)
    assert left.tolist() == [[True, True, True, False], [True, True, True, False], [True] * 4]
    assert ended.tolist() == [True, True, False]
    left, ended = stops(tokens, np.ones((3, 4), bool))
    assert left.sum(1).tolist() == [0, 4, 4] and ended.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("stop", "message"),
    [(5, "stop=5 is not a text"), (["a", 5], "is not a text, nor a list"), (["a", ""], "stop='' would end every text")],
)
def test_stops_are_texts(stop: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stop_strings(stop)
