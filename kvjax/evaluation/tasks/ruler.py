"""Retrieval from contexts of a given length: RULER's families (Hsieh et al. 2024, arXiv 2404.06654), and two more.

Structure and counts are the published ones. Words and sentences are not, no worked example precedes the question, and
`length` does not include the answer. Compare scores with each other, not with published numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvjax.evaluation.tasks.cases import Case
from kvjax.evaluation.tasks.words import ADJECTIVES, NOUNS
from kvjax.utils.settings import whole_number

NOISE = (
    "Rain falls on the hills.",
    "The river runs to the sea.",
    "Birds rest in the old trees.",
    "A wind blows from the west.",
    "Night comes after the day.",
)
"""Sentences repeated as hay."""
HAYS = ("noise", "needles", "essay")
"""Kinds of hay: repeated sentences, needles that are not asked for, a text of the user's."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of keys or values: its name in a needle, and a function that draws one."""

    name: str
    draw: Callable[[random.Random], str]


KINDS = {
    "words": Kind("word", lambda rng: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"),
    "numbers": Kind("number", lambda rng: str(rng.randrange(10**6, 10**7))),
    "uuids": Kind("code", lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4))),
}
"""Possible values of `key_type` and `value_type`."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """A case before its amount of hay is chosen.

    Args:
        context: returns the context with a number of units of hay; more units never give fewer tokens.
        question: as in `Case`.
        answers: as in `Case`.
        prefix: as in `Case`.
        keys: number of keys, or of words to distinguish, in the context.
        hay_keys: keys that each unit of hay adds.
        least: units of hay that the question needs to have an answer.
    """

    context: Callable[[int], str]
    question: str
    answers: tuple[str, ...]
    prefix: str
    keys: int = 1
    hay_keys: int = 0
    least: int = 0


@dataclasses.dataclass(frozen=True)
class CaseRequest:
    """Settings of a draft; `cases` explains the fields.

    Args:
        words: of the text.
        needles: 1 if the family has a fixed number.
    """

    length: int
    depth: float | None
    hay: str | None
    words: Sequence[str]
    needles: int
    key_type: str
    value_type: str

    def first_depth(self, draws: Draws) -> float:
        """Return the depth of the first needle: the given one, or a random one."""
        return draws.rng.random() if self.depth is None else self.depth


@dataclasses.dataclass(frozen=True)
class QuestionFamily:
    """A kind of question.

    Args:
        draft: makes a case without its hay.
        summary: what is asked.
        hays: possible kinds of hay, the default first; empty if the family has its own.
        depth: True if a single needle is asked for, which has a depth.
        needles: default, minimum and maximum number; None for a fixed number.
        types: True if keys and values may be of several kinds.
        max_new_tokens: tokens of an answer, as in RULER.
    """

    draft: Callable[[CaseRequest, Draws], Draft]
    summary: str
    hays: tuple[str, ...]
    depth: bool
    needles: tuple[int, int, int] | None = None
    types: bool = False
    max_new_tokens: int = 128


class Draws:
    """Random texts without repetition.

    Args:
        rng: what to draw from.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: set[str] = set()

    def fresh(self, draw: Callable[[random.Random], str]) -> str:
        """Draw a text that was not drawn before.

        Raises:
            ValueError: there are hardly any left.
        """
        for _ in range(1000):
            if (made := draw(self.rng)) not in self._used:
                self._used.add(made)
                return made
        raise ValueError(f"{len(self._used)} keys and values are all there are of their kind; ask for uuids.")


