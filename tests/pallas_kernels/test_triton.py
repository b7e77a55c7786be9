"""The Triton twin of decode attention, where Triton is installed.

With TRITON_INTERPRET=1 (and torch) its kernel runs in Triton's interpreter, otherwise it is compiled for GPUs that need
not be there, through jax-triton (and a jax with CUDA's plugin). Neither is part of the default environment.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import Unsupported
from pallas_kernels.decode_attention import ScoreNoise, decode_attention
from pallas_kernels.decode_attention.api import DecodeAttention
from pallas_kernels.operands import Operand, Quantised
from tests.kernel_cases.decode_attention import CASES, arguments, case
from tests.kernels import Case


def triton_takes(some: Case) -> bool:
    """Whether the twin has what a case needs."""
    inputs = some.arrays[0]
    four = any(isinstance(inputs[name], Quantised) and inputs[name].bits == 4 for name in "kv")
    return not four and "gaussian" not in some.label and "places" not in inputs


MORE = (
    case(1, 2, 3, 700, 64, scores="gumbel", features=4),
    case(1, 2, 3, 300, 80, scores="each", alibi=True, window=64),
    case(1, 2, 3, 300, 80, e=48, scores="sum", bits=(8, 8), soft_cap=5.0, features=3),
    case(1, 1, 2, 40, 200, scores="sum"),
)
RUNNABLE = [some for some in (*CASES, *MORE) if triton_takes(some)]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def interpret(*arrays, kernel, out_shape, grid, name, num_warps, num_stages, **settings):
    """What `jax_triton.triton_call` does, on the CPU and with poisoned outputs."""
    import torch

    inputs = [torch.from_numpy(np.array(x)) for x in arrays]
    outputs = [torch.full(shape.shape, float("nan")) for shape in out_shape]
    kernel[grid](*inputs, *outputs, **settings)
    return [jnp.asarray(x.numpy()) for x in outputs]


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton, torch and TRITON_INTERPRET=1")
@pytest.mark.parametrize("some", [some for some in RUNNABLE if some.dtype == "float32"], ids=str)
def test_interpreted_it_agrees_with_numpy(monkeypatch, some: Case):
    # The interpreter multiplies bfloat16 as if it were integers, so float32 alone.
    stand_in = types.ModuleType("jax_triton")
    stand_in.triton_call = interpret  # type: ignore[attr-defined]
    stand_in.__spec__ = importlib.machinery.ModuleSpec("jax_triton", None)
    monkeypatch.setitem(sys.modules, "jax_triton", stand_in)
    actual = some.run(*jax.tree.map(jnp.asarray, some.arrays), implementation="triton", platform="gpu")
    bound = some.bound
    for name, wanted in some.expected().items():
        np.testing.assert_allclose(np.asarray(actual[name]), wanted, rtol=bound, atol=bound, err_msg=name)


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves nothing to compile")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("some", RUNNABLE, ids=str)
def test_it_compiles_for_a_gpu(monkeypatch, some: Case, capability: int):
    pytest.importorskip("jax_triton", reason="needs jax-triton and a jax with CUDA's plugin", exc_type=ImportError)
    from pallas_kernels.decode_attention import triton

    compiled_for = functools.partial(triton.decode_attention, compute_capability=capability)
    monkeypatch.setattr(triton, "decode_attention", compiled_for)
    function = jax.jit(functools.partial(some.run, implementation="triton", platform="gpu"))
    lowered = function.trace(*some.arrays).lower(lowering_platforms=("cuda",))
    assert "triton_kernel_call" in lowered.as_text()


@pytest.mark.skipif(importlib.util.find_spec("jax_triton") is not None, reason="jax-triton is installed")
def test_without_jax_triton_it_says_what_to_install():
    with pytest.raises(Unsupported, match=r"needs jax-triton, which pip install 'kvjax\[gpu\]' brings"):
        decode_attention(**arguments(case(1, 1, 1, 16, 64)), implementation="triton", platform="gpu")


def test_what_it_lacks_is_refused():
    inputs = case(1, 1, 1, 16, 64, bits=(8, 4)).arrays[0]
    (q, k, v), spec = (inputs[name] for name in "qkv"), AttentionSpec(1.0)
    position, query_position = inputs["position"], inputs["query_position"]
    noise = ScoreNoise(jnp.zeros(1, jnp.uint32), jnp.ones(1), kind="gaussian")

    def lacks(v: Operand, scores: ScoreNoise | None = None) -> str | None:
        call = DecodeAttention(q, k, v, position, query_position, spec, scores=scores)
        return call.unsupported("triton", "gpu")

    assert lacks(k, noise) == "it has no gaussian noise"
    assert lacks(k) is None
    assert lacks(v) == "it has no codes of four bits"
