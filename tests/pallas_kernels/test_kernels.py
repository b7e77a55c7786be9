"""Every kernel in every implementation against its NumPy reference, and how implementations are chosen."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import VARIABLE, Unsupported
from pallas_kernels.op import choose, or_xla
from pallas_kernels.rope.api import RotateHeads, rope
from tests.kernel_cases import CASES
from tests.kernels import TPU_WAYS, XLA, Case, Way, check

FIRST = list({case.op: case for case in reversed(CASES)}.values())
COPYING = ("fused_decode", "evict", "less_memory", "paged_attention")
"""Operations that write into their arguments or copy by themselves, where interpreters of TPU kernels may differ.

Half of their cases run in both.
"""


def _marks(number: int, case: Case, way: Way) -> list[pytest.MarkDecorator]:
    """Interpreters of TPU kernels take turns: the next case of an operation runs in the other one."""
    if case in FIRST and way == XLA:
        return [pytest.mark.core]
    other = TPU_WAYS[number % 2]
    both = (case.op in COPYING and number % 4 < 2) or not set(TPU_WAYS) <= set(case.ways)
    return [pytest.mark.slow] if way == other and not both else []


RUNS = [
    pytest.param(case, way, id=f"{case}-{way}", marks=_marks(number, case, way))
    for number, case in enumerate(CASES)
    for way in case.ways
]


@pytest.mark.parametrize(("case", "way"), RUNS)
def test_implementations_agree_with_numpy(case: Case, way: Way):
    check(case, way)


def test_auto_is_xla_on_cpu(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose("op", "auto", {"pallas": None, "triton": None}, platform="cpu") == "xla"


def test_auto_on_tpu_falls_back_beyond_a_limit(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert choose("op", "auto", {"pallas": None}, platform="tpu") == "pallas"
    assert choose("op", "auto", {"pallas": "c=7 is odd"}, platform="tpu") == "xla"
    assert choose("op", "auto", {}, platform="tpu") == "xla"


def test_the_variable_overrides_auto_and_an_argument_overrides_the_variable(monkeypatch):
    monkeypatch.setenv(VARIABLE, "pallas")
    assert choose("op", "auto", {"pallas": None}, platform="cpu", interpret=True) == "pallas"
    assert choose("op", "xla", {"pallas": None}, platform="cpu", interpret=True) == "xla"
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(ValueError, match=f"{VARIABLE}=fast is not one of auto, xla, pallas, triton"):
        choose("op", "auto", {}, platform="cpu")


def test_the_first_of_several_that_can_run_does(monkeypatch):
    assert choose("op", "triton,pallas,xla", {"pallas": None}, platform="gpu") == "pallas"
    assert choose("op", "pallas,xla", {"pallas": "c=7 is odd"}, platform="tpu") == "xla"
    monkeypatch.setenv(VARIABLE, "pallas,xla")
    assert choose("op", "auto", {}, platform="gpu") == "xla"
    with pytest.raises(Unsupported, match="'pallas': c=7 is odd; nor as 'triton': there is no such kernel"):
        choose("op", "pallas,triton", {"pallas": "c=7 is odd"}, platform="gpu")
    for unknown in ("pallas,fast", "pallas,auto", ""):
        with pytest.raises(ValueError, match="is not one of"):
            choose("op", unknown, {}, platform="gpu")


def test_xla_stands_in_for_what_every_model_asks(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert [or_xla(name) for name in ("auto", "xla", "pallas")] == ["auto", "xla,xla", "pallas,xla"]
    monkeypatch.setenv(VARIABLE, "pallas")
    assert choose("op", or_xla("auto"), {"pallas": "d=64 is not 128"}, platform="tpu") == "xla"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(platform="gpu"), "it is written for tpu alone"),
        (
            dict(dtype=jnp.float64),
            "it takes heads all in float32 or all in bfloat16, and angles in float32, not float64",
        ),
        (dict(interleaved=True), "pairs of neighbours are not halves of a head"),
        (dict(d=64), "d=64,64 is not 128"),
        (dict(w=32), "w=32 of 128 channels are not whole heads"),
        (dict(n=4), "n=4,8 heads are not multiples of 8"),
        (dict(b=12), "b=12 rows are not a multiple of 16"),
        (dict(n=512), "n=512,8 heads of 16 rows are too many at once"),
    ],
)
def test_limits_of_rotate_are_named(changes, reason):
    asked = dict(b=32, n=32, d=128, w=128, dtype=jnp.bfloat16, platform="tpu", interleaved=False) | changes
    if asked["d"] < asked["w"]:
        asked["w"] = asked["d"]
    heads: list[Any] = [jax.ShapeDtypeStruct((asked["b"], n, asked["d"]), asked["dtype"]) for n in (asked["n"], 8)]
    angles: Any = jax.ShapeDtypeStruct((asked["b"], asked["w"]), jnp.float32)
    call = RotateHeads(tuple(heads[:1]), angles, angles, tuple(heads[1:]), interleaved=asked["interleaved"])
    assert (call.unsupported("pallas", asked["platform"]) or "").startswith(reason)


@pytest.mark.parametrize(
    ("implementation", "limits", "platform", "reason"),
    [
        ("pallas", {"pallas": None}, "cpu", "compiles for tpu and gpu, not for cpu"),
        ("pallas", {"pallas": "d=512 is more than 256"}, "tpu", "d=512 is more than 256"),
        ("triton", {"triton": None}, "tpu", "compiles for gpu, not for tpu"),
        ("triton", {"pallas": None}, "gpu", "no such kernel"),
    ],
)
def test_asking_for_what_cannot_run_says_why(implementation, limits, platform, reason):
    with pytest.raises(Unsupported, match=reason):
        choose("op", implementation, limits, platform=platform)


def test_the_function_of_an_operation_has_its_arguments_and_those_of_a_call():
    assert [*inspect.signature(rope).parameters] == ["rotated", "cos", "sin", "still", "interleaved", "how"]
    assert rope.__doc__ == RotateHeads.__doc__
    run = jax.jit(functools.partial(rope, implementation="xla", platform="cpu"), donate_argnames=())
    heads = [jnp.ones((1, 2, 4))]
    np.testing.assert_array_equal(run(heads, cos=jnp.ones((1, 4)), sin=jnp.zeros((1, 4)))[0], heads[0])