def cases(
    tokenizer: Any,
    family: str,
    length: int,
    depth: float | None,
    *,
    count: int,
    seed: int,
    hay: str | None = None,
    text: str | None = None,
    needles: int | None = None,
    key_type: str | None = None,
    value_type: str | None = None,
) -> list[Case]:
    """Make cases of a family, with contexts filled with hay to a number of tokens.

    The seed of a case's random draws depends only on family, length, depth, seed and the case's number.

    Args:
        tokenizer: the model's. It counts the tokens of the context as it begins a text, and of `Case.asked`; those of a
            chat template are added to them.
        family: one of `FAMILIES`.
        length: maximum tokens of context, question and prefix; they take at least nine tenths of it.
        depth: place of the needle, as the share of hay before it from 0.0 to 1.0, in an essay at the nearest end of a
            sentence; None for a family whose needles have random places, or that has none.
        count: cases, at least 1.
        seed: at least 0.
        hay: one of `HAYS`, or None for the family's default, or for an essay if a text is given.
        text: source of an essay, which begins at a random sentence and is repeated if it is too short.
        needles: keys of `multi_key`, values of `multi_value`, queries of `multi_query`, variables of
            `variable_tracking`, words to name of `common_words`; None for the family's default.
        key_type: one of `KINDS`; None for words.
        value_type: one of `KINDS`; None for numbers.

    Returns:
        Cases with `family`, `length`, `depth`, `hay`, `needles`, `key_type`, `value_type`, `seed`, `index` (the case's
        number), `keys` (number of keys in the context) and `tokens` (tokens used of `length`) in `Case.told`.

    Raises:
        TypeError: a number has another type.
        ValueError: there is no such family, it does not take a setting, or the length is too short or cannot be filled.
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is not one of {', '.join(FAMILIES)}.")
    made_of, length = FAMILIES[family], whole_number("length", length)
    count, seed = whole_number("count", count), whole_number("seed", seed, 0)
    depth = _depth(family, depth)
    hay = _hay_of(family, hay, text)
    settings = {
        "hay": hay,
        "needles": _needles_of(family, needles),
        "key_type": _type_of(family, "key_type", key_type, "words"),
        "value_type": _type_of(family, "value_type", value_type, "numbers"),
    }
    request = CaseRequest(
        length,
        depth,
        hay,
        (text or "").split(),
        settings["needles"] or 1,
        settings["key_type"] or "words",
        settings["value_type"] or "numbers",
    )
    made: list[Case] = []
    for index in range(count):
        draws = Draws(random.Random(f"{family} {length} {depth} {seed} {index}"))
        draft = made_of.draft(request, draws)
        case = Case("", draft.question, draft.answers, draft.prefix)
        asked = len(tokenizer.encode(case.asked, add_special_tokens=False))

        def size(units: int, draft: Draft = draft, asked: int = asked) -> int:
            return len(tokenizer.encode(draft.context(units))) + asked

        units, tokens = _fit(size, draft.least, family, length)
        keys = draft.keys + draft.hay_keys * units
        told = {"family": family, "length": length, "depth": depth, **settings, "seed": seed, "index": index}
        told |= {"keys": keys, "tokens": tokens}
        made.append(dataclasses.replace(case, context=draft.context(units), told=told))
    return made


def _depth(family: str, depth: float | None) -> float | None:
    if not FAMILIES[family].depth:
        if depth is not None:
            raise ValueError(f"depth={depth!r} is not for {family}, which asks for no single needle; give None.")
        return None
    if not isinstance(depth, (int, float)) or isinstance(depth, bool) or not 0 <= depth <= 1:
        raise ValueError(f"depth={depth!r} of {family} is not from 0.0, before all hay, to 1.0, after it.")
    return float(depth)


def _hay_of(family: str, hay: str | None, text: str | None) -> str | None:
    hays = FAMILIES[family].hays
    if not hays:
        if hay is not None or text is not None:
            raise ValueError(f"hay={hay!r} is not for {family}, which has no hay but its own; leave out hay and text.")
        return None
    if hay is None:
        hay = hays[0] if text is None else "essay"
    if hay not in hays:
        raise ValueError(f"hay={hay!r} of {family} is not one of {', '.join(hays)}.")
    if (hay == "essay") != (text is not None):
        raise ValueError(f"hay={hay!r} and a text do not go together; give a text with hay='essay', and only then.")
    if text is not None and not text.strip():
        raise ValueError("the text for hay='essay' is empty; give one with words.")
    return hay


def _needles_of(family: str, needles: int | None) -> int | None:
    usual = FAMILIES[family].needles
    if usual is None:
        if needles is not None:
            raise ValueError(f"needles={needles!r} is not for {family}, whose number is fixed; leave it out.")
        return None
    return usual[0] if needles is None else whole_number("needles", needles, *usual[1:])


def _type_of(family: str, name: str, kind: str | None, usual: str) -> str | None:
    if not FAMILIES[family].types:
        if kind is not None:
            raise ValueError(
                f"{name}={kind!r} is not for {family}, which has keys and values of its own; leave it out."
            )
        return None
    if kind is not None and kind not in KINDS:
        raise ValueError(f"{name}={kind!r} is not one of {', '.join(KINDS)}.")
    return kind or usual


def _fit(size: Callable[[int], int], least: int, family: str, length: int) -> tuple[int, int]:
    """Find the units of hay that fill a length, and their tokens, with few calls of the tokenizer (secant method)."""
    units, taken, beyond, beyond_tokens = least, size(least), None, 0
    if taken > length:
        raise ValueError(f"length={length} is too short for {family}, which takes {taken} tokens; give more.")
    slope = (length - taken) / 16  # the first step is small: a unit may be a word or 80 tokens
    while taken < 0.98 * length and (beyond is None or beyond - units > 1):
        step = max(1, int((0.995 * length - taken) / slope))
        guess = units + step if beyond is None else min(units + step, beyond - 1)
        reached = size(guess)
        slope = max((reached - taken) / (guess - units), 0.1)
        if reached <= length:
            units, taken = guess, reached
        else:
            beyond, beyond_tokens = guess, reached
    if taken < 0.9 * length:
        raise ValueError(
            f"length={length} cannot be filled to nine tenths by {family}, which takes {taken} tokens or, with another "
            f"piece of hay, {beyond_tokens}; give {11 * (beyond_tokens - taken)} or more."
        )
    return units, taken


class Hay:
    """Endless units of hay, made on demand.

    Args:
        units: source of the units.
        joint: text between two units.
    """

    def __init__(self, units: Iterator[str], joint: str) -> None:
        self._units, self._made, self._joint = units, list[str](), joint

    def take(self, count: int) -> list[str]:
        """Return the first units."""
        self._made += itertools.islice(self._units, max(0, count - len(self._made)))
        return self._made[:count]

    def plant(self, count: int, needles: Sequence[tuple[float, str]]) -> str:
        """Join a number of units with needles at their depths; needles of equal depth keep their order."""
        hay, made, done = self.take(count), list[str](), 0
        for depth, needle in sorted(needles, key=lambda planted: planted[0]):
            place = _place(hay, depth)
            made += [*hay[done:place], needle]
            done = place
        return self._joint.join([*made, *hay[done:]])


def _place(hay: Sequence[str], depth: float) -> int:
    # Take the nearest end of a sentence, unless there is none within a twentieth of the text.
    exact = round(depth * len(hay))
    for step in range(len(hay) // 20 + 1):
        for place in (exact - step, exact + step):
            within = 0 < place < len(hay)
            if place in (0, len(hay)) or (within and hay[place - 1].endswith((".", "!", "?", '"'))):
                return place
    return exact


def _hay(request: CaseRequest, draws: Draws) -> Hay:
    if request.hay == "noise":
        return Hay(itertools.cycle(NOISE), " ")
    words = request.words
    ends = [i for i, word in enumerate(words, 1) if word.endswith((".", "!", "?"))]
    start = draws.rng.choice(ends or [0])
    return Hay((words[i % len(words)] for i in itertools.count(start)), " ")


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _single(request: CaseRequest, draws: Draws) -> Draft:
    return _magic(request, draws)


def _multi_key(request: CaseRequest, draws: Draws) -> Draft:
    return _magic(request, draws, others=request.needles - 1)


def _multi_value(request: CaseRequest, draws: Draws) -> Draft:
    return _magic(request, draws, values=request.needles)


def _multi_query(request: CaseRequest, draws: Draws) -> Draft:
    return _magic(request, draws, queries=request.needles)


def _magic(request: CaseRequest, draws: Draws, *, others: int = 0, values: int = 1, queries: int = 1) -> Draft:
    """Draft RULER's needles in a haystack: sentences that state the value of a key."""
    name, opening = f"magic {KINDS[request.value_type].name}", "One" if values > 1 else "The"

    def draw(kind: str) -> str:
        return draws.fresh(KINDS[kind].draw)

    def needle(key: str) -> tuple[str, str]:
        value = draw(request.value_type)
        return f"{opening} {name} of {key} is {value}.", value

    keys = [draw(request.key_type) for _ in range(queries)]
    asked = [needle(key) for key in keys for _ in range(values)]
    needles = [text for text, _ in asked] + [needle(draw(request.key_type))[0] for _ in range(others)]
    depths = [request.first_depth(draws), *(draws.rng.random() for _ in needles[1:])]
    planted, of_needles = list(zip(depths, needles, strict=True)), request.hay == "needles"
    endless = (needle(draw(request.key_type))[0] for _ in itertools.count())
    hay = Hay(endless, "\n") if of_needles else _hay(request, draws)
    alone = len(needles) == 1 and not of_needles
    hidden, them = (f"a {name}", "it") if alone else (f"{name}s", "them")
    intro = f"The text below hides {hidden}. Remember {them}: you will be asked for {them}."
    several, these = len(asked) > 1, _listed(keys)
    question = f"What are all the {name}s of {these}?" if several else f"What is the {name} of {these}?"
    prefix = f"The {name}s of {these} are" if several else f"The {name} of {these} is"
    return Draft(
        lambda units: f"{intro}\n{hay.plant(units, planted)}",
        question,
        tuple(value for _, value in asked),
        prefix,
        keys=queries + others,
        hay_keys=int(of_needles),
    )


