"""LESS: against Algorithm 1 in NumPy, its limits, its memory, its checkpoints and the variants it is compared with."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments import lowrank_oracle
from kvjax import generate
from kvjax.cache.ranks import TOKEN_BLOCK
from kvjax.cli import options
from kvjax.methods.less import checkpoint
from kvjax.methods.less.feature_maps import Psi, init_kernels, performer_kernels, unstack
from kvjax.methods.less.memory import LowRankMemory
from kvjax.methods.register import REGISTRY
from kvjax.models import ModelConfig
from kvjax.models.fingerprint import fingerprint
from kvjax.types import Evicted, LayerTokens, Partial
from pallas_kernels.attention import merge, share_of_evicted
from tests.cases import Case, fastgen_case, slow
from tests.held import layers
from tests.methods.test_oracles import SHAPES, compare_with_oracle
from tests.oracles import basic, fastgen, less
from tests.small_models import GQA, MHA, MQA, random_model, small_config

HIDDEN = 16


def kernels_for(config: ModelConfig, scale: float = 1.0, literal: bool = False, features: int = 8) -> Any:
    """Random kernels whose learned scalars are around `scale`, as if training had raised them."""
    return _kernels_for(config, scale, literal, features, jax.config.read("jax_enable_x64"))


@functools.cache
def _kernels_for(config: ModelConfig, scale: float, literal: bool, features: int, x64: bool) -> Any:
    def draw(path, leaf):
        if path[-1].key.endswith("scale"):
            return jnp.asarray(scale * (1 + 0.5 * rng.normal(size=leaf.shape)), leaf.dtype)
        return jnp.asarray(rng.normal(size=leaf.shape) * math.sqrt(2 / sum(leaf.shape[-2:])), leaf.dtype)

    # Drawn by NumPy, in the shapes and of the size of `init_kernels`: to compile JAX's generator takes seconds.
    rng = np.random.default_rng(7)
    init = functools.partial(init_kernels, config=config, features=features, hidden=HIDDEN, literal=literal)
    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(init, jax.random.key(7)))


def run(model, policy, tokens, budget: int | float = 20, steps=30, **settings):
    """Logits [steps + 1, b, vocab] of a text, and the last state; two rows of 90 tokens share their programs."""
    rows = np.asarray(tokens)
    prompt = rows.shape[1] - steps
    state, logits = kvjax.prefill(model, policy, rows[:, :prompt], budget, max_new_tokens=30, **settings)
    every = [logits]
    for step in range(steps):
        state, logits = kvjax.decode_step(state, jnp.asarray(rows[:, prompt + step], jnp.int32))
        every.append(logits)
    return np.stack(every), state


def text(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 64, (rows, length))


@pytest.mark.parametrize(
    ("base", "oracle", "literal", "shape"),
    [
        *(("h2o", basic.H2O, False, shape) for shape in SHAPES),
        ("streaming", basic.Window, False, "gqa"),
        ("lambda_mask", basic.Window, True, "gqa"),
    ],
)
def test_equals_algorithm_1(base: str, oracle: Any, literal: bool, shape: str, x64: None) -> None:
    config, lengths = SHAPES[shape]
    settings = {"base": base, "kernels": kernels_for(config, literal=literal)}
    case = Case("less", less.less(oracle), settings)
    compare_with_oracle(case, random_model(config, seed=1, dtype=jnp.float64), lengths[:1], 110)


@pytest.mark.parametrize("base", ["fastgen", "h2o"])
def test_equals_algorithm_1_where_heads_have_slots_of_their_own(base: str, x64: None) -> None:
    memory = {"residual": "less", "residual.kernels": kernels_for(GQA)}
    cases = {
        "fastgen": dataclasses.replace(fastgen_case(0.5, **memory), oracle=less.less(fastgen.FastGen)),
        "h2o": Case("h2o", less.less(basic.H2O), memory, plan="adakv"),
    }
    compare_with_oracle(cases[base], random_model(GQA, seed=1, dtype=jnp.float64), (41, 33), 60)


@pytest.mark.parametrize("base", ["h2o", slow("streaming"), slow("lsh_e")])
def test_is_the_base_while_nothing_has_left(base: str) -> None:
    model, tokens = random_model(GQA), text(2, 90)
    room: dict[str, Any] = dict(budget=32, steps=20, lengths=[12, 9])
    plain, _ = run(model, kvjax.policy(base), tokens[:, :80], **room)
    ours, state = run(model, kvjax.policy("less", base=base, kernels=kernels_for(GQA)), tokens[:, :80], **room)
    np.testing.assert_array_equal(ours, plain)
    assert all(not cache.state.residual.z.any() for cache in layers(state))


@pytest.mark.parametrize("literal", [False, True])
def test_is_the_base_when_the_learned_scalars_are_zero(literal: bool) -> None:
    model, tokens = random_model(GQA), text(2, 90)
    plain, _ = run(model, kvjax.policy("h2o"), tokens)
    ours, _ = run(model, kvjax.policy("less", kernels=kernels_for(GQA, 0.0, literal)), tokens)
    np.testing.assert_array_equal(ours, plain)
    changed, _ = run(model, kvjax.policy("less", kernels=kernels_for(GQA, 1.0, literal)), tokens)
    assert np.abs(changed - plain).max() > 1e-2


@pytest.mark.parametrize("chunk", [None, 1, 7, 40])
def test_folds_what_leaves_a_prompt(chunk: int | None, x64: None) -> None:
    """Keys of the first layer depend on nothing that was evicted, so its memory is known however the prompt is read."""
    n, budget = 3 * TOKEN_BLOCK + 11, 20
    model, tokens = random_model(GQA, dtype=jnp.float64), text(2, n)
    kernels = kernels_for(GQA)
    _, whole = run(model, kvjax.policy("full"), tokens, 1.0, steps=1)
    cache = layers(whole)[0]
    order = np.argsort(np.where(cache.position < 0, 10**6, cache.position), axis=-1)[..., :n, None]
    k, v = (np.take_along_axis(np.asarray(leaf), order, axis=2) for leaf in (cache.kv.k, cache.kv.v))
    features = np.asarray(Psi(8, HIDDEN).apply({"params": unstack(kernels)[0]["psi"]}, jnp.asarray(k)))
    features = features[:, :, : n - budget]
    policy = kvjax.policy("less", base="window", kernels=kernels)
    _, state = run(model, policy, tokens, budget, steps=1, prefill_chunk=chunk)
    memory = layers(state)[0].state.residual
    np.testing.assert_allclose(memory.h, np.einsum("bhmr,bhmd->bhrd", features, v[:, :, : n - budget]), rtol=1e-9)
    np.testing.assert_allclose(memory.z, features.sum(2), rtol=1e-9)


@pytest.mark.parametrize("features", [4, 8, 16])
def test_counts_its_bytes(features: int) -> None:
    model, tokens = random_model(GQA), text(2, 60)
    of_base = kvjax.cache_bytes(run(model, kvjax.policy("h2o"), tokens, steps=0)[1])
    policy = kvjax.policy("less", kernels=kernels_for(GQA, features=features))
    numbers = GQA.layers * 2 * GQA.kv_heads * (features * GQA.head_width + features)
    assert kvjax.cache_bytes(run(model, policy, tokens, steps=0)[1]) == of_base + 4 * numbers


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-6)])
@pytest.mark.parametrize("evicted", [0, 50])
def test_stable_form_is_equation_3(dtype: str, tolerance: float, evicted: int, x64: None) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=shape).astype(dtype) for shape in ((2, 2, 2, 1, 8), (2, 2, 9, 8), (2, 2, 9, 8)))
    policy = LowRankMemory(layers=unstack(kernels_for(GQA))).layer(0)
    new = _new(jnp.asarray(q), jnp.zeros((2, 2, 1, 8), dtype))
    old_k, old_v = (jnp.asarray(rng.normal(size=(2, 2, max(evicted, 1), 8)), dtype) for _ in range(2))
    position = jnp.full(old_k.shape[:3], 0 if evicted > 0 else -1)
    state = policy.absorb(policy.init_head(new), Evicted(old_k, old_v, position))
    logits = np.einsum("bhgtd,bhsd->bhgts", q, k) / np.sqrt(8)
    weights = np.exp(logits)
    part = Partial(
        jnp.asarray(np.einsum("bhgts,bhsd->bhgtd", weights / weights.sum(-1, keepdims=True), v)),
        jnp.asarray(np.log(weights.sum(-1))),
    )
    share = share_of_evicted(policy.share(state, new))
    phi = np.asarray(policy.phi(jnp.asarray(q)))
    above = np.einsum("bhgtr,bhrd->bhgtd", phi, state.h) + np.einsum("bhgts,bhsd->bhgtd", weights, v)
    below = np.einsum("bhgtr,bhr->bhgt", phi, state.z) + weights.sum(-1)
    np.testing.assert_allclose(merge(part, share).out, above / below[..., None], rtol=tolerance, atol=tolerance)


def test_bfloat16_stays_finite_and_sums_in_float32() -> None:
    policy = kvjax.policy("less", kernels=kernels_for(GQA))
    logits, state = run(random_model(GQA, dtype=jnp.bfloat16), policy, text(2, 90))
    assert np.isfinite(logits).all()
    assert layers(state)[0].state.residual.h.dtype == jnp.float32


def _new(q, k) -> LayerTokens:
    ones, each, config = jnp.ones((q.shape[0], 1), jnp.int32), jnp.ones(q.shape[0], jnp.int32), GQA.layer(0)
    of_rows: dict[str, Any] = dict(prompt_length=each, read=each, horizon=each, end=each, seed=each.astype(jnp.uint32))
    return LayerTokens(
        q=q, k=k, v=k, raw_q=q, raw_k=k, hidden=k[:, 0], position=ones, token=ones, config=config, **of_rows
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, model = tmp_path_factory.mktemp("less") / "kernels", random_model(GQA)
    checkpoint.save(directory, kernels_for(GQA), _settings(model))
    return directory


def _settings(model, **changes: Any) -> checkpoint.Settings:
    made = checkpoint.Settings(model.name, fingerprint(model), "h2o", {"recent": 0.5}, 0.1, hidden=HIDDEN)
    return dataclasses.replace(made, **changes)


def test_checkpoint_serves_its_kernels(saved: Path) -> None:
    model, tokens = random_model(GQA), text(2, 90)
    direct, _ = run(model, kvjax.policy("less", kernels=kernels_for(GQA)), tokens)
    loaded, _ = run(model, kvjax.policy("less", checkpoint=str(saved), recent=0.5), tokens)
    np.testing.assert_array_equal(loaded, direct)
    assert checkpoint.read_settings(saved).budget == 0.1


@pytest.mark.parametrize("literal", [False, True])
def test_checkpoint_is_replaced_whole(tmp_path: Path, literal: bool) -> None:
    model, target = random_model(GQA), tmp_path / "kernels"
    checkpoint.save(target, kernels_for(GQA), _settings(model))
    kernels = kernels_for(GQA, 2.0, literal, features=4)
    checkpoint.save(target, kernels, _settings(model, features=4, literal=literal), dtype=jnp.bfloat16)
    loaded, _ = checkpoint.load(target, model, "h2o")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), loaded, kernels)
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]


def test_checkpoint_is_refused_where_it_does_not_fit(saved: Path) -> None:
    def refused(model, **settings) -> str:
        with pytest.raises(ValueError) as caught:
            kvjax.prefill(model, kvjax.policy("less", **settings), text(1, 30).tolist(), 20)
        return str(caught.value)

    model, other = random_model(GQA), random_model(GQA, seed=1)
    message = refused(other, checkpoint=str(saved))
    assert fingerprint(model) in message and fingerprint(other) in message
    message = refused(model, checkpoint=str(saved), base="streaming")
    assert "'h2o'" in message and "'streaming'" in message
    message = refused(model, checkpoint=str(saved), features=4)
    assert "8 features" in message and "features=4" in message
    assert "train_less" in refused(model, checkpoint="nowhere")
    assert "(2, 2, 8)" in refused(model, kernels=kernels_for(MHA)) and "(4, 1, 8)" in refused(
        model, kernels=kernels_for(MHA)
    )
    assert "3 layers" in refused(model, kernels=kernels_for(small_config(4, 2, layers=3)))


@pytest.mark.parametrize("base", sorted(set(REGISTRY) - {"less"}))
def test_changes_nothing_but_the_residual(base: str) -> None:
    made = kvjax.policy("less", base=base, kernels="performer", features=4)
    assert made.residual == LowRankMemory(kernels="performer", features=4, base=base)
    assert dataclasses.replace(made, residual=None) == kvjax.policy(base)
    by_part = {"residual.kernels": "performer", "residual.features": 4}
    assert kvjax.policy(base, **by_part) == kvjax.policy(base, residual="less", **by_part) == made


def _policy(name: str, settings: dict[str, Any]) -> kvjax.Policy:
    return kvjax.policy(name, **settings)


def test_settings_go_to_the_residual_or_to_the_base() -> None:
    made = kvjax.policy("less", base="h2o", recent=0.25, sinks=2, kernels="performer", features=4)
    assert made == kvjax.policy(
        "h2o", recent=0.25, sinks=2, residual=LowRankMemory(kernels="performer", features=4, base="h2o")
    )
    assert (made.protection.sinks, made.protection.recent) == (2, 0.25)
    assert kvjax.policy("less", base=kvjax.policy("streaming")).codec.positions == "cache"
    kernels = kernels_for(GQA)
    assert kvjax.policy("h2o", **{"residual.kernels": kernels}).residual == LowRankMemory(layers=kernels)
    with pytest.raises(ValueError, match=r"'less' has no setting 'noise'; it takes checkpoint, kernels"):
        _policy("h2o", {"residual.noise": 1})
    with pytest.raises(ValueError, match=r"residual\.features cannot be set for a residual that is an instance"):
        _policy("h2o", {"residual": LowRankMemory(), "residual.features": 4})
    for wrong, name in (({"noise": 1}, "noise"), ({"kernels": "magic"}, "magic"), ({"base": "nobody"}, "nobody")):
        with pytest.raises(ValueError, match=name):
            _policy("less", wrong)
    with pytest.raises(ValueError, match="recent"):
        kvjax.policy("less", base=kvjax.policy("h2o"), recent=0.1)


def test_fingerprint_is_of_the_model_and_not_of_its_dtype() -> None:
    model = random_model(MQA)
    other = kvjax.Model(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.weights), MQA, name="other")
    assert fingerprint(model) == fingerprint(other)
    assert fingerprint(model) != fingerprint(random_model(MQA, seed=1))


def test_performer_estimates_the_exponential() -> None:
    config = small_config(4, 2, layers=400)
    kernels = performer_kernels(jax.random.key(0), config)["phi"]
    norms = jnp.einsum("lhrd,lhsd->lhrs", kernels["planes"], kernels["planes"])
    np.testing.assert_allclose(norms * (1 - jnp.eye(8)), 0, atol=1e-4)
    policy = LowRankMemory(kernels="performer", layers={"phi": kernels, "psi": kernels})
    q, k = 0.3 * jax.random.normal(jax.random.key(1), (2, 1, 2, 6, 8))
    q = q[:, :, None]

    def product(planes):
        params = {name: {"planes": planes} for name in ("phi", "psi")}
        drawn = dataclasses.replace(policy, layers=params)
        return jnp.einsum("bhgtr,bhtr->bhgt", drawn.phi(q), drawn.psi(k))

    estimate = jax.vmap(product)(kernels["planes"]).mean(0)
    np.testing.assert_allclose(estimate, jnp.exp(jnp.einsum("bhgtd,bhtd->bhgt", q, k) / 8**0.5), rtol=0.05)


def test_baseline_plus_spends_the_memory_on_slots() -> None:
    model, tokens = random_model(GQA), text(2, 90)
    plain, _ = run(model, kvjax.policy("h2o"), tokens, budget=24)
    plus, state = run(model, kvjax.policy("baseline_plus"), tokens, budget=20)
    np.testing.assert_array_equal(plus, plain)
    limit = layers(state)[0].limit
    assert int(limit.max()) == 24 and int(state.policy.protection.recent_slots(limit).max()) == 12
    with pytest.raises(ValueError, match="features=3"):
        kvjax.policy("baseline_plus", features=3)


def test_low_rank_oracle_recovers_attention() -> None:
    model, tokens = random_model(GQA), jnp.asarray(text(2, 40), jnp.int32)
    exact = model.logits(np.asarray(tokens))
    everything = lowrank_oracle.logits(model.weights, GQA, tokens, keep=40)
    np.testing.assert_allclose(everything, exact, rtol=1e-4, atol=1e-4)
    errors = [
        float(jnp.abs(lowrank_oracle.logits(model.weights, GQA, tokens, keep=4, rank=rank) - exact).mean())
        for rank in (0, 2, 8)
    ]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-3


def test_best_rank_is_the_nearest_matrix() -> None:
    matrix = jax.random.normal(jax.random.key(0), (3, 20, 8))
    values = jnp.linalg.svd(matrix, compute_uv=False)
    for rank in range(9):
        nearest = lowrank_oracle.best_rank(matrix, rank)
        error = jnp.linalg.norm(matrix - nearest, axis=(1, 2))
        np.testing.assert_allclose(error, jnp.sqrt((values[:, rank:] ** 2).sum(-1)), atol=1e-4)
    np.testing.assert_allclose(lowrank_oracle.singular_values(matrix), values / values[:, :1], rtol=1e-5)


def test_command_line_takes_a_checkpoint() -> None:
    def choice(*words: str):
        return options.policy_and_budget(generate.parser().parse_args(words))[0]

    expected = kvjax.policy("less", base="streaming", sinks=2, checkpoint="DIR")
    assert choice("--policy", "less", "--set", "base=streaming", "sinks=2", "--less-checkpoint", "DIR") == expected
    over_h2o = kvjax.policy("h2o", residual=LowRankMemory("DIR", base="h2o"))
    assert choice("--policy", "h2o", "--less-checkpoint", "DIR") == over_h2o
