"""Models with a recurrent state in most layers: whatever reads a text says the same, and policies act on attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.recurrent import Columns, Recurrent
from kvjax.evaluation.trace import trace
from kvjax.inference.decode import lower_step
from kvjax.inference.shapes import state_shapes
from kvjax.inference.state import bytes_by_kind, held_positions, slot_limits
from kvjax.models import ModelConfig
from kvjax.training.less.record import collect
from tests.cases import slow
from tests.small_models import CONVOLVED, HYBRID, random_model

TEXT = np.random.default_rng(0).integers(0, HYBRID.vocab_size, (2, 90))
LENGTHS = np.array([70, 41])
MODEL = random_model(HYBRID)


def close(found: Any, row: int, at: int, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found[row], expected[row, at], rtol=1e-4, atol=1e-4)


READ: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "chunks": ("h2o", {"budget": 90, "prefill_chunk": 16}),
    "steps": ("h2o", {"budget": 90, "prefill_chunk": 1}),
    "pages": ("h2o", {"budget": 90, "plan": "adakv"}),
}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, HYBRID) if name in ("full", "pages") else slow(name, HYBRID) for name in READ),
        *(("full", CONVOLVED), slow("steps", CONVOLVED)),
    ],
    ids=lambda it: it if isinstance(it, str) else ("convolutions" if it is CONVOLVED else "delta"),
)
def test_prompts_turns_and_steps_equal_the_whole_text(name: str, config: ModelConfig) -> None:
    policy, settings = READ[name]
    model = random_model(config)
    expected = np.asarray(model.logits(TEXT))
    state, logits = kvjax.prefill(model, policy, TEXT[:, :70], lengths=LENGTHS, max_new_tokens=20, **settings)
    for row, length in enumerate(LENGTHS):
        close(logits, row, length - 1, expected)
    turn = [TEXT[0, 70:80].tolist(), []]
    state, logits = kvjax.extend(state, turn)
    close(logits, 0, 79, expected)
    state = state.replace(active=jnp.array([False, True]))
    before = state
    state, logits = kvjax.decode_step(state, jnp.asarray([999, TEXT[1, 41]]))
    close(logits, 1, 41, expected)
    for one, other in zip(before.layers, state.layers, strict=True):
        if isinstance(one, Columns):
            jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), one, other)
    state = state.replace(active=jnp.array([True, True]))
    for step in range(3):
        state, logits = kvjax.decode_step(state, TEXT[[0, 1], [80 + step, 42 + step]])
        close(logits, 0, 80 + step, expected)
        close(logits, 1, 42 + step, expected)


def test_a_policy_acts_on_layers_with_attention_alone() -> None:
    state, _ = kvjax.prefill(MODEL, "h2o", TEXT[:, :70], 0.25, lengths=LENGTHS, max_new_tokens=10)
    assert [type(layer) is Recurrent for layer in state.layers] == [True, False, True]
    (positions,), (limit,) = held_positions(state), slot_limits(state)
    assert limit.tolist() == [[20, 20], [12, 12]]  # a quarter of each planned text
    assert [(positions[row] >= 0).sum(-1).tolist() for row in range(2)] == [[20, 20], [12, 12]]
    full, _ = kvjax.prefill(MODEL, "full", TEXT[:, :70], lengths=LENGTHS, max_new_tokens=10)
    jax.tree.map(np.testing.assert_array_equal, state.layers[0], full.layers[0])  # no attention comes before it
    sizes = bytes_by_kind(state)
    assert sizes["recurrent"] == sum(leaf.nbytes for i in (0, 2) for leaf in jax.tree.leaves(state.layers[i]))
    assert sum(sizes.values()) == kvjax.cache_bytes(state) < kvjax.full_cache_bytes(state)
    assert kvjax.full_cache_bytes(state) == kvjax.cache_bytes(full)


@pytest.mark.compiled_well
def test_decoding_takes_constant_memory() -> None:
    def needed(tokens: int) -> tuple[int, int]:
        state = state_shapes(MODEL, "h2o", 2, tokens, 32, max_new_tokens=8)
        memory = lower_step(state).compile().memory_analysis()
        assert memory is not None
        return kvjax.cache_bytes(state), memory.temp_size_in_bytes

    assert needed(64) == needed(2000)


def test_rows_are_taken_and_put() -> None:
    state, _ = kvjax.prefill(MODEL, "h2o", TEXT[:, :70], 20, lengths=LENGTHS, max_new_tokens=10)
    _, expected = kvjax.decode_step(state, [5, 6])
    _, swapped = kvjax.decode_step(kvjax.take_rows(state, [1, 0]), [6, 5])
    np.testing.assert_allclose(swapped[::-1], expected, rtol=1e-5, atol=1e-5)
    put = kvjax.put_rows(state, [0], kvjax.take_rows(state, [1]))
    _, both = kvjax.decode_step(put, [6, 6])
    np.testing.assert_allclose(both, np.asarray(expected)[[1, 1]], rtol=1e-5, atol=1e-5)


def test_slots_for_each_layer_are_those_of_layers_with_attention() -> None:
    state, _ = kvjax.prefill(MODEL, "h2o", TEXT[:, :70], [24], max_new_tokens=10)
    assert [limit.max() for limit in slot_limits(state)] == [24]
    with pytest.raises(
        ValueError, match=r"budget=\[24, 24\] is not .* from 1 for each of 1 layers with slots of their own"
    ):
        kvjax.prefill(MODEL, "h2o", TEXT[:, :70], [24, 24])


def test_a_stop_string_ends_a_lossless_text_where_no_token_can_be_taken_back() -> None:
    model = random_model(dataclasses.replace(HYBRID, vocab_size=2048))
    model.tokenizer = kvjax.load("tiny").tokenizer
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.0}
    (text,) = model.generate(["Once upon a time"], **settings)
    words = text.split()
    settings |= {"stop": [words[len(words) // 2]]}
    expected = model.generate(["Once upon a time"], **settings)
    assert len(expected[0]) < len(text)
    assert model.generate(["Once upon a time"], policy="h2o", budget=16, lossless=True, **settings) == expected


def test_what_needs_attention_in_all_layers_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="learned kernels need attention in all layers, which 'random' does not have"):
        kvjax.prefill(MODEL, kvjax.policy("less"), TEXT, 16)
    with pytest.raises(ValueError, match="kernels are trained for attention in all layers, which 'random' does not"):
        collect(MODEL, kvjax.policy("h2o"), 16, TEXT, tmp_path)
    with pytest.raises(ValueError, match="triattention needs attention with RoPE in all layers"):
        kvjax.prefill(MODEL, "triattention", TEXT, 16)
    with pytest.raises(ValueError, match="this needs attention in all layers, and layer 0 has a Recurrent"):
        trace(MODEL, "h2o", [1] * 20, [1] * 3, 16)


def test_compression_leaves_recurrent_layers_as_they_are() -> None:
    settings: dict[str, Any] = {"lengths": LENGTHS, "max_new_tokens": 10}
    full, _ = kvjax.prefill(MODEL, "full", TEXT[:, :70], **settings)
    pressed = kvjax.compress(full, "keydiff", budget=16)
    read, _ = kvjax.prefill(MODEL, "keydiff", TEXT[:, :70], 16, **settings)
    np.testing.assert_array_equal(held_positions(pressed), held_positions(read))
    for one, other in zip(pressed.layers, full.layers, strict=True):
        if isinstance(one, Recurrent):
            jax.tree.map(np.testing.assert_array_equal, one, other)
    np.testing.assert_allclose(kvjax.decode_step(pressed, [5, 6])[1], kvjax.decode_step(read, [5, 6])[1], atol=1e-5)


def test_a_text_is_read_again_over_a_recurrent_state() -> None:
    policy = kvjax.policy("kvzip", prompt=(1, 2), later=(3,), recent=4)
    state, _ = kvjax.prefill(MODEL, policy, TEXT[:, :70], 16, lengths=LENGTHS, max_new_tokens=10)
    full, _ = kvjax.prefill(MODEL, "full", TEXT[:, :70], lengths=LENGTHS, max_new_tokens=10)
    (positions,) = held_positions(state)
    assert (positions >= 0).sum(-1).mean(1).tolist() == [16, 16]  # of both heads, which share their slots
    jax.tree.map(np.testing.assert_array_equal, state.layers[0], full.layers[0])