def _variable_tracking(request: CaseRequest, draws: Draws) -> Draft:
    """Draft one chain of assignments, in order: a number, then each variable from the one before."""
    value = str(draws.rng.randrange(10**4, 10**5))
    names = [draws.fresh(lambda rng: "".join(rng.choices(string.ascii_uppercase, k=5))) for _ in range(request.needles)]
    sources = [value, *(f"VAR {name}" for name in names)]
    chain = [f"VAR {name} = {source}." for name, source in zip(names, sources, strict=False)]
    planted = list(zip(sorted(draws.rng.random() for _ in chain), chain, strict=True))
    hay = _hay(request, draws)
    intro = "The text below hides assignments of variables. Remember them and what value each variable gets."
    return Draft(
        lambda units: f"{intro}\n{hay.plant(units, planted)}",
        f"Which variables have the value {value}, directly or through others?",
        tuple(names),
        f"The {len(names)} variables with the value {value} are:",
        keys=len(names),
    )


def _common_words(request: CaseRequest, draws: Draws) -> Draft:
    """Draft a numbered list with some words 30 times and others 3 times, or 6 and 1 in contexts below 4096."""
    often, rarely = (30, 3) if request.length >= 4096 else (6, 1)
    words = draws.rng.sample(ADJECTIVES + NOUNS, len(ADJECTIVES + NOUNS))
    common, order = words[: request.needles], draws.rng.random()

    def pairs() -> Iterator[str]:
        while True:  # after the plain words; skips pairs that contain an answer
            pair = draws.fresh(KINDS["words"].draw)
            if not set(pair.split("-")) & set(common):
                yield pair

    others = Hay(itertools.chain(words[request.needles :], pairs()), " ")

    def context(units: int) -> str:
        listed = common * often + others.take(units) * rarely
        random.Random(order).shuffle(listed)
        entries = " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
        return f"In the numbered list below some words occur more often than others. Remember those.\n{entries}"

    asked, verb = (f"{len(common)} words occur", "are") if len(common) > 1 else ("word occurs", "is")
    return Draft(
        context,
        f"Which {asked} most often in the list?",
        tuple(common),
        f"The {asked.replace(' occur', ' that occur')} most often in the list {verb}:",
        keys=len(common),
        hay_keys=1,
        least=1,
    )


