"""The fused kernels of LESS are the modules that training uses, and refuse what they cannot do."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvjax.methods.less.feature_maps import Phi, Psi
from pallas_kernels.attention import Partial
from pallas_kernels.common import Unsupported
from pallas_kernels.less_memory import phi, psi, remember
from tests.kernel_cases.less_memory import WAYS, case_phi, case_psi, case_remember
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
        ((1, 1, 1, 4, 8), 128, "gpu", "it is written for tpu alone"),
        ((1, 1, 1, 4, 12), 128, "tpu", "d=12 is not a multiple of 8"),
        ((1, 1, 1, 4, 8), 100, "tpu", "hidden=100 is not a multiple of 128"),
    ],
)
def test_what_cannot_run_is_refused_before_compilation(shape, hidden, platform, reason):
    first, second = jnp.ones((1, 1, shape[-1], hidden)), jnp.ones((1, 1, hidden, 8))
    with pytest.raises(Unsupported, match=reason):
        phi(jnp.ones(shape), first, second, implementation="pallas", platform=platform)


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "reason"),
    [
        (1, 4, 1, "h=4 KV heads are not a multiple of 8"),
        (129, 8, 1, "b=129 rows of g=1 queries are more than 128"),
        (65, 8, 4, "b=65 rows of g=4 queries are more than 128, or 256 in all"),
        (1, 8, 0, "there are no tokens"),
    ],
)
def test_a_step_that_cannot_be_one_kernel_is_refused_or_left_to_several(rows, heads, groups, reason):
    _, evicted, _, _, _, of_psi = case_remember(1, heads, 1, 16, 128, 8).arrays
    q, evicted = jnp.ones((rows, heads, groups, 16)), (jnp.ones((rows, heads, 16)), *evicted[1:])
    of_phi = {"first": jnp.ones((heads, groups, 16, 128)), "second": jnp.ones((heads, groups, 128, 8))}
    memory = jnp.zeros((rows, heads, 8, 16)), jnp.zeros((rows, heads, 8))
    seen = Partial(jnp.ones((rows, heads, groups, 16)), jnp.zeros((rows, heads, groups)))
    with pytest.raises(Unsupported, match=reason):
        remember(memory, evicted, q, seen, of_phi, of_psi, implementation="pallas", platform="tpu")


def test_a_step_is_what_phi_and_psi_make_of_it():
    """Where one kernel takes all of it, and where it is made of the two others and XLA."""
    for heads, kernels in ((8, 1), (4, 2)):
        arrays = case_remember(3, heads, 2, 32, 128, 8).arrays
        expected = remember(*arrays, implementation="xla")
        step = partial(remember, implementation="pallas,xla", interpret=True, platform="tpu")
        found = jax.jit(step)(*arrays)
        assert str(jax.make_jaxpr(step)(*arrays)).count("pallas_call[") == kernels
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, expected)
