"""Decode attention beyond the table: random shapes, splits of every size, what it refuses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvjax.policies.keyformer import Keyformer
from kvjax.types import KV, LayerCache, NewTokens
from pallas_kernels.common import Unsupported, slots_lie_along_lanes
from pallas_kernels.decode_attention import Gumbel, decode_attention, pallas, pallas_gpu
from tests.kernel_cases.decode_attention import CASES, case
from tests.kernels import GPU_WAYS, TPU_WAYS, XLA, check


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
)
def test_any_shape(shape, dtype, scores, features, alibi, way):
    if way in GPU_WAYS:
        shape = (*shape[:-1], 64)
    some = case(*shape, dtype=dtype, scores=scores, features=features, alibi=alibi)
    check(some, way)


@pytest.mark.parametrize("way", TPU_WAYS, ids=str)
@pytest.mark.parametrize("held", [0, pallas.HELD_BYTES], ids=["scored_by_xla", "scored_on_chip"])
@pytest.mark.parametrize("scores", ["each", "sum", "gumbel"])
def test_many_splits_give_what_one_gives(monkeypatch, scores, held, way):
    monkeypatch.setattr(pallas, "BLOCK_BYTES", 1)
    monkeypatch.setattr(pallas, "HELD_BYTES", held)
    for width in (64, 128):  # stored slots innermost, and as written
        some = case(1, 2, 3, 300, width, scores=scores, features=4)
        assert pallas.tile(2, 300, width, 4) == (2, 128)
        assert slots_lie_along_lanes(300, width) == (width == 64)
        check(some, way)


@pytest.mark.parametrize("scores", ["each", "gumbel"])
def test_splits_of_programs_give_what_one_gives(scores):
    some = case(1, 2, 3, 700, 64, scores=scores, features=4)
    assert pallas_gpu.tile(2, 700, 64) == (64, 384)
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
    some = case(2, 2, 2, 40, 64, scores="gumbel", live="full").arrays[0]
    policy = Keyformer(tau_init=1.5, tau_end=1.5)
    new = NewTokens(
        q=some["q"][:, :, :, None],
        k=some["k"][:, :, :1],
        v=some["v"][:, :, :1],
        position=some["query_position"][:, None],
        token=jnp.zeros((2, 1), jnp.int32),
        prompt_length=jnp.ones(2, jnp.int32),
        read=some["query_position"] + 1,
        horizon=jnp.full(2, 8),
        seed=some["seed"],
        layer=3,
    )
    arguments = [some[name] for name in ("q", "k", "v", "position", "query_position")]
    probs = jnp.asarray(decode_attention(*arguments, scores="each").scores)
    kv, limit = KV(some["k"], some["v"]), jnp.full((2, 2), 40)
    cache = LayerCache(kv, some["position"], None, None, stats=jnp.zeros((2, 2, 40)), state=None, limit=limit)
    expected = policy.observe(cache, probs[:, :, :, None], new).stats
    gumbel = Gumbel(some["seed"], jnp.full(2, 1.5), layer=3)
    for way in (XLA, TPU_WAYS[0], GPU_WAYS[0]):
        found = decode_attention(*arguments, scores=gumbel, **way.options)
        np.testing.assert_allclose(np.asarray(found.scores), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(g=17), "g=17 query heads share a KV head, more than 16"),
        (dict(d=264), "d=264 is not a multiple of 8 up to 256"),
        (dict(d=60), "d=60 is not a multiple of 8 up to 256"),
        (dict(c=65537), "c=65537 slots are more than 65536"),
        (dict(dtype=jnp.float16), "q, k, v of float16, float16, float16 are not"),
    ],
)
def test_limits_are_named_before_compilation(change, reason):
    g, c, d, dtype = ({"g": 1, "c": 16, "d": 64, "dtype": jnp.float32} | change).values()
    q, k = (jax.ShapeDtypeStruct((1, 1, n, d), dtype) for n in (g, c))
    position, query = jax.ShapeDtypeStruct((1, 1, c), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(Unsupported, match=f"decode_attention cannot run as 'pallas': {reason}"):
        jax.eval_shape(functools.partial(decode_attention, **TPU_WAYS[0].options), q, k, k, position, query)


def test_unknown_scores_are_refused():
    arrays = case(1, 1, 1, 16, 64).arrays[0]
    with pytest.raises(ValueError, match="scores='most' is not None, 'each', 'sum' or a Gumbel"):
        decode_attention(**arrays, scores="most")
    with pytest.raises(ValueError, match="noise='pink' is not one of gumbel, gaussian, none"):
        decode_attention(**arrays, scores=Gumbel(jnp.zeros(1, jnp.uint32), jnp.ones(1), noise="pink"))
