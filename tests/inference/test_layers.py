"""Models whose layers differ, against a literal forward in NumPy."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.inference.decode import lower_step
from kvjax.methods.adakv import AdaKV
from kvjax.methods.less import checkpoint
from kvjax.models import ModelConfig, Rope
from kvjax.models.config import LayerEmbeddings, QueryGrowth
from kvjax.models.fingerprint import fingerprint
from kvjax.types import LayerConfig
from tests.cases import in_turns, slow
from tests.oracles.forward import forward
from tests.small_models import LLAMA4, random_model, small_config

OTHER = Rope(width=4, theta=100.0, interleaved=True)
PROPORTIONAL = Rope(width=8, scaling="proportional", fraction=0.5)
CONFIGS: dict[str, dict[str, Any]] = {
    "window, then all": {"windows": (3, None)},
    "windows instead of one window": {"windows": (None, 5), "sliding_window": 2},
    "another RoPE each": {"ropes": (Rope(width=8), OTHER)},
    "RoPE, then none, instead of one RoPE": {"ropes": (OTHER, None)},
    "RoPEs alone": {"ropes": (None, OTHER), "rope": None},
    "window with its own RoPE": {"windows": (4, None), "ropes": (Rope(width=8), Rope(width=8, theta=1e6))},
    "growing queries": {"query_growth": QueryGrowth(0.5, 4), "ropes": (OTHER, None)},
    "norms without scales, queries that grow where they are not rotated, a shared expert": {
        **{"ropes": (OTHER, None), "query_key_norms": True, "query_key_scales": False},
        **{"query_growth": QueryGrowth(0.5, 4, offset=1, unrotated=True), "mixture": LLAMA4.mixture, "chunked": True},
    },
    "keys of earlier layers, embeddings and factors of each layer": {
        **{
            "layers": 5,
            "windows": (4, None, 4, None, 4),
            "sources": (None, None, 0, 1, 0),
            "mlp_widths": (48,) * 2 + (9,) * 3,
        },
        **{"ropes": (OTHER, PROPORTIONAL) * 2 + (OTHER,), "query_key_norms": True, "value_norms": True},
        **{"layer_embeddings": LayerEmbeddings(6, 50), "layer_scales": True},
    },
    "values that are keys, heads of two widths and numbers": {
        **{"head_widths": (8, 12), "layer_kv_heads": (2, 1), "tied_values": (False, True), "value_norms": True},
        **{"query_key_norms": True, "ropes": (OTHER, Rope(width=12))},
    },
    "scale": {"attention_scale": 0.7},
    "soft cap": {"soft_cap": 0.4},
    "soft cap of the logits": {"logit_soft_cap": 0.8, "tied": True},
    "narrow values": {"value_width": 3},
    "wide values": {"value_width": 20, "qkv_bias": True},
    "sinks": {"sinks": True, "windows": (None, 4), "soft_cap": 0.4},
    "alibi": {"position": "alibi", "rope": None, "windows": (None, 4), "soft_cap": 0.4},
    "alibi of its own, scales, clipping": {
        **{"position": "alibi", "rope": None, "slopes": (0.5, 0.1, 0.02, 0.3)},
        **{"attention_scales": (0.3, 0.9), "qkv_clip": 0.6, "logit_scale": 0.5},
    },
}


def assert_equal_to_numpy(config: ModelConfig, seed: int = 0) -> None:
    with jax.enable_x64(True):
        model = random_model(config, seed, jnp.float64)
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, 12)
        ours = model.logits(tokens[None])[0]
        theirs = forward(jax.tree.map(np.asarray, model.weights), config, tokens)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_every_setting(changes: dict[str, Any]) -> None:
    assert_equal_to_numpy(small_config(4, 2, **changes))


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Up to three layers that differ in everything that layers may differ in."""
    layers, kv_heads, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((2, 6, 8)))
    ropes = st.builds(Rope, st.sampled_from((2, width)), theta=st.sampled_from((10.0, 1e4)), interleaved=st.booleans())
    some = st.one_of(st.none(), st.floats(0.3, 3.0))
    return small_config(
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        layers=layers,
        head_width=width,
        value_width=draw(st.one_of(st.none(), st.integers(1, 9))),
        rope=None,
        ropes=(draw(ropes), *(draw(st.one_of(st.none(), ropes)) for _ in range(layers - 1))),
        windows=tuple(draw(st.one_of(st.none(), st.integers(1, 14))) for _ in range(layers)),
        attention_scale=draw(some),
        soft_cap=draw(some),
        logit_soft_cap=draw(some),
    )


