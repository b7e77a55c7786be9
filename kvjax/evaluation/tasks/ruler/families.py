"""Families of questions, each with a function that drafts its cases."""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Iterator

from kvjax.evaluation.tasks.ruler.drafts import HAYS, KINDS, CaseRequest, Draft, Hay, QuestionFamily
from kvjax.evaluation.tasks.words import ADJECTIVES, NOUNS


def _draw_code(request: CaseRequest, letters: str, length: int) -> str:
    return request.fresh(lambda rng: "".join(rng.choices(letters, k=length)))


def _magic(request: CaseRequest, *, distractors: int = 0, values: int = 1, queries: int = 1) -> Draft:
    """Draft RULER's needles in a haystack: sentences that state the value of a key."""
    name, opening = f"magic {KINDS[request.value_type].name}", "One" if values > 1 else "The"

    def draw(kind: str) -> str:
        return request.fresh(KINDS[kind].draw)

    def needle(key: str) -> tuple[str, str]:
        value = draw(request.value_type)
        return f"{opening} {name} of {key} is {value}.", value

    keys = [draw(request.key_type) for _ in range(queries)]
    targets = [needle(key) for key in keys for _ in range(values)]
    needles = [text for text, _ in targets] + [needle(draw(request.key_type))[0] for _ in range(distractors)]
    depths = [request.first_depth(), *(request.rng.random() for _ in needles[1:])]
    planted, of_needles = list(zip(depths, needles, strict=True)), request.hay == "needles"
    endless = (needle(draw(request.key_type))[0] for _ in itertools.count())
    hay = Hay(endless, "\n") if of_needles else request.text_hay()
    single = len(needles) == 1 and not of_needles
    hidden, them = (f"a {name}", "it") if single else (f"{name}s", "them")
    intro = f"The text below hides {hidden}. Remember {them}: you will be asked for {them}."
    several, these = len(targets) > 1, " and ".join([", ".join(keys[:-1]), keys[-1]] if queries > 1 else keys)
    question = f"What are all the {name}s of {these}?" if several else f"What is the {name} of {these}?"
    prefix = f"The {name}s of {these} are" if several else f"The {name} of {these} is"
    return Draft(
        lambda units: f"{intro}\n{hay.plant(units, planted)}",
        question,
        tuple(value for _, value in targets),
        prefix,
        keys=queries + distractors,
        hay_keys=int(of_needles),
    )


def _variable_tracking(request: CaseRequest) -> Draft:
    """Draft one chain of assignments, in order: a number, then each variable from the one before."""
    value = str(request.rng.randrange(10**4, 10**5))
    names = [_draw_code(request, string.ascii_uppercase, 5) for _ in range(request.needles)]
    sources = [value, *(f"VAR {name}" for name in names)]
    chain = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False)]
    planted = list(zip(sorted(request.rng.random() for _ in chain), chain, strict=True))
    hay = request.text_hay()
    intro = "The text below hides assignments of variables. Remember them and what value each variable gets."
    return Draft(
        lambda units: f"{intro}\n{hay.plant(units, planted)}",
        f"Which variables have the value {value}, directly or through others?",
        tuple(names),
        f"The {len(names)} variables with the value {value} are:",
        keys=len(names),
    )


def _common_words(request: CaseRequest) -> Draft:
    """Draft a numbered list with some words 30 times and others 3 times, or 6 and 1 in contexts below 4096."""
    often, rarely = (30, 3) if request.length >= 4096 else (6, 1)
    words = request.rng.sample(ADJECTIVES + NOUNS, len(ADJECTIVES + NOUNS))
    common, order = words[: request.needles], request.rng.random()

    def pairs() -> Iterator[str]:
        while True:  # after the plain words; skips pairs that contain an answer
            pair = request.fresh(KINDS["words"].draw)
            if not set(pair.split("-")) & set(common):
                yield pair

    rare_words = Hay(itertools.chain(words[request.needles :], pairs()), " ")

    def context(units: int) -> str:
        listed = common * often + rare_words.take(units) * rarely
        random.Random(order).shuffle(listed)
        entries = " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
        return f"In the numbered list below some words occur more often than others. Remember those.\n{entries}"

    subject, verb = (f"{len(common)} words occur", "are") if len(common) > 1 else ("word occurs", "is")
    return Draft(
        context,
        f"Which {subject} most often in the list?",
        tuple(common),
        f"The {subject.replace(' occur', ' that occur')} most often in the list {verb}:",
        keys=len(common),
        hay_keys=1,
        min_units=1,
    )


