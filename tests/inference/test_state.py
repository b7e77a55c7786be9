"""States, their parts and policies in a line."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import kvjax
from tests.small_models import GQA, random_model


@pytest.mark.parametrize(
    ("name", "settings", "shown"),
    [
        ("h2o", {}, "State(h2o, 2 rows, 16 slots per head, "),
        ("keyformer", {"codec": "int8", "plan": "adakv"}, "State(keyformer, 2 rows, "),
    ],
)
def test_a_state_is_shown_in_a_line(name: str, settings: dict[str, Any], shown: str) -> None:
    policy = kvjax.policy(name, recent=0.25, **settings)
    state, _ = kvjax.prefill(random_model(GQA), policy, [[1, 2], [3]], 8, max_new_tokens=4)
    said = repr(state)
    assert said.startswith(shown) and said.endswith(f", {kvjax.cache_bytes(state):,} bytes)")
    assert repr(state.cache) == f"Cache({said.partition(', ')[2]}"
    assert repr(state.decoder) == f"Decoder({name}, {state.config.layers} layers, float32)"
    inside: list[str] = []
    jax.eval_shape(lambda state: inside.append(repr(state)), state)
    assert inside == [said]


def test_a_policy_is_shown_by_what_is_not_a_default() -> None:
    policy = kvjax.policy("h2o", sinks=4, codec="int8")
    expected = "Policy(score=Accumulated(), protection=Protection(sinks=4, recent=0.5), codec=Codec(quantizer=Int8()), "
    assert repr(policy) == f"{expected}name='h2o')"
    bound = repr(kvjax.policy("less").bind(kvjax.load("tiny")))
    assert "residual=LowRankMemory(layers=<" in bound and " arrays>" in bound and len(bound) < 200
