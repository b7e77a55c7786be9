"""Perplexity and fidelity against what they must be where that is known, descriptions, tables and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import kvjax
from experiments import lowrank_oracle
from experiments.claims import Claim
from experiments.less.axes import log_scale
from experiments.lowrank_oracle import Split
from kvjax import evaluation
from kvjax.evaluation.fidelity import hellinger
from kvjax.evaluation.figures import Point, new_figure, plot_quality, save_figure
from kvjax.evaluation.grid import describe
from kvjax.evaluation.perplexity import begin
from kvjax.evaluation.summary import paired
from kvjax.evaluation.texts import passages
from kvjax.methods.less.memory import LowRankMemory
from kvjax.types import LayerConfig
from kvjax.utils import compilation
from kvjax.utils.markdown import markdown_table
from pallas_kernels.attention import AttentionSpec
from tests.methods.less.test_less import kernels_for
from tests.small_models import GQA, random_model

TEXT = "Once upon a time there was a fox who told a story.\nThe story was long, and nobody knew its end.\n" * 40


def ids(rows: int = 2, length: int = 40) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (rows, length))


@pytest.mark.parametrize(("policy", "prefix"), [("full", 1), ("h2o", 1), ("h2o", 7), ("h2o", 39)])
def test_perplexity_of_a_full_budget_is_that_of_the_forward_pass(policy: str, prefix: int) -> None:
    model, tokens = random_model(GQA), ids()
    likelihood = jax.nn.log_softmax(model.logits(tokens)[:, :-1])
    expected = -np.take_along_axis(np.asarray(likelihood), tokens[:, 1:, None], -1)[..., 0][:, prefix - 1 :]
    made = evaluation.perplexity(model, policy, tokens, 1.0, prefix=prefix)
    np.testing.assert_allclose(made.nats, expected, atol=2e-5)
    assert made.nats_per_token() == pytest.approx(expected.mean(), abs=1e-5)
    assert made.likeliest.tolist() == likelihood[:, prefix - 1 :].argmax(-1).tolist()
    assert made.rows(20).tolist() == pytest.approx(expected[:, max(0, 21 - prefix) :].mean(1).tolist(), abs=1e-5)


def test_perplexity_is_what_prefill_and_decode_steps_say() -> None:
    model, tokens = random_model(GQA), ids()
    policy = kvjax.policy("less", kernels=kernels_for(GQA))
    state, logits = kvjax.prefill(model, policy, tokens[:, :1], 16, max_new_tokens=39, prefill_chunk=1)
    nats, likeliest = [], []
    for token in jnp.asarray(tokens[:, 1:], jnp.int32).T:
        nats.append(-jax.nn.log_softmax(logits)[jnp.arange(2), token])
        likeliest.append(logits.argmax(-1))
        state, logits = kvjax.decode_step(state, token)
    made = evaluation.perplexity(model, policy, tokens, 16)
    np.testing.assert_allclose(made.nats.T, nats, atol=2e-5)
    np.testing.assert_array_equal(made.likeliest.T, likeliest)
    assert made.cache_bytes == kvjax.cache_bytes(state) and made.full_cache_bytes == kvjax.full_cache_bytes(state)


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("h2o", {"prefix": 40}, "prefix of 40"),
        ("h2o", {"plan": "nothing"}, "no plan"),
        ("keyformer", {"plan": "adakv"}, "prompt"),
    ],
)
def test_perplexity_refuses_in_one_sentence(policy: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation.perplexity(random_model(GQA), policy, ids(), 36, **settings)
    with pytest.raises(ValueError, match="beyond 39"):
        evaluation.Streamed(np.zeros((2, 39)), np.zeros((2, 39), int), 1, 0, 0).rows(39)


SET: dict[str, dict[str, Any]] = {
    "dilated_window": {"dilation": 2},
    "keyformer": {"noise": "gaussian", "recent": 7, "shared": True, "special": (3,)},
    "snapkv": {"recent": 0.25, "kernel": 3, "group": "max"},
    "pyramidkv": {"beta": 5.0, "recent": 8},
    "lightkv": {"middle": "mask", "ratio": 2.0, "context_limit": 64, "alpha": 3, "omega": 3.0},
    "lsh_e": {"bits": 8, "seed": 3, "prompt": "one_shot"},
    "topk_oracle": {"k": 0.5},
    "fastgen": {"order": ("local", "frequent"), "punctuation": (4, 5), "recent": 3},
    "criticalkv": {"base": "snapkv", "kernel": 5, "epsilon": 0.1, "sinks": 2},
    "baseline_plus": {"base": "tova", "features": 4, "sinks": 2},
}


EVICTS: dict[str, dict[str, Any]] = {
    "full": {},
    "topk_oracle": {},
    "fastgen": {},
    "lightkv": {},
    "simlayerkv": {},
    "duoattention": {},
}
"""Policies in which no eviction can wait for others."""


@pytest.mark.parametrize("name", [name for name in kvjax.methods.REGISTRY if name != "less"])
def test_settings_are_read_off_parts(name: str) -> None:
    for settings in ({}, SET.get(name, {"sinks": 3, "positions": "original"}) | EVICTS.get(name, {"evict_every": 8})):
        made = kvjax.policy(name, **settings)
        found = kvjax.methods.settings_in(made)
        assert found.items() >= settings.items() and kvjax.policy(name, **found) == made


def test_descriptions_tell_policies_apart() -> None:
    plain = {"name": "h2o", "recent": 0.5, "sinks": 0, "special": [], "positions": "original"}
    assert describe(kvjax.policy("h2o")) == plain
    less = describe(kvjax.policy("h2o", residual="less"))
    assert less["name"] == "less" and less["base"] == plain and less["kernels"] == "learned"
    moments = describe(kvjax.policy("h2o", residual="momentkv"))
    assert moments == {"name": "momentkv", "base": plain}
    parts: tuple[dict[str, str], ...] = (
        {},
        {"codec": "int8"},
        {"codec": "int4"},
        {"plan": "adakv"},
        {"plan": "pyramid"},
    )
    made = [json.dumps(describe(kvjax.policy("h2o", **some))) for some in parts]  # type: ignore[arg-type]
    assert len({*made}) == len(parts)


def test_hellinger() -> None:
    p, q = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    np.testing.assert_allclose(hellinger(jnp.asarray(p), jnp.asarray(q)), [0.0, 1.0], atol=1e-6)


def test_fidelity_is_zero_until_something_is_evicted() -> None:
    model, tokens = random_model(GQA), ids()
    assert evaluation.fidelity(model, "h2o", tokens, 40).hellinger.max() < 1e-3
    found = evaluation.fidelity(model, "h2o", tokens, 16)
    apart = found.hellinger
    assert apart.shape == (2, 40, GQA.layers) and apart[:, :16].max() < 1e-3 and apart[:, 17:].min() > 0.01
    np.testing.assert_allclose(found.attention_kept[:, :16], 1, atol=1e-5)
    assert 0 < found.attention_kept[:, 17:].min() < found.attention_kept[:, 17:].max() < 1
    np.testing.assert_allclose(found.divergence[:, :16], 0, atol=1e-5)
    state, logits = begin(model, "h2o", 2, 40, 16), jnp.zeros(())
    for token in tokens.T:
        state, logits = kvjax.decode_step(state, token)
    ours, full = (jax.nn.log_softmax(each) for each in (logits, model.logits(tokens)[:, -1]))
    np.testing.assert_allclose(found.divergence[:, -1], jnp.sum(jnp.exp(full) * (full - ours), axis=-1), atol=1e-4)
    assert (found.agrees[:, -1] == (jnp.argmax(ours, -1) == jnp.argmax(full, -1))).all()
    coded = evaluation.fidelity(model, kvjax.policy("h2o", codec="int8"), tokens, 40).hellinger
    assert 1e-4 < coded.max() < 0.05
    with pytest.raises(ValueError, match="positions=original"):
        evaluation.fidelity(model, "streaming", tokens, 16)
    with pytest.raises(ValueError, match="selection"):
        evaluation.fidelity(model, "topk_oracle", tokens, 16)


def test_fidelity_gives_evicted_tokens_their_share_of_equation_3() -> None:
    """The first layer's rows of a window, whose evicted tokens are known without a cache."""
    model, tokens, budget = random_model(GQA), ids(), 16
    policy = kvjax.policy("less", base="window", kernels=kernels_for(GQA)).bind(model)
    assert isinstance(policy.residual, LowRankMemory)
    less = policy.residual.layer(0)
    seen = {}

    def top_k(q: Array, k: Array, v: Array, position: Array, keep: int, config: LayerConfig) -> Split:
        seen.setdefault("qk", (q, k))
        return original(q, k, v, position, keep, config)

    original, lowrank_oracle.top_k = lowrank_oracle.top_k, top_k
    try:
        lowrank_oracle.logits(model.weights, GQA, jnp.asarray(tokens), keep=40)
    finally:
        lowrank_oracle.top_k = original
    q, k = seen["qk"]
    position = jnp.broadcast_to(jnp.arange(40), (2, 40))
    weights = jnp.exp(jnp.einsum("bhgtd,bhsd->bhgts", q, k) / np.sqrt(GQA.head_width))
    weights = jnp.where(AttentionSpec(1.0).mask(position, position[:, None])[:, :, None], weights, 0.0)
    evicted = jnp.arange(40) <= jnp.arange(40)[:, None] - budget
    features = jnp.einsum("bhgtr,bhsr->bhgts", less.phi(q), less.psi(k))
    ours = jnp.where(evicted, features, weights)
    rows = [x / x.sum(-1, keepdims=True) for x in (weights, ours)]
    expected = hellinger(*rows).mean((1, 2))
    found = evaluation.fidelity(model, policy, tokens, budget).hellinger[..., 0]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert np.asarray(expected)[:, budget:].min() > 0.01


