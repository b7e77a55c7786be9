"""Layers that read the slots of an earlier layer and store nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import kvjax
from kvjax.cache.shared import Shared
from kvjax.evaluation.fidelity import fidelity
from kvjax.evaluation.replay import masked_perplexity
from kvjax.evaluation.trace import trace
from kvjax.inference import prefill
from kvjax.inference.extend import lower_prefill
from kvjax.inference.prefill import independent_runs
from kvjax.inference.state import slot_limits
from kvjax.methods.pyramidkv import Pyramid
from kvjax.model import Model
from kvjax.training.less.record import collect
from tests.small_models import SOURCES, random_model

TEXT = np.random.default_rng(0).integers(0, SOURCES.vocab_size, (2, 60))
LENGTHS = np.array([20, 13])
PROMPTS = [row[:length].tolist() for row, length in zip(TEXT, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(SOURCES)


@pytest.fixture
def in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read prompts as those of deep models: the layers before the first that is read by others one by one."""
    monkeypatch.setattr(prefill, "DEEP", 1)


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 8])
def test_a_prompt_is_attended_in_full_before_its_tokens_are_evicted(model: Model, chunk: int | None) -> None:
    state, logits = kvjax.prefill(model, "h2o", PROMPTS, 8, max_new_tokens=4, prefill_chunk=chunk)
    assert [len(np.unique(positions[0, 0])) <= 17 for positions in kvjax.held_positions(state)] == [True, True]
    if chunk is None:
        close(logits, np.asarray(model.logits(TEXT))[range(2), LENGTHS - 1])


