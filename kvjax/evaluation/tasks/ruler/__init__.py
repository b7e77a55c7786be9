"""Retrieval from contexts of a given length: RULER's families (Hsieh et al. 2024, arXiv 2404.06654), and two more.

Structure and counts are the published ones. Words and sentences are not, no worked example precedes the question, and
`length` does not include the answer. Compare scores with each other, not with published numbers.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from kvjax.evaluation.tasks.cases import Case
from kvjax.evaluation.tasks.ruler.drafts import HAYS as HAYS
from kvjax.evaluation.tasks.ruler.drafts import KINDS, CaseRequest, Draft
from kvjax.evaluation.tasks.ruler.drafts import NOISE as NOISE
from kvjax.evaluation.tasks.ruler.families import FAMILIES
from kvjax.utils.settings import whole_number


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
        tokenizer: the model's. It counts the tokens of the context as it begins a text, and of
            `Case.continuation`; those of a chat template are added to them.
        family: one of `FAMILIES`.
        length: maximum tokens of context, question and prefix; they take at least nine tenths of it.
        depth: place of the needle as the fraction of hay before it, 0.0 to 1.0, rounded to the end of a sentence in an
            essay; None for a family without needles or with needles at random places.
        hay: one of `HAYS`, or None for the family's default, or for an essay if a text is given.
        text: source of an essay, which begins at a random sentence and is repeated if it is too short.
        needles: keys of `multi_key`, values of `multi_value`, queries of `multi_query`, variables of
            `variable_tracking`, words to name of `common_words`; None for the family's default.
        key_type: one of `KINDS`; None for words.
        value_type: one of `KINDS`; None for numbers.

    Returns:
        Cases whose `Case.metadata` has their settings and `index`, the number of `keys` in the context, and the
        `tokens` used of `length`.

    Raises:
        ValueError: the family does not take a setting, or the length is too short or cannot be filled.
    """
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is not one of {', '.join(FAMILIES)}.")
    design, length = FAMILIES[family], whole_number("length", length)
    count, seed = whole_number("count", count), whole_number("seed", seed, 0)
    types_reason = "which has keys and values of its own; leave it out"
    for name, value, supported, why in (
        ("depth", depth, design.depth, "which asks for no single needle; give None"),
        ("hay", hay if text is None else "essay", design.hays, "which has no hay but its own; leave out hay and text"),
        ("needles", needles, design.needles, "whose number is fixed; leave it out"),
        ("key_type", key_type, design.types, types_reason),
        ("value_type", value_type, design.types, types_reason),
    ):
        if value is not None and not supported:
            raise ValueError(f"{name}={value!r} is not for {family}, {why}.")
    if design.depth:
        if not isinstance(depth, (int, float)) or isinstance(depth, bool) or not 0 <= depth <= 1:
            raise ValueError(f"depth={depth!r} of {family} is not from 0.0, before all hay, to 1.0, after it.")
        depth = float(depth)
    if design.needles is not None:
        default, *limits = design.needles
        needles = default if needles is None else whole_number("needles", needles, *limits)
    types = {"key_type": key_type or "words", "value_type": value_type or "numbers"}
    for name, kind in types.items():
        if kind not in KINDS:
            raise ValueError(f"{name}={kind!r} is not one of {', '.join(KINDS)}.")
    settings: dict[str, Any] = {"hay": _hay_of(family, hay, text) if design.hays else None, "needles": needles}
    settings |= types if design.types else dict.fromkeys(types)
    results, words = list[Case](), (text or "").split()
    for index in range(count):
        rng = random.Random(f"{family} {length} {depth} {seed} {index}")
        draft = design.draft(CaseRequest(rng, length, depth, words, **settings))
        case = Case("", draft.question, draft.references, draft.prefix)
        units, tokens = _fit(draft, case.continuation, tokenizer, family, length)
        metadata = {"family": family, "length": length, "depth": depth, **settings, "seed": seed, "index": index}
        metadata |= {"keys": draft.keys + draft.hay_keys * units, "tokens": tokens}
        results.append(dataclasses.replace(case, context=draft.context(units), metadata=metadata))
    return results


def _hay_of(family: str, hay: str | None, text: str | None) -> str:
    hays = FAMILIES[family].hays
    if hay is None:
        hay = hays[0] if text is None else "essay"
    if hay not in hays:
        raise ValueError(f"hay={hay!r} of {family} is not one of {', '.join(hays)}.")
    if (hay == "essay") != (text is not None):
        raise ValueError(f"hay={hay!r} and a text do not go together; give a text with hay='essay', and only then.")
    if text is not None and not text.strip():
        raise ValueError("the text for hay='essay' is empty; give one with words.")
    return hay


def _fit(draft: Draft, question: str, tokenizer: Any, family: str, length: int) -> tuple[int, int]:
    """Find the units of hay that fill a length, and their tokens, with few calls of the tokenizer (secant method)."""
    question_tokens = len(tokenizer.encode(question, add_special_tokens=False))

    def size(units: int) -> int:
        return len(tokenizer.encode(draft.context(units))) + question_tokens

    units, tokens, beyond, beyond_tokens = draft.min_units, size(draft.min_units), None, 0
    if tokens > length:
        raise ValueError(f"length={length} is too short for {family}, which takes {tokens} tokens; give more.")
    slope = (length - tokens) / 16  # the first step is small: a unit may be a word or 80 tokens
    while tokens < 0.98 * length and (beyond is None or beyond - units > 1):
        step = max(1, int((0.995 * length - tokens) / slope))
        guess = units + step if beyond is None else min(units + step, beyond - 1)
        reached = size(guess)
        slope = max((reached - tokens) / (guess - units), 0.1)
        if reached <= length:
            units, tokens = guess, reached
        else:
            beyond, beyond_tokens = guess, reached
    if tokens < 0.9 * length:
        raise ValueError(
            f"length={length} cannot be filled to nine tenths by {family}, which takes {tokens} tokens or, with "
            f"another piece of hay, {beyond_tokens}; give {11 * (beyond_tokens - tokens)} or more."
        )
    return units, tokens