def _frequent_words(request: CaseRequest, draws: Draws) -> Draft:
    """Draft coded words with frequencies of the zeta distribution of exponent 2; the most frequent is noise."""
    most, order = 3, draws.rng.random()
    coded = Hay(
        itertools.chain(
            ["..."],
            (draws.fresh(lambda rng: "".join(rng.choices(string.ascii_lowercase, k=6))) for _ in itertools.count()),
        ),
        " ",
    )

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
        tuple(coded.take(most + 1)[1:]),
        "The three coded words that occur most often are:",
        keys=most,
        # The last of them has to occur at least once more than the word of the next rank.
        least=math.ceil(1 / (share(most + 1) - share(most + 2))),
    )


def _key_values(request: CaseRequest, draws: Draws) -> Draft:
    """Draft a JSON object of uuids (Liu et al. 2023, Lost in the Middle, arXiv 2307.03172, section 3)."""

    def pair() -> tuple[str, str]:
        return draws.fresh(KINDS["uuids"].draw), draws.fresh(KINDS["uuids"].draw)

    def line(key: str, value: str) -> str:
        return f'"{key}": "{value}"'

    key, value = pair()
    planted = [(request.first_depth(draws), line(key, value))]
    hay = Hay((line(*pair()) for _ in itertools.count()), ",\n ")
    return Draft(
        lambda units: f"The JSON object below holds keys and their values.\n{{{hay.plant(units, planted)}}}",
        f'What is the value of the key "{key}"?',
        (value,),
        f'The value of the key "{key}" is',
        hay_keys=1,
    )


