"""The fused kernels of LESS are the modules that training uses, and refuse what they cannot do."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvjax.policies.residuals.kernels import Phi, Psi
from pallas_kernels.common import Unsupported
from pallas_kernels.less_kernels import phi, psi
from tests.kernel_cases.less_kernels import WAYS, case_phi, case_psi
from tests.kernels import check


def test_phi_is_the_module():
    q = jax.random.normal(jax.random.key(0), (2, 2, 3, 5, 16))
    module = Phi(features=8, hidden=128)
    params: Any = module.init(jax.random.key(1), q)
    np.testing.assert_allclose(
        phi(q, **params["params"]), cast(jax.Array, module.apply(params, q)), rtol=1e-5, atol=1e-6
    )


@settings(max_examples=6, phases=[Phase.generate])
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 150)),
    st.sampled_from([8, 64, 72]),
    st.integers(1, 40),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([1, 2]),
    st.sampled_from(WAYS),
)
def test_any_shape(shape, width, features, dtype, scales, way):
    b, h, g, t = shape
    check(case_phi(b, h, g, t, width, 128, features, dtype), way)
    check(case_psi(b, h, t, width, 128, features, dtype, scales), way)


@pytest.mark.parametrize("literal", [False, True])
def test_psi_is_the_module(literal):
    k = jax.random.normal(jax.random.key(0), (2, 2, 5, 16))
    module = Psi(features=8, hidden=128, literal=literal)
    params: Any = module.init(jax.random.key(1), k)
    np.testing.assert_allclose(
        psi(k, **params["params"]), cast(jax.Array, module.apply(params, k)), rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize(
    ("shape", "hidden", "platform", "reason"),
    [
        ((1, 1, 1, 4, 8), 128, "gpu", "kernel is for tpu, as Triton has no exact GELU"),
        ((1, 1, 1, 4, 12), 128, "tpu", "d=12 is not a multiple of 8"),
        ((1, 1, 1, 4, 8), 100, "tpu", "hidden=100 is not a multiple of 128"),
    ],
)
def test_what_cannot_run_is_refused_before_compilation(shape, hidden, platform, reason):
    first, second = jnp.ones((1, 1, shape[-1], hidden)), jnp.ones((1, 1, hidden, 8))
    with pytest.raises(Unsupported, match=reason):
        phi(jnp.ones(shape), first, second, implementation="pallas", platform=platform)
