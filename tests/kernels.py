"""What a row of the kernels' table is: operation, implementations, shapes, a float64 NumPy reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.op import Kernels, using

BOUNDS = {"float32": 2e-5, "bfloat16": 1e-2}
"""Largest error of a number of order one, absolute or relative, by the dtype of the inputs."""

ROUNDED = 1e-3
"""The same where float32 meets codes as two digits of eight bits."""


def gpu(kind: str) -> AbstractMesh:
    """A GPU that is not there, for which programs are lowered."""
    return AbstractMesh((1,), ("one",), abstract_device=AbstractDevice(kind, None, "gpu"))


H100 = gpu("NVIDIA H100 80GB HBM3")


@dataclass(frozen=True)
class Way:
    """One way to run an operation where there is no accelerator."""

    implementation: str
    interpret: Any = False
    platform: str | None = None

    def __str__(self) -> str:
        how = {False: "", True: "-interpret"}.get(self.interpret, "-tpu-interpreter")
        return f"{self.implementation}{how}" + (f"-{self.platform}" if self.platform else "")

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for an operation's function."""
        return dict(implementation=self.implementation, interpret=self.interpret, platform=self.platform)


XLA = Way("xla")
TPU_WAYS = (Way("pallas", True, "tpu"), Way("pallas", pltpu.InterpretParams(), "tpu"))
GPU_WAYS = (Way("pallas", True, "gpu"),)


def in_its_way(test: Callable[..., None]) -> Callable[..., None]:
    """A test with a parameter `way`, by which the operations run that name none."""

    @functools.wraps(test)
    def run(*args: Any, way: Way, **named: Any) -> None:
        with using(Kernels(**way.options)):
            test(*args, way=way, **named)

    return run


@dataclass(frozen=True)
class Case:
    """One operation on one set of inputs.

    `run(*arrays, implementation=..., interpret=..., platform=...)` returns a dict of arrays, `oracle(*arrays)` the same
    names from float64 arrays; integers have to be equal.
    """

    op: str
    label: str
    arrays: tuple[Any, ...]
    """NumPy arrays (bfloat16 through ml_dtypes) or pytrees of them."""
    run: Callable[..., dict[str, Any]]
    oracle: Callable[..., dict[str, Any]]
    ways: Sequence[Way] = (XLA, *TPU_WAYS)
    dtype: str = "float32"
    rounded: bool = False
    """Whether queries and weights are rounded to meet codes."""

    @property
    def bound(self) -> float:
        """Largest error, absolute or relative."""
        return max(BOUNDS[self.dtype], ROUNDED if self.rounded else 0.0)

    def __str__(self) -> str:
        return f"{self.op}-{self.label}-{self.dtype}"

    def expected(self) -> dict[str, Any]:
        """What the oracle says."""
        return self.oracle(*jax.tree.map(widen, self.arrays))


def widen(x: Any) -> Any:
    """Floating numbers as float64, everything else as it is."""
    floating = isinstance(x, np.ndarray) and (x.dtype.kind == "f" or x.dtype == ml_dtypes.bfloat16)
    return x.astype(np.float64) if floating else x


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Gaussian numbers in a dtype that NumPy may not know."""
    return rng.normal(size=tuple(shape)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def check(case: Case, way: Way) -> None:
    """Run a case, compiled, and compare with what its oracle says."""
    actual = jax.jit(functools.partial(case.run, **way.options))(*case.arrays)
    expected, bound = case.expected(), case.bound
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = np.asarray(actual[name])
        assert got.shape == np.shape(wanted), name
        if np.asarray(wanted).dtype.kind in "iub":
            np.testing.assert_array_equal(got, wanted, err_msg=name)
        else:
            np.testing.assert_allclose(got.astype(np.float64), wanted, rtol=bound, atol=bound, err_msg=name)