def test_passages_of_a_text_in_one_line_are_from_several_places(tmp_path: Path) -> None:
    file = tmp_path / "line.txt"
    file.write_text(TEXT.replace("\n", " "))
    rows = passages(kvjax.load("tiny"), [file], 3, 30).tokens.tolist()
    assert rows[0] != rows[1] != rows[2] != rows[0]


def test_passages(tmp_path: Path) -> None:
    tiny = kvjax.load("tiny", dtype="float32")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text(TEXT)
    made = passages(tiny, files, 3, 30)
    assert made.tokens.shape == (6, 30) and made.rows == {"a": slice(0, 3), "b": slice(3, 6)}
    decoded = [tiny.tokenizer.decode(row[1:]) for row in made.tokens]
    assert made.bytes.tolist() == [len(text.encode()) for text in decoded]
    right: dict[str, Any] = dict(files=files, rows=3, length=30)
    wrong: dict[str, Any]
    for wrong in (dict(rows=0), dict(length=10**5), dict(files=[tmp_path / "none"]), dict(files=files[:1] * 2)):
        with pytest.raises(ValueError):
            passages(tiny, **(right | wrong))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells of its memory mappings on Linux only")
def test_programs_are_dropped_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    program: Any = jax.jit(lambda x: x + 1)
    program(1.0)
    compilation.drop_programs()
    assert program._cache_size() == 1
    monkeypatch.setattr(compilation, "_MANY_MAPPINGS", 0)
    compilation.drop_programs()
    assert program._cache_size() == 0


