"""Layers with a window of their own hold that, under any policy; budgets are about the others."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.inference.budget import plan_slots
from kvjax.inference.state import held_positions, slot_limits
from kvjax.models.config import ModelConfig
from kvjax.policies.allocation import layer_slots
from tests.cases import PAIRS, slow
from tests.cases import POLICIES as SINGLE
from tests.small_models import LOCAL, random_model, small_config

WINDOW = 12
MODEL = random_model(LOCAL)
TEXT = np.random.default_rng(5).integers(0, 64, (2, 90))


def slots_of(config: ModelConfig, policy: Any, budget: Any, lengths: Any = (30, 100), new: int = 20) -> np.ndarray:
    """Slots of the first head [layers, rows]."""
    limits, capacities = plan_slots(kvjax.policy(policy), budget, np.array(lengths), new, config, max(lengths))
    assert all((limit <= capacity).all() for limit, capacity in zip(limits, capacities, strict=True))
    return np.stack([limit[:, 0] for limit in limits])


def test_a_budget_is_spread_over_layers_that_see_further() -> None:
    config = small_config(4, 2, layers=4, windows=(16, 70, None, 16))
    np.testing.assert_array_equal(slots_of(config, "h2o", 0.2), [[16, 16], [10, 70], [10, 24], [16, 16]])
    np.testing.assert_array_equal(slots_of(config, "h2o", [5, 6, 7, 8]), [[16, 16], [6, 70], [7, 7], [16, 16]])
    arithmetic = kvjax.policy("h2o", plan="arithmetic")
    np.testing.assert_array_equal(slots_of(config, arithmetic, 20), [[16, 16], [30, 70], [10, 20], [16, 16]])
    np.testing.assert_array_equal(slots_of(config, "full", 1.0), [[16, 16], [50, 70], [50, 120], [16, 16]])
    limited = kvjax.policy("lightkv", context_limit=90, ratio=1.0)
    np.testing.assert_array_equal(slots_of(config, limited, 20), [[16, 16], [20, 70], [20, 20], [16, 16]])
    # Recent windows have to fit where the budget is, and more than its window is of no use to a layer.
    np.testing.assert_array_equal(slots_of(config, "snapkv", 200)[:, 1], [16, 70, 200, 16])


@given(
    windows=st.lists(st.none() | st.integers(1, 60), min_size=1, max_size=5),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    budget=st.integers(8, 90),
    plan=st.sampled_from(["uniform", "arithmetic", "interleaved"]),
)
def test_any_windows_leave_the_budget_to_the_other_layers(
    windows: list[int | None], lengths: list[int], budget: int, plan: str
) -> None:
    config, policy = small_config(4, 2, layers=len(windows), windows=tuple(windows)), kvjax.policy("h2o", plan=plan)
    slots = slots_of(config, policy, budget, lengths)
    widths = np.array([10**6 if window is None else window for window in windows])
    for row, length in enumerate(lengths):
        local = widths < min(length + 20, widths.max())
        shares = layer_slots(policy.plan, budget, int((~local).sum()))
        assert shares.sum() == budget * (~local).sum()
        np.testing.assert_array_equal(slots[local, row], widths[local])
        np.testing.assert_array_equal(slots[~local, row], np.minimum(shares, widths[~local]))
        np.testing.assert_array_equal(slots[:, row], slots_of(config, policy, budget, [length])[:, 0])


def test_a_budget_is_about_all_layers_that_see_equally_far() -> None:
    config = small_config(4, 2, sliding_window=16)
    assert not any(layer.local for layer in config.layer_configs)
    np.testing.assert_array_equal(slots_of(config, "h2o", 10), [[10, 10], [10, 10]])
    np.testing.assert_array_equal(slots_of(config, "h2o", 40), [[16, 16], [16, 16]])


def test_one_score_for_all_layers_needs_layers_alike() -> None:
    with pytest.raises(ValueError, match=r"needs the same tokens in all of them, .* use shared=False"):
        slots_of(LOCAL, kvjax.policy("keyformer", shared=True), 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o+adakv", "lightkv-context", "fastgen-low", "topk_oracle"])
def test_a_row_does_not_know_whether_its_neighbour_outgrows_a_window(name: str) -> None:
    case, lengths = CASES[name], np.array([30, 4])
    policy, arguments = case.make(), {"plan": case.plan, "max_new_tokens": 7}
    budget = 1.0 if policy.plan.sizing.mode == "profiled" else 6

    def read(rows: Any) -> tuple[np.ndarray, ...]:
        state, logits = kvjax.prefill(MODEL, policy, TEXT[rows, :30], budget, lengths=lengths[rows], **arguments)
        after, later = kvjax.decode_step(state, TEXT[rows, 40])
        return np.asarray(logits), np.asarray(later), *slot_limits(after)

    both = read(np.array([0, 1]))
    for row in range(2):
        for batch, alone in zip(both, read(np.array([row])), strict=True):
            np.testing.assert_allclose(batch[row], alone[0], atol=2e-5)
    assert (both[2][0] == WINDOW).all() and (both[2][1] < WINDOW).all()


CASES = SINGLE | PAIRS
NAMES = [
    *("streaming", "less+snapkv+adakv"),
    *(slow(name) for name in ("full", "h2o", "lsh_e", "lightkv-context", "lightkv-mask", "h2o-sequential")),
    *(slow(name) for name in ("less-performer", "window-cache-positions+adakv", "streaming+int8", "h2o+adakv+int8")),
    *(slow(name) for name in ("keyformer", "scissorhands", "tova", "snapkv", "l2", "fastgen", "fastgen-local")),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_local_layer_holds_its_window_whatever_the_policy(name: str) -> None:
    case, length = CASES[name], np.array([30, 19])
    policy = case.make(**case.full)
    budget, plan = (100, case.plan) if policy.plan.sizing.mode == "budget" else (1.0, None)
    whole = np.asarray(MODEL.logits(TEXT))

    def check(logits: Any) -> None:
        assert (slot_limits(state)[0] == WINDOW).all()
        for row, held in enumerate(held_positions(state)[0]):
            for head in held:
                assert sorted(head[head >= 0]) == list(range(max(0, length[row] - WINDOW), length[row]))
        if case.equals_full:  # with room for the whole text in the other layer
            np.testing.assert_allclose(logits, whole[range(2), length - 1], atol=3e-5)

    arguments = {"plan": plan, "prefill_chunk": case.prefill_chunk, "max_new_tokens": 50}
    state, logits = kvjax.prefill(MODEL, policy, TEXT[:, :30], budget, lengths=length, **arguments)
    check(logits)
    if name == "full":
        assert kvjax.cache_bytes(state) == kvjax.full_cache_bytes(state)
    for _ in range(3):
        state, logits = kvjax.decode_step(state, TEXT[range(2), length])
        length = length + 1
        check(logits)
    turn = np.array([2, 9])
    given = [row[at : at + more].tolist() for row, at, more in zip(TEXT, length, turn, strict=True)]
    state, logits = kvjax.extend(state, given)
    length = length + turn
    check(logits)


LATER = {
    "exact": ("streaming", {}, [8, 60]),
    "h2o": ("h2o", {}, 8),
    "h2o+int8": ("h2o", {"codec": "int8"}, 8),
    "h2o+adakv": ("h2o", {"plan": "adakv"}, 8),
    "h2o-every-4": ("h2o", {"evict_every": 4}, 8),
    "streaming-cache-positions": ("streaming", {"positions": "cache"}, 8),
    "less": ("less", {"kernels": "performer"}, 8),
}


@pytest.mark.parametrize("name", [name if name in ("exact", "h2o+int8", "h2o+adakv") else slow(name) for name in LATER])
def test_a_turn_beyond_the_plan_gets_the_window_of_a_longer_plan(name: str, x64: None) -> None:
    # In float64, because in float32 a rounding that differs between two programs may change a code of 8 bits.
    kind, settings, budget = LATER[name]
    policy, model = kvjax.policy(kind, **settings), random_model(LOCAL, dtype=jnp.float64)

    def read(rows: list[int], new: int) -> tuple[kvjax.State, np.ndarray]:
        state, _ = kvjax.prefill(model, policy, TEXT[rows, :6], budget, max_new_tokens=new)
        turn = [(TEXT[row, 6:40] if row == 0 else TEXT[row, 6:9]).tolist() for row in rows]
        state, logits = kvjax.extend(state, turn)
        for step in range(40, 60):
            state, following = kvjax.decode_step(state, TEXT[rows, step])
            logits = np.concatenate([logits, following], 1)
        return state, np.asarray(logits)

    both, logits = read([0, 1], 4)
    for row, new in ((0, 70), (1, 4)):  # the second row does not outgrow its window within the turn
        alone, expected = read([row], new)
        np.testing.assert_allclose(logits[row], expected[0], rtol=1e-9, atol=1e-9)
        for mine, theirs in zip(slot_limits(both), slot_limits(alone), strict=True):
            np.testing.assert_array_equal(mine[row], theirs[0])
    if name == "exact":
        budget, policy = 1.0, kvjax.policy("full")
        np.testing.assert_allclose(logits[0], read([0], 70)[1][0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "settings"), [("keyformer", {"shared": True}), ("lightkv", {"recent": 2})])
def test_a_turn_is_refused_whose_window_a_policy_cannot_give(name: str, settings: dict[str, Any]) -> None:
    state, _ = kvjax.prefill(MODEL, kvjax.policy(name, **settings), TEXT[:, :6], 8, max_new_tokens=4)
    with pytest.raises(ValueError, match="a text of 40 tokens outgrows the 10 that were planned in row 1 and a layer"):
        kvjax.extend(state, [[], TEXT[1, 6:40].tolist()])
