"""LESS training: evictions replayed in parallel, equation 3 at all positions at once, runs that resume."""

from __future__ import annotations

import csv
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.slots import Slots
from kvjax.cli import main, train_less
from kvjax.evaluation.perplexity import begin
from kvjax.inference.prepare import bind_policy
from kvjax.inference.shapes import empty_state
from kvjax.inference.state import held_positions
from kvjax.methods.less import checkpoint
from kvjax.methods.less.feature_maps import unstack
from kvjax.methods.less.memory import LowRankMemory, Memory
from kvjax.model import Model
from kvjax.models.fingerprint import fingerprint
from kvjax.models.sharding import parse_mesh
from kvjax.training.less.loss import memory_attention
from kvjax.training.less.recipe import Recipe
from kvjax.training.less.record import Features, record
from kvjax.training.less.run import write_losses
from kvjax.types import Evicted, LayerTokens, Partial, TokenBatch
from pallas_kernels.attention import merge, share_of_evicted
from pallas_kernels.operands import values
from tests.cases import slow
from tests.held import layers
from tests.methods.less.test_less import HIDDEN, kernels_for
from tests.paths import ROOT
from tests.small_models import GQA, MQA, random_model, sharp_model

N, BUDGET = 60, 12
TOKENS = np.random.default_rng(3).integers(0, 64, (2, N))


class FullAnswers(Slots, kw_only=True):
    """Evicts as it always does, while the model goes on with the given attention outputs [b h g n e]."""

    answers: Any = None

    def attend_token(self, policy: Any, new: LayerTokens, requests: Any, evicted: Any) -> Any:
        slots, attended = super().attend_token(policy, new, requests, evicted)
        out = jnp.take_along_axis(self.answers, new.position[:, None, None, :, None], axis=3)
        return slots, attended._replace(partial=attended.partial._replace(out=out))


def replay(model: Model, policy: kvjax.Policy, mask: str = "decode") -> tuple[Features, np.ndarray]:
    seed = kvjax.prefill(model, "full", TOKENS[:, :1].tolist(), max_new_tokens=1)[0].seed
    policy = bind_policy(model, policy, BUDGET, None)
    state = empty_state(model, policy, 2, N, BUDGET).replace(seed=seed)
    features, left = record(state, jnp.asarray(TOKENS, jnp.int32), mask=mask)
    return features, np.asarray(left)


BASES = [("h2o", {}), ("streaming", {}), ("lambda_mask", {"recent": 3}), ("keyformer", {}), ("tova", {}), ("l2", {})]


@pytest.mark.parametrize(
    ("name", "settings"), [base if base[0] in ("lambda_mask", "keyformer") else slow(*base) for base in BASES]
)
def test_evicts_what_decoding_evicts(name: str, settings: dict[str, Any], x64: None) -> None:
    """Decode steps over the same queries, keys and values hold exactly what the replay did not evict, in all layers."""
    model, base = sharp_model(GQA), kvjax.policy(name, **settings)
    features, left = replay(model, base)
    state = begin(model, base, 2, N, BUDGET)
    seed = kvjax.prefill(model, "full", TOKENS[:, :1].tolist(), max_new_tokens=1)[0].seed
    answering = (
        FullAnswers(**vars(slots), answers=full) for slots, full in zip(layers(state), features.full, strict=True)
    )
    state = state.replace(layers=tuple(answering), seed=seed)
    plain = model.logits(TOKENS)
    for t in range(N):
        state, logits = kvjax.decode_step(state, jnp.asarray(TOKENS[:, t]))
        np.testing.assert_allclose(logits, plain[:, t], atol=1e-9)
        for layer, position in enumerate(held_positions(state)):
            for row, head in np.ndindex(2, GQA.kv_heads):
                held = position[row, head]
                gone = left[layer, row, head, : t + 1]
                assert sorted(held[held >= 0]) == sorted({*range(t + 1)} - {*gone[gone >= 0]})
    assert (left[..., BUDGET:] >= 0).all()


