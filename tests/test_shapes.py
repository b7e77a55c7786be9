"""Calls with shapes other than in a signature are refused where shapes are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

from pallas_kernels.hamming.api import HammingVictim
from pallas_kernels.ranking import EvictionRules
from tests.shapes import checked, compare_arguments


@jaxtyped(typechecker=checked)
def paired(x: Float[Array, "b c"], y: Float[Array, "b c"] | None, kind: str, to: Any) -> tuple[str, Float[Array, " c"]]:
    return kind, to(x if y is None else x + y)


def last(x: Array) -> Array:
    return x[-1]


@pytest.mark.parametrize(
    ("rows", "dtype", "to"), [(3, jnp.float32, last), (2, jnp.int32, last), (2, jnp.float32, lambda x: x)]
)
def test_what_a_signature_does_not_say_is_refused(rows: int, dtype: Any, to: Callable[[Array], Array]) -> None:
    with pytest.raises(TypeCheckError):
        paired(jnp.ones((2, 5)), jnp.ones((rows, 5), dtype), "sum", to)


def test_what_it_says_and_other_types_and_programs_without_arrays_pass() -> None:
    other: Any = 3
    assert paired(jnp.ones((2, 5)), None, other, last)[1].shape == (5,)
    shapes: Any = jax.ShapeDtypeStruct((2, 5), jnp.float32)
    assert paired(shapes, None, "sum", lambda x: x)[1] is shapes


@pytest.mark.parametrize(("rows", "dtype", "fits"), [(2, jnp.int32, True), (3, jnp.int32, False), (2, float, False)])
def test_arguments_of_an_operation_have_the_shapes_of_its_fields(rows: int, dtype: Any, fits: bool) -> None:
    rules = EvictionRules(*(jnp.ones((2, 4), jnp.int32) for _ in range(3)))
    query, codes = jnp.zeros((2, 4, 1, 1), jnp.uint32), [jnp.zeros((2, 4, 8), jnp.uint32)]
    call = HammingVictim(query, codes, jnp.zeros((rows, 4, 8), dtype), jnp.ones(2, jnp.int32), protection=rules)
    if fits:
        compare_arguments(call)
    else:
        with pytest.raises(TypeCheckError):
            compare_arguments(call)
