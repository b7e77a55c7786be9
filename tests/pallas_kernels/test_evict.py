"""Eviction and Hamming distances beyond the table: against the cache's own rules, in place, what they refuse."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.cache import ranks
from kvjax.cache.evict import hashed_codes, ranked
from kvjax.cache.fused import FusedStep, may_fuse
from kvjax.cache.keep import compressed
from kvjax.cache.slots import Slots as LayerSlots
from kvjax.methods.lsh_e import Hamming, projections
from kvjax.types import KV, Kernels, LayerTokens, Parts
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import Unsupported
from pallas_kernels.evict import evict
from pallas_kernels.fused_decode import Hashed, Query, Ranking, Slots, Token
from pallas_kernels.fused_decode.api import FusedDecode
from pallas_kernels.hamming import Hashing, hamming, hashes
from pallas_kernels.op import using
from pallas_kernels.ranking import EvictionRules
from pallas_kernels.workloads import operand
from tests.kernel_cases.evict import case, run
from tests.kernel_cases.hamming import case as hamming_case
from tests.kernels import GPU_WAYS, TPU_WAYS, XLA, Way, check, in_its_way
from tests.small_models import small_config


@settings(max_examples=6, phases=[Phase.generate])
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 4), st.sampled_from([16, 32, 64]), st.sampled_from([64, 80])),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["full", "ragged"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([XLA, *TPU_WAYS]),
)
def test_any_shape(shape, dtype, live, shrinks, keep, way):
    check(case(*shape, dtype=dtype, live=live, shrinks=shrinks, keep=keep), way)


@settings(max_examples=6, phases=[Phase.generate])
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 4), st.sampled_from([16, 32, 48]), st.sampled_from([64, 80])),
    st.sampled_from(["int8", "uint8"]),
    st.sampled_from([None, 2, 5]),
    st.sampled_from([XLA, *TPU_WAYS]),
)
def test_any_buffers(shape, codes, words, way):
    check(case(*shape, codes=codes, words=words, live="ragged"), way)


@settings(max_examples=6, phases=[Phase.generate])
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 8), st.integers(1, 4), st.integers(1, 150), st.integers(1, 70)),
    st.sampled_from(["full", "ragged"]),
    st.sampled_from([XLA, *TPU_WAYS]),
)
def test_any_codes(shape, live, way):
    check(hamming_case(*shape, live=live), way)


CONFIG = small_config(4, 2, head_width=64).layer(0)
SLOPED = small_config(4, 2, head_width=64, position="alibi", rope=None).layer(0)


def new_token(key, b, h, g, d, position):
    q, k, v = (jax.random.normal(jax.random.fold_in(key, i), (b, h, *x, 1, d)) for i, x in enumerate(([g], [], [])))
    return LayerTokens(
        q=q,
        k=k,
        v=v,
        raw_q=q,
        raw_k=k,
        hidden=jnp.zeros((b, 1, d)),
        position=position[:, None],
        token=jnp.zeros((b, 1), jnp.int32),
        prompt_length=jnp.ones(b, jnp.int32),
        read=position + 1,
        horizon=jnp.ones(b, jnp.int32),
        end=position + 1,
        seed=jnp.zeros(b, jnp.uint32),
        config=CONFIG,
    )


def full_view(b, h, c, d, remembered):
    """Slots of which every one holds a token, with what a score remembers of keys and scores."""
    inputs = jax.tree.map(jnp.asarray, case(b, h, c, d, live="full").arrays[0])
    k, v = inputs["buffers"]["pair"]
    score = remembered(k, inputs["scores"])
    return LayerSlots(jnp.full((b, h), c), Parts(), KV(k, v), inputs["position"], Parts(score=score))


@pytest.mark.parametrize("way", [XLA, TPU_WAYS[0]], ids=str)
@pytest.mark.compiled_well
@in_its_way
def test_a_token_takes_the_slot_that_compression_would_drop(way):
    """What ranks lowest is one rule: for one token more than a head may hold, and for a whole prompt."""
    b, h, c, d = 2, 2, 48, 64
    new = new_token(jax.random.key(0), b, h, 2, d, jnp.asarray([150, 120]))
    policy = kvjax.policy("h2o", sinks=2, recent=5)
    slots = full_view(b, h, c, d, lambda k, scores: scores)
    written, pair = slots.write(policy, new, pairs=True)
    joined = slots.appended(policy, new)
    smaller, leaving = compressed(policy, joined, new, c)
    left = jnp.where(leaving, joined.position, 0).sum(-1)
    np.testing.assert_array_equal(leaving.sum(-1), 1)
    assert pair.leaving.all() and not (written.position == left[..., None]).any()
    np.testing.assert_array_equal(np.sort(written.position), np.sort(smaller.position))
    for taken, stored in ((pair.k, joined.kv.k), (pair.v, joined.kv.v)):
        np.testing.assert_array_equal(taken[:, :, 0], (np.asarray(stored) * leaving[..., None]).sum(2))
    here = written.position == new.position[:, None]
    np.testing.assert_array_equal((np.asarray(written.kv.v) * here[..., None]).sum(2), new.v[:, :, 0])
    np.testing.assert_array_equal(jnp.where(here, written.slots.score, 0), 0)


@pytest.mark.parametrize("way", [XLA, TPU_WAYS[0]], ids=str)
def test_what_leaves_is_handed_out_where_it_is_asked_for(way):
    inputs = jax.tree.map(jnp.asarray, case(2, 2, 48, 64, live="ragged").arrays[0])
    slot, left, _, *written = evict(**inputs, **way.options)
    alone = evict(**inputs, pairs=False, **way.options)
    assert alone[2] is None
    jax.tree.map(np.testing.assert_array_equal, (slot, left, *written), (*alone[:2], *alone[3:]))


@pytest.mark.parametrize(("pairs", "reads"), [(False, 1), (True, 4)])
def test_a_step_reads_what_leaves_only_for_who_asks(pairs, reads):
    """The position alone is always read; and on a CPU keys and values alone are written by scatters."""
    new = new_token(jax.random.key(0), 2, 2, 2, 64, jnp.asarray([150, 120]))
    slots = full_view(2, 2, 48, 64, lambda k, scores: scores)
    text = jax.jit(lambda slots: slots.write(kvjax.policy("h2o"), new, pairs=pairs)).lower(slots).as_text()
    assert text.count('"stablehlo.gather"') == reads
    assert text.count('"stablehlo.scatter"') == 2


def fused(policy, slots, new, requests):
    """The step of one token per row as one kernel."""
    slots = slots.prepared(policy, new)
    ranking = ranked(policy, slots, new)
    return FusedStep(policy, slots, new, requests, ranking, policy.codec.operands(slots, new, room=ranking.rules.limit))


@pytest.mark.parametrize("name", ["h2o", "keyformer", "tova", "lambda_mask", "lsh_e"])
def test_one_pass_is_exchange_then_attention(name):
    b, h, g, c, d = 2, 2, 2, 32, 64
    policy = kvjax.policy(name)
    if name == "lsh_e":
        policy = dataclasses.replace(policy, score=Hamming(bits=40, planes=projections(0, 0, h, 40, d)))
    new = new_token(jax.random.key(2), b, h, g, d, jnp.asarray([70, 50]))

    def begun(k, scores):
        zeros = policy.score.init_slot(new.replace(k=k), Parts())
        return (
            None
            if zeros is None
            else jax.tree.map(lambda leaf: leaf + scores if leaf.dtype == jnp.float32 else leaf, zeros)
        )

    view, heard = full_view(b, h, c, d, begun), []
    slots = view.replace(limit=jnp.full((b, h), c - 1))
    requests = policy.score.attention_stats(slots, new)
    with using(Kernels(**TPU_WAYS[0].options)):
        step = fused(policy, slots, new, requests)
        assert step.supported
        found, answered, _ = step()
    expected, _ = slots.write(policy, new)
    expected, attended = expected.attend_token(policy, new, requests, None)
    assert (answered.stats is None) == (name in ("h2o", "keyformer"))  # added to the scores on the way
    for after, out, stats in (
        (found, answered.partial.out, answered.stats),
        (expected, attended.partial.out, attended.stats),
    ):
        heard.append((after.update_slots(policy, requests, stats, new), out))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *heard)


@pytest.mark.parametrize("way", TPU_WAYS, ids=str)
@pytest.mark.parametrize("base", [CONFIG, SLOPED], ids=["rope", "alibi"])
@in_its_way
def test_one_pass_sees_the_sinks_that_a_layers_window_has_not_passed_from_near(base, way):
    newest, window, c, sinks = np.array([50, 64, 65, 67, 68, 90]), 64, 48, 4
    b, h = len(newest), 2
    config, policy = dataclasses.replace(base, window=window), kvjax.policy("streaming", sinks=sinks)
    new = new_token(jax.random.key(2), b, h, 2, 64, jnp.asarray(newest)).replace(config=config)
    view = full_view(b, h, c, 64, lambda k, scores: None)
    held = np.full((b, h, c), -1)
    for row, last in enumerate(newest):  # sinks that the window has passed before have left, the others have not
        first = np.arange(max(0, last - window), sinks)
        held[row, :, :sinks] = [*first, *range(last - c + 1, last - c + 1 + sinks - len(first))]
        held[row, :, sinks : c - 1] = np.arange(last - c + 1 + sinks, last)
    slots = view.replace(position=jnp.asarray(held, jnp.int32), limit=jnp.full((b, h), c - 1))
    step = fused(policy, slots, new, ())
    assert step.supported
    found, answered, _ = step()
    with using(Kernels("xla")):
        expected, _ = slots.write(policy, new)
        expected, attended = expected.attend_token(policy, new, (), None)
    np.testing.assert_array_equal(found.position, expected.position)
    np.testing.assert_allclose(answered.partial.out, attended.partial.out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        dict(name="h2o", positions="cache"),
        dict(c=40),
        dict(way=XLA),
        dict(way=GPU_WAYS[0]),
    ],
    ids=str,
)
def test_what_one_pass_cannot_do_is_left_to_two_calls(change):
    settings = {"name": "streaming", "positions": "original", "way": TPU_WAYS[0], "c": 48} | change
    way, name, c = (settings.pop(key) for key in ("way", "name", "c"))
    policy = kvjax.policy(name, **settings)
    new = new_token(jax.random.key(2), 1, 2, 2, 64, jnp.asarray([70]))
    view = full_view(1, 2, c, 64, lambda k, scores: None)
    with using(Kernels(**way.options)):
        assert not (may_fuse(policy, view, new) and fused(policy, view, new, ()).supported)


@pytest.mark.parametrize("way", [XLA, TPU_WAYS[0]], ids=str)
@in_its_way
def test_hamming_finds_the_victim_of_lsh_e(way):
    b, h, g, c, d = 2, 2, 3, 48, 64
    new = new_token(jax.random.key(1), b, h, g, d, jnp.asarray([150, 120]))
    planes = projections(0, 0, h, 40, d)
    policy = kvjax.policy("lsh_e", bits=40)
    policy = dataclasses.replace(policy, score=Hamming(bits=40, planes=planes))
    view = full_view(b, h, c, d, lambda k, scores: tuple(jnp.moveaxis(hashes(planes, k), -1, 0)))
    guard = policy.protection.guard(view, new)
    hashing = hashed_codes(policy.ranking(view, new), view)
    assert hashing is not None
    asked: dict[str, Any] = dict(keep=guard.keep)
    bounds = EvictionRules(guard.sinks, guard.recent, view.limit)
    found = hamming(
        hashing.hashing.of_queries(), view.slots.score, view.position, new.position[:, 0], protection=bounds, **asked
    )
    of_slots = ranks.rank(policy, view, new)
    lowest = of_slots == of_slots.min(-1, keepdims=True)
    oldest = jnp.where(lowest, view.position, 1000).argmin(-1)
    np.testing.assert_array_equal(found, oldest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.compiled_well
def test_donated_buffers_are_written_in_place(dtype):
    inputs = dict(case(2, 2, 512, 64).arrays[0])
    cache = {name: inputs.pop(name) for name in ("position", "buffers")}
    cache["buffers"] = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim == 4 else leaf, cache["buffers"])
    function = jax.jit(lambda cache, inputs: run(cache | inputs, shrinks=False, implementation="xla"), donate_argnums=0)
    memory = function.trace(cache, inputs).lower().compile().memory_analysis()
    assert memory is not None
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(c=40), "c=40 slots are not a multiple of 16 up to 16384"),
        (dict(c=32768), "c=32768 slots are not a multiple of 16 up to 16384"),
        (dict(statistic=jnp.float16), "holds float16, not one of float32, int32, uint32"),
        (dict(key=jnp.float16), r"not \[b h c w\] of float32, bfloat16, int8, uint8, int32, uint32"),
        (dict(key=jnp.uint32, c=8192, d=5), "w=5 words, in eights, of c=8192 slots are more than 32768"),
        (dict(c=256), "w=64 numbers in each of c=256 slots lie slots-innermost"),
        (dict(d=264), "more than 256 numbers per slot"),
        (dict(platform="gpu"), "it is written for tpu alone"),
    ],
)
def test_limits_are_named_before_compilation(change, reason):
    setting = {"c": 16, "d": 64, "key": jnp.float32, "statistic": jnp.float32, "platform": "tpu"} | change
    c, d = setting["c"], setting["d"]
    of = jax.ShapeDtypeStruct

    def call(scores, position, new, buffers, added, protection):
        options = Way("pallas", True, setting["platform"]).options
        return evict(scores, position, new, buffers, added, protection=protection, **options)

    buffers = (of((1, 1, c, d), setting["key"]), of((1, 1, c), setting["statistic"]))
    added = (of((1, 1, d), setting["key"]), of((1, 1), setting["statistic"]))
    protection = EvictionRules(*(jnp.ones((1, 1), jnp.int32),) * 3)
    with pytest.raises(Unsupported, match=f"evict cannot run as 'pallas'.*{reason}"):
        slots = of((1, 1, c), jnp.float32), of((1, 1, c), jnp.int32)
        jax.eval_shape(call, *slots, of((1,), jnp.int32), buffers, added, protection)


@pytest.mark.parametrize(
    ("c", "d", "dtype", "bits", "platform", "reason"),
    [
        (40, 128, "float32", None, "tpu", "c=40 slots are not a multiple of 16 up to 16384"),
        (56, 128, "float32", 8, "tpu", "c=56 slots are not a multiple of 16 up to 16384"),
        (208, 64, "float32", None, "tpu", "c=208 slots are not a multiple of 128 up to 16384"),
        (16400, 128, "bfloat16", None, "tpu", "c=16400 slots are not a multiple of 16 up to 16384"),
        (3136, 128, "bfloat16", None, "tpu", "its blocks take 31088640 bytes of the chip's memory, not 14680064"),
        (64, 264, "float32", None, "tpu", "d=264 is not a multiple of 8 up to 256"),
        (64, 128, "float16", None, "tpu", "q, k, v of float16, float16, float16"),
        (64, 128, "float32", None, "gpu", "it is written for tpu alone"),
    ],
)
def test_limits_of_one_pass_are_named(c, d, dtype, bits, platform, reason):
    q: Any = jax.ShapeDtypeStruct((1, 8, 2, d), dtype)
    pair = operand((1, 8, c, d), dtype, bits)
    assert re.match(reason, step_of_shapes(q, pair, scores="sum").unsupported("pallas", platform) or "")


def step_of_shapes(q: Any, pair: Any, standing: Hashed | None = None, scores: str | None = None) -> FusedDecode:
    """A step with the arguments that limits depend on."""
    no: Any = None
    slots, query = Slots(no, pair, pair, no), Query(q, AttentionSpec(1.0), scores=scores)
    return FusedDecode(slots, Token(no, no, no, no), Ranking(standing, no), query)


def test_one_pass_hashes_by_the_same_planes_in_all_rows():
    of: Any = jax.ShapeDtypeStruct
    q, pair = of((1, 8, 2, 128), jnp.float32), operand((1, 8, 64, 128), jnp.float32, None)
    codes = (of((1, 8, 64), jnp.uint32),)
    for planes, reason in (((8, 16, 128), None), ((1, 8, 16, 128), r"not by [1, 8, 16, 128] [b h bits d]")):
        hashing = Hashing(of(planes, jnp.float32), q, of((1, 8, 1, 128), jnp.float32))
        found = step_of_shapes(q, pair, Hashed(hashing, codes)).unsupported("pallas", "tpu")
        assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("g", "c", "words", "platform", "reason"),
    [
        (1, 16385, 1, "tpu", "c=16385 slots are more than 16384"),
        (9, 16, 8, "tpu", "g=9 queries of w=8 words are more than 64 words"),
        (1, 16384, 3, "tpu", "c=16384 codes of w=3 words are more than 32768 words"),
        (1, 16, 1, "gpu", "it is written for tpu alone"),
    ],
)
def test_limits_of_hamming_are_named(g, c, words, platform, reason):
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.uint32)
    protection = EvictionRules(*(jnp.ones((1, 1), jnp.int32),) * 3)
    call = functools.partial(hamming, protection=protection, implementation="pallas", interpret=True, platform=platform)
    with pytest.raises(Unsupported, match=f"hamming cannot run as 'pallas': {reason}"):
        jax.eval_shape(call, of((1, 1, g, words)), of((1, 1, c, words)), of((1, 1, c)), of((1,)))
