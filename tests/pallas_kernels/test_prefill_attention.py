"""What prompt attention with column sums promises beyond the table: any shape, float64, linear memory, refusals."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from benchmarks.aot.tpu import grids_of
from kvjax.cache import stats
from kvjax.methods.keyformer import GumbelSoftmax
from kvjax.types import Heads, LayerTokens, Parts
from pallas_kernels import noise
from pallas_kernels.attention import AttentionSpec, attend
from pallas_kernels.common import VARIABLE, Unsupported
from pallas_kernels.operands import SplitKV
from pallas_kernels.prefill_attention import QueryTokens, prefill_attention
from tests.cases import in_turns
from tests.kernel_cases.prefill_attention import case, inputs, operand
from tests.kernels import GPU_WAYS, XLA, Way, check
from tests.small_models import small_config

SPEC = AttentionSpec(8**-0.5)


@settings(max_examples=8)
@given(
    b=st.integers(1, 3),
    h=st.integers(1, 3),
    g=st.integers(1, 4),
    n=st.integers(1, 300) | st.integers(600, 1200),
    cached=st.sampled_from([0, 1, 37]),
    window=st.sampled_from([None, 1, 50]),
    extra=st.sets(st.sampled_from(["noise", "weights", "slopes", "places"])),
    rows=st.sampled_from([None, 1, 5]),
    e=st.sampled_from([8, 12]),
    soft_cap=st.sampled_from([None, 2.0]),
    scores=st.booleans(),
)
def test_any_shape_agrees_with_numpy(b, h, g, n, cached, window, extra, rows, e, soft_cap, scores):
    options: dict[str, Any] = dict(cached=cached, window=window, rows=rows, e=e, soft_cap=soft_cap, scores=scores)
    check(case("any", b, h, g, n, 8, extra=tuple(extra), ways=(XLA,), **options), XLA)


@settings(max_examples=8)
@given(
    n=st.integers(1, 300),
    cached=st.sampled_from([1, 37, 300]),
    joined=st.booleans(),
    kinds=st.tuples(st.sampled_from(["array", "int8", "int4", "turned"]), st.sampled_from(["array", "int8", "int4"])),
    window=st.sampled_from([None, 50]),
)
def test_any_operand_agrees_with_numpy(n, cached, joined, kinds, window):
    check(case("any", 2, 1, 2, n, 8, cached=cached, joined=joined, kinds=kinds, window=window, ways=(XLA,)), XLA)


def test_double_precision(x64):
    made = case("double", 1, 2, 2, 90, 8, dtype="float64", extra=("noise",), tau=1.5, ways=(XLA,))
    found = made.run(*jax.tree.map(jnp.asarray, made.arrays), implementation="xla")
    for name, wanted in made.expected().items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-11, atol=1e-11, err_msg=name)


def test_keyformer_counts_the_same(x64):
    made: dict[str, Any] = {name: jnp.asarray(x) for name, x in inputs(2, 2, 2, 48, 8, dtype="float64").items()}
    q, k, v, position = (made[name] for name in ("q", "k", "v", "query_position"))
    seed, length = jnp.array([3, 4], jnp.uint32), (position >= 0).sum(1)
    new = LayerTokens(
        q=q, k=k, v=v, raw_q=q, raw_k=k, hidden=k[:, 0], position=position, token=position, prompt_length=length,
        read=length, horizon=jnp.full(2, 8), end=length + 8, seed=seed, layer=1, config=small_config(4, 2).layer(0),
    )  # fmt: skip
    slots = jnp.broadcast_to(position[:, None], (2, 2, 48))
    _, probs = attend(q, k, v, SPEC.mask(position, slots), SPEC)
    request = GumbelSoftmax(damping=0.9).attention_stats(Heads(jnp.full((2, 2), 48), Parts()), new)
    wanted = stats.reduced(request, probs, v, slots, new)
    age = length[:, None] - 1 - position
    weights = jnp.where(position >= 0, 0.9**age, 0.0)[:, None]
    zeta = noise.gumbel(noise.uniform_at(seed, 1, slots).astype(jnp.float64))
    found = prefill_attention(**made, spec=SPEC, weights=weights, noise=zeta).scores
    assert found is not None
    np.testing.assert_allclose(found[:, :, 0], jnp.where(slots >= 0, wanted, 0), rtol=1e-9, atol=1e-12)


def test_blocks_of_an_accelerator_agree_with_numpy():
    check(case("large", 1, 1, 2, 2500, 8, extra=("noise",), ways=(XLA,)), Way("xla", platform="gpu"))


def test_wide_float32_agrees_with_numpy_in_the_gpu_form():
    check(case("wide", 1, 1, 2, 40, 256, extra=("weights",), rows=3, ways=GPU_WAYS), GPU_WAYS[0])


def temporary(made: dict[str, Any], **options: Any) -> int:
    """Bytes besides arguments and results."""
    arrays, run = jax.tree.map(jnp.asarray, made), functools.partial(prefill_attention, implementation="xla", **options)
    memory = jax.jit(run).lower(**arrays, spec=SPEC).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.compiled_well
def test_memory_is_linear_in_the_prompt(rows):
    def of(n: int) -> int:
        made = inputs(1, 2, 2, n, 16, padding=False)
        return temporary(made | {"weights": np.ones((1, 1, rows, n), np.float32)})

    assert of(4096) < 2.2 * of(2048)


@pytest.mark.parametrize(
    ("kinds", "scores"),
    in_turns([("int8", "int8"), ("int4", "int4"), ("turned", "array"), ("array", "array")], [True, False]),
)
@pytest.mark.compiled_well
def test_no_decoded_copy_of_a_cache_exists(kinds, scores):
    made, cached = inputs(1, 4, 1, 16, 64, cached=4000, padding=False), 4000
    decoded = made["k"][:, :, :cached].nbytes
    alone = temporary(made | {name: made[name][:, :, cached:] for name in ("k", "v", "key_position")}, scores=scores)
    held = 4 * 16 * cached * 4 if scores else 0
    joined = {
        name: SplitKV(made[name][:, :, :cached] if kind == "array" else operand(kind, made[name][:, :, :cached]),
                     made[name][:, :, cached:])
        for name, kind in zip("kv", kinds, strict=True)
    }  # fmt: skip
    assert temporary(made | joined, scores=scores) < alone + 1.2 * held + decoded / 4


def test_rows_of_weights_are_answered_together():
    rng, made = np.random.default_rng(0), inputs(2, 2, 2, 300, 8, cached=20)
    weights = jnp.asarray(rng.random((2, 1, 3, 300)), jnp.float32).at[:, :, 1].set(0)
    together = prefill_attention(**made, spec=SPEC, weights=weights).scores
    assert together is not None
    for m in range(3):
        alone = prefill_attention(**made, spec=SPEC, weights=weights[:, :, m]).scores
        assert alone is not None
        np.testing.assert_allclose(together[:, :, m], alone[:, :, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [XLA, Way("pallas", True, "tpu"), Way("pallas", True, "gpu")], ids=str)
@pytest.mark.parametrize("cached, window", [(0, 150), (37, None)])
def test_a_prompt_may_be_read_in_shares(cached, window, way):
    """Blocks of 32 queries go to three readers by turns; what keys received is the sum of their shares."""
    made = inputs(2, 1, 2, 700, 16, cached=cached)
    settings: dict[str, Any] = dict(spec=dataclasses.replace(SPEC, window=window), **way.options)
    noise = jnp.asarray(np.random.default_rng(0).gumbel(size=(2, 1, 700 + cached)), jnp.float32)
    whole = prefill_attention(**made, noise=noise, **settings)
    assert whole.scores is not None
    sums = jnp.zeros_like(whole.scores)
    for reader in range(3):
        token = np.flatnonzero(np.arange(700) // 32 % 3 == reader)
        own = QueryTokens(jnp.asarray(token), 700)
        share = made | {"q": made["q"][:, :, :, token], "query_position": made["query_position"][:, token]}
        found = prefill_attention(**share, noise=noise, query_tokens=own, **settings)
        assert found.scores is not None
        sums += found.scores
        for part, all_ in ((found.out, whole.out[:, :, :, token]), (found.lse, whole.lse[:, :, :, token])):
            np.testing.assert_allclose(part, all_, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums, whole.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", [XLA, Way("pallas", True, "tpu")], ids=str)
def test_what_no_query_counts_is_not_summed(way):
    made = inputs(1, 1, 1, 300, 8)
    found = prefill_attention(**made, spec=SPEC, weights=jnp.zeros((1, 1, 2, 300)), **way.options).scores
    np.testing.assert_array_equal(found, np.zeros((1, 1, 2, 300)))


def test_auto_reads_operands_with_xla_and_arrays_with_a_kernel(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    made = inputs(1, 1, 1, 16, 8)
    assert len(grids(made)) == 1
    assert not grids(made | {"k": operand("int8", made["k"])})


def grids(made: dict[str, Any], **options: Any) -> list[tuple[int, ...]]:
    """Of the kernels that the form for TPU calls."""
    run = functools.partial(prefill_attention, spec=SPEC, platform="tpu", interpret=True, **options)
    return [grid.sizes for grid in grids_of(jax.make_jaxpr(run)(**made).jaxpr)]


def test_what_does_not_fit_the_memory_of_a_chip_takes_smaller_blocks_then_a_second_pass():
    def of(cached: int, **options: Any) -> list[tuple[int, ...]]:
        return grids(inputs(1, 1, 1, 512, 8, cached=cached), **options)

    assert of(3000) == [(1, 1, 1, 1, 7)]
    assert of(7000) == [(1, 1, 1, 2, 15)]
    assert of(30000) == [(1, 1, 1, 1, 60), (1, 1, 60, 1, 1)]
    assert of(30000, scores=False) == [(1, 1, 1, 1, 60)]
    check(case("long", 1, 1, 1, 512, 8, cached=7000), Way("pallas", True, "tpu"))


@pytest.mark.parametrize("interpret", [True, pltpu.InterpretParams(detect_races=True)], ids=["plain", "races"])
def test_many_keys_of_16_bits_take_two_blocks_a_step(interpret):
    made = case("wider", 1, 1, 2, 200, 8, extra=("noise",), tau=2.0, dtype="bfloat16", cached=3900, window=3000)
    assert grids(made.arrays[0], tau=2.0) == [(1, 1, 2, 1, 5)]
    assert grids(inputs(1, 1, 2, 200, 8, dtype="bfloat16", cached=3800), tau=2.0) == [(1, 1, 2, 1, 8)]
    check(made, Way("pallas", interpret, "tpu"))


@pytest.mark.parametrize(
    "extra, tau, dtype",
    [(("weights",), 1.0, "float32"), (("noise",), 1.0, "bfloat16"), (("noise", "weights"), 0.5, "float32")],
)
def test_a_second_pass_finds_the_same(monkeypatch, extra, tau, dtype):
    monkeypatch.setattr("pallas_kernels.prefill_attention.pallas_tpu.chip_memory", lambda interpret: (128, 0))
    options: dict[str, Any] = dict(extra=extra, tau=tau, dtype=dtype, cached=40, window=200, soft_cap=20.0)
    made = case("again", 2, 2, 2, 600, 16, rows=2 if tau == 1 else None, **options)
    assert len(grids(made.arrays[0], tau=tau)) == 2
    check(made, Way("pallas", True, "tpu"))


@pytest.mark.compiled_well
def test_a_prompt_does_not_depend_on_its_neighbours():
    made = jax.tree.map(jnp.asarray, inputs(3, 1, 2, 70, 8))
    alone = prefill_attention(**{name: x[1:2] for name, x in made.items()}, spec=SPEC)
    together = prefill_attention(**made, spec=SPEC)
    jax.tree.map(lambda one, all_: np.testing.assert_allclose(one[0], all_[1], rtol=2e-6, atol=1e-6), alone, together)


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, dict(implementation="pallas", platform="gpu"), "d=8 is not a power of two from 16"),
        ({}, dict(implementation="pallas", platform="cpu"), "compiles for tpu and gpu, not for cpu"),
        ({}, dict(implementation="triton", platform="gpu"), "no such kernel"),
        (
            {"dtype": "float64"},
            dict(implementation="pallas", platform="tpu"),
            "float64 are not all float32",
        ),
        ({"d": 12}, dict(implementation="pallas", platform="tpu"), "d=12 is not a multiple of 8"),
        ({"e": 12}, dict(implementation="pallas", platform="tpu"), "values of e=12 are not a multiple of 8"),
        ({"d": 16, "e": 24}, dict(implementation="pallas", platform="gpu"), "values of e=24 are not a power of two"),
        (
            {},
            dict(implementation="pallas", platform="tpu", weights=np.ones((1, 1, 17, 4), np.float32)),
            "17 rows of weights are more than 16",
        ),
        (
            {},
            dict(
                implementation="pallas",
                platform="tpu",
                spec=dataclasses.replace(SPEC, slopes=np.ones((1, 1), np.float32)),
                places=(np.zeros((1, 1, 4), int), np.zeros((1, 1, 4), int)),
            ),
            "ALiBi at places other than the positions",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_compilation(changes, options, reason, x64):
    made = inputs(**(dict(b=1, h=1, g=1, n=4, d=8) | changes))
    with pytest.raises(Unsupported, match=reason):
        prefill_attention(**made, **dict(spec=SPEC) | options)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda k, v: {"k": operand("int8", k)}, "keys are Quantised"),
        (lambda k, v: {"k": operand("turned", k)}, "keys are LazyRope"),
        (lambda k, v: {"v": operand("int4", v)}, "values are Quantised"),
        (lambda k, v: {"k": SplitKV(k, k), "v": SplitKV(v, v)}, "keys are SplitKV"),
    ],
)
def test_kernels_refuse_what_is_not_an_array(change, reason):
    made = inputs(1, 1, 1, 4, 8)
    with pytest.raises(Unsupported, match=f"{reason}, and it reads arrays only"):
        prefill_attention(**made | change(made["k"], made["v"]), spec=SPEC, implementation="pallas", platform="tpu")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tau": 0.0}, "tau=0.0 is not a temperature above 0"),
        ({"spec": dataclasses.replace(SPEC, window=0)}, "window=0 is not a number of tokens from 1"),
    ],
)
def test_settings_out_of_range_are_named(options, reason):
    with pytest.raises(ValueError, match=reason):
        prefill_attention(**inputs(1, 1, 1, 4, 8), **dict(spec=SPEC) | options)


def test_fewer_keys_than_queries_are_refused():
    made = inputs(1, 1, 1, 4, 8)
    made |= {name: made[name][:, :, :3] for name in "kv"}
    with pytest.raises(ValueError, match="3 keys are fewer than the 4 queries' own"):
        prefill_attention(**made, spec=SPEC)


def test_keys_and_values_joined_at_different_slots_are_refused():
    made = inputs(1, 1, 1, 4, 8, cached=3)
    made["k"] = SplitKV(made["k"][:, :, :3], made["k"][:, :, 3:])
    with pytest.raises(ValueError, match=r"Keys are joined at slots \(3,\), values at \(\)"):
        prefill_attention(**made, spec=SPEC)


def test_rotated_values_are_refused():
    made = inputs(1, 1, 1, 4, 8)
    with pytest.raises(ValueError, match="Values are LazyRope, but only keys are rotated"):
        prefill_attention(**made | {"v": operand("turned", made["v"])}, spec=SPEC)
