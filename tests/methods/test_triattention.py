"""TriAttention against its oracle, the calibration that it needs, and files of mean queries."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax import generate
from kvjax.cli import calibrate
from kvjax.inference.extend import lower_prefill
from kvjax.methods.triattention import FILE, QueryMeans, TriAttention, load, save
from kvjax.model import Model
from kvjax.models import ModelConfig
from kvjax.training.calibrate import query_means
from tests.cases import core, slow
from tests.held import kept
from tests.oracles import codecs, less, triattention
from tests.oracles.decoder import Decoder, Oracle, Prompt
from tests.paths import ROOT
from tests.small_models import GQA, LEARNED, MHA, MQA, PARTIAL, YARN, random_model, sharp_model, small_config

LENGTHS, STEPS, EVERY = (41, 9), 28, 8
TEXT = np.random.default_rng(4).integers(0, GQA.vocab_size, (2, 80))
CALIBRATION = [TEXT[0, :48], TEXT[1, :30]]
SHAPES = {"mha": MHA, "gqa": GQA, "mqa": MQA, "partial": PARTIAL, "yarn": YARN}


@functools.cache
def model(shape: str) -> Model:
    """In float64: called under `x64`."""
    return sharp_model(SHAPES[shape])


def shape_of(config: ModelConfig) -> dict[str, Any]:
    return dict(layers=config.layers, kv_heads=config.kv_heads, groups=config.groups)


def decoder(shape: str, oracles: list[Oracle]) -> Decoder:
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model(shape).weights)
    return Decoder(weights, SHAPES[shape], oracles, STEPS)


class Reader(Oracle):
    """Keeps everything, and its prompt, too."""

    prompt: Prompt

    def read(self, prompt):
        self.prompt = prompt

    def scores(self, h, new):
        return self.heads[h].positions


@functools.cache
def means(shape: str) -> list[list[list[triattention.Mean]]]:
    """Mean queries of each layer, KV head and query head, by the oracle."""
    config, texts = SHAPES[shape], list[Any]()
    usual: dict[str, Any] = dict(recents=[0] * config.kv_heads, sinks=0, special=(), positions="original")
    for text in CALIBRATION:
        readers: list[Any] = [
            Reader([99] * config.kv_heads, **shape_of(config), **usual, layer=layer) for layer in range(config.layers)
        ]
        decoder(shape, readers).prompt(text.tolist())
        texts.append([reader.prompt.queries for reader in readers])

    def of_head(layer: int, h: int, g: int) -> triattention.Mean:
        return triattention.calibrated([queries[layer][h][g] for queries in texts], config.rope)

    return [
        [[of_head(layer, h, g) for g in range(config.groups)] for h in range(config.kv_heads)]
        for layer in range(config.layers)
    ]


def policy(shape: str, **settings: Any) -> kvjax.Policy:
    """The policy with the mean queries of a model."""
    made = kvjax.policy("triattention", distances=6, recent=2, evict_every=EVERY, **settings)
    assert isinstance(made.score, TriAttention)
    found = query_means(model(shape), CALIBRATION)[0]
    return dataclasses.replace(made, score=dataclasses.replace(made.score, means=found))


def oracles(shape: str, kind: type[Oracle], budget: int, made: kvjax.Policy, state: kvjax.State) -> list[Oracle]:
    config, residual = SHAPES[shape], state.policy.residual
    assert isinstance(made.score, TriAttention)
    usual: dict[str, Any] = dict(sinks=0, recent=2, recents=[2] * config.kv_heads, special=(), positions="original")
    usual |= dict(distances=6, keep_prompt=made.score.keep_prompt, evict_every=EVERY, codec=made.codec.name)
    usual |= dict(rope=config.rope, kernels="performer", parameters=getattr(residual, "layers", None))
    return [
        kind([budget] * config.kv_heads, **usual, **shape_of(config), layer=layer, means=means(shape)[layer])
        for layer in range(config.layers)
    ]


@pytest.mark.parametrize(
    ("shape", "budget", "parts"),
    [
        core("gqa", 14, {"keep_prompt": False}),
        ("gqa", 46, {}),
        ("gqa", 20, {"codec": "int8"}),
        ("mha", 14, {}),
        slow("mqa", 14, {"keep_prompt": False}),
        ("partial", 14, {"keep_prompt": False}),
        ("yarn", 14, {"keep_prompt": False}),
        ("gqa", 14, {"keep_prompt": False, "residual": "less", "residual.kernels": "performer"}),
    ],
)
def test_equals_its_oracle(shape: str, budget: int, parts: dict[str, Any], x64: None) -> None:
    made, kind = policy(shape, **parts), triattention.TriAttention
    kind = codecs.coded(kind) if "codec" in parts else less.less(kind) if "residual" in parts else kind
    prompts = [TEXT[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    state, first = kvjax.prefill(model(shape), made, prompts, budget, max_new_tokens=STEPS, key=jax.random.key(5))
    rows = [decoder(shape, oracles(shape, kind, budget, made, state)) for _ in prompts]
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
    assert most == budget + EVERY - 1


@pytest.mark.parametrize("shape", ["gqa", "partial"])
def test_calibration_averages_queries_before_rotation(shape: str, x64: None) -> None:
    (center, norm), tokens = query_means(model(shape), CALIBRATION)
    assert tokens == sum(map(len, CALIBRATION))
    config = SHAPES[shape]
    for layer, heads in enumerate(means(shape)):
        for h, g in np.ndindex(config.kv_heads, config.groups):
            wanted, found = heads[h][g], np.asarray(center[layer][h, g])
            np.testing.assert_allclose(triattention.pairs(found, config.rope), wanted.center, atol=1e-12)
            np.testing.assert_allclose(found[config.rope.width :], wanted.still, atol=1e-12)  # type: ignore[union-attr]
            np.testing.assert_allclose(norm[layer][h, g], wanted.norm, atol=1e-12)


DEEP = small_config(4, 2, layers=13)


def drawn(config: ModelConfig) -> QueryMeans:
    """Arrays that nobody has calibrated."""
    shape, width, numbers = (config.kv_heads, config.groups), config.head_width, np.random.default_rng(0)
    sizes = width, width // 2
    found = [
        tuple(jnp.asarray(numbers.normal(size=(*shape, n)), jnp.float32) for _ in range(config.layers)) for n in sizes
    ]
    return QueryMeans(*found)


def test_layers_share_programs() -> None:
    made = kvjax.policy("triattention", evict_every=EVERY)
    made = dataclasses.replace(made, score=TriAttention(means=drawn(DEEP)))
    deep, prompts = random_model(DEEP), [[1, 2, 3, 4, 5, 6, 7, 8] * 3]
    assert len(lower_prefill(deep, made, prompts, 18)) == 3
    state, _ = kvjax.prefill(deep, made, prompts, 18, max_new_tokens=4)
    step = jax.make_jaxpr(kvjax.decode_step)(state, jnp.asarray([9])).eqns[0].params["jaxpr"]
    layers = [equation.params["jaxpr"] for equation in step.eqns if equation.params.get("name") == "_block_once"]
    assert len(layers) == DEEP.layers
    assert len({id(layer.jaxpr) for layer in layers}) == 1


def test_mean_queries_are_read_as_they_were_written(tmp_path: Path) -> None:
    owner, found = random_model(GQA), drawn(GQA)
    save(tmp_path / "new", found, owner, 78)
    jax.tree.map(np.testing.assert_array_equal, load(str(tmp_path / "new"), owner), found)


def test_mean_queries_that_do_not_fit_are_one_sentence(tmp_path: Path) -> None:
    owner, other = random_model(GQA), random_model(GQA, seed=3)
    save(tmp_path, drawn(GQA), owner, 78)

    def refused(model: Model, checkpoint: str) -> str:
        with pytest.raises(
            ValueError, match=r"^[^\n]*run kvjax calibrate for this model and give checkpoint=DIR\.$"
        ) as e:
            kvjax.prefill(model, kvjax.policy("triattention", checkpoint=checkpoint), [[1, 2, 3, 4]], 4)
        return str(e.value)

    assert "are those of model 'random'" in refused(other, str(tmp_path))
    assert "no mean queries are shipped for model 'random'" in refused(owner, "")
    assert "holds no mean queries" in refused(owner, str(tmp_path / "nowhere"))
    with safe_open(tmp_path / FILE, framework="numpy") as stored:
        told = stored.metadata()
    arrays = load_file(tmp_path / FILE)
    damaged = np.full_like(arrays["norm.0"], np.nan)
    for changed in ({"center.0": arrays["center.0"]}, arrays | {"center.1": damaged}, arrays | {"norm.0": damaged}):
        save_file(changed, tmp_path / FILE, told)
        assert "has no numbers of shape [" in refused(owner, str(tmp_path))
    (tmp_path / FILE).write_bytes(b"damaged")
    assert "is damaged" in refused(owner, str(tmp_path))
    with pytest.raises(ValueError, match="needs attention with RoPE in all layers, which 'random' does not have"):
        kvjax.prefill(random_model(LEARNED), kvjax.policy("triattention"), [[1, 2, 3, 4]], 4)


def test_the_command_writes_what_generate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "queries"
    text.write_text("Once upon a time there was a girl who went to the park. " * 40)
    words = ["--text", str(text), "--out", str(out), "--tokens", "96", "--length", "32"]
    assert calibrate.main(words) == 0
    said = capsys.readouterr()
    assert "mean queries over 96 tokens" in said.out and "[32/96" in said.err
    usual = ["--prompt", "Once upon a time", "--max-new-tokens", "4", "--budget", "12", "--temperature", "0"]
    for checkpoint in (str(out), ""):  # empty for those that are shipped
        settings = [f"checkpoint={checkpoint}", "evict_every=4"]
        assert generate.main(["--policy", "triattention", "--set", *settings, *usual]) == 0


def test_long_words_are_read_as_far_as_the_tokens_that_are_asked(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" everything" * 100)  # a token each
    prompts = calibrate.prompts_of(kvjax.load("tiny"), [tmp_path / "text.txt"], 96, 32)
    assert [len(prompt) for prompt in prompts] == [32, 32, 32]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--length 4096", "--length 4096 is not a number of tokens from 1 to the model's longest, 1152"),
        ("--tokens 16 --length 32", "--tokens 16 is less than one prompt of 32 tokens from each text; use more"),
        ("--length 512", "text.txt has 21 tokens, less than a prompt of 512; use a smaller --length"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    words: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("the girl and the dog " * 4)
    given = ["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), *words.split()]
    assert calibrate.main(given) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_mesh_gives_what_one_device_gives() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    words = [sys.executable, "-m", "tests.methods.mesh_triattention"]
    run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
