"""RoPE's context extensions against transformers' own functions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.generation.sampling import Sampling
from kvjax.inference.decode import trace_step
from kvjax.models.families.settings import read_rope
from kvjax.rope import STRETCH, Rope, rope_frequencies, rotate, turns_of
from kvjax.serving.requests import Request
from kvjax.serving.scheduler import Device
from pallas_kernels import operands
from tests.inference.test_layers import assert_cached_equals_plain
from tests.small_models import random_model, small_config

_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 9.0, 20.0, 30.0]}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama4": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0},
    "yarn of its own": {"rope_type": "yarn", "factor": 3.0, "attention_factor": 0.7, "beta_fast": 9, "beta_slow": 2.0},
    "yarn with two scales": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "longrope": {"rope_type": "longrope", **_FACTORS},
    "longrope of its own": {"rope_type": "longrope", "factor": 8.0, "attention_factor": 1.3, **_FACTORS},
    "longrope with a factor": {"rope_type": "longrope", "factor": 8.0, **_FACTORS},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [40, 64, 65, 1000])
def test_frequencies_are_those_of_transformers(name: str, length: int) -> None:
    pytest.importorskip("torch")
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_theta": 5e3, **SCALINGS[name]}
    if scaling["rope_type"] not in ("linear", "dynamic"):
        scaling["original_max_position_embeddings"] = 64
    longest = 64 if scaling["rope_type"] == "dynamic" else 256
    settings = {"head_dim": 12, "max_position_embeddings": longest, "rope_parameters": scaling}
    theirs = transformers.LlamaConfig(**{**settings, "rope_parameters": dict(scaling)})
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, seq_len=length)
    rope = read_rope(settings, 12)
    np.testing.assert_allclose(rope_frequencies(rope, length), expected.numpy(), rtol=2e-6)
    np.testing.assert_allclose(rope.magnitude, factor, rtol=1e-6)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_each_row_has_the_frequencies_of_its_own_length(name: str) -> None:
    scaling = {"original_max_position_embeddings": 64, **SCALINGS[name]}
    rope = read_rope({"max_position_embeddings": 64, "rope_parameters": scaling}, 12)
    lengths, positions = np.array([50, 700]), np.array([3, 5000])
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 12)).astype(np.float32)
    every = rotate(rope, jnp.asarray(x), jnp.asarray(positions)[None, None], jnp.asarray(lengths))
    for row, length in enumerate(lengths):
        angles = positions[:, None] * np.asarray(rope_frequencies(rope, int(length)))
        first, second = x[row][..., :6], x[row][..., 6:]
        turned = first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)
        np.testing.assert_allclose(every[row], rope.magnitude * np.concatenate(turned, -1), atol=5e-3)
    with pytest.raises(ValueError, match=f"frequencies of {name} RoPE depend on the length of the text; give it"):
        rotate(rope, jnp.asarray(x), jnp.asarray(positions)[None, None])


LONG = Rope(
    8, scaling="longrope", factor=4.0, original_max_positions=30, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4
)


def test_a_cache_has_the_frequencies_of_its_planned_text() -> None:
    model = random_model(small_config(4, 2, rope=LONG))
    text = np.random.default_rng(1).integers(0, 64, (2, 40))
    lengths = np.array([32, 12])  # of 40 and 20 tokens that are planned, one text is beyond 30
    state, logits = kvjax.prefill(model, "full", text[:, :32], lengths=lengths, max_new_tokens=8)
    for step in range(8):
        whole = np.where(np.arange(40) < (lengths + 8)[:, None], text, 0)
        expected = np.asarray(model.logits(whole, lengths + 8))
        np.testing.assert_allclose(logits, expected[range(2), lengths + step - 1], atol=2e-5)
        state, logits = kvjax.decode_step(state, text[range(2), lengths + step])


def test_a_short_text_has_the_frequencies_of_short_texts_under_any_plan() -> None:
    model = random_model(small_config(4, 2, rope=LONG))
    text = np.random.default_rng(1).integers(0, 64, (1, 40))
    expected = np.asarray(model.logits(text[:, :20]))[0]
    state, logits = kvjax.prefill(model, "full", text[:, :12], max_new_tokens=100, rope_length=20)
    np.testing.assert_allclose(logits[0], expected[11], atol=2e-5)
    state, logits = kvjax.decode_step(state, text[:, 12])
    np.testing.assert_allclose(logits[0], expected[12], atol=2e-5)
    both = kvjax.take_rows(kvjax.put_rows(kvjax.take_rows(state, [0, 0]), [1], state), [1])
    _, logits = kvjax.extend(both, text[:, 13:20])
    np.testing.assert_allclose(logits[0], expected[19], atol=2e-5)
    with pytest.raises(ValueError, match="rope_length=0"):
        kvjax.prefill(model, "full", text, rope_length=0)


@pytest.mark.parametrize("policy", ["full", "streaming"])
def test_a_server_reads_short_texts_with_the_frequencies_of_short_texts(policy: str) -> None:
    model = random_model(small_config(4, 2, rope=LONG))
    device = Device(model, policy, 100, rows=2, context=100, chunk=32, steps=1)
    tokens = np.random.default_rng(1).integers(0, 64, 40).tolist()
    for row, (length, later) in enumerate([(20, 10), (20, 11)]):
        request = Request(tuple(tokens[:length]), sampling=Sampling(0.0), max_tokens=later)
        text, logits = device.read(device.begin(device.plan(request)), tokens[:length])
        expected = np.asarray(model.logits([tokens[: length + later]]))[0, length - 1]
        np.testing.assert_allclose(logits[0], expected, atol=2e-5)
        device.put(row, text, logits, request)
    written, _ = device.write({0, 1}, 1)
    assert device.state is not None and written.counts.tolist() == [1, 1]
    for row, later in enumerate((10, 11)):
        whole = [*tokens[:20], int(written.tokens[row, 0]), *tokens[21 : 20 + later]]
        expected = np.asarray(model.logits([whole]))[0, 20]
        np.testing.assert_allclose(device.state.logits[row], expected, atol=2e-5)


def test_texts_with_the_same_frequencies_have_the_same_length() -> None:
    config = small_config(4, 2, rope=LONG)
    lengths = config.rope_length(np.array([1, 30, 31, 90]))
    assert lengths is not None and lengths.tolist() == [30, 30, 31, 31]
    growing = small_config(4, 2, rope=Rope(8, scaling="dynamic", factor=4.0, original_max_positions=30))
    lengths = growing.rope_length(np.array([1, 30, 31, 90]))
    assert lengths is not None and lengths.tolist() == [30, 30, 31, 90]
    assert small_config(4, 2).rope_length(np.array([1, 90])) is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "positions"), [("h2o", "cache"), ("streaming", "cache"), ("h2o", "original")])
def test_scaled_keys_are_the_same_wherever_they_are_rotated(name: str, positions: str) -> None:
    rope = Rope(8, scaling="yarn", factor=4.0, original_max_positions=16)
    policy = kvjax.policy(name, positions=positions)
    assert_cached_equals_plain(small_config(4, 2, rope=rope), policy)


def test_keys_by_rank_have_no_frequencies_of_a_whole_text() -> None:
    model = random_model(small_config(4, 2, rope=LONG))
    with pytest.raises(
        ValueError, match=r"frequencies of longrope RoPE are those of the whole text; use positions='or"
    ):
        kvjax.prefill(model, kvjax.policy("h2o", positions="cache"), [[1, 2, 3]], 8)
    _, logits = kvjax.prefill(model, "streaming", [list(range(20))], 8)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"width": 2, "scaling": "dynamic"}, "dynamic RoPE needs a width from 4, not 2"),
        (
            {"width": 8, "scaling": "longrope"},
            "short_factors=None does not fit longrope RoPE of width 8; give 4",
        ),
        ({"width": 8, "long_factors": (1.0,)}, r"long_factors=\(1\.0,\) does not fit none RoPE of width 8; give none"),
    ],
)
def test_rope_refuses(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Rope(**settings)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_channels_change_places_alike_on_all_platforms(interleaved: bool, dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 16)), dtype)
    expected = np.asarray(operands.swap_halves(interleaved, x))
    channels = np.arange(16)
    np.testing.assert_array_equal(expected, np.asarray(x)[..., channels ^ 1 if interleaved else (channels + 8) % 16])
    np.testing.assert_array_equal(operands.swap_by_product(interleaved, x), expected)


def test_a_step_computes_angles_once_for_all_layers() -> None:
    local = Rope(8, theta=100.0)
    config = small_config(4, 2, ropes=(Rope(8), local, Rope(8)), layers=3)
    state, _ = kvjax.prefill(random_model(config), "h2o", [[1, 2, 3]], 8, max_new_tokens=8)
    jaxpr = str(trace_step(state).jaxpr)
    assert jaxpr.count("= cos ") == jaxpr.count("= sin ") == 2


def test_a_bound_of_positions_changes_no_bit():
    rope, positions = Rope(128), jnp.asarray([[0], [1], [209], [STRETCH - 1]])
    expected, found = turns_of(rope, positions, "float32"), turns_of(rope, positions, "float32", None, STRETCH)
    np.testing.assert_array_equal(found, expected)
