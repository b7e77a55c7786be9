"""Methods written outside of kvjax, against their oracles: the same logits, and the same tokens after every step."""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inference.extend import lower_prefill
from kvjax.model import Model
from kvjax.models import ModelConfig
from tests.cases import core, slow
from tests.held import kept
from tests.models import GQA, PARTIAL, random_model, sharp_model, small_config
from tests.oracles import codecs, triattention
from tests.oracles.decoder import Decoder, Oracle, Prompt
from tests.plugins.triattention import TriAttention, calibrated
from tests.plugins.triattention import triattention as triattention_policy

ROOT = Path(__file__).parents[1]
LENGTHS, STEPS, EVERY = (41, 9), 28, 8
TEXT = np.random.default_rng(4).integers(0, GQA.vocab_size, (2, 80))
CALIBRATION = [TEXT[0, :48].tolist(), TEXT[1, :30].tolist()]
SHAPE: dict[str, Any] = dict(layers=GQA.layers, kv_heads=GQA.kv_heads, groups=GQA.groups)
ROPE: Any = GQA.rope


@functools.cache
def model() -> Model:
    """In float64: called under `x64`."""
    return sharp_model(GQA)


def decoder(oracles: list[Oracle]) -> Decoder:
    return Decoder(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model().weights), GQA, oracles, STEPS)


@functools.cache
def calibrated_score() -> TriAttention:
    return calibrated(model(), CALIBRATION, distances=6)


class Reader(Oracle):
    """Keeps everything, and its prompt, too."""

    prompt: Prompt

    def read(self, prompt):
        self.prompt = prompt

    def scores(self, h, new):
        return self.heads[h].positions


@functools.cache
def query_means() -> list[list[list[tuple[Any, Any]]]]:
    """Q and m of each layer, KV head and query head, by the oracle."""
    texts: list[list[Any]] = []
    for text in CALIBRATION:
        readers: list[Any] = [
            Reader([99] * 2, **SHAPE, layer=layer, recents=[0] * 2, sinks=0, special=(), positions="original")
            for layer in range(GQA.layers)
        ]
        decoder(readers).prompt(text)
        texts.append([reader.prompt.queries for reader in readers])

    def of_head(layer: int, h: int, g: int) -> tuple[Any, Any]:
        return triattention.calibrated([queries[layer][h][g] for queries in texts], ROPE.theta)

    return [
        [[of_head(layer, h, g) for g in range(GQA.groups)] for h in range(GQA.kv_heads)] for layer in range(GQA.layers)
    ]


def means(layer: int, seed: int) -> dict[str, Any]:
    """What an oracle of TriAttention knows of a layer's queries."""
    centers, norms = ([[each[i] for each in head] for head in query_means()[layer]] for i in range(2))
    return dict(centers=centers, norms=norms, theta=ROPE.theta)


@dataclasses.dataclass(frozen=True)
class Plugin:
    """A method and its oracle.

    Args:
        make: returns the policy.
        oracle: its literal twin.
        budget: slots per head.
        settings: of the oracle.
        inject: (layer, seed) -> further settings.
    """

    make: Callable[[], kvjax.Policy]
    oracle: type[Oracle]
    budget: int
    settings: dict[str, Any]
    inject: Callable[[int, int], dict[str, Any]] = lambda layer, seed: {}

    def oracles(self, codec: str | None, seed: int) -> list[Oracle]:
        usual: dict[str, Any] = dict(sinks=0, recent=0, special=(), positions="original", codec=codec)
        settings = usual | SHAPE | self.settings
        settings["recents"] = [settings["recent"]] * GQA.kv_heads
        kind = self.oracle if codec is None else codecs.coded(self.oracle)
        limits = [self.budget] * GQA.kv_heads
        return [kind(limits, **settings, layer=layer, **self.inject(layer, seed)) for layer in range(GQA.layers)]


def tri(**settings: Any) -> kvjax.Policy:
    score = dataclasses.replace(calibrated_score(), **settings)
    return triattention_policy(score, every=EVERY, recent=2)


