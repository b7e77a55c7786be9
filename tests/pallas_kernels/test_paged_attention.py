"""Attention over pages beyond the table: in whole decode steps, and lowered for GPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import use_abstract_mesh

import kvjax
from kvjax.cache.paged.storage import Pages
from kvjax.inference import decode
from kvjax.inference.state import State, held_positions, slot_limits
from kvjax.methods.adakv import AdaKV
from kvjax.models import Rope
from kvjax.types import Kernels, LayerTokens
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import Unsupported
from pallas_kernels.operands import LazyRope, Quantised
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.api import ranges
from pallas_kernels.paged_attention.pallas_tpu import MAX_SCALARS, scalar_count, tile
from pallas_kernels.workloads import paged_workload
from tests.cases import fastgen_case, slow
from tests.kernel_cases.paged_attention import case
from tests.kernels import GPU_WAYS, H100, TPU_WAYS, XLA, check, in_its_way
from tests.small_models import random_model, small_config

RUNNING = (XLA, *GPU_WAYS, *TPU_WAYS)
WHOLE_STEPS = [("fastgen", RUNNING[1]), ("keyformer", RUNNING[-1])]
WHOLE_STEPS += [slow(policy, way) for policy in ("fastgen", "keyformer") for way in RUNNING[2:-1]]

MODEL = random_model(small_config(4, 2, head_width=16, rope=Rope(width=16)), seed=4)
TEXT = np.random.default_rng(3).integers(0, 64, (3, 70))
LENGTHS = (41, 25, 33)
STEPS = 12


@functools.cache
def state_of(name: str) -> State:
    """A state whose heads have caches of their own, and of unequal sizes."""
    if name == "fastgen":
        policy, budget, plan = fastgen_case(0.75).make(), 1.0, None
    else:
        policy, budget, plan = kvjax.policy(name, recent=4), 16, AdaKV(floor=0.2)
    prompts = TEXT[:, :41]
    state, _ = kvjax.prefill(MODEL, policy, prompts, budget, lengths=LENGTHS, max_new_tokens=STEPS, plan=plan)
    assert len({int(limit) for layer in slot_limits(state) for limit in layer.flat}) > 2
    return state


def steps(state: State) -> tuple[list[np.ndarray], list[list[np.ndarray]], list[Any]]:
    """Logits, positions held and scores after each of a few steps."""
    logits, held, scores = [], [], []
    for token in TEXT[:, 50 : 50 + STEPS].T:
        state, found = decode.decode_step(state, jnp.asarray(token))
        logits.append(np.asarray(found))
        held.append(held_positions(state))
        assert state.cache.pool is not None
        scores.append(jax.device_get(state.cache.pool.slots.score))
    return logits, held, scores


@functools.cache
def expected_steps(name: str) -> tuple[list[np.ndarray], list[list[np.ndarray]], list[Any]]:
    """What XLA makes of them."""
    return steps(state_of(name))


@settings(max_examples=6, phases=[Phase.generate])
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.sampled_from([16, 32, 64])),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from(RUNNING),
    st.sampled_from([None, (8, 8), (0, 8), (8, 0)]),
    st.sampled_from([32, 64]),
    st.sampled_from([None, 3.0]),
)
def test_any_pages(shape, dtype, most, alibi, way, bits, e, soft_cap):
    b, h, g, size = shape
    some = case(b, h, g, size, 64, dtype=dtype, most=most, alibi=alibi, bits=bits, e=e, soft_cap=soft_cap)
    check(some, way)


@pytest.mark.parametrize(("policy", "way"), WHOLE_STEPS, ids=str)
def test_a_step_on_pages_is_the_same_with_every_kernel(policy, way):
    state, expected = state_of(policy), expected_steps(policy)
    found = steps(state.replace(kernels=Kernels(**way.options)))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found[2], expected[2])
    before = held_positions(state)
    left = [set(x.flat) - set(y.flat) for x, y in zip(before, found[1][-1], strict=True)]
    assert any(left), "nobody was evicted"


@pytest.mark.parametrize("way", RUNNING, ids=str)
@in_its_way
def test_a_row_of_padding_reads_nothing_and_leaves_scores_as_they_are(way):
    state, config = state_of("keyformer"), MODEL.config.layer(0)
    pool = state.cache.pool
    assert pool is not None
    rng, b, h, g, d = np.random.default_rng(0), 3, 2, 2, 16
    position = jnp.asarray([-1, 25, 33])[:, None]
    q, k, v = (jnp.asarray(rng.normal(size=(b, h, *some, 1, d)), jnp.float32) for some in ((g,), (), ()))
    new = LayerTokens(
        q=q,
        k=k,
        v=v,
        raw_q=q,
        raw_k=k,
        hidden=jnp.zeros((b, 1, d)),
        position=position,
        token=jnp.zeros((b, 1), jnp.int32),
        prompt_length=state.prompt_length,
        read=position[:, 0] + 1,
        horizon=state.horizon,
        end=state.end,
        seed=state.seed,
        config=config,
        given=False,
    )
    policy = state.policy
    layer = state.layers[0].link((), pool.with_logits(g, jnp.float32))
    assert isinstance(layer, Pages)
    written, _ = layer.write(policy, new)
    requests = policy.score.attention_stats(written, new)
    attended, found = written.attend_token(policy, new, requests, None)
    after = attended.update_slots(policy, requests, found.stats, new).linked
    assert (np.asarray(found.partial.out[0]) == 0).all() and (np.asarray(found.partial.out[1:]) != 0).all()
    rows = np.asarray(pool.owner) // h
    for old, now in zip(jax.tree.leaves(pool.slots.score), jax.tree.leaves(after.slots.score), strict=True):
        np.testing.assert_array_equal(now[rows == 0], old[rows == 0])
        assert np.isfinite(now).all() and (np.asarray(now) != np.asarray(old))[rows > 0].any()


@pytest.mark.parametrize("way", [way for way in RUNNING if way.implementation == "pallas"], ids=str)
def test_what_other_heads_hold_does_not_come_through(way):
    inputs = jax.tree.map(jnp.asarray, case(2, 2, 2, 16, 64).arrays[0]) | {"spec": AttentionSpec(0.125)}
    (first, last), owner = inputs["pages"], inputs["owner"]
    page = jnp.arange(len(owner))
    mine = (owner == 3) & (page >= first) & (page < last)
    expected = paged_attention(**inputs, **way.options)
    others = {name: jnp.where(mine[:, None, None], inputs[name], jnp.nan) for name in "kv"}
    found = paged_attention(**inputs | others, **way.options)
    np.testing.assert_array_equal(found.out[1, 1], expected.out[1, 1])
    np.testing.assert_array_equal(found.lse[1, 1], expected.lse[1, 1])


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_of_pages_agree_with_exact_arithmetic(x64, bits):
    some = case(2, 2, 3, 16, 128, most=30, bits=(bits, bits))
    inputs = jax.tree.map(jnp.asarray, some.arrays[0])
    wide = {name: Quantised(inputs[name].codes, inputs[name].scale.astype(jnp.float64)) for name in "kv"}
    spec = AttentionSpec(128**-0.5)
    exact = paged_attention(**inputs | wide | {"q": inputs["q"].astype(jnp.float64)}, spec=spec).out
    np.testing.assert_allclose(exact, some.oracle(some.arrays[0])["out"], rtol=1e-6, atol=1e-6)
    for platform in ("cpu", "tpu", "gpu"):
        found = paged_attention(**inputs, spec=spec, implementation="xla", platform=platform).out
        assert np.abs(np.asarray(found - exact)).max() < 2e-4 * np.abs(np.asarray(exact)).max()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.compiled_well
def test_a_pool_of_codes_is_never_decoded_as_a_whole(bits):
    pages, size, d = 4096, 16, 128
    codes = jax.ShapeDtypeStruct((pages, size, d * bits // 8), jnp.int8 if bits == 8 else jnp.uint8)
    held = Quantised(codes, jax.ShapeDtypeStruct((pages, size), jnp.dtype(jnp.float32)))  # type: ignore[arg-type]
    shapes = paged_workload("", 2, 4, 2, pages, size, d, "float32").shapes | {"k": held, "v": held}
    attend = functools.partial(paged_attention, spec=AttentionSpec(0.1), platform="cpu")
    memory = jax.jit(attend).lower(**shapes).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < pages * size * d * 4 / 3


@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_in_pages_are_rotated_by_their_place(interleaved):
    inputs: dict[str, Any] = jax.tree.map(jnp.asarray, case(2, 2, 2, 16, 64, most=20).arrays[0])
    inputs |= {"spec": AttentionSpec(0.125)}
    order = jnp.asarray(np.random.default_rng(0).integers(0, 40, inputs["position"].shape), jnp.int32)
    angles = jnp.arange(40)[:, None] * 0.8 ** jnp.arange(16)
    turned = LazyRope(inputs["k"], order, jnp.cos(angles), jnp.sin(angles), interleaved)
    keys = inputs.pop("k")
    found = paged_attention(k=turned, **inputs)
    expected = paged_attention(k=turned.values(jnp.float32), **inputs)
    np.testing.assert_allclose(found.out, expected.out, rtol=1e-6, atol=1e-6)
    assert np.abs(np.asarray(found.out - paged_attention(k=keys, **inputs).out)).max() > 0.1
    with pytest.raises(Unsupported, match=r"keys are rotated when they are read \(LazyRope\)"):
        paged_attention(k=turned, **inputs, **TPU_WAYS[0].options)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_it_lowers_to_cuda():
    some = case(2, 2, 4, 16, 128, dtype="bfloat16", alibi=True)
    compiled_for = functools.partial(some.run, implementation="pallas", platform="gpu")
    with use_abstract_mesh(H100):
        lowered = jax.jit(compiled_for).trace(*some.arrays).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()


@pytest.mark.parametrize(
    ("changes", "platform", "reason"),
    [
        (dict(d=80), "gpu", "d=80 is not a power of two from 16 to 256"),
        (dict(d=84), "tpu", "d=84 is not a multiple of 8 up to 256"),
        (dict(d=128, bits=4), "tpu", "pages of four bits would be copied at every step, unless d and e are 256"),
        (dict(size=1040), "tpu", "s=1040 slots in a page are more than 1024"),
        (dict(g=17), "tpu", "g=17 query heads share a KV head, more than 16"),
        (dict(b=2048, h=32), "tpu", "its steps take 264193 scalars for rows, heads and pages, more than 240000"),
    ],
)
def test_limits_are_named(changes, platform, reason):
    program = paged_workload("", **(dict(b=1, h=2, g=1, pages=20, size=16, d=64, dtype="float32") | changes))
    with pytest.raises(Unsupported, match=f"paged_attention cannot run as 'pallas': {reason}"):
        program.jit("pallas", platform).trace(**program.shapes)


def test_ranges_of_owners_with_pages_and_without():
    owner = jnp.asarray([3, 0, 0, 2, 2, 2, 0, 0])
    begin, end = ranges(owner, jnp.asarray([1, 6]), 4)
    assert list(zip(begin.tolist(), end.tolist(), strict=True)) == [(1, 3), (3, 3), (3, 6), (6, 6)]


@pytest.mark.parametrize(("mean", "slots"), [(1, 128), (128, 128), (160, 256), (256, 256), (288, 512), (5000, 512)])
def test_a_step_takes_the_pages_of_a_usual_head(mean, slots):
    heads, layers, size = 40, 4, 16
    held = heads * layers * mean // size
    for count in (held, held * 17 // 16):  # pools are rounded up
        assert tile(heads, layers, max(count, 64), size) * size == slots


def test_a_step_takes_more_pages_where_so_many_steps_could_not_be_told():
    rows, heads, layers, size = 256, 32, 32, 16
    count = rows * heads * layers * 8  # of 128 slots a head
    block = tile(rows * heads, layers, count, size)
    assert (
        scalar_count(rows, rows * heads, count, 128 // size)
        > MAX_SCALARS
        >= scalar_count(rows, rows * heads, count, block)
    )


def test_few_and_many_pages_a_step_give_the_same():
    some, (way, *_) = case(2, 2, 4, 16, 64, most=40), TPU_WAYS
    (inputs,), pages = some.arrays, len(some.arrays[0]["owner"])
    assert tile(4, 1, pages, 16) > tile(4, 8, pages, 16)
    found = [some.run(inputs, layers=layers, **way.options) for layers in (1, 8)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *found)
