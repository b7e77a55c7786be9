"""Budgets over layers: exact sums, the papers' shapes, and any plan under any score."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.inference.padding import round_slots
from kvjax.inference.state import allocated_slots, held_positions
from kvjax.methods import PLANS
from kvjax.methods.adakv import AdaKV
from kvjax.methods.interleaved import Interleaved
from kvjax.methods.lightkv import Arithmetic
from kvjax.methods.pyramidkv import Pyramid
from kvjax.policies.allocation import Uniform, layer_slots
from kvjax.types import LayerTokens, View
from pallas_kernels.attention import slot_block
from tests.cases import in_turns
from tests.held import kept, layers
from tests.oracles import plans
from tests.small_models import random_model, small_config

MODEL = random_model(small_config(4, 2, layers=4))
TEXT = np.random.default_rng(0).integers(0, 64, (2, 200))


@given(
    plan=st.one_of(
        st.just(Uniform()),
        st.builds(Arithmetic, st.floats(1, 8)),
        st.builds(Pyramid, st.floats(1, 20), st.integers(0, 20)),
        st.builds(Interleaved, st.integers(2, 5), st.floats(1, 8)),
    ),
    budget=st.integers(41, 5000),
    layers=st.integers(1, 80),
)
def test_budgets_sum_exactly_and_follow_their_shares(plan, budget, layers):
    shares, budgets = plan.layer_budgets(budget, layers), layer_slots(plan, budget, layers)
    assert budgets.sum() == layers * budget
    assert budgets.min() >= 1
    assert np.abs(budgets - shares).max() < 1 + 1e-6


def test_slots_that_rounding_leaves_go_to_the_largest_remainders() -> None:
    shares = Arithmetic(ratio=2.0).layer_budgets(10, 4)  # 13.33, 11.11, 8.89, 6.67
    np.testing.assert_array_equal(np.floor(shares), [13, 11, 8, 6])
    np.testing.assert_array_equal(layer_slots(Arithmetic(ratio=2.0), 10, 4), [13, 11, 9, 7])
    # Of equal remainders (4.5, 1.5, 4.5, 1.5) the lower layer's is first.
    np.testing.assert_array_equal(layer_slots(Interleaved(period=2, ratio=3.0), 3, 4), [5, 2, 4, 1])


def test_arithmetic_is_equation_2():
    budgets = layer_slots(Arithmetic(ratio=3.0), 100, 5)
    c_1, c_last, layers = 150, 50, 5
    expected = [c_last + (c_1 - c_last) * (layers - layer) / (layers - 1) for layer in range(1, layers + 1)]
    np.testing.assert_array_equal(budgets, expected)


def test_pyramid_falls_to_one_part_in_beta_above_its_window():
    window, budget = 32, 128
    last = (budget - window) // 20
    expected = window + np.array([2 * (budget - window) - last, budget - window, last])
    np.testing.assert_array_equal(layer_slots(Pyramid(20.0, window), budget, 3), expected)


def test_interleaved_alternates():
    np.testing.assert_array_equal(layer_slots(Interleaved(), 50, 4), [80, 20, 80, 20])
    np.testing.assert_array_equal(layer_slots(Interleaved(period=3, ratio=2.0), 40, 3), [60, 30, 30])


@pytest.mark.parametrize(("budget", "layers"), [(41, 2), (57, 3), (100, 5), (128, 26), (333, 32), (20, 1)])
def test_budgets_are_those_of_the_papers_formulas(budget: int, layers: int) -> None:
    tried: list[tuple[str, dict[str, Any]]] = [
        ("uniform", {}),
        ("arithmetic", {"ratio": 3.0}),
        ("arithmetic", {"ratio": 1.7}),
        ("pyramid", {"beta": 20.0, "window": 0}),
        ("pyramid", {"beta": 7.0, "window": 8}),
        ("interleaved", {"period": 2, "ratio": 4.0}),
        ("interleaved", {"period": 3, "ratio": 2.5}),
    ]
    for name, settings in tried:
        found = layer_slots(PLANS[name](**settings), budget, layers).tolist()
        assert found == plans.layer_budgets(name, budget, layers, **settings), name


def ranks(kind: str, heads: int, slots: int, rows: int, seed: int) -> np.ndarray:
    """Scores [rows, heads, slots] of prompts of several lengths, the lowest number where there is no token."""
    rng = np.random.default_rng(seed)
    made = rng.random((rows, heads, slots)) * np.geomspace(1, 30, heads)[:, None]
    if kind == "ties":
        made = np.floor(2 * made) / 2
    if kind == "one head":
        made[:, 1:] /= 1e6
    made[..., -3:] = np.inf  # a recent window
    made = made.astype(np.float32)
    for row in range(rows):
        made[row, :, : 7 * row] = np.finfo(np.float32).min
    return made


@pytest.mark.parametrize(("kind", "floor"), in_turns(["spread", "ties", "one head"], [0.2, 0.0, 0.5, 1.0]))
def test_heads_get_what_ada_kv_allots(kind: str, floor: float) -> None:
    """Algorithm 1 and its safeguard, in rows of several lengths, some too short for all slots."""
    apart = 0
    for seed, (heads, budget) in enumerate(((1, 9), (2, 20), (3, 17), (4, 5), (8, 12), (8, 33))):
        scores = ranks(kind, heads, 40, 4, seed)
        longest = np.array([44, 37, 30, 23])
        split = AdaKV(floor=floor).split(
            jnp.asarray(scores), jnp.full((4, heads), budget), jnp.asarray(longest, jnp.int32)[:, None]
        )
        for row, most in enumerate(longest.tolist()):
            tokens = [head[head > np.finfo(np.float32).min].tolist() for head in scores[row]]
            expected = plans.allot(tokens, budget, floor, most)
            assert split[row].tolist() == expected
            assert min(expected) >= min(most, int(floor * budget))
            apart += len({*expected}) > 1
    assert (apart > 0) == (floor < 1)


@pytest.mark.parametrize(
    "plan, message",
    [
        (lambda: layer_slots(Pyramid(), 19, 4), "gives layer 3 no slot at a budget of 19"),
        (lambda: layer_slots(Pyramid(window=32), 16, 4), "does not hold the window of 32"),
        (lambda: Pyramid(beta=0.5), "beta=0.5"),
        (lambda: Arithmetic(ratio=0.5), "ratio=0.5"),
        (lambda: Interleaved(period=1), "period=1"),
    ],
)
def test_bad_plans_are_one_sentence(plan, message):
    with pytest.raises(ValueError, match=message):
        plan()


@pytest.mark.parametrize(("plan", "name"), in_turns(list(PLANS), ["snapkv", "h2o", "keyformer"]))
def test_any_plan_works_under_any_score(name, plan):
    state, logits = kvjax.prefill(MODEL, kvjax.policy(name, recent=0.25), TEXT, 80, plan=plan, max_new_tokens=4)
    slots = np.array([(position >= 0).sum(-1) for position in held_positions(state)])
    equal = np.broadcast_to(layer_slots(PLANS[plan](), 80, 4)[:, None, None], (4, 2, 2))
    if PLANS[plan]().sizing.per_head:
        slots, equal = slots.sum(-1), equal.sum(-1)
    np.testing.assert_array_equal(slots, equal)
    assert np.isfinite(logits).all()


@struct.dataclass
class _Split(kvjax.Score):
    """Newest tokens within a head, and between heads the tokens of the first head."""

    def score(self, view: View, new: LayerTokens) -> kvjax.SplitRanking:
        within = view.position.astype(jnp.float32)
        return kvjax.SplitRanking(within, jnp.where(jnp.arange(within.shape[1])[:, None] == 0, 1.0, 0.0) + 0 * within)


def test_heads_compete_by_a_ranking_of_their_own() -> None:
    policy = kvjax.Policy(_Split(), kvjax.Protection(), plan=AdaKV(floor=0.5))
    state, _ = kvjax.prefill(MODEL, policy, TEXT, 40, max_new_tokens=4)
    for row in range(2):
        for first, second in kept(state, row):
            assert first == list(range(140, 200)) and second == list(range(180, 200))


def test_settings_of_a_plan_come_with_a_dot():
    settings: dict[str, Any] = {"plan.period": 3, "plan.ratio": 2.0}
    made = kvjax.policy("h2o", plan="interleaved", **settings)
    assert made == dataclasses.replace(kvjax.policy("h2o"), plan=Interleaved(3, 2.0))
    assert layer_slots(made.plan, 40, 3).tolist() == [60, 30, 30]
    with pytest.raises(ValueError, match=r"plan\.period is a setting of a plan; name one"):
        kvjax.policy("h2o", **settings)
    with pytest.raises(ValueError, match="plan 'arithmetic' has no setting 'period'; it takes"):
        kvjax.policy("h2o", plan="arithmetic", **settings)
    with pytest.raises(ValueError, match=r"plan\.period cannot be set for a plan that is an instance"):
        kvjax.policy("h2o", plan=Interleaved(), **settings)


def test_a_fraction_is_planned_for_each_row():
    state, _ = kvjax.prefill(MODEL, "h2o", TEXT, 0.5, lengths=[200, 100], plan="arithmetic", max_new_tokens=100)
    limits = np.array([cache.limit for cache in layers(state)])
    np.testing.assert_array_equal(limits.sum(0), [[4 * 150] * 2, [4 * 100] * 2])


@pytest.mark.parametrize(("slots", "rounded"), [(1, 16), (17, 32), (65, 80), (1000, 1008), (1025, 1088)])
def test_buffers_hold_little_more_than_what_was_asked_for(slots: int, rounded: int) -> None:
    assert round_slots(slots) == rounded


@given(slots=st.integers(1, 20_000))
def test_attention_finds_blocks_in_any_buffers(slots: int) -> None:
    capacity = round_slots(slots)
    for least, most in ((64, 128), (16, 256)):
        block = slot_block(capacity, least, most)
        fitting = [size for size in range(16, most + 1, 16) if size >= least and capacity % size == 0]
        assert block == max(fitting, default=capacity)
        assert least == 64 or block <= most


def test_the_full_cache_is_counted_as_full_allocates_it() -> None:
    arguments: dict[str, Any] = {"lengths": [50, 33], "max_new_tokens": 30}
    state, _ = kvjax.prefill(MODEL, "full", TEXT[:, :50], **arguments)
    short, _ = kvjax.prefill(MODEL, "h2o", TEXT[:, :50], 20, **arguments)
    assert kvjax.full_cache_bytes(state) == kvjax.full_cache_bytes(short) == kvjax.cache_bytes(state)


@pytest.mark.parametrize("plan", [None, "adakv"])
def test_slots_are_counted_as_they_are_allocated(plan: str | None) -> None:
    state, _ = kvjax.prefill(MODEL, "h2o", TEXT[:, :50], 65, max_new_tokens=30, plan=plan)
    of_heads = [layer.shape for layer in state.cache.positions()] if plan is None else []
    assert all(shape[-1] == 80 for shape in of_heads) and (plan or allocated_slots(state) == 80)
    assert 65 <= allocated_slots(state) < 97
