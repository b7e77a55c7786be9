"""Perplexity, recall and fidelity against what they must be where that is known, and reports that resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

import kvjax
from experiments import lowrank_oracle, weights
from experiments.less.checkpoints import even_slots, open_shelf
from experiments.lowrank_oracle import Split
from kvjax import evaluation
from kvjax.cli.evaluate import main
from kvjax.evaluation.claims import Claim, markdown_table
from kvjax.evaluation.fidelity import hellinger
from kvjax.evaluation.figures import Point, new_figure, plot_quality, save_figure
from kvjax.evaluation.perplexity import begin
from kvjax.evaluation.runs import describe
from kvjax.evaluation.store import Store
from kvjax.evaluation.summary import paired
from kvjax.evaluation.texts import passages
from kvjax.methods.less import checkpoint
from kvjax.methods.less.memory import LowRankMemory
from kvjax.types import LayerConfig
from kvjax.utils import compilation
from pallas_kernels.attention import causal_mask
from tests.methods.less.test_less import HIDDEN, kernels_for
from tests.small_models import GQA, random_model

TEXT = "Once upon a time there was a fox who told a story.\nThe story was long, and nobody knew its end.\n" * 40


def ids(rows: int = 2, length: int = 40) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (rows, length))


@pytest.mark.parametrize(("policy", "prefix"), [("full", 1), ("h2o", 1), ("h2o", 7)])
def test_perplexity_of_a_full_budget_is_that_of_the_forward_pass(policy: str, prefix: int) -> None:
    model, tokens = random_model(GQA), ids()
    likelihood = jax.nn.log_softmax(model.logits(tokens)[:, :-1])
    expected = -np.take_along_axis(np.asarray(likelihood), tokens[:, 1:, None], -1)[..., 0][:, prefix - 1 :]
    made = evaluation.perplexity(model, policy, tokens, 1.0, prefix=prefix)
    np.testing.assert_allclose(made.nats, expected, atol=2e-5)
    assert made.nats_per_token() == pytest.approx(expected.mean(), abs=1e-5)
    assert made.rows(20).tolist() == pytest.approx(expected[:, 21 - prefix :].mean(1).tolist(), abs=1e-5)
    assert made.nats_per_byte(np.array([80, 120])) == pytest.approx(expected.sum() / 200, rel=1e-5)


def test_perplexity_is_what_prefill_and_decode_steps_say() -> None:
    model, tokens = random_model(GQA), ids()
    policy = kvjax.policy("less", kernels=kernels_for(GQA))
    state, logits = kvjax.prefill(model, policy, tokens[:, :1], 16, max_new_tokens=39, prefill_chunk=1)
    nats = []
    for token in jnp.asarray(tokens[:, 1:], jnp.int32).T:
        nats.append(-jax.nn.log_softmax(logits)[jnp.arange(2), token])
        state, logits = kvjax.decode_step(state, token)
    made = evaluation.perplexity(model, policy, tokens, 16)
    np.testing.assert_allclose(made.nats.T, nats, atol=2e-5)
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
        evaluation.Streamed(np.zeros((2, 39)), 1, 0, 0, 0, 0.0, 0.0).rows(39)


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
    np.testing.assert_allclose(found.kept[:, :16], 1, atol=1e-5)
    assert 0 < found.kept[:, 17:].min() < found.kept[:, 17:].max() < 1
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
    weights = jnp.where(causal_mask(position, position[:, None], None)[:, :, None], weights, 0.0)
    evicted = jnp.arange(40) <= jnp.arange(40)[:, None] - budget
    features = jnp.einsum("bhgtr,bhsr->bhgts", less.phi(q), less.psi(k))
    ours = jnp.where(evicted, features, weights)
    rows = [x / x.sum(-1, keepdims=True) for x in (weights, ours)]
    expected = hellinger(*rows).mean((1, 2))
    found = evaluation.fidelity(model, policy, tokens, budget).hellinger[..., 0]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert np.asarray(expected)[:, budget:].min() > 0.01


@pytest.fixture(scope="module")
def tiny() -> kvjax.Model:
    return kvjax.load("tiny", dtype="float32")


def test_recall(tiny: kvjax.Model) -> None:
    text = np.asarray(tiny.tokenizer(TEXT)["input_ids"])
    settings: dict[str, Any] = dict(text=text, forms=("pair",), cases=4)
    assert evaluation.recall(tiny, "full", 1.0, 50, **settings).share["pair"] > 0.5
    forgetful = evaluation.recall(tiny, "window", 8, 50, **settings)
    assert forgetful.mean == 0.0 and forgetful.cache_bytes < forgetful.full_cache_bytes
    wrong: dict[str, Any]
    for wrong, message in (({"forms": ("poem",)}, "poem"), ({"length": 10**6}, "length=1000000")):
        with pytest.raises(ValueError, match=message):
            evaluation.recall(tiny, "full", **(settings | wrong))


def test_passages(tiny: kvjax.Model, tmp_path: Path) -> None:
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


def test_store_makes_each_measurement_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> dict[str, list[float]]:
        made.append(1)
        return {"x": [0.5]}

    for _ in range(2):
        assert Store(tmp_path / "m.json").measure("a", {"slots": (1, 2)}, make) == {"x": [0.5]}
    assert len(made) == 1 and [file.name for file in tmp_path.iterdir()] == ["m.json"]
    assert Store(tmp_path / "m.json").stored("a", {"slots": (1, 3)}) is None
    Store(tmp_path / "m.json").measure("a", {"slots": (1, 3)}, make)
    again = Store(tmp_path / "m.json", redo=True)
    for _ in range(2):
        again.measure("a", {"slots": (1, 3)}, make)
    assert len(made) == 3
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(ValueError, match="delete it"):
        Store(tmp_path / "m.json")


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


@pytest.fixture(scope="module")
def saved(tiny: kvjax.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("kernels") / "few"
    settings = checkpoint.Settings(tiny.name, checkpoint.fingerprint(tiny), "h2o", {}, budget=0.05, hidden=HIDDEN)
    checkpoint.save(directory, kernels_for(tiny.config), settings)
    return directory


def copied(saved: Path, directory: Path, **changes: Any) -> str:
    """The same kernels, as if they had been made for something else."""
    shutil.copytree(saved, directory)
    settings = json.loads((saved / "settings.json").read_text())
    (directory / "settings.json").write_text(json.dumps(settings | changes))
    return str(directory)


def test_shelf_finds_the_nearest_kernels(tiny: kvjax.Model, saved: Path, tmp_path: Path) -> None:
    few, many = str(saved), copied(saved, tmp_path / "many", budget=114)
    shelf = open_shelf(tiny, [f"a={few}", many])
    assert [(k.name, k.slots) for k in shelf.kernels] == [("a", even_slots(0.05, 1152)), ("many", 114)]
    near = {slots: shelf.nearest("tova", slots) for slots in (22, 56, 114)}
    assert [k.name for k in near.values() if k] == ["a", "a", "many"] and shelf.nearest("keyformer", 56) is None
    other = copied(saved, tmp_path / "other", policy_settings={"recent": 0.25})
    for wrong, message in (([few, few], "called 'few'"), ([few, other], "recent"), (["nowhere"], "nowhere")):
        with pytest.raises(ValueError, match=message):
            open_shelf(tiny, wrong)


def test_less_report_is_written_and_resumes(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures need the plots extra")
    text = tmp_path / "story.txt"
    text.write_text(TEXT)
    words = ["less", "--text", str(text), "--out", str(tmp_path / "out"), "--rows", "2", "--length", "40"]
    words += ["--budgets", "0.012", "--checkpoints", f"kernels={copied(saved, tmp_path / 'kernels', budget=12)}"]
    assert main([*words, "--only", "performer"]) == 0
    first = capsys.readouterr().err.splitlines()
    measured_names = [f"perplexity: {name}, 12 slots" for name in ("h2o", "h2o performer", "less kernels on h2o")]
    assert [line.rpartition(": ")[0] for line in first] == measured_names
    assert all("nats per token, cache" in line for line in first)
    written = (tmp_path / "out" / "less.md").read_text()
    assert "performer" in written and "| not measured |" not in written and "**not measured**" in written
    measured = json.loads((tmp_path / "out" / "less" / "measurements.json").read_text())
    assert len(measured) == 3
    assert main([*words, "--only", "performer"]) == 0
    assert capsys.readouterr().err == "" and (tmp_path / "out" / "less.md").read_text() == written
    assert main([*words, "--only", "performer", "--redo"]) == 0
    assert capsys.readouterr().err.splitlines() == first


def test_quality_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="figures need the plots extra")
    text = tmp_path / "story.txt"
    text.write_text(TEXT)
    words = ["quality", "--text", str(text), "--out", str(tmp_path / "out"), "--rows", "2", "--length", "40"]
    assert main([*words, "--policies", "window,snapkv", "--budgets", "12"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'quality.md'}\n"
    written = (tmp_path / "out" / "quality.md").read_text()
    assert "| window | 12 |" in written and "snapkv at 12 is left out: sinks + recent" in written
    assert (tmp_path / "out" / "quality" / "quality.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budgets", "much"], "'much' is not a share"),
        (["--budgets", "0.9"], "not from 8 to half"),
        (["--checkpoints", "nowhere"], "nowhere holds no kernels"),
        (["--rows", "0"], "nothing to predict"),
        (["--text", "nowhere.txt"], "--text nowhere.txt is not a file"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "story.txt"
    text.write_text(TEXT)
    assert main(["less", "--text", str(text), "--out", str(tmp_path / "out"), *words]) == 2
    caught = capsys.readouterr()
    assert caught.out == "" and message in caught.err and caught.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("high", [1.3, 4.0, 40.0, 1e5])
def test_figures_can_be_read(high: float) -> None:
    pytest.importorskip("matplotlib", reason="figures need the plots extra")
    figure, (axes,) = new_figure()
    points = [Point(f"policy {i}", cost, high ** (i / 25)) for i in range(26) for cost in (0.1, 0.5)]
    plot_quality(axes, points, None, "nats per token", log=True)
    styles = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.get_lines()}
    assert len(styles) == 26
    figure.draw_without_rendering()
    low, top = axes.get_ylim()
    ticks = [label.get_text() for label in axes.get_yticklabels() if low <= label.get_position()[1] <= top]
    assert 2 <= len(ticks) <= 12 and all("mathdefault" not in text for text in ticks)
    legend = axes.get_legend()
    assert legend is not None and legend.get_window_extent().x0 >= axes.get_window_extent().x1


def test_rounded_weights_are_compared_by_hand() -> None:
    draw = np.random.default_rng(0)
    expected, logits = draw.standard_normal((2, 5, 7)).astype(np.float32)
    tokens = draw.integers(0, 7, 5)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (expected[:-1], logits[:-1]))
    by_hand = (
        -q[np.arange(4), tokens[1:]].mean(),
        (np.exp(p) * (p - q)).sum(-1).mean(),
        (p.argmax(-1) == q.argmax(-1)).mean(),
    )
    np.testing.assert_allclose(weights.errors_of(expected, logits, tokens), by_hand, rtol=1e-5)


@pytest.mark.slow
def test_rounding_weights_costs_little(tmp_path: Path) -> None:
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time there was a little girl named Lily.\n" * 20)
    words = ["weights", "--text", str(text), "--rows", "1", "--length", "32", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    report = (tmp_path / "out" / "weights.md").read_text()
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith(("| float", "| bfloat", "| int8"))]
    assert [row[0] for row in rows] == ["| float32", "| bfloat16", "| int8, float32", "| int8, bfloat16"]
    sizes, divergences = ([float(row[column].replace(",", "")) for row in rows] for column in (1, 3))
    assert sizes[3] < sizes[1] < sizes[0] and 0 == divergences[0] < divergences[2] < 0.01
