"""Every policy against its literal NumPy twin: the same logits and the same tokens kept, step by step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import decode
from kvjax.model import Model
from tests.cases import FIRST, POLICIES, Case
from tests.held import stored, unpacked
from tests.models import GQA, MHA, MQA, random_model
from tests.oracles.decoder import Decoder

STEPS = 300
SHAPES = {"mha": (MHA, (57,)), "gqa": (GQA, (41, 9)), "mqa": (MQA, (57,))}


@jax.jit
def _follow(state, text):
    """Logits [steps, b, vocab] and cached positions, sorted, of every step, for a text [b, steps]."""

    def step(state, token):
        state, logits = decode.step(state, token)
        return state, (logits, stored(state.caches))

    return jax.lax.scan(step, state, text.T)[1]


def _oracles(case: Case, state: kvjax.State, row: int, tokens: int):
    policy, config = state.policy, state.config
    settings = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    for layer, limit in enumerate(decode.slot_limits(state)):
        injected = {} if case.inject is None else case.inject(policy, config, layer, int(state.seed[row]), tokens)
        oracle = case.oracle(
            layer=layer,
            layers=config.layers,
            limit=int(limit[row, 0]),
            kv_heads=config.kv_heads,
            groups=config.groups,
            **(settings | injected),
        )
        if case.prefill_chunk == 1:
            oracle.sequential = True
        yield oracle


def _compare(case: Case, model: Model, lengths: tuple[int, ...], steps: int) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, model.config.vocab_size, length + steps) for length in lengths]
    prompts = [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]
    state, first = kvjax.prefill(
        model,
        case.make(),
        prompts,
        case.budget,
        max_new_tokens=steps,
        plan=case.plan,
        prefill_chunk=case.prefill_chunk,
        key=jax.random.key(5),
    )
    following = np.stack([text[length:] for text, length in zip(texts, lengths, strict=True)])
    logits, positions = jax.tree.map(np.asarray, _follow(state, jnp.asarray(following, jnp.int32)))
    at_first, positions = decode.held_positions(state), unpacked(state.caches, positions)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.weights)
    evicted = 0
    for row, length in enumerate(lengths):
        oracles = list(_oracles(case, state, row, length + steps))
        decoder = Decoder(weights, model.config, oracles, horizon=steps)
        np.testing.assert_allclose(first[row], decoder.prompt(prompts[row]), rtol=1e-8, atol=1e-9)
        for layer, held in enumerate(at_first):
            live = [sorted(p for p in head if p >= 0) for head in held[row].tolist()]
            assert live == decoder.kept()[layer], f"row {row}, layer {layer} after the prompt"
        for step in range(steps):
            expected = decoder.step(int(following[row, step]))
            for layer, kept in enumerate(decoder.kept()):
                live = [sorted(p for p in head if p >= 0) for head in positions[layer][step, row].tolist()]
                assert live == kept, f"row {row}, layer {layer}, step {step}"
                evicted += sum(length + step + 1 - len(head) for head in kept)
            message = f"row {row}, step {step}"
            np.testing.assert_allclose(logits[step, row], expected, rtol=1e-8, atol=1e-9, err_msg=message)
    assert evicted > 0 or not state.policy.evicts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", POLICIES)
def test_equals_its_oracle(name: str, shape: str, x64: None) -> None:
    config, lengths = SHAPES[shape]
    _compare(POLICIES[name], random_model(config, seed=1, dtype=jnp.float64), lengths, STEPS)


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in POLICIES]
)
def test_equals_its_oracle_on_the_embedded_model(name: str, x64: None) -> None:
    _compare(POLICIES[name], kvjax.load("tiny", dtype=jnp.float64), (57,), STEPS)