def test_full_softmax_masks_accumulate_the_full_softmax(x64: None) -> None:
    model = sharp_model(GQA)
    features, left = replay(model, kvjax.policy("h2o"), "full-softmax")
    assert (left != replay(model, kvjax.policy("h2o"))[1]).any()
    q = np.asarray(features.q[0])
    keys = np.asarray(first_layer_keys(model))
    logits = np.einsum("bhgtd,bhsd->bhgts", q, keys) / np.sqrt(q.shape[-1])
    logits = np.where(np.tril(np.ones((N, N), bool)), logits, -np.inf)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs = (probs / probs.sum(-1, keepdims=True)).sum(2)
    for row, head in np.ndindex(2, GQA.kv_heads):
        cached: list[int] = []
        for t in range(N):
            gone = -1
            if len(cached) == BUDGET:  # the newest half stays
                old = [s for s in cached if s <= t - BUDGET // 2]
                # What stands in the cache since s has gathered attention in every step since.
                gone = min(old, key=lambda s: probs[row, head, s:t, s].sum())
                cached.remove(gone)
            cached.append(t)
            assert left[0, row, head, t] == gone


def first_layer_keys(model: Model) -> jax.Array:
    state, _ = kvjax.prefill(model, "full", TOKENS.tolist(), max_new_tokens=1)
    view = layers(state)[0]
    order = jnp.argsort(jnp.where(view.position < 0, N, view.position), axis=-1)[..., :N, None]
    return jnp.take_along_axis(values(view.kv.k, jnp.float64), order, axis=2)


@pytest.mark.parametrize("literal", [False, True])
def test_all_positions_at_once_equal_one_step_after_another(literal: bool, x64: None) -> None:
    """The policy `less`, given the evicted pairs step by step, answers what training computes in parallel."""
    model, recipe = sharp_model(MQA), Recipe(hidden=HIDDEN, literal=literal)
    features, _ = replay(model, kvjax.policy("h2o"))
    seen = jax.tree.map(lambda leaf: leaf[0], features)
    kernels = kernels_for(MQA, 3.0, literal)
    together = memory_attention(jax.tree.map(lambda leaf: leaf[0], kernels), recipe, seen)
    assert np.abs(together - seen.sparse)[..., BUDGET:, :].max() > 1e-3
    less = LowRankMemory(layers=unstack(kernels)).layer(0)
    ones, config = jnp.ones((2, 1), jnp.int32), model.config.layer(0)

    def new_tokens(q: jax.Array, k: jax.Array, v: jax.Array) -> LayerTokens:
        each = ones[:, 0]
        lengths: dict[str, Any] = dict(prompt_length=each, read=each, horizon=each, end=each)
        reading = TokenBatch(token=ones, position=ones, seed=each.astype(jnp.uint32), **lengths)
        return reading.of_layer(config, 0, k[:, 0], q, k, v)

    @jax.jit
    def step(state: Memory, at: jax.Array | int) -> tuple[Memory, jax.Array]:
        q, k, v, out = (at_position(x, at) for x in (seen.q, seen.k, seen.v, seen.sparse))
        leaving = jax.lax.dynamic_slice_in_dim(seen.leaving, at, 1, axis=-1) > 0
        state = less.absorb(state, Evicted(k, v, jnp.where(leaving, 0, -1)))
        share = share_of_evicted(less.share(state, new_tokens(q, k, v)))
        lse = jax.lax.dynamic_slice_in_dim(seen.lse, at, 1, axis=-1)
        return state, merge(Partial(out, lse), share).out

    state = less.init_head(new_tokens(seen.q[..., :0, :], seen.k[..., :0, :], seen.v[..., :0, :]))
    for t in range(N):
        state, answer = step(state, t)
        np.testing.assert_allclose(together[..., t : t + 1, :], answer, atol=1e-12)


def at_position(x: jax.Array, at: jax.Array | int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, at, 1, axis=-2)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    words = ["the", "a", "little", "dog", "cat", "ran", "and", "then", "Tom", "Lily", "said", "that", "house", "tree"]
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(" ".join(rng.choice(words, 4000)) + "\n", encoding="utf-8")
    return file


def arguments(text: Path, out: Path, *more: str) -> list[str]:
    shape = "--policy h2o --budget 10 --sequences 9 --length 64 --epochs 3 --hidden 16 --batch 2 --rate 1e-2"
    return [*shape.split(), "--text", str(text), "--out", str(out), *more]


def start(text: Path, out: Path) -> subprocess.Popen[bytes]:
    """A run in a process of its own: those that are compared to the last bit are compiled as users' runs are."""
    kept = {"PYTHONPATH": os.pathsep.join(sys.path), "KVJAX_CACHE_DIR": str(text.parent / "programs")}
    command = [sys.executable, "-m", "kvjax", "train_less", *arguments(text, out)]
    return subprocess.Popen(command, env=os.environ | kept, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def trained(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "kernels"
    assert start(text_file, out).wait() == 0
    return out


def test_trained_kernels_serve_and_leave_less_error(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = checkpoint.read_settings(trained)
    for row in settings.training["errors"]:
        assert 0 < row["after"] < row["before"]
    with (trained / "losses.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 4 * 3 and float(rows[2]["training"]) < float(rows[0]["training"])
    assert {"kernels", "losses.csv", "settings.json", "training"} <= {path.name for path in trained.iterdir()}
    assert not (trained / "training" / "features").exists()
    model, policy = kvjax.load("tiny"), kvjax.policy("less", checkpoint=str(trained))
    tokens = np.arange(2, 42)[None].tolist()
    plain, ours = (
        kvjax.decode_step(kvjax.prefill(model, chosen, tokens, 10)[0], jnp.ones(1, jnp.int32))[1]
        for chosen in ("h2o", policy)
    )
    assert np.isfinite(ours).all() and not np.allclose(plain, ours)


def test_other_settings_are_refused(
    trained: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def message(*words: str) -> str:
        assert train_less.main(list(words)) == 2
        return capsys.readouterr().err

    assert train_less.main(arguments(text_file, trained, "--mesh", "data=1,model=1")) == 0  # is no such setting
    assert "already" in capsys.readouterr().out
    said = message(*arguments(text_file, trained, "--hidden", "32"))
    assert "hidden=16" in said and "32" in said
    said = message(*arguments(text_file, trained, "--policy", "tova"))
    assert "'h2o'" in said and "'tova'" in said
    new = tmp_path / "new"
    assert "evicts nothing" in message(*arguments(text_file, new, "--policy", "full"))
    assert "'less'" in message(*arguments(text_file, new, "--policy", "less"))
    assert "nowhere.txt" in message(*arguments(tmp_path / "nowhere.txt", new))
    assert "budget=1.5" in message(*arguments(text_file, new, "--budget", "1.5"))
    assert "batch" in message(*arguments(text_file, new, "--sequences", "2"))
    assert "holds texts of 64 tokens" in message(*arguments(text_file, new, "--budget", "64"))
    assert "4096 devices" in message(*arguments(text_file, new, "--mesh", "model=4096"))


def test_a_run_that_made_nothing_may_be_followed_by_another(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for hidden in ("16", "32"):
        assert train_less.main(arguments(text_file, tmp_path, "--budget", "64", "--hidden", hidden)) == 2
        assert "holds texts of 64 tokens whole" in capsys.readouterr().err


def test_a_mesh_is_a_number_for_each_axis() -> None:
    there = jax.device_count()
    mesh = parse_mesh(f" model = {there},data=1")
    assert dict(mesh.shape) == {"data": 1, "model": there, "slots": 1}
    assert mesh.devices.ravel().tolist() == jax.devices()
    for text in ("", "data", "data=2;model=1", "rows=1", "data=1,data=1", "model=0", "model=-1", "data=1.5", "data=1,"):
        with pytest.raises(ValueError, match=f"{text} is not made of data, model, slots"):
            parse_mesh(text)
    with pytest.raises(ValueError, match=f"asks for {2 * there} devices, but there are {there}"):
        parse_mesh(f"data=2,model={there}")


def test_a_mesh_trains_as_one_device_does(tmp_path: Path) -> None:
    """And goes on with what another mesh has saved; in a process with eight devices."""
    words = [sys.executable, "-m", "tests.training.less.mesh_training", str(tmp_path)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0 and run.stdout.endswith("all as on one device\n"), run.stderr


OWN = """
import jax.numpy as jnp
import kvjax
from kvjax.models.fingerprint import fingerprint
from flax import struct

@struct.dataclass
class LongValues(kvjax.Score):
    def init_slot(self, new, state):
        return jnp.linalg.norm(new.v, axis=-1)

    def score(self, view, new):
        return view.slots.score

def mine():
    return kvjax.Policy(LongValues(), kvjax.Protection(recent=2))
"""


def test_more_epochs_go_on_and_the_last_line_serves(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(OWN)

    def run(name: str, epochs: int) -> list[str]:
        words = ("--policy", f"{tmp_path / 'mine.py'}:mine", "--epochs", str(epochs))
        assert train_less.main(arguments(text_file, tmp_path / name, *words)) == 0
        return capsys.readouterr().out.splitlines()

    run("more", 1)
    *_, line = run("more", 2)
    assert "already has these kernels, after 2 epochs" in run("more", 1)[-2]
    run("whole", 2)
    more, whole = tmp_path / "more", tmp_path / "whole"
    assert (more / "losses.csv").read_text() == (whole / "losses.csv").read_text()
    model = kvjax.load("tiny")
    kernels = [checkpoint.load(directory, model, "LongValues")[0] for directory in (more, whole)]
    jax.tree.map(np.testing.assert_array_equal, *kernels)
    command, generate, *words = shlex.split(line.removeprefix("use them with: "))
    assert (command, generate) == ("kvjax", "generate")
    assert main.main(["generate", *words, "--max-new-tokens", "4"]) == 0
    assert "less kept 4 of 4" in capsys.readouterr().err


def test_a_picture_of_losses_leaves_matplotlib_alone(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"backend": "svg"}):  # as a notebook's, whose next figure must still be shown
        write_losses(tmp_path, np.ones((2, 3, 2)))
        assert matplotlib.rcParams["backend"] == "svg"
    assert (tmp_path / "losses.png").stat().st_size > 1000


def test_a_killed_run_ends_with_the_same_kernels(trained: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    child = start(text_file, out)
    try:
        deadline = time.monotonic() + 240
        while not any((out / "training").glob("step-*")):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not (out / "settings.json").exists()
    assert start(text_file, out).wait() == 0
    model = kvjax.load("tiny")
    kernels, whole = (checkpoint.load(directory, model, "h2o")[0] for directory in (out, trained))
    jax.tree.map(np.testing.assert_array_equal, kernels, whole)
    assert (out / "losses.csv").read_text() == (trained / "losses.csv").read_text()


def test_shipped_kernels_are_those_of_the_nearest_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(GQA)
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path)
    for slots in (50, 10):
        settings = checkpoint.Settings("random", fingerprint(model), "h2o", {}, slots, hidden=HIDDEN)
        checkpoint.save(tmp_path / f"h2o_{slots}", kernels_for(GQA, scale=slots), settings)
    unbound = kvjax.policy("less")

    def scale(policy: kvjax.Policy) -> float:
        assert isinstance(policy.residual, LowRankMemory)
        return float(jnp.abs(policy.residual.layers[0]["psi"]["outer_scale"]).mean())

    of_ten, of_fifty = (float(jnp.abs(kernels_for(GQA, scale=s)["psi"]["outer_scale"][0]).mean()) for s in (10, 50))
    assert scale(unbound.bind(model)) == of_ten
    # 50 slots are 1.2% of the model's 4096 positions, 10 are 0.2%.
    for budget, expected in (
        (3, of_ten),
        (20, of_ten),
        (40, of_fifty),
        (0.01, of_fifty),
        (0.003, of_ten),
        (0.5, of_fifty),
    ):
        chosen = unbound.bind(model).budgeted(budget)
        assert scale(chosen) == expected
    assert scale(kvjax.policy("less", checkpoint="h2o_50").bind(model).budgeted(10)) == of_fifty
    with pytest.raises(ValueError, match="h2o_10, h2o_50"):
        kvjax.policy("less", base="tova").bind(model)


def test_a_model_in_bfloat16_teaches_much_the_same(trained: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "half"
    assert train_less.main(arguments(text_file, out, "--dtype", "bfloat16")) == 0
    half, whole = (checkpoint.read_settings(directory).training["errors"] for directory in (out, trained))
    for ours, theirs in zip(half, whole, strict=True):
        np.testing.assert_allclose(ours["after"], theirs["after"], rtol=0.1)
