"""Every policy against its literal NumPy twin: the same logits and the same tokens kept, step by step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.model import Model
from kvjax.models import ModelConfig
from kvjax.policies import Policy
from kvjax.rope import Rope
from tests.cases import FIRST, PAIRS, POLICIES, RARE, RECENT, Case, core, slow
from tests.held import kept, unpacked
from tests.oracles.decoder import Decoder
from tests.small_models import (
    GQA,
    LATENT,
    LEARNED,
    LLAMA4,
    LOCAL,
    MHA,
    MIXED,
    MQA,
    PARTIAL,
    SINKS,
    SLOPED,
    YARN,
    random_model,
    sharp_model,
    small_config,
    with_attention,
)

CLASSIC = [name for name in FIRST if name not in RECENT]
LIKE_OTHERS = ("streaming-every-8", "keyformer-every-8", "l2-every-8", "lightkv-offload")
"""Cases that evict in blocks as `h2o-every-8` and `tova-every-8` do, and `lightkv` with scores in another memory."""
SHAPES = {"mha": (MHA, (301,)), "gqa": (GQA, (41, 9)), "mqa": (MQA, (57,))}
SHAPES |= {"experts": (MIXED, (41, 9)), "llama4": (LLAMA4, (41, 9)), "latent": (LATENT, (41, 9))}
SHAPES |= {
    "partial": (PARTIAL, (41, 9)),
    "yarn": (YARN, (41, 9)),
    "alibi": (SLOPED, (41, 9)),
    "learned": (LEARNED, (41, 9)),
}


@jax.jit
def _follow(state: kvjax.State, text: Int[Array, "b steps"]) -> tuple[Float[Array, "steps b vocab"], Any]:
    """Logits and stored positions of every step of a text."""

    def step(state: kvjax.State, token: Int[Array, " b"]) -> tuple[kvjax.State, tuple[Array, Any]]:
        state, logits = kvjax.decode_step(state, token)
        return state, (logits, state.cache.stored_positions())

    return jax.lax.scan(step, state, text.T)[1]


def compare_with_oracle(
    case: Case, model: Model, lengths: tuple[int, ...], steps: int, policy: Policy | None = None
) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, model.config.vocab_size, length + steps) for length in lengths]
    prompts = [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]
    state, first = kvjax.prefill(
        model,
        policy or case.make(),
        prompts,
        case.budget,
        max_new_tokens=steps,
        plan=case.plan,
        prefill_chunk=case.prefill_chunk,
        key=jax.random.key(5),
    )
    following = np.stack([text[length:] for text, length in zip(texts, lengths, strict=True)])
    logits, positions = jax.tree.map(np.asarray, _follow(state, jnp.asarray(following, jnp.int32)))
    positions = unpacked(state.cache, positions)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.weights)
    evicted = 0
    for row, length in enumerate(lengths):
        decoder = Decoder(weights, model.config, case.oracles(state, row, length + steps), horizon=steps)
        np.testing.assert_allclose(first[row], decoder.prompt(prompts[row]), rtol=1e-8, atol=1e-9)
        # One slot more than the paper has is for the next token; until then a token has it that is going to leave.
        held = zip(decoder.oracles, kept(state, row), decoder.kept(), strict=True)
        for oracle, layer, wanted in held:
            more = 1 if oracle.fills and not oracle.evicts_first else 0
            for ours, papers in zip(layer, wanted, strict=True):
                assert set(papers) <= set(ours), f"row {row} after the prompt"
                assert len(ours) == min(len(papers) + more, length), f"row {row} after the prompt"
        for step in range(steps):
            expected = decoder.step(int(following[row, step]))
            for layer, wanted in enumerate(decoder.attended):
                live = [sorted(p for p in head if p >= 0) for head in positions[layer][step, row].tolist()]
                assert live == wanted, f"row {row}, layer {layer}, step {step}"
                evicted += sum(length + step + 1 - len(head) for head in wanted)
            message = f"row {row}, step {step}"
            np.testing.assert_allclose(logits[step, row], expected, rtol=1e-8, atol=1e-9, err_msg=message)
    assert evicted > 0 or state.policy.plan.sizing.mode == "unbounded"


def _random(config: ModelConfig) -> Model:
    return random_model(config, seed=1, dtype=jnp.float64)


@pytest.mark.parametrize(
    "name", [core(name) if name in CLASSIC else slow(name) if name in LIKE_OTHERS else name for name in POLICIES]
)
def test_equals_its_oracle(name: str, x64: None) -> None:
    config, lengths = SHAPES["gqa"]
    compare_with_oracle(POLICIES[name], _random(config), lengths, 110)


@pytest.mark.parametrize("name", [name if name == "h2o" else slow(name) for name in CLASSIC])
def test_equals_its_oracle_for_long(name: str, x64: None) -> None:
    config, lengths = SHAPES["gqa"]
    compare_with_oracle(POLICIES[name], _random(config), lengths, 300)


@pytest.mark.parametrize("name", [slow(name) if name in RARE else name for name in PAIRS])
def test_what_is_combined_equals_its_oracle(name: str, x64: None) -> None:
    config, lengths = SHAPES["gqa"]
    compare_with_oracle(PAIRS[name], _random(config), lengths, 62)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in a total that these oracles do not use
@pytest.mark.parametrize("name", ["scissorhands", "scissorhands+adakv"])
def test_tokens_whose_attention_rounds_to_0_are_seen(name: str, x64: None) -> None:
    compare_with_oracle((POLICIES | PAIRS)[name], sharp_model(MHA, longer=400), (41, 9), 62)


@pytest.mark.parametrize("name", ["h2o+int8", *map(slow, ("streaming+int4", "h2o+adakv+int8", "snapkv+fp8"))])
def test_short_prompts_give_no_factors_of_channels(name: str, x64: None) -> None:
    compare_with_oracle(PAIRS[name], _random(SHAPES["gqa"][0]), (1, 7, 8), 40)


def test_layers_are_lazy_after_prompts_that_are_longer_than_their_ends(x64: None) -> None:
    """The ends have all attention of a prompt of as many tokens, whose layers keep what follows."""
    ends = POLICIES["simlayerkv"].settings["sinks"] + POLICIES["simlayerkv"].settings["recent"]
    compare_with_oracle(POLICIES["simlayerkv"], _random(SHAPES["gqa"][0]), (ends + 1, ends, 3), 20)


def test_deviations_of_two_channels_are_those_of_a_sample(x64: None) -> None:
    """LagKV adds two softmaxes, so a factor of all deviations, as between n - 1 and n, changes its order."""
    config = small_config(4, 2, head_width=2, rope=Rope(width=2))
    compare_with_oracle(dataclasses.replace(POLICIES["lagkv"], budget=120), _random(config), (240,), 2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape) if shape == ("mqa" if name in RECENT or number % 2 else "mha") else slow(name, shape)
        for number, name in enumerate(FIRST)
        for shape in ("mha", "mqa")
    ],
)
def test_equals_its_oracle_with_more_or_fewer_heads(name: str, shape: str, x64: None) -> None:
    """Methods take turns; each is compared with several heads of several queries above."""
    config, lengths = SHAPES[shape]
    compare_with_oracle(POLICIES[name], _random(config), lengths, 40)


@pytest.mark.parametrize(
    "name",
    [
        *("less+h2o+int8", "fastgen"),
        *(slow(name) for name in FIRST if name != "fastgen"),
        *(slow(name) for name in ("less+keyformer", "h2o+adakv+int8", "less+snapkv+adakv")),
    ],
)
def test_experts_change_no_cache(name: str, x64: None) -> None:
    config, lengths = SHAPES["experts"]
    compare_with_oracle((POLICIES | PAIRS)[name], _random(config), lengths, 40)


@pytest.mark.parametrize(
    "name",
    [
        *("h2o", "less-performer"),
        *(slow(name) for name in FIRST if name not in ("h2o", "less-performer")),
        *(slow(name) for name in ("less+h2o+int8", "less+keyformer", "h2o+adakv+int8", "less+snapkv+adakv")),
    ],
)
def test_layers_without_rope_take_grown_queries_and_others_normed_ones(name: str, x64: None) -> None:
    config, lengths = SHAPES["llama4"]
    compare_with_oracle((POLICIES | PAIRS)[name], _random(config), lengths, 40)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(core("h2o", shape) for shape in ("partial", "alibi", "learned")),
        *(("streaming", shape) for shape in ("partial", "alibi")),
        *(slow(name, "yarn") for name in ("h2o-cache-positions", "leverage")),
        ("expected_attention", "yarn"),
        *(slow(name, "alibi") for name in ("h2o-cache-positions", "lightkv", "less-performer")),
    ],
)
def test_equals_its_oracle_wherever_positions_enter(name: str, shape: str, x64: None) -> None:
    config, lengths = SHAPES[shape]
    compare_with_oracle(POLICIES[name], _random(config), lengths, 40)


@pytest.mark.parametrize(
    "name",
    [
        *("h2o", "less-performer"),
        *(slow(name) for name in FIRST if name not in ("h2o", "less-performer")),
        *(slow(name) for name in ("less+h2o+int8", "less+keyformer", "h2o+int8", "less+snapkv")),
    ],
)
def test_latents_are_keys_and_values(name: str, x64: None) -> None:
    config, lengths = SHAPES["latent"]
    compare_with_oracle((POLICIES | PAIRS)[name], _random(config), lengths, 40)


def _uneven(config: ModelConfig) -> Model:
    """Keys of each KV head longer than those of the one before: the first looks everywhere, the last at little."""
    model = _random(config)
    long = np.repeat(np.geomspace(0.1, 20, config.kv_heads), config.head_width)[:, None]
    return Model(with_attention(model.weights, lambda mixer: {"key": mixer.key.weight * long}), config)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("l2", "gqa"), ("snapkv", "mha"), *(slow(name, "gqa") for name in ("h2o", "keyformer", "less+snapkv"))],
)
def test_heads_that_differ_get_slots_as_in_ada_kv(name: str, shape: str, x64: None) -> None:
    """By the paper's Algorithm 1 with its safeguard, in rows of several lengths."""
    case = (POLICIES | PAIRS)[name]
    case = dataclasses.replace(case, settings={**case.settings, "recent": 4}, budget=18, plan="adakv")
    compare_with_oracle(case, _uneven(SHAPES[shape][0]), (41, 30, 12), 30)


