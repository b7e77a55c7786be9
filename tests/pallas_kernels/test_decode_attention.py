"""Decode attention beyond the table: random shapes, splits of every size, what it refuses."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvjax.cache import stats
from kvjax.methods.keyformer import GumbelSoftmax
from kvjax.types import Heads, LayerTokens, Parts
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import Unsupported, slots_lie_along_lanes
from pallas_kernels.decode_attention import (
    ScoreNoise,
    decode_attention,
    kernel_parts,
    online_softmax,
    pallas_gpu,
    pallas_tpu,
    splits,
)
from pallas_kernels.operands import LazyRope, Quantised
from tests.cases import slow
from tests.kernel_cases.decode_attention import CASES, arguments, case
from tests.kernels import GPU_WAYS, TPU_WAYS, XLA, Case, check
from tests.small_models import small_config


def test_every_case_has_something_to_see():
    assert all(some.expected()["out"].any() for some in CASES if "-none" not in some.label)


@settings(max_examples=8, phases=[Phase.generate])  # no shrinking: every example is a compilation
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 150), st.sampled_from([64, 72])),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([None, "each", "sum", "gumbel"]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.sampled_from([XLA, *TPU_WAYS, *GPU_WAYS]),
    st.sampled_from([None, (8, 8), (4, 4), (0, 8), (8, 4)]),
    st.sampled_from([32, 64]),
    st.sampled_from([None, 3.0]),
)
def test_any_shape(shape, dtype, scores, features, alibi, way, bits, e, soft_cap):
    if way in GPU_WAYS:
        shape = (*shape[:-1], 64)
    if bits is not None and 4 in bits and way in TPU_WAYS:
        shape = (*shape[:-1], 64)
    some = case(*shape, dtype=dtype, scores=scores, features=features, alibi=alibi, bits=bits, e=e, soft_cap=soft_cap)
    check(some, way)


@pytest.mark.parametrize("way", TPU_WAYS, ids=str)
@pytest.mark.parametrize("held", [0, pallas_tpu.HELD_BYTES], ids=["scored_by_xla", "scored_on_chip"])
@pytest.mark.parametrize("scores", [slow("each"), slow("sum"), "gumbel"])
def test_many_splits_give_what_one_gives(monkeypatch, scores, held, way):
    monkeypatch.setattr(pallas_tpu, "BLOCK_BYTES", 1)
    monkeypatch.setattr(pallas_tpu, "HELD_BYTES", held)
    for width, heads, groups in ((64, 2, 3), (128, 2, 3), (128, 8, 1)):  # stored slots innermost, and as written
        for bits in (None, (8, 8)):
            some = case(1, heads, groups, 300, width, scores=scores, features=4, bits=bits)
            assert pallas_tpu.tile(heads, 300, width, 4) == (heads, 128)
            assert slots_lie_along_lanes(300, width) == (width == 64)
            check(some, way)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_tpu_that_multiplies_no_integers_gives_the_same(monkeypatch, bits):
    some = case(1, 2, 3, 128, 64, bits=(bits, bits), scores="sum")
    expected = some.run(*some.arrays, **TPU_WAYS[0].options)
    monkeypatch.setattr(kernel_parts, "multiplies_integers", lambda interpret: False)
    found = some.run(*some.arrays, **TPU_WAYS[0].options)
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-6)


def test_short_rows_share_a_step():
    assert pallas_tpu.tile(32, 256, 128, 1) == (32, 256)
    assert pallas_tpu.tile(8, 4096, 128, 1) == (8, 1024)
    assert pallas_tpu.tile(24, 256, 128, 1) == (8, 256)


def test_blocks_are_larger_on_chips_with_more_memory(monkeypatch):
    for memory, heads, slots in ((16 << 20, 16, 512), (128 << 20, 32, 1024)):
        monkeypatch.setattr(
            online_softmax.pltpu, "get_tpu_info", lambda memory=memory: SimpleNamespace(vmem_capacity_bytes=memory)
        )
        assert pallas_tpu.tile(32, 256, 128, 2) == (heads, 256)
        assert pallas_tpu.tile(8, 4096, 128, 2) == (8, slots)


@pytest.mark.parametrize(("heads", "groups", "expected"), [(16, 1, (2, 8)), (12, 1, (12, 8)), (8, 4, (8, 8))])
def test_single_queries_of_eight_heads_share_a_register(heads, groups, expected):
    assert online_softmax.rows_and_blocks(heads, groups) == expected
    rows = jnp.arange(heads * groups * 128.0).reshape(heads * groups, 128)
    laid = online_softmax.unpack_rows(rows, heads)
    assert laid.shape == (*expected, 128)
    assert (online_softmax.pack_rows(laid, heads, groups) == rows).all()


@pytest.mark.parametrize(("columns", "slots"), [(128, {}), (256, {208: 256, 384: 512})])
def test_slots_fill_the_columns_of_a_wide_matrix_unit(monkeypatch, columns, slots):
    monkeypatch.setattr(online_softmax.pltpu, "get_tpu_info", lambda: SimpleNamespace(mxu_column_size=columns))
    for c in (64, 128, 208, 256, 304, 384):
        q, k = jnp.zeros((2, 8, 128), jnp.bfloat16), jnp.zeros((2, c, 128), jnp.bfloat16)
        told = str(jax.make_jaxpr(lambda q, k: kernel_parts.block_products(q, k, None, 2, True))(q, k))
        assert ("concatenate" in told) == (c in slots)
        assert f"f32[2,8,{slots.get(c, c)}]" in told


@pytest.mark.parametrize("scores", ["each", "gumbel"])
def test_splits_of_programs_give_what_one_gives(scores):
    some = case(1, 2, 3, 700, 64, scores=scores, features=4)
    assert pallas_gpu.tile(2, 700, 64 * 4) == (64, 2) and splits.split_of(700, 2, 64) == 384
    check(some, GPU_WAYS[0])


def test_wide_float32_is_multiplied_in_halves():
    some = case(1, 1, 2, 40, 256, scores="sum")
    assert splits.channels(256, "float32") == (slice(0, 128), slice(128, 256))
    assert splits.channels(256, "bfloat16") == (slice(0, 256),)
    check(some, GPU_WAYS[0])


def test_huge_logits_do_not_overflow():
    some = case(1, 1, 2, 40, 64, scores="sum", features=4, live="full")
    inputs = dict(some.arrays[0])
    inputs["k"] = inputs["k"] * 1e3
    phi, h, z = inputs["low_rank"]
    inputs["low_rank"] = (phi * 1e15, h * 1e15, z * 1e15 + 1)
    for way in (XLA, TPU_WAYS[0], GPU_WAYS[0]):
        found = some.run(inputs, **way.options)
        assert all(np.isfinite(np.asarray(value)).all() for value in found.values())
        np.testing.assert_allclose(found["scores"].sum(), 2, rtol=1e-5)


def test_increments_are_those_of_keyformer():
    plain = case(2, 2, 2, 40, 64, scores="gumbel", live="full")
    some = plain.arrays[0]
    q, k, v = some["q"][:, :, :, None], some["k"][:, :, :1], some["v"][:, :, :1]
    new = LayerTokens(
        q=q,
        k=k,
        v=v,
        raw_q=q,
        raw_k=k,
        hidden=jnp.zeros((2, 1, 64)),
        position=some["query_position"][:, None],
        token=jnp.zeros((2, 1), jnp.int32),
        prompt_length=jnp.ones(2, jnp.int32),
        read=some["query_position"] + 1,
        horizon=jnp.full(2, 8),
        end=some["query_position"] + 8,
        seed=some["seed"],
        config=small_config(4, 2, head_width=64).layer(0),
        layer=3,
    )
    asked: dict[str, Any] = {name: some[name] for name in ("q", "k", "v", "position", "query_position")} | {
        "spec": AttentionSpec(1 / 8)
    }
    probs = jnp.asarray(decode_attention(**asked, scores="each").scores)
    request = GumbelSoftmax(tau_init=1.5, tau_end=1.5).attention_stats(Heads(jnp.full((2, 2), 40), Parts()), new)
    expected = stats.reduced(request, probs[:, :, :, None], some["v"], some["position"], new)
    gumbel = ScoreNoise(some["seed"], jnp.full(2, 1.5), layer=3)
    for way in (XLA, TPU_WAYS[0], GPU_WAYS[0]):
        found = decode_attention(**asked, scores=gumbel, **way.options)
        np.testing.assert_allclose(np.asarray(found.scores), expected, rtol=1e-5, atol=1e-5)


def exactly(some: Case) -> dict[str, Any]:
    """A case's inputs in float64, with keys and values as codes."""
    inputs = arguments(some)
    return (
        inputs
        | {name: Quantised(inputs[name].codes, inputs[name].scale.astype(np.float64)) for name in "kv"}
        | {"q": inputs["q"].astype(np.float64)}
    )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("c", [320, 512, 40])
