"""Parts that mean nothing together: each pair of the one table is refused in a sentence that names the remedy."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvjax
from kvjax.inference.prepare import bind, prepare_bound
from kvjax.methods import PLANS, REGISTRY
from kvjax.methods.compatibility import PAIRS, Pair, fitted
from kvjax.methods.fastgen import Profiled
from kvjax.methods.full import HostMemory
from kvjax.policies import Policy
from kvjax.policies.allocation import Uniform
from tests.small_models import GQA, random_model

EXAMPLES: tuple[tuple[Callable[[], Policy], ...], ...] = (
    (
        lambda: kvjax.policy("tova", plan="adakv"),
        lambda: kvjax.policy("keyformer", shared=True, plan="adakv"),
        lambda: kvjax.policy("less", base="tova", kernels="performer", plan="adakv"),
    ),
    (
        lambda: kvjax.policy("h2o", selection="topk", plan="adakv"),
        lambda: kvjax.policy("fastgen", special=(7,), selection="topk"),
    ),
    (lambda: kvjax.policy("lightkv", window="running", offload=True, plan="adakv"),),
    (lambda: kvjax.policy("lightkv", plan="adakv"),),
    tuple(functools.partial(kvjax.policy, name, plan="adakv") for name in ("rkv", "snapkv_decode")),
    (
        lambda: kvjax.policy("full", memory="host", selection="topk"),
        lambda: kvjax.policy("full", memory="host", positions="cache"),
        lambda: kvjax.policy("full", memory="host", residual="momentkv"),
        lambda: fitted(dataclasses.replace(kvjax.policy("h2o"), plan=HostMemory())),
    ),
    (
        lambda: kvjax.policy("full", evict_every=8),
        lambda: kvjax.policy("lightkv", evict_every=8, context_limit=64),
    ),
    (lambda: fitted(dataclasses.replace(kvjax.policy("fastgen", special=(7,)), plan=Uniform())),),
    (lambda: kvjax.policy("h2o", plan=Profiled()),),
    (lambda: fitted(dataclasses.replace(kvjax.policy("fastgen", special=(7,)), plan=Profiled(frequent=0.5))),),
    (
        lambda: kvjax.policy("h2o", positions="cache", codec="int8"),
        lambda: kvjax.policy("keyformer", positions="cache", codec="int4"),
    ),
    (
        lambda: kvjax.policy("streaming", special=(7,), codec="int8"),
        lambda: kvjax.policy("streaming", plan="adakv", codec="int4"),
    ),
    (
        lambda: kvjax.policy("h2o", residual="attention_matching", positions="cache"),
        lambda: kvjax.policy("streaming", residual="attention_matching"),
    ),
    (lambda: fitted(dataclasses.replace(kvjax.policy("lightkv", middle="mask"), protection=kvjax.Protection())),),
)
CASES = [(pair, make) for pair, makes in zip(PAIRS, EXAMPLES, strict=True) for make in makes]


@pytest.mark.core
@pytest.mark.parametrize(("pair", "make"), CASES)
def test_a_pair_that_means_nothing_is_one_sentence_with_its_remedy(pair: Pair, make: Callable[[], Policy]) -> None:
    expected = re.sub(r"\\\{\w+\\\}", r"[\\w, ]+", re.escape(f"{pair.what}; {pair.remedy}."))
    with pytest.raises(ValueError, match=f"^{expected}$"):
        make()


def test_names_in_a_refusal_are_those_that_users_write() -> None:
    for make, names in (
        (lambda: kvjax.policy("tova", plan="adakv"), r"^tova needs .* plan adakv does not give"),
        (lambda: kvjax.policy("h2o", selection="topk", plan="adakv"), "^selection topk reads .* plan adakv"),
        (lambda: kvjax.policy("h2o", plan=Profiled()), "protection of fastgen, not on protection by sinks"),
        (lambda: kvjax.policy("full", plan="pyramid"), "plan=pyramid has no effect"),
    ):
        with pytest.raises(ValueError, match=names):
            make()


def test_a_pair_that_meets_in_prefill_is_refused_there() -> None:
    model = random_model(GQA)
    for policy in (kvjax.policy("tova"), kvjax.policy("h2o", selection="topk")):
        with pytest.raises(ValueError, match="same slots in every head of a layer, which plan adakv does not give"):
            kvjax.prefill(model, policy, [[1, 2, 3]], 2, plan="adakv")
    made = dataclasses.replace(kvjax.policy("h2o", codec="int8"), codec=kvjax.Codec("cache", 8))
    with pytest.raises(ValueError, match="codec int8 holds keys as they are seen"):
        kvjax.prefill(model, made, [[1, 2, 3]], 2)


TINY = kvjax.load("tiny")
TEXT = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8").replace("\n", " ")


def refusal(name: str, **settings: Any) -> str:
    """The sentence by which a policy is refused for a prompt of 200 tokens, in a budget that holds any window."""
    try:
        policy, budget = bind(TINY, kvjax.policy(name, **settings), 1.0, None)
        assert policy.plan.sizing.mode != "budget" or budget == 1.0
        prepare_bound(TINY, policy, [list(range(200))], 1.0, None, max_new_tokens=8, key=None)
    except ValueError as error:
        return str(error)
    return ""


def policies_in(sentence: str) -> set[str]:
    """The names of policies in the sentences of docs/command_line.md that match a pattern."""
    found = re.search(sentence, TEXT)
    assert found is not None
    return {name for name in re.findall(r"`(\w+)`", found[1]) if name in REGISTRY}


BUDGETED = [name for name in REGISTRY if kvjax.policy(name).plan.sizing.mode == "budget"]


def test_docs_name_the_policies_that_take_no_plan() -> None:
    named = policies_in(r"under any policy that takes one: not(.*?)decide themselves\.")
    assert named == REGISTRY.keys() - set(BUDGETED)
    for plan in PLANS:
        assert {
            name for name in REGISTRY if "evicts nothing" in (text := refusal(name, plan=plan)) or "itself" in text
        } == named


def test_docs_name_the_policies_that_do_not_go_with_adakv() -> None:
    unless: dict[str, dict[str, Any]] = {
        "lightkv": {"window": "running"},
        "keydiff": {"block": None},
        "lsh_e": {"prompt": "one_shot"},
        "keyformer": {},
    }
    named = policies_in(r"works with every policy that takes a budget, except(.*?)\.  ")
    refused = {name for name in BUDGETED if refusal(name, plan="adakv")}
    assert named == refused | {"keyformer"}
    assert all(f"`{name}` unless" in TEXT for name, settings in unless.items() if settings)
    assert not any(refusal(name, plan="adakv", **settings) for name, settings in unless.items())
    assert refusal("keyformer", plan="adakv", shared=True)


ANY = {
    "`evict_every=64` lets": (BUDGETED, {"evict_every": 64}),
    "protect tokens under any policy": ([*REGISTRY], {"sinks": 2, "recent": 9, "special": (7,)}),
    "`--residual momentkv`, or": ([*REGISTRY], {"residual": "momentkv"}),
    "`--residual attention_matching` fits": ([*REGISTRY], {"residual": "attention_matching", "positions": "original"}),
}
"""Beginnings of sentences about any policy, the policies they mean, and what these take."""


@pytest.mark.parametrize("sentence", ANY)
def test_what_docs_say_of_any_policy_is_true_of_each(sentence: str) -> None:
    names, settings = ANY[sentence]
    assert sentence in TEXT
    assert {name: text for name in names if (text := refusal(name, **settings))} == {}
