"""SnapKV, LightKV and the top-k oracle beyond what the tables of policies already test."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import kvjax
from kvjax.cache.buffers import allocated_bytes
from kvjax.cache.slots import empty_slots
from kvjax.inference.prepare import prepare
from kvjax.policies import Selection
from tests.cases import in_turns
from tests.held import layers
from tests.small_models import GQA, random_model, sharp_model

MODEL = random_model(GQA)
TEXT = np.random.default_rng(0).integers(0, 64, (3, 60))
LENGTHS = [60, 20, 41]
SETTINGS: dict[str, Any] = {"snapkv": {"recent": 8}, "lightkv": {"alpha": 6}}


def live(state, layer=0):
    return (np.asarray(layers(state)[layer].position) >= 0).sum(-1)


def steps(state, count):
    """The last state and logits [count, b, vocab] of a fixed text."""
    seen = []
    for step in range(count):
        state, logits = kvjax.decode_step(state, jnp.full(state.position.shape, step % 64, jnp.int32))
        seen.append(logits)
    return state, np.array(seen)


@pytest.mark.parametrize(("name", "chunk"), in_turns(["snapkv", "lightkv"], [1, 16]))
@pytest.mark.compiled_well
def test_reading_in_chunks_does_not_depend_on_longer_neighbours(name, chunk):
    policy = kvjax.policy(name, **SETTINGS[name])
    together, logits = kvjax.prefill(MODEL, policy, TEXT, 12, lengths=LENGTHS, prefill_chunk=chunk, plan="uniform")
    _, following = steps(together, 5)
    for row, length in enumerate(LENGTHS):
        text = TEXT[row : row + 1]
        alone = kvjax.prefill(MODEL, policy, text, 12, lengths=[length], prefill_chunk=chunk, plan="uniform")
        np.testing.assert_allclose(logits[row], alone[1][0], atol=1e-5)
        np.testing.assert_array_equal(
            np.sort(layers(together)[1].position[row]), np.sort(layers(alone[0])[1].position[0])
        )
        np.testing.assert_allclose(following[:, row], steps(alone[0], 5)[1][:, 0], atol=1e-5)


def test_a_prompt_shorter_than_the_window_stays_whole():
    state, _ = kvjax.prefill(MODEL, "snapkv", TEXT[:, :20], 40, max_new_tokens=4)
    assert (live(state) == 20).all()


def test_nothing_leaves_up_to_the_context_limit_and_the_rest_at_once():
    policy = kvjax.policy("lightkv", context_limit=50)
    state, _ = kvjax.prefill(MODEL, policy, TEXT, 16, lengths=LENGTHS, max_new_tokens=40, plan="uniform")
    assert layers(state)[0].capacity >= 50
    for _ in range(35):
        length = np.asarray(state.position)[:, None]
        np.testing.assert_array_equal(live(state, 1), np.where(length <= 50, length, 16) * np.ones((1, 2)))
        state, _ = kvjax.decode_step(state, jnp.zeros(3, jnp.int32))


def planned(policy, budget, lengths):
    """The caches of prompts of some lengths, as shapes."""
    tokens = [[0] * length for length in lengths]
    prompts = prepare(MODEL, policy, tokens, budget, None, max_new_tokens=40, key=None, plan=None, chunk=None)
    layers = enumerate(zip(GQA.layer_configs, prompts.limits, prompts.capacities, strict=True))
    made, roomy = functools.partial(empty_slots, dtype=jnp.float32), prompts.policy.sized(prompts.lines)
    return jax.eval_shape(
        lambda: tuple(
            made(roomy.layer(i), c, i, limit=jnp.asarray(limit), slots=slots) for i, (c, limit, slots) in layers
        )
    )


def test_a_long_prompt_gets_no_more_slots_than_are_left_of_it():
    # C_l = 48 and 16; prompts up to the limit need room for as many tokens.
    policy = kvjax.policy("lightkv", context_limit=50)
    for shortest, slots in ((60, [48, 16]), (51, [48, 16]), (50, [64, 64])):
        assert [view.capacity for view in planned(policy, 32, [60, shortest])] == slots
    # The example of section 4: of C_l = 48 three times 48 / (2 omega) are left.
    masked = kvjax.policy("lightkv", omega=4, middle="mask")
    assert [view.capacity for view in planned(masked, 32, [60, 20])] == [32, 16]
    state, _ = kvjax.prefill(MODEL, policy, TEXT[:2], 32, lengths=[60, 51], max_new_tokens=40)
    assert kvjax.cache_bytes(state) == allocated_bytes(planned(policy, 32, [60, 51]))
    state, logits = steps(state, 3)
    assert np.isfinite(logits).all() and (live(state, 0) == 48).all() and (live(state, 1) == 16).all()


def test_bytes_fall_with_the_context_limit_and_the_width_of_the_mask():
    """Figures 3 to 5, for texts of 2048 tokens: no layer holds more than the limit, so C_1 is at most the limit."""

    def held(name, budget=1.0, **settings):
        return allocated_bytes(planned(kvjax.policy(name, **settings), budget, [2048]))

    limits = (256, 512, 1024)
    running, exact = (
        [held("lightkv", limit * 2 // 3, context_limit=limit, window=window) for limit in limits]
        for window in ("running", "exact")
    )
    assert running == sorted(set(running)) and exact == sorted(set(exact))
    assert exact[-1] < held("full")
    for limit, bounded, more in zip(limits, running, exact, strict=True):
        assert bounded < held("h2o", limit)
        # The queries that are kept count: as many as there are slots, each of d numbers for each of g heads.
        queries = 4 * GQA.kv_heads * GQA.groups * GQA.head_width * (limit + limit // 3)
        assert more - bounded > 0.9 * queries
    masks = [held("lightkv", 341, context_limit=512, middle="mask", omega=omega) for omega in (8, 4, 2)]
    assert masks == sorted(set(masks)) and masks[-1] < exact[1]


def test_evicted_at_the_context_limit_means_absorbed_by_less():
    settings = {"kernels": "performer", "features": 8, "base": "lightkv", "context_limit": 30}
    state, _ = kvjax.prefill(MODEL, kvjax.policy("less", **settings), TEXT[:1, :20], 16, max_new_tokens=20)

    def absorbed(state):
        leaves = jax.tree.leaves(layers(state)[0].state.residual)
        return [np.asarray(leaf) for leaf in leaves]

    full, _ = steps(state, 10)
    assert all(map(np.array_equal, absorbed(full), absorbed(state)))
    compressed, logits = steps(full, 1)
    assert not all(map(np.array_equal, absorbed(compressed), absorbed(full)))
    assert np.isfinite(logits).all()


def test_widths_of_the_report():
    # Section 4: a mask of one fourth of 2048 tokens is 256 on each side; 256 of the middle are kept.
    policy, limit = kvjax.policy("lightkv", omega=4, middle="mask"), jnp.array([[2048]])
    assert policy.protection.sink_slots(limit) == policy.protection.recent_slots(limit) == 256
    assert policy.slots_at(limit, jnp.array([4096])) == 3 * 256
    assert kvjax.policy("lightkv", omega=4).slots_at(limit, jnp.array([4096])) == 2048  # equation 6


@pytest.mark.parametrize(("window", "chunk"), in_turns(["exact", "running"], [None, 1]))
def test_offloaded_scores_lie_in_host_memory_and_change_nothing(window, chunk):
    def read(**settings):
        policy = kvjax.policy("lightkv", window=window, special=(7, 11), **settings)
        return kvjax.prefill(MODEL, policy, TEXT, 16, lengths=LENGTHS, prefill_chunk=chunk)

    (plain, expected), (offloaded, logits) = read(), read(offload=True)
    np.testing.assert_array_equal(logits, expected)
    for step in range(20):
        for cache in layers(offloaded):
            # Scores, masks and window queries together (section 3.4); what attention needs stays.
            gone = jax.tree.leaves((cache.slots.score, cache.slots.protection, cache.state.score))
            assert len(gone) >= 3 and {leaf.sharding.memory_kind for leaf in gone} == {"pinned_host"}
            stays = jax.tree.leaves((cache.kv, cache.position))
            assert {leaf.sharding.memory_kind for leaf in stays} != {"pinned_host"}
        token = jnp.full(3, step, jnp.int32)
        plain, expected = kvjax.decode_step(plain, token)
        offloaded, logits = kvjax.decode_step_in_place(offloaded, token)
        # Two programs: XLA may round differently where it fuses differently.
        np.testing.assert_allclose(logits, expected, atol=5e-6)
        for cache, like in zip(layers(offloaded), layers(plain), strict=True):
            np.testing.assert_array_equal(cache.position, like.position)


def test_offloading_without_host_memory_is_one_sentence():
    device = SimpleNamespace(platform="abacus", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    table = SimpleNamespace(weight=SimpleNamespace(devices=lambda: [device]))
    model = SimpleNamespace(weights=SimpleNamespace(table=table))
    with pytest.raises(ValueError, match="'pinned_host', which abacus does not have"):
        kvjax.policy("lightkv", offload=True).bind(cast(Any, model))


def test_top_k_of_everything_is_the_full_cache_and_frees_nothing():
    full, expected = kvjax.prefill(MODEL, "full", TEXT, lengths=LENGTHS, max_new_tokens=20)
    oracle, logits = kvjax.prefill(MODEL, "topk_oracle", TEXT, 80, lengths=LENGTHS, max_new_tokens=20)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    np.testing.assert_allclose(steps(oracle, 20)[1], steps(full, 20)[1], atol=1e-5)
    assert kvjax.cache_bytes(oracle) >= kvjax.cache_bytes(full)


def test_top_k_comes_closer_with_k():
    _, expected = kvjax.prefill(MODEL, "full", TEXT, max_new_tokens=4)
    errors = []
    for k in (1, 4, 16, 40):
        _, logits = kvjax.prefill(MODEL, "topk_oracle", TEXT, k, max_new_tokens=4)
        errors.append(float(np.abs(logits - expected).mean()))
    assert errors == sorted(errors, reverse=True) and errors[0] > 2 * errors[-1]


@struct.dataclass
class Oldest(Selection):
    """Choice of the oldest token that a query sees."""

    def pick(self, probs: Any, new: Any) -> Any:
        return (probs > 0) & (jnp.cumsum(probs > 0, -1) == 1)


def test_a_selection_may_choose_a_token_whose_attention_rounds_to_0():
    texts = [TEXT[0].tolist(), TEXT[1, :20].tolist()]
    found = []
    for longer in (1, 1000):
        model = sharp_model(GQA, jnp.float32, longer)
        state, logits = kvjax.prefill(model, kvjax.policy("full", selection=Oldest()), texts, max_new_tokens=4)
        found.append((logits, steps(state, 4)[1]))
    for sharp, plain in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(sharp, plain, atol=1e-5)


@pytest.mark.parametrize(
    "name, settings, budget, message",
    [
        ("snapkv", {}, 16, "sinks \\+ recent = 0 \\+ 32"),
        ("snapkv", {"kernel": 4}, 40, "kernel=4"),
        ("snapkv", {"pooling": "median"}, 40, "pooling='median'"),
        ("snapkv", {"group": "sum"}, 40, "group='sum'"),
        ("pyramidkv", {"recent": 8, "beta": 0.1}, 40, "beta=0.1"),
        ("pyramidkv", {}, 24, "does not hold the window of 32"),
        ("lightkv", {"omega": 0.5}, 40, "omega=0.5"),
        ("lightkv", {"alpha": 0}, 40, "alpha=0"),
        ("lightkv", {"alpha": 61}, 40, "alpha=61, .* needs 61 tokens of a prompt, and one has 60"),
        ("lightkv", {"middle": "all"}, 40, "middle='all'"),
        ("lightkv", {"context_limit": 0}, 40, "context_limit=0"),
        ("lightkv", {"context_limit": 59}, 40, "context_limit=59 is below the C_1 = 60 slots"),
        ("lightkv", {"window": "last"}, 40, "window='last' is not 'exact' or 'running'"),
        ("lightkv", {"ratio": 0.5}, 40, "ratio=0.5"),
        ("lightkv", {"sinks": 39, "recent": 9}, 40, "do not fit in a budget"),
        ("topk_oracle", {"k": 0}, 40, "k=0"),
        ("topk_oracle", {}, 0, "k=0"),
        ("topk_oracle", {}, [4, 4], "budget=\\[4, 4\\]"),
    ],
)
def test_bad_settings_are_one_sentence(name, settings, budget, message):
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(MODEL, kvjax.policy(name, **settings), TEXT, budget)
