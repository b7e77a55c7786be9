"""Cases of retrieval, against a literal solver that knows contexts and questions alone, and the scores of answers."""

from __future__ import annotations

import collections
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.evaluation.tasks.cases import Case, exact_match, f1, read_cases, rouge, string_match
from kvjax.evaluation.tasks.ruler import FAMILIES, KINDS, cases
from kvjax.evaluation.tasks.words import ADJECTIVES, NOUNS
from kvjax.models.tokenizer import read_tokenizer

ESSAY = " ".join(f"In the year {1000 + i} nothing of note was seen, or so they say!" for i in range(150))
ENDLESS = "word " * 300
NEEDLE = r"The magic \w+ of {} is \S+\.|The pass key is .* is the pass key\.|\"{}\": \"[^\"]+\""
HAYS = [(family, hay) for family, made in FAMILIES.items() for hay in made.hays or (None,)]
OF_DEPTH = [(family, hay) for family, hay in HAYS if FAMILIES[family].depth]


class Words:
    """Counts words, another tokenizer than all others."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
        return ["<s>"] * add_special_tokens + text.split()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return read_tokenizer(Path(kvjax.__file__).parent / "tiny" / "weights")


def make(tokenizer: Any, family: str, length: int = 1024, depth: float = 0.5, **settings: Any) -> list[Case]:
    arguments: dict[str, Any] = {"count": 2, "seed": 0} | settings
    return cases(tokenizer, family, length, depth if FAMILIES[family].depth else None, **arguments)


def of_hay(hay: str | None, text: str = ESSAY) -> dict[str, Any]:
    return {"hay": hay, "text": text if hay == "essay" else None}


def most_common(words: list[str], count: int) -> set[str]:
    ranked = collections.Counter(words).most_common(count + 1)
    assert len(ranked) == count or ranked[count - 1][1] > ranked[count][1], "the answer would be one of several"
    return {word for word, _ in ranked[:count]}


def solve(context: str, question: str) -> set[str]:
    """The answers, as a reader without a model would find them."""
    if "pass key" in question:
        return set(re.findall(r"pass key is (\d+)", context))
    if "coded words" in question:
        return most_common([word for word in context.split("\n", 1)[1].split() if word != "..."], 3)
    if "in the list" in question:
        count = int((re.search(r"Which (\d+) words", question) or [0, 1])[1])
        return most_common(re.findall(r"\d+\. (\S+)", context), count)
    if found := re.search(r"value of the key \"(.*)\"", question):
        return {json.loads(context[context.index("{") :])[found[1]]}
    if found := re.search(r"have the value (\d+)", question):
        values = {found[1]}
        for variable, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", context):
            values |= {variable} if source in values else set[str]()
        return values - {found[1]}
    asked = re.split(r", | and ", question.split(" of ", 1)[1].rstrip("?"))
    return {value for key in asked for value in re.findall(rf"magic \w+ of {re.escape(key)} is (\S+)\.", context)}


@pytest.mark.parametrize("length", (512, 1500))
@pytest.mark.parametrize(("family", "hay"), HAYS)
def test_cases_are_as_long_as_asked_and_have_their_answers(
    tokenizer: Any, family: str, hay: str | None, length: int
) -> None:
    made = make(tokenizer, family, length, **of_hay(hay))
    for case in made:
        asked = tokenizer.encode(case.continuation, add_special_tokens=False)
        tokens = len(tokenizer.encode(case.context)) + len(asked)
        assert 0.9 * length <= len(tokenizer.encode(case.context + case.continuation)) <= length
        assert 0.9 * length <= tokens == case.metadata["tokens"] <= length
        assert solve(case.context, case.question) == set(case.references)
        assert len(set(case.references)) == len(case.references) and (case.context + case.continuation).isascii()
        assert case.prefix and not any(answer in case.continuation for answer in case.references)
        told = {name: case.metadata[name] for name in ("family", "length", "hay", "seed")}
        assert told == {"family": family, "length": length, "hay": hay, "seed": 0}
    assert [case.metadata["index"] for case in made] == [0, 1] and made[0].references != made[1].references


@pytest.mark.parametrize("depth", (0, 0.3, 1.0))
@pytest.mark.parametrize(("family", "hay"), OF_DEPTH)
def test_the_needle_is_at_its_depth(tokenizer: Any, family: str, hay: str | None, depth: float) -> None:
    for text in (ESSAY, ENDLESS) if hay == "essay" else ("",):
        for case in make(tokenizer, family, 1500, depth, **of_hay(hay, text)):
            key = re.escape((re.search(r"[\w\"]+-[\w\"-]+", case.question) or [""])[0].strip('"'))
            body = case.context.split("\n", 1)[1]
            found = re.findall(NEEDLE.format(key, key), body)
            assert len(found) == 1 and case.references[0] in found[0]
            before, after = (re.sub(r"\W", "", each) for each in body.split(found[0]))
            share = len(before) / (len(before) + len(after))
            if depth in (0, 1) and not (family == "multi_key" and hay != "needles"):
                assert share == depth
            assert share == pytest.approx(depth, abs=0.05) and case.metadata["depth"] == float(depth)
            if text == ESSAY and 0 < depth < 1:
                assert body.split(found[0])[0].rstrip().endswith(("!", "."))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_asked_depends_on_nothing_else(tokenizer: Any, family: str) -> None:
    def told(made: list[Case]) -> list[tuple[str, tuple[str, ...]]]:
        return [(case.question, case.references) for case in made]

    whole = make(tokenizer, family, count=3)
    assert make(tokenizer, family, count=1) == whole[:1]
    assert told(make(Words(), family, count=2)) == told(whole[:2])
    for hay in FAMILIES[family].hays:
        assert told(make(tokenizer, family, count=1, **of_hay(hay))) == told(whole[:1])
    assert told(make(tokenizer, family, seed=1))[0] not in told(whole)
    assert told(make(tokenizer, family, 1025))[0] not in told(whole)
    if FAMILIES[family].depth:
        assert told(make(tokenizer, family, depth=0.25))[0] not in told(whole)


@pytest.mark.parametrize(
    ("family", "needles", "keys", "answers"),
    [
        ("multi_key", 7, 7, 1),
        ("multi_value", 6, 1, 6),
        ("multi_value", 1, 1, 1),
        ("multi_query", 3, 3, 3),
        ("variable_tracking", 3, 3, 3),
        ("common_words", 1, None, 1),
        ("common_words", 4, None, 4),
    ],
)
def test_needles_are_counted(tokenizer: Any, family: str, needles: int, keys: int | None, answers: int) -> None:
    hay = None if keys is None else "noise"
    for case in make(tokenizer, family, hay=hay, needles=needles):
        assert len(case.references) == answers and solve(case.context, case.question) == set(case.references)
        assert case.metadata["needles"] == needles
        counted = len(set(re.findall(r"\d+\. (\S+)", case.context))) if keys is None else keys
        assert case.metadata["keys"] == counted


@pytest.mark.parametrize("key_type", KINDS)
@pytest.mark.parametrize("value_type", KINDS)
def test_keys_and_values_are_of_any_kind(key_type: str, value_type: str) -> None:
    forms = {"words": r"[a-z]+-[a-z]+", "numbers": r"[1-9]\d{6}", "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}
    (case,) = make(Words(), "multi_key", 900, key_type=key_type, value_type=value_type, count=1)
    needles = re.findall(r"The magic \w+ of (\S+) is (\S+)\.\n", case.context + "\n")
    assert len(needles) == case.metadata["keys"] == len({key for key, _ in needles}) > 90
    assert all(re.fullmatch(forms[key_type], key) and re.fullmatch(forms[value_type], value) for key, value in needles)
    assert solve(case.context, case.question) == set(case.references)


def test_a_long_list_has_words_enough() -> None:
    (case,) = make(Words(), "common_words", 6000, count=1)
    listed = collections.Counter(re.findall(r"\d+\. (\S+)", case.context))
    assert solve(case.context, case.question) == set(case.references) and len(listed) > len(ADJECTIVES + NOUNS)
    assert set(listed.values()) == {30, 3}
    assert not any(answer in word for answer in case.references for word in listed if word != answer)


def test_the_shortest_coded_text_has_one_answer() -> None:
    with pytest.raises(ValueError, match="length=90 is too short for frequent_words, which takes 9"):
        make(Words(), "frequent_words", 90)
    for length in range(100, 160, 4):
        (case,) = make(Words(), "frequent_words", length, count=1)
        assert solve(case.context, case.question) == set(case.references)


def test_no_word_is_part_of_another() -> None:
    words = ADJECTIVES + NOUNS
    assert [word for word in words if sum(word in other for other in words) > 1] == []


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("double", {}, "family='double' is not one of single, multi_key"),
        *((family, {"length": 12}, f"length=12 is too short for {family}, which takes") for family in FAMILIES),
        ("key_values", {"length": 320}, r"by key_values, which takes 2\d\d .* 3\d\d; give 8\d\d or more"),
        *(("single", {"depth": depth}, "is not from 0.0") for depth in (-0.1, 1.1, None, float("nan"), True, "0.5")),
        ("multi_query", {"depth": 0.5}, "depth=0.5 is not for multi_query"),
        ("common_words", {"depth": 0.0}, "depth=0.0 is not for common_words"),
        ("single", {"hay": "essay"}, "hay='essay' and a text do not go together"),
        ("single", {"hay": "noise", "text": ESSAY}, "hay='noise' and a text do not go together"),
        ("single", {"text": " \n"}, "the text for hay='essay' is empty"),
        ("pass_key", {"hay": "needles"}, "hay='needles' of pass_key is not one of noise, essay"),
        ("key_values", {"hay": "noise"}, "hay='noise' is not for key_values"),
        ("single", {"needles": 2}, "needles=2 is not for single"),
        ("multi_key", {"needles": 0}, "needles=0"),
        ("single", {"key_type": "names"}, "key_type='names' is not one of words, numbers, uuids"),
        ("pass_key", {"value_type": "words"}, "value_type='words' is not for pass_key"),
        ("single", {"count": 0}, "count=0"),
        ("single", {"seed": -1}, "seed=-1"),
        ("single", {"length": 0}, "length=0"),
    ],
)
def test_refusals(tokenizer: Any, family: str, changes: dict[str, Any], message: str) -> None:
    usual = {"length": 1024, "depth": 0.5 if family in FAMILIES and FAMILIES[family].depth else None}
    settings: dict[str, Any] = usual | {"count": 1, "seed": 0} | changes
    with pytest.raises(ValueError, match=message):
        cases(tokenizer, family, **settings)


def test_cases_are_read_from_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    lines: list[dict[str, Any]] = [
        {"context": "Lily is six.\n", "question": "How old is Lily?", "answer": "six", "id": 7},
        {"context": "Tom sat.", "question": "Who sat?", "answer": ["Tom", "Tom, he did"]},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_cases(file) == [
        Case("Lily is six.", "How old is Lily?", ("six",), metadata={"id": 7}),
        Case("Tom sat.", "Who sat?", ("Tom", "Tom, he did")),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"context": "a", "question": "b"}',
        '{"context": "a", "question": "b", "answer": []}',
        '{"context": "a", "question": "b", "answer": ["c", " "]}',
        '{"context": "a", "question": 5, "answer": "c"}',
        '{"context": "a", "question": "b", "answer": "c", "prefix": "d"}',
    ],
)
def test_lines_that_are_no_cases_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_text(f'{{"context": "a", "question": "b", "answer": "c"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"cases.jsonl, line 2: it is not of the form"):
        read_cases(file)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"cases.jsonl, line 1: it is not JSON"):
        read_cases(file)


TEXTS = st.text("ab THE.,-", min_size=1, max_size=12)


@given(answer=TEXTS, answers=st.lists(TEXTS, min_size=1, max_size=4), order=st.randoms(use_true_random=False))
def test_scores_are_shares(answer: str, answers: list[str], order: Any) -> None:
    shuffled = order.sample(answers, len(answers))
    for score in (string_match, exact_match, f1):
        assert 0 <= score(answer, answers) == score(answer, shuffled) <= 1
    assert exact_match(answer, answers) <= f1(answer, answers)
    assert exact_match(answer, [*answers, answer]) == f1(answer, [*answers, answer]) == 1
    assert string_match(" ".join(answers), answers) == 1


def test_scores_by_hand() -> None:
    assert string_match("They are Red-Fox and 12345.", ["red-fox", "123", "blue", "6"]) == 0.5
    assert exact_match("The  cat, sat!", ["a dog", "Cat sat"]) == 1 and exact_match("cats sat", ["cat sat"]) == 0
    assert f1("the cat cat sat", ["cat sat down", "dog"]) == pytest.approx(2 * 2 / (3 + 3))
    assert f1("The", ["cat"]) == 0 and f1("The", ["a"]) == exact_match("The", ["a"]) == 1


@pytest.mark.parametrize("answers", ([], [""], ["a", ""], "a"))
def test_nothing_expected_is_refused(answers: Any) -> None:
    for score in (string_match, exact_match, f1):
        with pytest.raises(ValueError, match="expects nothing; give a list of texts"):
            score("a", answers)


def test_rouge_by_hand() -> None:
    pytest.importorskip("rouge_score", reason="ROUGE needs the evaluate extra")
    # 5 words, 4 of them among 6: F = 2 * 4 / 11; pairs: 2 of 4 among 5; in order: 3.
    scores = rouge("the cats lay on mats", "on the mat the cat lay")
    assert scores == pytest.approx({"rouge-1": 10 / 11, "rouge-2": 4 / 9, "rouge-l": 6 / 11})
    assert rouge("cats", "cats") == {"rouge-1": 1, "rouge-2": 0, "rouge-l": 1}


def test_rouge_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'kvjax[evaluate]'")):
        rouge("a", "a")