def _frequent_words(request: CaseRequest) -> Draft:
    """Draft coded words with frequencies of the zeta distribution of exponent 2; the most frequent is noise."""
    count, order = 3, request.rng.random()
    words = (_draw_code(request, string.ascii_lowercase, 6) for _ in itertools.count())
    coded = Hay(itertools.chain(["..."], words), " ")

    def share(rank: int) -> float:
        return 6 / (math.pi * rank) ** 2

    def context(units: int) -> str:
        counts = list(itertools.takewhile(bool, (int(units * share(rank)) for rank in itertools.count(1))))
        text = [word for word, times in zip(coded.take(len(counts)), counts, strict=True) for _ in range(times)]
        random.Random(order).shuffle(text)
        return f"Count how often each coded word occurs in the text below.\n{' '.join(text)}"

    return Draft(
        context,
        "Which three coded words occur most often in the text, apart from the dots?",
        tuple(coded.take(count + 1)[1:]),
        "The three coded words that occur most often are:",
        keys=count,
        # The last of them has to occur at least once more than the word of the next rank.
        min_units=math.ceil(1 / (share(count + 1) - share(count + 2))),
    )


def _key_values(request: CaseRequest) -> Draft:
    """Draft a JSON object of uuids (Liu et al. 2023, Lost in the Middle, arXiv 2307.03172, section 3)."""

    def pair() -> tuple[str, str]:
        return request.fresh(KINDS["uuids"].draw), request.fresh(KINDS["uuids"].draw)

    def line(key: str, value: str) -> str:
        return f'"{key}": "{value}"'

    key, value = pair()
    planted = [(request.first_depth(), line(key, value))]
    hay = Hay((line(*pair()) for _ in itertools.count()), ",\n ")
    return Draft(
        lambda units: f"The JSON object below holds keys and their values.\n{{{hay.plant(units, planted)}}}",
        f'What is the value of the key "{key}"?',
        (value,),
        f'The value of the key "{key}" is',
        hay_keys=1,
    )


def _pass_key(request: CaseRequest) -> Draft:
    """Draft five digits in noise (Mohtashami and Jaggi 2023, arXiv 2305.16300, section 4.2)."""
    key = str(request.rng.randrange(10**4, 10**5))
    needle = f"The pass key is {key}. Keep it in mind: {key} is the pass key."
    planted, hay = [(request.first_depth(), needle)], request.text_hay()
    intro = "The text below hides a pass key among things of no importance. Remember it: you will be asked for it."
    return Draft(
        lambda units: f"{intro}\n{hay.plant(units, planted)}", "What is the pass key?", (key,), "The pass key is"
    )


MANY = (4, 1, 1000)
"""Default, minimum and maximum number of needles."""
FAMILIES = {
    "single": QuestionFamily(_magic, "the value of a key, from one needle", HAYS, depth=True, types=True),
    "multi_key": QuestionFamily(
        lambda request: _magic(request, distractors=request.needles - 1),
        "the value of a key among other keys",
        ("needles", "noise", "essay"),
        depth=True,
        needles=MANY,
        types=True,
    ),
    "multi_value": QuestionFamily(
        lambda request: _magic(request, values=request.needles), "all values of a key", HAYS, needles=MANY, types=True
    ),
    "multi_query": QuestionFamily(
        lambda request: _magic(request, queries=request.needles),
        "the values of several keys",
        HAYS,
        needles=MANY,
        types=True,
    ),
    "variable_tracking": QuestionFamily(
        _variable_tracking,
        "all variables of a chain of assignments",
        ("noise", "essay"),
        needles=(5, 2, 1000),
        max_new_tokens=30,
    ),
    "common_words": QuestionFamily(
        _common_words, "the words that a list has most often", (), needles=(10, 1, 100), max_new_tokens=120
    ),
    "frequent_words": QuestionFamily(_frequent_words, "the three most frequent coded words", (), max_new_tokens=50),
    "key_values": QuestionFamily(_key_values, "the value of a key of a JSON object", (), depth=True),
    "pass_key": QuestionFamily(
        _pass_key, "a pass key, from one needle", ("noise", "essay"), depth=True, max_new_tokens=32
    ),
}
"""Families of `cases`, by name."""
