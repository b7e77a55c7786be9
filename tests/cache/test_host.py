"""Prompts of the full cache in host memory: the texts are those of a full cache on the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import generate
from kvjax.cache.buffers import host_bytes
from kvjax.cache.host import HostSlots
from kvjax.generation.chat import Conversation
from kvjax.generation.generate import generate_ids
from kvjax.inference.decode import lower_step
from kvjax.inference.verify import truncate, verify
from kvjax.models import ModelConfig
from kvjax.serving.engine import Engine
from kvjax.types import KV
from tests.cases import slow
from tests.small_models import GQA, LOCAL, SINKS, SLOPED, random_model

PROMPTS = [np.random.default_rng(row).integers(0, 64, size).tolist() for row, size in enumerate((41, 57, 48))]
CODECS = (None, "int8")


def full(codec: str | None = None, **settings: Any) -> kvjax.Policy:
    return kvjax.policy("full", codec=codec, **settings)


def assert_close(ours: Any, expected: Any) -> None:
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-9)


def kinds_of(kv: KV) -> set[str | None]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(kv)}


def assert_prompts_in_host_memory(cache: kvjax.Cache) -> None:
    for layer in cache.layers:
        assert isinstance(layer, HostSlots)
        assert kinds_of(layer.prompt) == {"pinned_host"} != kinds_of(layer.kv)


@pytest.mark.parametrize("codec", CODECS)
def test_steps_turns_and_rows_are_those_of_the_full_cache(codec: str | None, x64: None) -> None:
    model = random_model(GQA, dtype=jnp.float64)
    states = [
        kvjax.prefill(model, full(codec, **settings), PROMPTS, max_new_tokens=30)[0]
        for settings in ({"memory": "host"}, {})
    ]
    prompt = host_bytes(states[0].cache.memory)
    assert kvjax.cache_bytes(states[0]) == kvjax.cache_bytes(states[1]) > prompt > 0 == host_bytes(states[1].cache)
    shorter = [
        kvjax.prefill(model, full(codec, **settings), [[5, 6, 7], [8, 9]], max_new_tokens=30)[0]
        for settings in ({"memory": "host"}, {})
    ]
    for read in (
        lambda state: kvjax.decode_step(state, [1, 2, 3]),
        lambda state: kvjax.extend(state, [[5, 6, 7, 8], [], [9, 10]], logits="all"),
        lambda state: kvjax.decode_step(state.replace(active=jnp.array([True, False, True])), [4, 5, 6]),
        lambda state: kvjax.decode_step_in_place(kvjax.take_rows(state, [2, 0, 0]), [7, 8, 9]),
    ):
        (states[0], ours), (states[1], expected) = map(read, states)
        active = np.asarray(states[1].active)
        assert_close(ours[active], expected[active])
        assert_prompts_in_host_memory(states[0].cache)
    assert host_bytes(states[0].cache.memory) == prompt
    positions = ([np.sort(layer) for layer in kvjax.held_positions(state)] for state in states)
    for ours, expected in zip(*positions, strict=True):
        np.testing.assert_array_equal(ours, expected)
    put = [kvjax.put_rows(state, [2, 0], rows) for state, rows in zip(states, shorter, strict=True)]
    (_, ours), (_, expected) = (kvjax.decode_step(state.replace(active=jnp.ones(3, bool)), [1, 2, 3]) for state in put)
    assert_close(ours, expected)


@pytest.fixture(scope="module")
def texts() -> dict[str | None, list[list[int]]]:
    """Greedy texts of full caches on the device, by their codec."""
    with jax.enable_x64(True):
        model = random_model(GQA, dtype=jnp.float64)
        settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}
        return {codec: generate_ids(model, PROMPTS, policy=full(codec), **settings).tokens for codec in CODECS}


@pytest.mark.parametrize(
    ("codec", "settings"),
    [
        (None, {}),
        slow(None, {"policy": "streaming", "budget": 0.25, "draft_tokens": "auto"}),
        ("int8", {"policy": "h2o", "budget": 17, "plan": "adakv", "draft_tokens": 2}),
    ],
)
def test_texts_are_those_of_the_full_cache(codec: str | None, settings: Any, texts: Any, x64: None) -> None:
    host = full(codec, memory="host")
    role = {"lossless": True, "verifier": host} if settings else {"policy": host}
    generation = generate_ids(
        random_model(GQA, dtype=jnp.float64), PROMPTS, max_new_tokens=40, temperature=0.0, **role, **settings
    )
    assert generation.tokens == texts[codec]
    assert_prompts_in_host_memory(generation.padded.cache.caches[0])


@pytest.mark.parametrize("config", [SLOPED, LOCAL, slow(SINKS)], ids=["alibi", "windows", "sinks"])
def test_known_tokens_attend_to_prompts_of_every_kind_of_layer(config: ModelConfig, x64: None) -> None:
    model, after = random_model(config, dtype=jnp.float64), list[Any]()
    tokens, lengths = jnp.array([[8, 15, 9], [4, 1, 2], [7, 7, 3]]), jnp.array([3, 0, 2])
    for settings in ({"memory": "host"}, {}):
        decoder = kvjax.decoder(model, full(**settings)).replace(beyond_window=3)
        cache, _ = decoder.prefill(PROMPTS, max_new_tokens=12)
        opened, logits = jax.jit(verify)(decoder.for_steps(), cache.replace(key=None), tokens, lengths)
        kept = truncate(opened, cache.position + jnp.minimum(lengths, 1)).replace(key=cache.key)
        _, later = kvjax.decode_step(kvjax.State(decoder.for_steps(), kept), [1, 2, 3])
        after.append((logits[0], logits[2, :2], later))
        in_host_memory = [isinstance(layer, HostSlots) for layer in cache.layers]
        assert in_host_memory == ["memory" in settings and layer.window is None for layer in config.layer_configs]
    jax.tree.map(assert_close, *after)


def test_prompts_of_many_layers_are_read_layer_by_layer(x64: None) -> None:
    model = random_model(dataclasses.replace(GQA, layers=12), dtype=jnp.float64)
    _, expected = kvjax.prefill(model, "full", PROMPTS, max_new_tokens=8)
    for reader in (
        kvjax.decoder(model, full(memory="host")),
        kvjax.speculation(model, "streaming", 16, verifier=full(memory="host")),
    ):
        cache, logits = reader.prefill(PROMPTS, max_new_tokens=8)
        assert_close(logits, expected)
        assert_prompts_in_host_memory(cache)


def test_a_step_in_place_copies_no_prompt() -> None:
    state, _ = kvjax.prefill(random_model(GQA), full(memory="host"), PROMPTS, max_new_tokens=30)
    memory = lower_step(state).compile().memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= kvjax.cache_bytes(state)


def test_a_conversation_is_that_of_the_full_cache(tmp_path: Path) -> None:
    model, turns = kvjax.load("tiny"), ("The dog was big.", "Then a cat came.")
    settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "context": 120}
    expected, ours = Conversation(model, **settings), Conversation(model, policy=full(memory="host"), **settings)
    for number, turn in enumerate(turns):
        assert "".join(ours.reply(turn)) == "".join(expected.reply(turn))
        if number == 0:
            use = ours.use()
            assert use == expected.use()
            ours.save(tmp_path / "saved")
            ours.forget()
            ours.load(tmp_path / "saved")
            assert ours.use() == use and host_bytes(ours._state().cache.memory) > 0


def test_the_command_writes_the_full_cache_s_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--prompt", "Once upon a time there was a dog", "-n", "30", "--temperature", "0"]
    assert generate.main(words) == 0
    expected = capsys.readouterr().out
    words += ["--policy", "h2o", "--budget", "8", "--lossless", "--verifier", "full[memory=host]"]
    assert generate.main(words) == 0
    outputs = capsys.readouterr()
    assert outputs.out == expected
    assert "\nlossless to full[memory=host]: " in outputs.err and " in host memory), a full cache" in outputs.err


def prefilled(**settings: Any) -> kvjax.State:
    return kvjax.prefill(random_model(GQA), full(memory="host"), PROMPTS, max_new_tokens=8, **settings)[0]


REFUSED: dict[str, Any] = {
    "memory='disk' is not one of device, host": lambda: full(memory="disk"),
    "plan HostMemory copies prompts from host memory as they are stored": lambda: full(memory="host", selection="topk"),
    "a selection or positions='cache'; use policy full with memory='host'": lambda: full(
        memory="host", positions="cache"
    ),
    "prefill_chunk=16 does not go with memory='host', which moves whole prompts": lambda: prefilled(prefill_chunk=16),
    "prefill_chunk=4 does not go with memory='host'": lambda: kvjax.extend(prefilled(), [[5]] * 3, prefill_chunk=4),
    "the slots of a prompt are in host memory": lambda: kvjax.compress(prefilled(), "keydiff", 16),
    "a beam search gathers rows of all caches at each step": lambda: generate_ids(
        random_model(GQA), PROMPTS, policy=full(memory="host"), max_new_tokens=4, beams=2
    ),
    "every layer of 'random' has a window": lambda: kvjax.decoder(
        random_model(dataclasses.replace(LOCAL, windows=(12, 12))), full(memory="host")
    ),
    "full with memory='host' moves whole prompts to host memory, and a server reads chunks": lambda: Engine(
        kvjax.load("tiny"), lossless=True, verifier=full(memory="host")
    ),
    "mode='budget' is not unbounded": lambda: kvjax.Sizing(host_memory=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_prompts_in_host_memory_do_not_support_is_refused(message: str) -> None:
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_mesh_is_refused() -> None:
    model = random_model(GQA)
    model.mesh = jax.make_mesh((1, 1, 1), ("data", "heads", "slots"))
    with pytest.raises(ValueError, match="memory='host' keeps the prompts of one device; leave memory out"):
        kvjax.decoder(model, full(memory="host"))