@given(config=configs(), seed=st.integers(0, 100))
def test_any_settings(config: ModelConfig, seed: int) -> None:
    assert_equal_to_numpy(config, seed)


def assert_cached_equals_plain(
    config: ModelConfig, policy: kvjax.Policy, seed: int = 0, **settings: Any
) -> kvjax.State:
    """A prompt, a turn and written tokens from a cache that holds all of them, rows of unequal lengths."""
    with jax.enable_x64(True):
        model = random_model(config, seed, jnp.float64)
        text = np.random.default_rng(seed).integers(0, config.vocab_size, (2, 34))
        expected = np.asarray(model.logits(text))
        read, turn = np.array([20, 13]), np.array([5, 9])
        prompts = [row[:n].tolist() for row, n in zip(text, read, strict=True)]
        budget = 40 if policy.plan.sizing.mode != "unbounded" else 1.0
        state, logits = kvjax.prefill(model, policy, prompts, budget, max_new_tokens=30, **settings)
        np.testing.assert_allclose(logits, expected[range(2), read - 1], rtol=0, atol=1e-9)
        turns = [row[n : n + more].tolist() for row, n, more in zip(text, read, turn, strict=True)]
        state, every = kvjax.extend(state, turns, logits="all")
        for row in range(2):
            wanted = expected[row, read[row] : read[row] + turn[row]]
            np.testing.assert_allclose(every[row, : turn[row]], wanted, rtol=0, atol=1e-9)
        for at in (read + turn + step for step in range(4)):
            state, logits = kvjax.decode_step(state, jnp.asarray(text[range(2), at], jnp.int32))
            np.testing.assert_allclose(logits, expected[range(2), at], rtol=0, atol=1e-9)
        return state


def in_every_second(first: int) -> Any:
    """Settings in turns: slots and pages share one attention. Slopes and scales come with layers, whoever made them."""
    usual = [changes for changes in CONFIGS.values() if "slopes" not in changes][first::2]
    return pytest.mark.parametrize(
        "changes", [changes if changes in usual else slow(changes) for changes in CONFIGS.values()], ids=CONFIGS
    )


@in_every_second(0)
def test_a_full_cache_honours_every_setting(changes: dict[str, Any]) -> None:
    assert_cached_equals_plain(small_config(4, 2, **changes), kvjax.policy("full"))


@in_every_second(1)
def test_pages_honour_every_setting(changes: dict[str, Any]) -> None:
    policy, config = kvjax.policy("h2o", plan=AdaKV(floor=1.0)), small_config(4, 2, **changes)
    if config.layer_kv_heads is not None:
        with pytest.raises(ValueError, match="with slots for each head needs equal heads in all layers, but those"):
            kvjax.prefill(random_model(config), policy, [[1, 2, 3]], 8)
        with pytest.raises(ValueError, match="residual less needs equal heads in all layers, but those of this model"):
            kvjax.policy("less", kernels="performer").bind(random_model(config))
        return
    state = assert_cached_equals_plain(config, policy)
    assert state.cache.pool is not None


@pytest.mark.parametrize(("policy", "chunk"), in_turns(["h2o", "keyformer", "scissorhands", "lsh_e"], [None, 8, 1]))
def test_policies_that_hold_everything_honour_every_setting(policy: str, chunk: int | None) -> None:
    ropes = (Rope(width=8), OTHER, None)
    config = small_config(4, 2, layers=3, windows=(4, None, 7), ropes=ropes, soft_cap=0.4, value_width=3)
    assert_cached_equals_plain(config, kvjax.policy(policy), prefill_chunk=chunk)


@settings(max_examples=5)
@given(
    config=configs(), seed=st.integers(0, 100), paged=st.booleans(), positions=st.sampled_from(("original", "cache"))
)
def test_caches_honour_any_settings(config: ModelConfig, seed: int, paged: bool, positions: str) -> None:
    plan = AdaKV(floor=1.0) if paged else None
    assert_cached_equals_plain(config, kvjax.policy("h2o", plan=plan, positions=positions), seed)


