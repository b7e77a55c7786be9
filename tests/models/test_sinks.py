"""Learned sinks of query heads, wherever attention is computed; tests of the caches are in methods/test_oracles.py."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.evaluation.perplexity import perplexity
from kvjax.evaluation.replay import masked_perplexity
from kvjax.models import Rope
from kvjax.models.families import read_model_config
from kvjax.training.less.record import collect
from kvjax.types import Kernels
from pallas_kernels.attention import Partial, with_sink
from tests.cases import slow
from tests.kernels import TPU_WAYS
from tests.small_models import SINKS, random_model, sharp_model, small_config

TOKENS = np.random.default_rng(3).integers(1, SINKS.vocab_size, (2, 26))


def test_a_sink_is_a_key_without_a_value() -> None:
    rng = np.random.default_rng(0)
    logits, values = rng.normal(size=(2, 3, 2, 4, 5)), rng.normal(size=(2, 3, 5, 6))
    sinks = rng.normal(size=(3, 2)) * [[100], [1], [-100]]
    logits[1, :, :, 2] = -np.inf  # a query that sees no token
    total = np.exp(logits).sum(-1)
    out = np.einsum("bhgtc,bhce->bhgte", np.exp(logits), values)
    of_tokens = Partial(
        jnp.asarray(out / np.where(total > 0, total, 1)[..., None]),
        jnp.asarray(np.log(np.where(total > 0, total, 1)) + np.where(total > 0, 0, -np.inf)),
    )
    found = with_sink(of_tokens, jnp.asarray(sinks))
    total = total + np.exp(sinks)[..., None]
    np.testing.assert_allclose(found.out, out / total[..., None], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.lse, np.log(total), rtol=1e-4)
    assert with_sink(of_tokens, None) is of_tokens


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.GptOssConfig().to_dict()
    config = read_model_config(settings)[1]
    assert config.windows == (128, None) * 18 and config.rope is not None and config.rope.factor == 32
    left_out = ("rope_parameters", "layer_types", "head_dim", "attention_bias", "sliding_window", "swiglu_limit")
    left_out += ("swiglu_alpha", "num_experts_per_tok", "num_local_experts", "rms_norm_eps", "num_key_value_heads")
    assert read_model_config({name: x for name, x in settings.items() if name not in left_out})[1] == config


def test_masks_of_decoding_are_decoding() -> None:
    model, policy = sharp_model(SINKS, jnp.float32), kvjax.policy("less", kernels="performer")
    masked = masked_perplexity(model, policy, TOKENS, 9, mask="decode")
    np.testing.assert_allclose(masked.nats, perplexity(model, policy, TOKENS, 9).nats, atol=2e-4)


def test_less_learns_from_attention_beside_sinks(tmp_path: Path) -> None:
    """Before anything is evicted, attention to the kept pairs is attention to all of them."""
    features = collect(random_model(SINKS), kvjax.policy("h2o"), 9, TOKENS, tmp_path)
    np.testing.assert_allclose(features.sparse[..., :9, :], features.full[..., :9, :], atol=1e-5)
    assert np.abs(features.sparse[..., 9:, :] - features.full[..., 9:, :]).max() > 1e-3


@pytest.mark.parametrize("name", [slow("h2o"), slow("less")])
def test_a_kernel_that_evicts_and_attends_leaves_sinks_to_the_cache(name: str) -> None:
    config = small_config(4, 2, sinks=True, head_width=32, rope=Rope(width=32))
    model, found = random_model(config), list[np.ndarray]()
    policy = kvjax.policy("h2o") if name == "h2o" else kvjax.policy("less", kernels="performer")
    for kernels in (Kernels("xla"), Kernels("pallas,xla", TPU_WAYS[0].interpret, TPU_WAYS[0].platform)):
        state, logits = kvjax.prefill(model, policy, TOKENS[:, :20], 16, max_new_tokens=6, implementation=kernels)
        program = str(jax.make_jaxpr(state.decoder.step)(state.cache, jnp.zeros(2, jnp.int32)))
        assert ("name=fused_decode" in program) == (kernels.implementation != "xla")
        for token in TOKENS[:, 20:].T:
            state, logits = kvjax.decode_step(state, token)
        found.append(np.asarray(logits))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3, atol=1e-3)