def test_two_digits_agree_with_exact_arithmetic(x64, bits, c):
    some = case(2, 2, 4, c, 128, bits=(bits, bits), live="full", scores="each")
    exact = decode_attention(**exactly(some), scores="each", platform="cpu")
    expected = some.oracle(some.arrays[0])
    np.testing.assert_allclose(exact.out, expected["out"], rtol=1e-6, atol=1e-6)  # scales are of float32
    assert exact.out.dtype == jnp.float64
    for platform in ("cpu", "tpu", "gpu"):
        found = decode_attention(**arguments(some), scores="each", implementation="xla", platform=platform)
        for name in ("out", "scores"):
            wanted = np.asarray(getattr(exact, name))
            assert np.abs(np.asarray(getattr(found, name)) - wanted).max() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.compiled_well
def test_codes_are_never_decoded_as_a_whole(bits, dtype):
    with jax.enable_x64(dtype == "float64"):
        b, h, g, c, d = 4, 4, 2, 2048, 128
        codes = jax.ShapeDtypeStruct((b, h, c, d * bits // 8), jnp.int8 if bits == 8 else jnp.uint8)
        held = Quantised(codes, jax.ShapeDtypeStruct((b, h, c), jnp.dtype(jnp.float32)))  # type: ignore[arg-type]
        q = jax.ShapeDtypeStruct((b, h, g, d), jnp.dtype(dtype))
        position, query = jax.ShapeDtypeStruct((b, h, c), jnp.int32), jax.ShapeDtypeStruct((b,), jnp.int32)
        attend = functools.partial(decode_attention, spec=AttentionSpec(0.1), scores="sum", platform="cpu")
        memory = jax.jit(attend).lower(q, held, held, position, query).compile().memory_analysis()
    assert memory is not None
    decoded = b * h * c * d * q.dtype.itemsize
    assert memory.temp_size_in_bytes < decoded / 3


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.compiled_well
def test_one_query_of_bfloat16_makes_no_wide_copy_on_a_cpu(slopes):
    b, h, c, d = 2, 2, 2048, 128
    q, k = (jax.ShapeDtypeStruct((b, h, n, d), jnp.dtype(jnp.bfloat16)) for n in (1, c))
    position, query = jax.ShapeDtypeStruct((b, h, c), jnp.int32), jax.ShapeDtypeStruct((b,), jnp.int32)
    spec = AttentionSpec(0.1, slopes=jnp.ones((h, 1)) if slopes else None)
    attend = functools.partial(decode_attention, spec=spec, scores="sum", platform="cpu")
    memory = jax.jit(attend).lower(q, k, k, position, query).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < b * h * c * d * 2 / 3
    assert jax.eval_shape(attend, q, k, k, position, query).out.shape == (b, h, 1, d)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bits", [0, 8])
def test_keys_are_rotated_by_their_place(bits, interleaved):
    inputs = arguments(case(2, 2, 2, 40, 64, bits=(0, bits), live="full"))
    order = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 2, 40)), jnp.int32)
    angles = jnp.arange(40)[:, None] * 0.8 ** jnp.arange(16)
    turned = LazyRope(jnp.asarray(inputs.pop("k")), order, jnp.cos(angles), jnp.sin(angles), interleaved)
    found = decode_attention(k=turned, **inputs)
    expected = decode_attention(k=turned.values(jnp.float32), **inputs)
    np.testing.assert_allclose(found.out, expected.out, rtol=1e-6, atol=1e-6)
    assert np.abs(np.asarray(found.out - decode_attention(k=turned.keys, **inputs).out)).max() > 0.1
    inputs.pop("v")
    with pytest.raises(ValueError, match="v is LazyRope, but only keys are rotated"):
        decode_attention(k=turned, v=turned, **inputs)


