"""Phi and psi of LESS for TPU: both matmuls of a head and what follows in one kernel, the hidden layer never leaves it.

Features lie transposed, [features, tokens], so that tokens fill the lanes. The grid is (heads, blocks of tokens); a
head's weights are fetched once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.attention import Partial
from pallas_kernels.common import LANES, SUBLANES, padded, tpu_params
from pallas_kernels.decode_attention.kernel_parts import LOWEST
from pallas_kernels.less_kernels.types import Remembered

BLOCK = 512
"""Tokens of one grid step, at most."""
VMEM_BYTES = 14 << 20


def phi(
    x: Float[Array, "m t d"], first: Float[Array, "m d r"], second: Float[Array, "m r f"], *, interpret: Any
) -> Float[Array, "m t f"]:
    """See `reference.phi`; compiled for v4 to v6e, interpreted, never run on a chip."""

    def kernel(x_ref: Any, first_ref: Any, second_ref: Any, out_ref: Any) -> None:
        out_ref[0] = jnp.abs(_two_layers(x_ref[0], first_ref[0], second_ref[0]))

    return _call(kernel, x, (first, _transposed(second)), interpret, "less_phi")


def psi(
    x: Float[Array, "m t d"],
    first: Float[Array, "m d r"],
    second: Float[Array, "m r f"],
    third: Float[Array, "m f f"],
    outer_scale: Float[Array, "m f"],
    residual_scale: Float[Array, "m f"] | None,
    *,
    interpret: Any,
) -> Float[Array, "m t f"]:
    """See `reference.psi`; compiled for v4 to v6e, interpreted, never run on a chip."""

    def kernel(x_ref: Any, *refs: Any) -> None:
        *weights, out_ref = refs
        out_ref[0] = _psi(x_ref[0], *(ref[0] for ref in weights))

    weights = _weights_of_psi(first, second, third, outer_scale, residual_scale)
    return _call(kernel, x, weights, interpret, "less_psi")


def remember(
    memory: tuple[Float[Array, "b h R e"], Float[Array, "b h R"]],
    evicted: tuple[Float[Array, "b h d"], Float[Array, "b h e"], Bool[Array, "b h"]],
    q: Float[Array, "b h g d"],
    attended: Partial,
    of_phi: Mapping[str, Array],
    of_psi: Mapping[str, Array],
    *,
    interpret: Any,
) -> Remembered:
    """See `api.remember`; the grid is (blocks of eight heads, heads), so that a step has one head of all rows."""
    (b, h, g, d), (k, v, leaving), (held, total) = q.shape, evicted, memory
    features, e = held.shape[2:]

    def heads_of_rows(x: Float[Array, "b m w"], heads: int) -> tuple[Array, pl.BlockSpec]:
        return x, pl.BlockSpec((b, heads, x.shape[2]), lambda block, head: (0, block, 0))

    def own(x: Array, heads: int = 1) -> tuple[Array, pl.BlockSpec]:
        # Heads come first, and rows, where there are any, last.
        shape = heads, *x.shape[1:]
        return x, pl.BlockSpec(shape, lambda block, head: (block * SUBLANES + head, *(0,) * (len(shape) - 1)))

    whole = pl.BlockSpec((b, 1, features, e), lambda block, head: (0, block * SUBLANES + head, 0, 0))
    named = _weights_of_psi(**of_psi)
    inputs: dict[str, Any] = {
        "q": heads_of_rows(q.reshape(b, h * g, d), SUBLANES * g),
        "k": heads_of_rows(k, SUBLANES),
        "v": heads_of_rows(v, SUBLANES),
        "out": heads_of_rows(attended.out.reshape(b, h * g, e), SUBLANES * g),
        "lse": own(attended.lse.transpose(1, 2, 0)),
        "leaving": own(leaving.astype(jnp.float32).T[:, None]),
        "h": (held, whole),
        "z": own(total.transpose(1, 2, 0)),
        "phi_first": own(of_phi["first"].reshape(h * g, d, -1), g),
        "phi_second": own(_transposed(of_phi["second"].reshape(h * g, -1, features)), g),
        "psi": tuple(zip(*(own(x) for x in named), strict=True)),
    }
    went = ("h", "z")  # in place
    arrays = {name: array for name, (array, _) in inputs.items()}
    specs = {name: spec for name, (_, spec) in inputs.items()}
    came = [jax.tree_util.keystr(path[:1], simple=True) for path, _ in jax.tree.leaves_with_path(arrays)]
    scratch = {"q": (SUBLANES * g, d), "k": (SUBLANES, d), "v": (SUBLANES, e), "out": (SUBLANES * g, e)}
    shapes = {name: jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in went}
    shapes["out"] = jax.ShapeDtypeStruct(arrays["out"].shape, q.dtype)
    found = pl.pallas_call(
        functools.partial(_remember, groups=g),
        grid=(h // SUBLANES, SUBLANES),
        in_specs=[specs],
        out_specs={name: specs[name] for name in shapes},
        out_shape=shapes,
        scratch_shapes=[{name: pltpu.VMEM((b * m, width), jnp.float32) for name, (m, width) in scratch.items()}],
        input_output_aliases={came.index(name): sorted(shapes).index(name) for name in went},
        compiler_params=tpu_params(1, 1, VMEM_BYTES),
        interpret=interpret,
        name="less_remember",
    )(arrays)
    return Remembered(found["h"], found["z"].transpose(2, 0, 1), found["out"].reshape(b, h, g, e))


def _remember(refs: Any, outputs: Any, scratch: Any, *, groups: int) -> None:
    head, rows = pl.program_id(1), refs["h"].shape[0]

    @pl.when(head == 0)
    def _() -> None:
        # A row's heads lie along sublanes: single numbers of 32 bits can be taken from there, every eighth at once.
        for name in ("q", "k", "v"):
            scratch[name][...] = refs[name][...].astype(jnp.float32).reshape(scratch[name].shape)

    def of_head(name: str, which: Any, heads: int) -> Float[Array, "b w"]:
        return scratch[name][pl.ds(which, rows, stride=heads), :]

    features = _psi(of_head("k", head, SUBLANES), *(ref[0] for ref in refs["psi"]))
    features = jnp.where(refs["leaving"][0] > 0, features, 0.0)
    z = refs["z"][0] + features
    outputs["z"][0] = z
    shares = []
    for i in range(groups):
        x = of_head("q", head * groups + i, SUBLANES * groups)
        phi = jnp.abs(_two_layers(x, refs["phi_first"][i], refs["phi_second"][i]))
        mass = (phi * z).sum(0, keepdims=True)
        some = mass > 0
        mass = jnp.where(some, mass, 1.0)
        # Both as parts of the larger one; what has seen nothing has no part.
        ours = jnp.where(some, jnp.log(mass), LOWEST)
        theirs = jnp.maximum(refs["lse"][0, i : i + 1], LOWEST)
        top = jnp.maximum(ours, theirs)
        ours, theirs = jnp.where(some, jnp.exp(ours - top), 0.0), jnp.exp(theirs - top)
        share = 1 / (ours + theirs)
        shares.append((phi * (ours * share / mass), theirs * share))
    v = of_head("v", head, SUBLANES)
    for row in range(rows):
        one = slice(row, row + 1)
        h = refs["h"][row, 0] + features[:, one] * v[one]
        outputs["h"][row, 0] = h
        for i, (phi, theirs) in enumerate(shares):
            at = head * groups + i
            low = (phi[:, one] * h).sum(0, keepdims=True)
            merged = refs["out"][row, pl.ds(at, 1)] * theirs[:, one] + low
            scratch["out"][pl.ds(row * SUBLANES * groups + at, 1)] = merged

    @pl.when(head == SUBLANES - 1)
    def _() -> None:
        every = outputs["out"]
        every[...] = scratch["out"][...].reshape(every.shape).astype(every.dtype)


def _call(
    kernel: Callable[..., None], x: Float[Array, "m t d"], weights: tuple[Array, ...], interpret: Any, name: str
) -> Float[Array, "m t f"]:
    (m, t, d), features = x.shape, weights[1].shape[1]
    # Few tokens, as in a decode step, are one block of whole rows, which need not fill the lanes.
    size = padded(t, SUBLANES) if t < LANES else min(BLOCK, padded(t, LANES))
    tokens = padded(t, size)
    x = jnp.pad(x, ((0, 0), (0, tokens - t), (0, 0)))
    whole = [pl.BlockSpec((1, *weight.shape[1:]), lambda m, i: (m, 0, 0)) for weight in weights]
    out = pl.pallas_call(
        kernel,
        grid=(m, tokens // size),
        in_specs=[pl.BlockSpec((1, size, d), lambda m, i: (m, i, 0)), *whole],
        out_specs=pl.BlockSpec((1, features, size), lambda m, i: (m, 0, i)),
        out_shape=jax.ShapeDtypeStruct((m, features, tokens), jnp.float32),
        compiler_params=tpu_params(2),
        interpret=interpret,
        name=name,
    )(x, *weights)
    return jnp.swapaxes(out[..., :t], 1, 2)


def _two_layers(x: Float[Array, "t d"], first: Float[Array, "d r"], second: Float[Array, "f r"]) -> Float[Array, "f t"]:
    tokens = len(x)
    if tokens == 1:  # of one Mosaic makes products of vectors, which it cannot in 16 bits
        x = jnp.broadcast_to(x, (SUBLANES, x.shape[1]))
    inner = _gelu(_dot(x.astype(first.dtype), first, (1, 0)))
    return _gelu(_dot(second, inner.astype(second.dtype), (1, 1))[:, :tokens])


def _dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    contracted = (((over[0],), (over[1],)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))


def _psi(
    x: Float[Array, "t d"],
    first: Float[Array, "d r"],
    second: Float[Array, "f r"],
    third: Float[Array, "f f"],
    outer_scale: Float[Array, "f 1"],
    residual_scale: Float[Array, "f 1"] | None = None,
) -> Float[Array, "f t"]:
    outer = jnp.abs(outer_scale) * _two_layers(x, first, second)
    mixed = _dot(third, outer, (1, 0))
    return jnp.abs(mixed if residual_scale is None else outer + residual_scale * mixed)


def _weights_of_psi(
    first: Array, second: Array, third: Array, outer_scale: Array, residual_scale: Array | None = None
) -> tuple[Array, ...]:
    scales = [outer_scale] if residual_scale is None else [outer_scale, residual_scale]
    return first, _transposed(second), _transposed(third), *[scale[..., None] for scale in scales]


def _transposed(x: Float[Array, "m r f"]) -> Float[Array, "m f r"]:
    return jnp.swapaxes(x, 1, 2)
