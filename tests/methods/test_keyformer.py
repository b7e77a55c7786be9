"""Keyformer without noise and temperature is H2O."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods.keyformer import GumbelSoftmax
from tests.held import layers
from tests.small_models import GQA, random_model

SHORT = {"tau_end": 1.0}
"""H2O's sums, by the shortcut that temperature one allows."""
GENERAL = {"tau_end": 1 + 1e-12, "damping": 1 - 1e-12}
"""Equation 9 with a temperature for each query and weights, all of them one in single precision."""


@pytest.mark.parametrize(("noise", "settings"), [("none", SHORT), ("constant", SHORT), ("none", GENERAL)])
def test_without_noise_at_temperature_one_it_is_h2o(noise, settings):
    model, text = random_model(GQA), np.random.default_rng(0).integers(0, 64, (2, 90))
    policies = kvjax.policy("h2o", recent=0.5), kvjax.policy("keyformer", noise=noise, recent=0.5, **settings)
    sums = GumbelSoftmax(noise, **settings)
    assert (sums.damping == 1 and sums.tau_init == sums.tau_end) == (settings is SHORT)
    (a, first), (b, second) = (kvjax.prefill(model, policy, text[:, :50], 24) for policy in policies)
    np.testing.assert_array_equal(first, second)
    for step in range(50, 90):
        token = jnp.asarray(text[:, step], jnp.int32)
        (a, first), (b, second) = kvjax.decode_step(a, token), kvjax.decode_step(b, token)
        np.testing.assert_array_equal(first, second)
        for one, other in zip(layers(a), layers(b), strict=True):
            np.testing.assert_array_equal(one.position, other.position)


@pytest.mark.parametrize("settings", [{"noise": "pink"}, {"tau_init": 0.0}, {"tau_end": -1.0}, {"damping": 0.0}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        kvjax.policy("keyformer", **settings)
