"""Keywords of functions that generate texts: type checkers know those that the functions take."""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import kvjax
from kvjax.generation import keywords as types
from kvjax.generation.generate import begin, generate_ids, generate_texts, stream_text
from kvjax.utils.settings import keywords

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("kind", "functions", "left_out"),
    [
        (types.BeginKeywords, [begin], []),
        (types.TextKeywords, [begin], ["chat", "num_samples", "rope_length"]),
        (types.TextsKeywords, [begin, generate_ids], ["chat"]),
        (types.GenerateKeywords, [begin, generate_ids, generate_texts], []),
        (types.StreamKeywords, [begin, stream_text], ["num_samples", "rope_length"]),
    ],
)
def test_types_are_those_of_the_functions(kind: Any, functions: list[Callable[..., Any]], left_out: list[str]) -> None:
    written = {name: getattr(hint, "__forward_arg__", hint) for name, hint in kind.__annotations__.items()}
    takes = {each.name: each for function in functions for each in inspect.signature(function).parameters.values()}
    expected = {name: takes[name].annotation for name in keywords(*functions) if name not in left_out}
    assert written == expected


def test_a_misspelt_keyword_is_flagged_by_type_checkers_and_refused() -> None:
    model = kvjax.load("tiny")
    with pytest.raises(TypeError, match="did you mean policy"):
        model.generate("Once", polcy="h2o")  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="did you mean budget"):
        model.stream("Once", buget=16)  # pyright: ignore[reportCallIssue]