def test_a_prompt_in_runs_of_layers_is_the_same(model: Model, in_runs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, logits = kvjax.prefill(model, "h2o", PROMPTS, 8, max_new_tokens=4)
    monkeypatch.setattr(prefill, "DEEP", 12)
    together, expected = kvjax.prefill(model, "h2o", PROMPTS, 8, max_new_tokens=4)
    close(logits, expected)
    jax.tree.map(close, runs.cache.memory, together.cache.memory)


def test_runs_hold_all_layers_that_read_each_other() -> None:
    assert independent_runs(SOURCES) == [slice(0, 5)]
    apart = dataclasses.replace(SOURCES, sources=(None, None, None, 1, 2))
    assert independent_runs(apart) == [slice(0, 1), slice(1, 5)]
    assert independent_runs(dataclasses.replace(SOURCES, sources=None)) == [slice(i, i + 1) for i in range(5)]


BY_STEPS: dict[str, Callable[[Any], tuple[Any, Array]]] = {
    "decode steps": lambda state: decoded(state),
    "known tokens": lambda state: stepped(state),
    "a turn in chunks of one token": lambda state: kvjax.extend(state, TEXT[:, 12:28], prefill_chunk=1),
}


def decoded(state: Any) -> tuple[Any, Array]:
    for token in TEXT[:, 12:27].T:
        state, _ = kvjax.decode_step(state, token)
    return kvjax.decode_step(state, TEXT[:, 27])


def stepped(state: Any) -> tuple[Any, Array]:
    steps = jax.jit(lambda decoder, cache, tokens: decoder.steps(cache, tokens))
    _, logits = steps(state.decoder, state.cache.replace(key=None), jnp.asarray(TEXT[:, 12:28]))
    return state, logits[:, -1]


@pytest.mark.parametrize("read", BY_STEPS.values(), ids=BY_STEPS)
def test_readers_see_what_their_source_holds_when_it_reads_a_token(read: Any) -> None:
    """A policy that keeps the newest 12 tokens is a window of 12 in each layer, also for those that store nothing."""
    whole = random_model(dataclasses.replace(SOURCES, windows=None))
    windowed = Model(whole.weights, dataclasses.replace(SOURCES, windows=(12,) * 5), name="windowed")
    state, _ = kvjax.prefill(whole, "window", TEXT[:, :12], 12, max_new_tokens=16)
    close(read(state)[1], np.asarray(windowed.logits(TEXT[:, :28]))[:, -1])


def test_rows_are_selected_and_replaced(model: Model) -> None:
    state, _ = kvjax.prefill(model, "h2o", PROMPTS, 8, max_new_tokens=4)
    _, logits = kvjax.decode_step(state, TEXT[:, 40])
    _, swapped = kvjax.decode_step(kvjax.take_rows(state, [1, 0]), TEXT[::-1, 40])
    close(swapped, logits[::-1])
    both = kvjax.put_rows(state, [0], kvjax.take_rows(state, [1]))
    close(kvjax.decode_step(both, TEXT[[1, 1], 40])[1], np.asarray(logits)[[1, 1]])


def test_only_layers_that_store_count(model: Model) -> None:
    state, _ = kvjax.prefill(model, "full", PROMPTS, max_new_tokens=4)
    own = random_model(dataclasses.replace(SOURCES, sources=None, windows=(None,) * 5))
    five, _ = kvjax.prefill(own, "full", PROMPTS, max_new_tokens=4)
    assert [type(layer) is Shared for layer in state.layers] == [False, False, True, True, True]
    assert kvjax.cache_bytes(state) == kvjax.full_cache_bytes(state)
    unbounded = random_model(dataclasses.replace(SOURCES, windows=(None,) * 5))
    two, _ = kvjax.prefill(unbounded, "full", PROMPTS, max_new_tokens=4)
    assert 5 * kvjax.cache_bytes(two) == 2 * kvjax.cache_bytes(five)
    kvjax.prefill(model, "h2o", PROMPTS, [6, 9])
    with pytest.raises(ValueError, match=r"from 1 for each of 2 layers with slots of their own\."):
        kvjax.prefill(model, "h2o", PROMPTS, [8] * 5)


def test_a_budget_is_one_of_the_layers_that_store(model: Model) -> None:
    policy = kvjax.policy("h2o", plan=Pyramid(beta=2.0))
    state, _ = kvjax.prefill(model, policy, [TEXT[0, :11].tolist()], 8, max_new_tokens=1)
    assert sum(int(limit[0, 0]) for limit in slot_limits(state)) == 16


@pytest.mark.parametrize("several", [False, True])
def test_readers_at_the_end_run_for_the_last_token_alone(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five layers at one of 48 positions: 2 / 5 of the work, and a little."""
    monkeypatch.setattr(prefill, "DEEP", 1 if several else 12)
    settings: dict[str, Any] = dict(max_new_tokens=4)
    readers, own = (
        lower_prefill(random_model(dataclasses.replace(SOURCES, sources=sources)), "full", TEXT[:, :48], **settings)
        for sources in (SOURCES.sources, None)
    )
    assert _flops(readers) < 0.5 * _flops(own) * (1 if not several else 5)  # equal layers share one program


def _flops(lowered: list[Any]) -> float:
    return sum(program.cost_analysis()["flops"] for program in lowered)


def test_a_text_beyond_its_plan_gets_the_slots_of_its_windows(model: Model) -> None:
    state, _ = kvjax.prefill(model, "h2o", TEXT[:, :8], 6, max_new_tokens=1)
    state, _ = kvjax.extend(state, TEXT[:, 8:30])
    assert [int(limit.max()) for limit in slot_limits(state)] == [12, 6]


def test_a_trace_is_one_of_the_layers_that_store(model: Model) -> None:
    record = trace(model, "h2o", TEXT[0, :12].tolist(), TEXT[0, 12:15].tolist(), 8)
    assert len(record.positions) == 2


def test_a_cache_is_compressed_as_a_prompt_is(model: Model) -> None:
    """Keys are all that `keydiff` ranks by; with a block it would evict before the end of a prompt."""
    policy = kvjax.policy("keydiff", block=None)
    whole, _ = kvjax.prefill(model, "full", PROMPTS, max_new_tokens=4)
    pressed = kvjax.compress(whole, policy, 8)
    state, _ = kvjax.prefill(model, policy, PROMPTS, 8, max_new_tokens=4)
    for ours, theirs in zip(kvjax.held_positions(pressed), kvjax.held_positions(state), strict=True):
        np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))
    close(kvjax.decode_step(pressed, TEXT[:, 40])[1], kvjax.decode_step(state, TEXT[:, 40])[1])


def test_prompts_are_read_a_second_time(model: Model) -> None:
    policy = kvjax.policy("kvzip", prompt=[1], later=[2], recent=2)
    state, logits = kvjax.prefill(model, policy, PROMPTS, 8, max_new_tokens=4)
    close(logits, np.asarray(model.logits(TEXT))[range(2), LENGTHS - 1])
    whole, _ = kvjax.prefill(model, "full", PROMPTS, max_new_tokens=4)
    pressed = kvjax.compress(whole, policy, 8, text=PROMPTS)
    for ours, theirs in zip(kvjax.held_positions(pressed), kvjax.held_positions(state), strict=True):
        np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))


@pytest.mark.slow
def test_fidelity_is_one_of_the_layers_that_store(model: Model) -> None:
    compared = fidelity(model, "h2o", TEXT[:, :24], 24)
    assert compared.hellinger.shape[-1] == 2 and np.abs(compared.hellinger).max() < 1e-3


REFUSED: dict[str, tuple[Callable[[Model, Path], Any], str]] = {
    "replay": (lambda model, _: masked_perplexity(model, "h2o", TEXT, 8), "a replay of a policy layer by layer needs"),
    "LESS": (lambda model, out: collect(model, kvjax.policy("h2o"), 8, TEXT, out), "training of LESS needs keys and"),
    "retrieval heads": (lambda model, _: kvjax.prefill(model, "duoattention", PROMPTS), "heads of duoattention needs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_keys_in_each_layer_is_refused(name: str, model: Model, tmp_path: Path) -> None:
    do, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence) as refusal:
        do(model, tmp_path)
    assert str(refusal.value).endswith("reads those of layer 0; use another policy or model.")


@pytest.mark.parametrize("sources", [(None, None, 2, 1, 0), (None, None, 0, 2, 0), (None, 0, 0, 1, 0), (None,) * 4])
def test_a_source_is_an_earlier_layer_of_the_same_shape(sources: Any) -> None:
    with pytest.raises(ValueError, match=r"sources(\[\d\] must be an earlier layer| has 4 entries)"):
        dataclasses.replace(SOURCES, sources=sources)
