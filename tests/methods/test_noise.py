"""The random numbers of Keyformer and LSH-E have the distributions that the papers count on."""

from __future__ import annotations

import statistics

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods import lsh_e
from pallas_kernels import noise
from pallas_kernels.hamming import distances, hashes, pack_bits
from tests.small_models import random_model, small_config

POSITIONS = jnp.arange(40_000)[None, None]
UNIFORM = np.asarray(noise.uniform_at(jnp.array([7], jnp.uint32), 3, jnp.repeat(POSITIONS, 2, 1)), np.float64)


def test_hashed_numbers_are_uniform_and_independent():
    assert abs(UNIFORM.mean() - 0.5) < 0.005 and abs(UNIFORM.var() - 1 / 12) < 0.002
    counts = np.histogram(UNIFORM, 50, (0, 1))[0]
    assert abs(counts / counts.mean() - 1).max() < 0.1
    heads, neighbours = UNIFORM[0], UNIFORM[0, 0]
    assert abs(np.corrcoef(heads[0], heads[1])[0, 1]) < 0.02
    assert abs(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1]) < 0.02


def test_numbers_depend_on_seed_layer_head_position_and_query_alone():
    def at(seed, layer, position, query=None):
        queries = None if query is None else jnp.array([[query]])
        numbers = noise.uniform_at(jnp.array([seed], jnp.uint32), layer, jnp.array([[[position]]]), queries)
        return float(numbers.reshape(-1)[0])

    assert at(1, 2, 3) == at(1, 2, 3) and at(1, 2, 3, 4) == at(1, 2, 3, 4)
    assert len({at(1, 2, 3), at(2, 2, 3), at(1, 3, 3), at(1, 2, 4), at(1, 2, 3, 4), at(1, 2, 3, 5)}) == 6


@pytest.mark.parametrize("draw", [noise.gumbel, noise.gaussian])
def test_noise_has_the_mean_and_deviation_of_gumbel(draw):
    drawn = np.asarray(draw(jnp.asarray(UNIFORM)), np.float64)
    assert abs(drawn.mean() - 0.5772) < 0.015 and abs(drawn.std() - 1.2825) < 0.015


def test_entropy_rises_with_gumbel_noise_and_temperature():
    """Keyformer, equations 7 and 8: on average the noisy distribution of peaked logits is more uniform."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(400, 64))
    zeta = np.asarray(noise.gumbel(jnp.asarray(UNIFORM[0, 0, : logits.size]))).reshape(logits.shape)

    def softmax(x):
        p = np.exp(x - x.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True)

    def entropy(p):
        return -(p * np.log(np.maximum(p, 1e-30))).sum(-1).mean()

    # The expectation over draws is flatter than the distribution without noise.
    averaged = np.mean([softmax(logits + np.roll(zeta, i, 0)) for i in range(50)], axis=0)
    assert entropy(averaged) > entropy(softmax(logits)) + 0.1
    rising = [entropy(softmax((logits + zeta) / tau)) for tau in (1.0, 1.25, 1.5, 2.0, 4.0)]
    assert rising == sorted(rising)


def test_hamming_distance_estimates_the_angle():
    """LSH-E, equation 3: the expected share of differing bits is the angle over pi, its variance falls as 1/bits."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=32)
    y = 0.6 * x + 0.8 * rng.normal(size=32)
    angle = np.arccos(x @ y / np.linalg.norm(x) / np.linalg.norm(y)) / np.pi
    variances = {}
    for bits in (16, 64, 256):
        planes = lsh_e.projections(5, 0, 2000, bits, 32)
        codes = [hashes(planes, jnp.asarray(v, jnp.float32)[None, None]) for v in (x, y)]
        x_code, y_code = codes
        found = distances(x_code[None], tuple(jnp.moveaxis(y_code[None], -1, 0)))
        share = np.asarray(found, np.float64).reshape(-1) / bits
        assert abs(share.mean() - angle) < 4 * np.sqrt(angle * (1 - angle) / bits / 2000)
        variances[bits] = share.var()
        assert abs(variances[bits] * bits / (angle * (1 - angle)) - 1) < 0.15
    assert variances[16] > 3 * variances[64] > 9 * variances[256]


def test_hyperplanes_are_normal_and_each_head_of_each_layer_has_its_own():
    """LSH-E: R is drawn once for a layer and KV head; the policy that a model is read with has these."""
    score = kvjax.policy("lsh_e", seed=5).bind(random_model(small_config(4, 2, layers=3, head_width=64))).score
    assert isinstance(score, lsh_e.Hamming) and score.planes is not None
    drawn = np.stack([np.asarray(planes, np.float64) for planes in score.planes])
    assert drawn.shape == (3, 2, 16, 64)
    heads = drawn.reshape(6, -1)
    assert np.abs(np.corrcoef(heads) - np.eye(6)).max() < 0.15
    share = np.sort(drawn.ravel())
    quantiles = np.array([statistics.NormalDist().inv_cdf(p) for p in (0.05, 0.25, 0.5, 0.75, 0.95)])
    np.testing.assert_allclose(np.quantile(share, [0.05, 0.25, 0.5, 0.75, 0.95]), quantiles, atol=0.08)
    again = lsh_e.projections(6, 0, 2, 16, 64)
    assert np.abs(np.corrcoef(np.asarray(again).ravel(), drawn[0].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize("bits", [1, 4, 16, 32, 33, 64])
def test_codes_are_packed_without_loss(bits):
    planes = lsh_e.projections(0, 0, 2, bits, 8)
    code = hashes(planes, jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 8)), jnp.float32))
    assert code.dtype == jnp.uint32 and code.shape == (2, 5, -(-bits // 32))
    words = np.asarray(code, "<u4").view(np.uint8)
    unpacked = np.unpackbits(words, axis=-1, bitorder="little")[..., :bits]
    np.testing.assert_array_equal(pack_bits(jnp.asarray(unpacked, bool)), code)
