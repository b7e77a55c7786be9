"""Calls of Pallas kernels with records: a kernel gets references in the records in which its caller gave arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


class BlockedArray(NamedTuple):
    """An input or a result of a kernel."""

    array: Any
    """Array, or the shape of a result."""
    spec: pl.BlockSpec
    """Part that each grid step gets."""
    alias: Any = None
    """Input whose memory a result takes."""


def input_block(array: Any, spec: pl.BlockSpec) -> Any:
    """Return an input, for the place of an array in a record."""
    return BlockedArray(array, spec)


def output_block(shape: tuple[int, ...], spec: pl.BlockSpec, dtype: Any = jnp.float32) -> Any:
    """Return a result, for the place of an array in a record."""
    return BlockedArray(jax.ShapeDtypeStruct(shape, dtype), spec)


def alias_block(source: Any, spec: pl.BlockSpec | None = None, dtype: Any = None) -> Any:
    """Return a result in the memory of an input, with the input's parts and dtype unless others are given."""
    shape = jax.ShapeDtypeStruct(source.array.shape, dtype or source.array.dtype)
    return BlockedArray(shape, source.spec if spec is None else spec, source)


def arrays(tree: Any) -> Any:
    """Return a record's arrays in the same record."""
    return jax.tree.map(lambda x: x.array, tree, is_leaf=_is_block)


def specs(tree: Any) -> Any:
    """Return the parts that grid steps get of a record's arrays, in the same record."""
    return jax.tree.map(lambda x: x.spec, tree, is_leaf=_is_block)


def run(
    kernel: Callable[..., None],
    inputs: tuple[Any, ...],
    outputs: Any,
    *,
    grid: tuple[Any, ...],
    scratch_shapes: Sequence[Any] = (),
    scalars: Any = None,
    **call: Any,
) -> Any:
    """Run a kernel, which gets references in the records of the inputs, the outputs and the scratch memory.

    Args:
        kernel: function of these references.
        inputs: records of `input_block`s.
        outputs: record of results, from `output_block` and `alias_block`; the same record of arrays is returned.
        scalars: record of arrays that a TPU reads before its steps; the kernel and the specs' index maps get its
            references, the kernel first of all, the maps after the step. None for none.
        call: other arguments of `pallas_call`.
    """
    where: dict[str, Any] = dict(
        grid=grid, in_specs=specs(inputs), out_specs=[specs(outputs)], scratch_shapes=scratch_shapes
    )
    if scalars is not None:
        from jax.experimental.pallas import tpu as pltpu

        where = dict(grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, **where))
    sources, results = (jax.tree.leaves(tree, is_leaf=_is_block) for tree in (inputs, outputs))
    place = {id(x): i for i, x in enumerate(sources)}
    (record,) = pl.pallas_call(
        kernel,
        out_shape=[arrays(outputs)],
        input_output_aliases={place[id(x.alias)]: i for i, x in enumerate(results) if x.alias is not None},
        **where,
        **call,
    )(*(() if scalars is None else (scalars,)), *arrays(inputs))
    return record


def _is_block(x: object) -> bool:
    return isinstance(x, BlockedArray)
