"""Attention over pages beyond the table: as the library's own loop has it, and lowered for GPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import use_abstract_mesh

from kvjax import paged
from kvjax.types import KV, NewTokens
from pallas_kernels.common import Unsupported
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.programs import H100
from tests.kernel_cases.paged_attention import case
from tests.kernels import GPU_WAYS, XLA
from tests.models import GQA


@pytest.mark.parametrize("way", [XLA, *GPU_WAYS], ids=str)
def test_it_is_what_a_step_on_pages_computes(way):
    b, h, g = 2, GQA.kv_heads, GQA.groups
    inputs = jax.tree.map(jnp.asarray, case(b, h, g, 16, 64).arrays[0])
    pages, owner = inputs["pages"], inputs["owner"]
    nothing = jnp.zeros_like(owner)
    pool = paged.Pool(
        KV(inputs["k"], inputs["v"]), inputs["position"], None, None, owner, nothing, pages, (None,), (nothing,)
    )
    position = inputs["query_position"]
    new = NewTokens(
        q=inputs["q"][:, :, :, None],
        k=inputs["q"][:, :, 0, None],
        v=inputs["q"][:, :, 0, None],
        position=position[:, None],
        token=jnp.zeros((b, 1), jnp.int32),
        prompt_length=position,
        read=position + 1,
        horizon=position,
        seed=jnp.zeros(b, jnp.uint32),
    )
    found = paged_attention(**inputs, **way.options)
    out, highest, total, logits = paged.attend(GQA, pool, 0, new, jnp.zeros_like(found.logits))
    np.testing.assert_allclose(found.out, out[:, :, :, 0], rtol=1e-5, atol=1e-5)
    some = jnp.isfinite(found.lse).reshape(-1)
    lse = (highest + jnp.log(total)).reshape(-1)
    np.testing.assert_allclose(found.lse.reshape(-1)[some], lse[some], rtol=1e-5, atol=1e-5)
    mine = slice(int(pages[0]), int(pages[1]))
    np.testing.assert_allclose(found.logits[mine], logits[mine], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_it_lowers_to_cuda():
    some = case(2, 2, 4, 16, 128, dtype="bfloat16", alibi=True)
    compiled_for = functools.partial(some.run, implementation="pallas", platform="gpu")
    with use_abstract_mesh(H100):
        lowered = jax.jit(compiled_for).trace(*some.arrays).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()


@pytest.mark.parametrize(
    ("width", "platform", "reason"),
    [(80, "gpu", "d=80 is not a power of two from 16 to 256"), (64, "tpu", "it is written for gpu alone")],
)
def test_limits_are_named(width, platform, reason):
    inputs = case(1, 2, 1, 16, width).arrays[0]
    with pytest.raises(Unsupported, match=f"paged_attention cannot run as 'pallas': {reason}"):
        paged_attention(**inputs, implementation="pallas", interpret=True, platform=platform)