EMBEDDED = ("h2o", "keyformer", "less-performer", "fastgen", "lightkv", "lsh_e")
"""Cases that the default suite tries on a trained model, too: one for each way to ask, to evict and to remember."""


@pytest.mark.parametrize("name", [name if name in EMBEDDED else slow(name) for name in POLICIES])
def test_equals_its_oracle_on_the_embedded_model(name: str, x64: None) -> None:
    compare_with_oracle(POLICIES[name], kvjax.load("tiny", dtype=jnp.float64), (57,), 60)


@pytest.mark.parametrize(
    "name",
    [
        core("h2o"),
        *("h2o+int8", "kvzip"),
        *(slow(name) for name in FIRST if name not in ("h2o", "kvzip")),
        *(slow(name) for name in ("h2o-sequential", "h2o-cache-positions", "lightkv-context", "fastgen-low")),
        *(slow(name) for name in ("h2o-pyramid", "less+keyformer", "less+fastgen-local", "less+snapkv+adakv")),
        *(slow(name) for name in ("streaming+adakv", "h2o+topk")),
    ],
)
def test_layers_with_a_window_are_a_window_policy(name: str, x64: None) -> None:
    compare_with_oracle((POLICIES | PAIRS)[name], _random(LOCAL), (41, 9), 30)


@pytest.mark.parametrize(
    "name",
    [
        *("h2o", "less-performer"),
        *(slow(name) for name in ("keyformer", "fastgen", "tova", "less+keyformer", "less+snapkv+adakv")),
        *(slow(name) for name in ("h2o+int8", "h2o+topk")),
    ],
)
def test_learned_sinks_take_part_of_the_output_and_no_part_of_the_scores(name: str, x64: None) -> None:
    compare_with_oracle((POLICIES | PAIRS)[name], _random(SINKS), (41, 9), 30)