def test_four_bits_need_an_even_width() -> None:
    model = random_model(small_config(4, 2, value_width=3))
    with pytest.raises(ValueError, match="codec int4 packs numbers in pairs, but values of layer 0 have 3; use int8"):
        kvjax.prefill(model, kvjax.policy("h2o", codec="int4"), [[1, 2, 3]], 8)


def test_kernels_outlive_settings_that_a_model_does_not_have() -> None:
    tiny = kvjax.load("tiny")
    assert {checkpoint.read_settings(found).fingerprint for found in checkpoint.find("", "h2o")} == {fingerprint(tiny)}
    weights = random_model(small_config(4, 2)).weights
    changed = [{}, *(changes for changes in CONFIGS.values() if changes.get("value_width") is None)]
    prints = {fingerprint(kvjax.Model(weights, small_config(4, 2, **changes))) for changes in changed}
    assert len(prints) == len(changed)


def test_layers_of_a_plain_model_are_alike() -> None:
    config = small_config(4, 2, sliding_window=20)
    alike = LayerConfig(32, 2, 2, 8, 8, Rope(width=8), 8**-0.5, None, 20, None)
    assert config.layer_configs == (alike, alike) and config.layer(1) == alike


def test_layers_made_while_tracing_hold_no_tracers() -> None:
    config = small_config(6, 3, position="alibi", rope=None)

    @jax.jit
    def slopes() -> jax.Array:
        found = config.layer(1).spec.slopes
        assert found is not None
        return found

    np.testing.assert_allclose(slopes(), [[2**-2, 2**-4], [2**-6, 2**-8], [2**-1, 2**-3]], rtol=1e-6)
    assert isinstance(hash(config.layer(1)), int)
    assert all(type(slope) is float for head in config.layer(1).slopes or () for slope in head)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"windows": (3,)}, "windows has 1 entries for 2 layers; give one for each"),
        ({"ropes": (None, Rope(8), Rope(8))}, "ropes has 3 entries for 2 layers; give one for each"),
        ({"windows": (3, 0)}, r"windows\[1\] must be above 0, not 0; None lets a layer see all tokens"),
        ({"sliding_window": -1}, "sliding_window must be above 0, not -1; leave it None"),
        ({"attention_scale": 0.0}, r"attention_scale must be above 0, not 0\.0"),
        ({"soft_cap": -2.0}, r"soft_cap must be above 0, not -2\.0"),
        ({"logit_soft_cap": 0.0}, r"logit_soft_cap must be above 0, not 0\.0"),
        ({"qkv_clip": -1.0}, r"qkv_clip must be above 0, not -1\.0; leave it None"),
        ({"attention_scales": (1.0,)}, "attention_scales has 1 entries for 2 layers; give one for each"),
        ({"attention_scales": (1.0, 0.0)}, r"attention_scales\[1\] must be above 0, not 0\.0"),
        ({"slopes": (1.0,) * 4}, "4 slopes do not fit position='rope' with 4 query heads; give position='alibi'"),
        (
            {"position": "alibi", "rope": None, "slopes": (1.0,)},
            "1 slopes do not fit position='alibi' with 4 query heads",
        ),
        ({"value_width": 0}, "value_width must be above 0, not 0"),
        ({"ropes": (None, None)}, r"position='rope' does not fit ropes=\(None, None\); give a Rope"),
        (
            {"position": "alibi", "rope": None, "ropes": (None, Rope(8))},
            r"position='alibi' does not fit ropes=\(None, Rope\(width=8.*; leave it None",
        ),
        ({"ropes": (None, Rope(10))}, "RoPE of width 10 does not fit heads of width 8"),
    ],
)
def test_config_refuses(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        small_config(4, 2, **changes)


@pytest.mark.parametrize(
    ("policy", "windows", "traced"),
    [
        ("h2o", None, 1),
        ("streaming", None, 1),
        ("h2o", (3, None, None, None), 2),
        ("lsh_e", None, 1),
        ("keyformer", None, 1),
    ],
)
def test_a_step_traces_layers_of_one_shape_once(
    policy: str, windows: tuple[int | None, ...] | None, traced: int
) -> None:
    model = random_model(small_config(4, 2, layers=4, windows=windows), 0)
    state, _ = kvjax.prefill(model, policy, np.arange(3, 21)[None], 16, max_new_tokens=4)
    text = lower_step(state).as_text()
    assert len(re.findall(r"func private @_block_once(_\d+)?\(", text)) == traced
    assert len(re.findall(r"call @_block_once(_\d+)?\(", text)) == 4