def test_tables_and_figures(tmp_path: Path) -> None:
    assert markdown_table(["a", "b"], [["x|y", 1.0], ["z", None]]) == (
        "| a | b |\n| --- | ---: |\n| x\\|y | 1.0000 |\n| z | – |\n"
    )
    verdicts = [Claim("c", shown).verdict for shown in (True, False, None)]
    assert verdicts == ["shows", "does not show", "not measured"]
    assert paired([2.0, 3.0], [1.0, 1.0]) == (1.5, 0.5)
    pytest.importorskip("matplotlib", reason="figures need the plots extra")
    figure, (axes,) = new_figure()
    plot_quality(axes, [Point("a", 0.1, 3.0), Point("a", 0.2, 2.0)], 1.5, "nats")
    save_figure(figure, tmp_path / "made" / "f.png")
    first = (tmp_path / "made" / "f.png").read_bytes()
    save_figure(figure, tmp_path / "made" / "f.png")
    assert first[:4] == b"\x89PNG" and (tmp_path / "made" / "f.png").read_bytes() == first


@pytest.mark.parametrize("high", [1.3, 4.0, 40.0, 1e5])
def test_figures_can_be_read(high: float) -> None:
    pytest.importorskip("matplotlib", reason="figures need the plots extra")
    figure, (axes,) = new_figure()
    points = [Point(f"policy {i}", cost, high ** (i / 25)) for i in range(26) for cost in (0.1, 0.5)]
    plot_quality(axes, points, None, "nats per token")
    log_scale(axes)
    styles = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.get_lines()}
    assert len(styles) == 26
    figure.draw_without_rendering()
    low, top = axes.get_ylim()
    ticks = [label.get_text() for label in axes.get_yticklabels() if low <= label.get_position()[1] <= top]
    assert 2 <= len(ticks) <= 12 and all("mathdefault" not in text for text in ticks)
    legend = axes.get_legend()
    assert legend is not None and legend.get_window_extent().x0 >= axes.get_window_extent().x1