PLUGINS = {
    "triattention": Plugin(
        lambda: tri(keep_prompt=False),
        triattention.TriAttention,
        14,
        dict(distances=6, keep_prompt=False, evict_every=EVERY, recent=2),
        means,
    ),
    "triattention-prompt": Plugin(
        lambda: tri(keep_prompt=True),
        triattention.TriAttention,
        46,
        dict(distances=6, keep_prompt=True, evict_every=EVERY, recent=2),
        means,
    ),
}


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        core("triattention", None),
        slow("triattention", "int8"),
        slow("triattention-prompt", None),
        ("triattention-prompt", "int8"),
    ],
)
def test_equals_its_oracle(name: str, codec: str | None, x64: None) -> None:
    plugin = PLUGINS[name]
    policy = kvjax.policy(plugin.make(), codec=codec)
    prompts = [TEXT[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    state, first = kvjax.prefill(model(), policy, prompts, plugin.budget, max_new_tokens=STEPS, key=jax.random.key(5))
    rows = [decoder(plugin.oracles(codec, int(seed))) for seed in state.seed]
    for row, (each, prompt) in enumerate(zip(rows, prompts, strict=True)):
        np.testing.assert_allclose(first[row], each.prompt(prompt), rtol=1e-8, atol=1e-9)
        assert kept(state, row) == each.kept(), f"row {row} after the prompt"
    most = 0
    for step in range(STEPS):
        tokens = [int(TEXT[row, length + step]) for row, length in enumerate(LENGTHS)]
        state, logits = kvjax.decode_step(state, tokens)
        for row, each in enumerate(rows):
            expected = each.step(tokens[row])
            assert kept(state, row) == each.attended, f"row {row}, step {step}"
            np.testing.assert_allclose(logits[row], expected, rtol=1e-8, atol=1e-9, err_msg=f"row {row}, step {step}")
            most = max(most, *(len(head) for layer in each.attended for head in layer))
    assert most == plugin.budget + plugin.settings.get("evict_every", 1) - 1


def test_calibration_averages_queries_before_rotation(x64: None) -> None:
    score = calibrated_score()
    for layer, heads in enumerate(query_means()):
        for h, g in np.ndindex(GQA.kv_heads, GQA.groups):
            center, norm = heads[h][g]
            np.testing.assert_allclose(triattention.pairs(np.asarray(score.center[layer][h, g])), center, atol=1e-12)
            np.testing.assert_allclose(score.norm[layer][h, g], norm, atol=1e-12)


def drawn_score(config: ModelConfig) -> TriAttention:
    """Arrays that nobody has calibrated."""
    shape, width, numbers = (config.layers, config.kv_heads, config.groups), config.head_width, np.random.default_rng(0)
    center, norm = (jnp.asarray(numbers.normal(size=(*shape, n)), jnp.float32) for n in (width, width // 2))
    return TriAttention(center, norm)


DEEP = small_config(4, 2, layers=13)


def test_layers_share_programs() -> None:
    def make() -> kvjax.Policy:
        return triattention_policy(drawn_score(DEEP), every=EVERY)

    deep, prompts = random_model(DEEP), [[1, 2, 3, 4, 5, 6, 7, 8] * 3]
    assert len(lower_prefill(deep, make(), prompts, 18)) == 3
    state, _ = kvjax.prefill(deep, make(), prompts, 18, max_new_tokens=4)
    step = jax.make_jaxpr(kvjax.decode_step)(state, jnp.asarray([9])).eqns[0].params["jaxpr"]
    layers = [equation.params["jaxpr"] for equation in step.eqns if equation.params.get("name") == "_through_layer"]
    assert len(layers) == DEEP.layers
    assert len({id(layer.jaxpr) for layer in layers}) == 1


def test_pages_are_refused() -> None:
    score = drawn_score(GQA)
    message = "TriAttention compares the slots of a head with each other, which plan AdaKV keeps on pages"
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(random_model(GQA), kvjax.Policy(score), [[1, 2, 3, 4]], 80, plan="adakv")


@pytest.mark.parametrize(
    ("config", "message"), [(DEEP, "calibrate for this model"), (PARTIAL, "TriAttention needs RoPE of all channels")]
)
def test_arrays_of_another_model_are_refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(random_model(config), kvjax.Policy(drawn_score(GQA)), [[1, 2, 3, 4]], 4)


@pytest.mark.slow
def test_a_mesh_gives_what_one_device_gives() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    words = [sys.executable, "-m", "tests.mesh_plugins"]
    run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def test_plugins_import_public_names_alone() -> None:
    ours = ("kvjax", "pallas_kernels", "tests")
    for file in (ROOT / "tests" / "plugins").glob("*.py"):
        imported: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or ".")
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kvjax":
                assert node.attr in kvjax.__all__, f"{file.name} uses kvjax.{node.attr}"
        known = {module for module in imported if module.split(".")[0] in ours}
        assert known <= {"kvjax", "kvjax.types"}, f"{file.name} imports {known}"