def _pass_key(request: CaseRequest, draws: Draws) -> Draft:
    """Draft five digits in noise (Mohtashami and Jaggi 2023, arXiv 2305.16300, section 4.2)."""
    key = str(draws.rng.randrange(10**4, 10**5))
    needle = f"The pass key is {key}. Keep it in mind: {key} is the pass key."
    planted, hay = [(request.first_depth(draws), needle)], _hay(request, draws)
    intro = "The text below hides a pass key among things of no importance. Remember it: you will be asked for it."
    return Draft(
        lambda units: f"{intro}\n{hay.plant(units, planted)}", "What is the pass key?", (key,), "The pass key is"
    )


FAMILIES = {
    "single": QuestionFamily(_single, "the value of a key, from one needle", HAYS, depth=True, types=True),
    "multi_key": QuestionFamily(
        _multi_key,
        "the value of a key among other keys",
        ("needles", "noise", "essay"),
        depth=True,
        needles=(4, 1, 1000),
        types=True,
    ),
    "multi_value": QuestionFamily(
        _multi_value, "all values of a key", HAYS, depth=False, needles=(4, 1, 1000), types=True
    ),
    "multi_query": QuestionFamily(
        _multi_query, "the values of several keys", HAYS, depth=False, needles=(4, 1, 1000), types=True
    ),
    "variable_tracking": QuestionFamily(
        _variable_tracking,
        "all variables of a chain of assignments",
        ("noise", "essay"),
        depth=False,
        needles=(5, 2, 1000),
        max_new_tokens=30,
    ),
    "common_words": QuestionFamily(
        _common_words, "the words that a list has most often", (), depth=False, needles=(10, 1, 100), max_new_tokens=120
    ),
    "frequent_words": QuestionFamily(
        _frequent_words, "the three most frequent coded words", (), depth=False, max_new_tokens=50
    ),
    "key_values": QuestionFamily(_key_values, "the value of a key of a JSON object", (), depth=True),
    "pass_key": QuestionFamily(
        _pass_key, "a pass key, from one needle", ("noise", "essay"), depth=True, max_new_tokens=32
    ),
}
"""Families of `cases`, by name."""
