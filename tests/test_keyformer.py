"""Keyformer without noise and temperature is H2O."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.held import layers
from tests.models import GQA, random_model


@pytest.mark.parametrize("noise", ["none", "constant"])
def test_without_noise_at_temperature_one_it_is_h2o(noise):
    model, text = random_model(GQA), np.random.default_rng(0).integers(0, 64, (2, 90))
    policies = kvjax.policy("h2o", recent=0.5), kvjax.policy("keyformer", noise=noise, tau_end=1.0, recent=0.5)
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