@pytest.mark.parametrize("way", [XLA, TPU_WAYS[0], GPU_WAYS[0]], ids=str)
@pytest.mark.parametrize("bits", [0, 8])
def test_keys_may_be_values(bits, way):
    inputs = arguments(case(1, 1, 16, 24, 64, bits=(bits, bits)))
    apart = decode_attention(**inputs | {"v": inputs["k"]}, **way.options)
    once = decode_attention(**inputs | {"v": None}, **way.options)
    np.testing.assert_allclose(once.out, apart.out, rtol=1e-6, atol=1e-6)
    assert np.abs(np.asarray(once.out - decode_attention(**inputs, **way.options).out)).max() > 0.1


def test_latents_are_wider_than_other_keys():
    inputs = arguments(case(1, 1, 16, 24, 576))
    wanted = decode_attention(**inputs | {"v": None}, implementation="xla")
    found = decode_attention(**inputs | {"v": None}, **TPU_WAYS[0].options)
    np.testing.assert_allclose(found.out, wanted.out, rtol=1e-5, atol=1e-5)


def test_places_matter_for_slopes_alone():
    moved = arguments(case(1, 2, 2, 24, 64, alibi=True, moved=True))
    still = {name: value for name, value in moved.items() if name != "places"}
    assert np.abs(np.asarray(decode_attention(**moved).out - decode_attention(**still).out)).max() > 1e-3
    plain = AttentionSpec(1.0)
    for way in (XLA, TPU_WAYS[0], GPU_WAYS[0]):
        with_places, without = (decode_attention(**x | {"spec": plain}, **way.options).out for x in (moved, still))
        np.testing.assert_array_equal(with_places, without)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_what_kernels_leave_to_xla_is_named(platform):
    inputs = arguments(case(1, 2, 2, 24, 64, alibi=True, moved=True))
    options: dict[str, Any] = dict(implementation="pallas", interpret=True, platform=platform)
    with pytest.raises(Unsupported, match="places that are not positions, together with slopes"):
        decode_attention(**inputs, **options)
    angles = jnp.zeros((24, 32))
    turned = LazyRope(jnp.asarray(inputs["k"]), jnp.zeros((1, 2, 24), jnp.int32), angles, angles)
    with pytest.raises(Unsupported, match=r"keys are rotated when they are read \(LazyRope\)"):
        decode_attention(**inputs | {"k": turned, "places": None}, **options)
    narrow = arguments(case(1, 1, 1, 16, 24, bits=(8, 4)))
    reason = "e=24 is not a multiple of 16 up to 640" if platform == "tpu" else "d=24 is not a power of two from 16 to"
    with pytest.raises(Unsupported, match=reason):
        decode_attention(**narrow, **options)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(g=65), "g=65 query heads share a KV head, more than 64"),
        (dict(g=17, scores="sum"), "g=17 query heads share a KV head, more than 16"),
        (dict(d=648), "d=648 is not a multiple of 8 up to 640"),
        (dict(d=60), "d=60 is not a multiple of 8 up to 640"),
        (dict(c=2**20 + 1), "c=1048577 slots are more than 1048576"),
        (dict(dtype=jnp.float16), "q, k, v of float16, float16, float16 are not"),
    ],
)
def test_limits_are_named_before_compilation(change, reason):
    usual = {"g": 1, "c": 16, "d": 64, "dtype": jnp.float32, "scores": None}
    g, c, d, dtype, scores = (usual | change).values()
    q, k = (jax.ShapeDtypeStruct((1, 1, n, d), dtype) for n in (g, c))
    position, query = jax.ShapeDtypeStruct((1, 1, c), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    attend = functools.partial(decode_attention, scores=scores, **TPU_WAYS[0].options)
    with pytest.raises(Unsupported, match=f"decode_attention cannot run as 'pallas': {reason}"):
        jax.eval_shape(attend, q, k, k, position, query, AttentionSpec(1.0))


def test_unknown_scores_are_refused():
    arrays = arguments(case(1, 1, 1, 16, 64))
    with pytest.raises(ValueError, match="scores='most' is not None, 'each', 'sum' or a ScoreNoise"):
        decode_attention(**arrays, scores="most")
    with pytest.raises(ValueError, match="noise='pink' is not one of gumbel, gaussian, none"):
        decode_attention(**arrays, scores=ScoreNoise(jnp.zeros(1, jnp.uint32), jnp.ones(1), kind="pink"))
