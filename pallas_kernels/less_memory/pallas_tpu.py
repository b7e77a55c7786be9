"""Phi and psi of LESS for TPU: one kernel runs all layers of a head, and the hidden layer never leaves the kernel.

Features are transposed, [features, tokens], so that tokens fill the lanes. The grid is (heads, blocks of tokens); a
head's weights are fetched once.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Num

from pallas_kernels.attention import pad_to
from pallas_kernels.blocks import alias_block, input_block, output_block, run
from pallas_kernels.common import LANES, SUBLANES, VMEM_BYTES, chip, padded, tpu_params
from pallas_kernels.decode_attention.kernel_parts import LOWEST, matmul
from pallas_kernels.less_memory.api import KeyFeatures, QueryFeatures, Remember, Remembered

BLOCK = 512
"""Maximum tokens of one grid step."""
FEW = 16
"""Maximum features that are multiplied by W_3 as sums of rows; for more, the matrix unit is faster."""


def phi(x: QueryFeatures, *, interpret: Any) -> Float[Array, "m t f"]:
    first, second = x.layers

    def kernel(x_ref: Any, weights: Any, out_ref: Any) -> None:
        out_ref[0] = jnp.abs(_two_layers(x_ref[0], *(ref[0] for ref in weights)))

    return _call(kernel, x.x, (first, _transposed(second)), interpret, "less_phi")


def psi(x: KeyFeatures, *, interpret: Any) -> Float[Array, "m t f"]:
    first, second, third, *scales = x.layers

    def kernel(x_ref: Any, weights: Any, out_ref: Any) -> None:
        first, second, third, *scales = (ref[0] for ref in weights)
        out_ref[0] = _psi(x_ref[0], first, second, lambda outer: matmul(third, outer, (1, 0)), *scales)

    columns = [scale[..., None] for scale in scales if scale is not None]
    weights = first, _transposed(second), _transposed(third), *columns
    return _call(kernel, x.x, weights, interpret, "less_psi")


def less_remember(x: Remember, *, interpret: Any) -> Remembered:
    """See `api.remember`; the grid is (blocks of eight heads, heads), so each step has one head of all rows."""
    q, attended, of_phi, of_psi = x.q, x.attended, x.of_phi, x.of_psi
    (b, h, g, d), (k, v, position), (memory, total) = q.shape, x.evicted, x.memory
    features, e = memory.shape[2:]

    def heads_of_rows(x: Num[Array, "b m w"], heads: int) -> Any:
        return input_block(x, pl.BlockSpec((b, heads, x.shape[2]), lambda eight, head: (0, eight, 0)))

    def per_head(x: Array, heads: int = 1) -> Any:
        # Heads are the first axis, and rows, if any, the last.
        shape = heads, *x.shape[1:]
        return input_block(
            x, pl.BlockSpec(shape, lambda eight, head: (eight * SUBLANES + head, *(0,) * (len(shape) - 1)))
        )

    memory_spec = pl.BlockSpec((b, 1, features, e), lambda eight, head: (0, eight * SUBLANES + head, 0, 0))
    scales = [of_psi[name] for name in ("outer_scale", "residual_scale") if of_psi.get(name) is not None]

    def of_all_heads(x: Float[Array, "h *f"]) -> Any:
        # Heads last, as XLA stores arrays with few numbers per head.
        x = jnp.moveaxis(x, 0, -1)
        return input_block(x, pl.BlockSpec(x.shape, lambda eight, head: (0,) * x.ndim))

    inputs: dict[str, Any] = {
        "q": heads_of_rows(q.reshape(b, h * g, d), SUBLANES * g),
        "k": heads_of_rows(k, SUBLANES),
        "v": heads_of_rows(v, SUBLANES),
        "out": heads_of_rows(attended.out.reshape(b, h * g, e), SUBLANES * g),
        "lse": heads_of_rows(attended.lse.reshape(b, h * g, 1), SUBLANES * g),
        "position": heads_of_rows(position[..., None], SUBLANES),
        "h": input_block(memory, memory_spec),
        "z": per_head(total.transpose(1, 2, 0)),
        "phi_first": per_head(of_phi["first"].reshape(h * g, d, -1), g),
        "phi_second": per_head(_transposed(of_phi["second"].reshape(h * g, -1, features)), g),
        "psi_first": per_head(of_psi["first"]),
        "psi_second": per_head(_transposed(of_psi["second"])),
        "psi_third": of_all_heads(of_psi["third"]) if features <= FEW else per_head(_transposed(of_psi["third"])),
        "psi_scales": [of_all_heads(scale) for scale in scales],
    }
    scratch = {name: inputs[name].spec.block_shape[1:] for name in ("q", "k", "v", "out", "lse", "position")}
    scratch["merged"] = scratch["out"]
    outputs = {name: alias_block(inputs[name]) for name in ("h", "z")}
    outputs["out"] = output_block(inputs["out"].array.shape, inputs["out"].spec, q.dtype)
    results = run(
        functools.partial(_remember, groups=g),
        (inputs,),
        outputs,
        grid=(h // SUBLANES, SUBLANES),
        scratch_shapes=[{name: pltpu.VMEM((b * m, width), jnp.float32) for name, (m, width) in scratch.items()}],
        compiler_params=tpu_params(1, 1, VMEM_BYTES),
        interpret=interpret,
        name="less_remember",
    )
    return Remembered(results["h"], results["z"].transpose(2, 0, 1), results["out"].reshape(b, h, g, e))


def _remember(refs: Any, outputs: Any, scratch: Any, *, groups: int) -> None:
    eight, head, rows = pl.program_id(0), pl.program_id(1), refs["h"].shape[0]

    @pl.when(head == 0)
    def _() -> None:
        # A row's heads are along sublanes; a strided read takes every eighth from there, if numbers have 32 bits.
        for name in ("q", "k", "v", "out", "lse", "position"):
            scratch[name][...] = refs[name][...].astype(jnp.float32).reshape(scratch[name].shape)

    def of_head(name: str, which: Any, heads: int) -> Float[Array, "b w"]:
        return scratch[name][pl.ds(which, rows, stride=heads), :]

    def weight(x: Float[Array, "*f h"]) -> Float[Array, "*f 1"]:
        is_head = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == eight * SUBLANES + head
        return jnp.where(is_head, x, 0.0).sum(-1, keepdims=True)

    def mix(outer: Float[Array, "f b"]) -> Float[Array, "f b"]:
        if len(outer) > FEW:
            return matmul(refs["psi_third"][0], outer, (1, 0))
        third = weight(refs["psi_third"][...])
        return _total(third[i] * outer[i : i + 1] for i in range(len(outer)))

    scales = [weight(ref[...]) for ref in refs["psi_scales"]]
    features = _psi(of_head("k", head, SUBLANES), refs["psi_first"][0], refs["psi_second"][0], mix, *scales)
    features = jnp.where(_transposed_vector(of_head("position", head, SUBLANES)) >= 0, features, 0.0)
    z = refs["z"][0] + features
    outputs["z"][0] = z
    shares = []
    for i in range(groups):
        at = head * groups + i
        phi = jnp.abs(_two_layers(of_head("q", at, SUBLANES * groups), refs["phi_first"][i], refs["phi_second"][i]))
        mass = (phi * z).sum(0, keepdims=True)
        nonempty = mass > 0
        mass = jnp.where(nonempty, mass, 1.0)
        # Both are relative to the larger one; an empty part adds nothing.
        memory_weight = jnp.where(nonempty, jnp.log(mass), LOWEST)
        slots_weight = jnp.maximum(_transposed_vector(of_head("lse", at, SUBLANES * groups)), LOWEST)
        top = jnp.maximum(memory_weight, slots_weight)
        memory_weight = jnp.where(nonempty, jnp.exp(memory_weight - top), 0.0)
        slots_weight = jnp.exp(slots_weight - top)
        share = 1 / (memory_weight + slots_weight)
        shares.append((phi * (memory_weight * share / mass), slots_weight * share))
    v = of_head("v", head, SUBLANES)
    low: list[list[Array]] = [[] for _ in shares]
    for first in range(0, rows, SUBLANES):
        parts: list[list[Array]] = [[] for _ in shares]
        for row in range(first, min(first + SUBLANES, rows)):
            one = slice(row, row + 1)
            h = refs["h"][row, 0] + features[:, one] * v[one]
            outputs["h"][row, 0] = h
            for part, (phi, _) in zip(parts, shares, strict=True):
                part.append(phi[:, one] * h)
        for sums, part in zip(low, parts, strict=True):
            sums.append(_sums(part))
    for i, (sums, (_, slots_weight)) in enumerate(zip(low, shares, strict=True)):
        at = head * groups + i
        merged = of_head("out", at, SUBLANES * groups) * _transposed_vector(slots_weight) + jnp.concatenate(sums)
        scratch["merged"][pl.ds(at, rows, stride=SUBLANES * groups), :] = merged

    @pl.when(head == SUBLANES - 1)
    def _() -> None:
        out = outputs["out"]
        out[...] = scratch["merged"][...].reshape(out.shape).astype(out.dtype)


def _sums(parts: Sequence[Float[Array, "f e"]]) -> Float[Array, "n e"]:
    """Sum each row's part over features, and put each sum in its row's sublane."""
    features, rows = len(parts[0]), len(parts)
    if rows < SUBLANES or features % SUBLANES:
        return jnp.concatenate([part.sum(0, keepdims=True) for part in parts])
    sums = [_total(part[i : i + SUBLANES] for i in range(0, features, SUBLANES)) for part in parts]
    sublane = jax.lax.broadcasted_iota(jnp.int32, sums[0].shape, 0)
    for distance in (4, 2, 1):
        # Merges pairs of arrays: each sublane of the result is the sum of two sublanes of one row.
        first = sublane & distance == 0
        sums = [
            jnp.where(first, a, b) + jnp.where(first, pltpu.roll(a, SUBLANES - distance, 0), pltpu.roll(b, distance, 0))
            for a, b in zip(sums[:distance], sums[distance:], strict=True)
        ]
    return sums[0]


def _total(parts: Iterable[Array]) -> Array:
    return functools.reduce(operator.add, parts)


def _transposed_vector(x: Array) -> Array:
    """Transpose a row [1 n] to a column [n 1], or the other way, by a sum along its longer axis."""
    n, axis = x.size, 0 if x.shape[1] == 1 else 1
    places = [jax.lax.broadcasted_iota(jnp.int32, (n, n), axis) for axis in (0, 1)]
    return jnp.where(places[0] == places[1], x, 0.0).sum(axis, keepdims=True)


def _call(
    kernel: Callable[..., None], x: Float[Array, "m t d"], weights: tuple[Array, ...], interpret: Any, name: str
) -> Float[Array, "m t f"]:
    (m, t, d), features = x.shape, weights[1].shape[1]
    # Few tokens, as in a decode step, form one block of whole rows, which need not fill the lanes.
    size = padded(t, SUBLANES) if t < LANES else min(BLOCK, padded(t, LANES))
    tokens = padded(t, size)
    weight_blocks = [
        input_block(weight, pl.BlockSpec((1, *weight.shape[1:]), lambda m, i: (m, 0, 0))) for weight in weights
    ]
    out = run(
        kernel,
        (input_block(pad_to(x, 1, tokens), pl.BlockSpec((1, size, d), lambda m, i: (m, i, 0))), weight_blocks),
        output_block((m, features, tokens), pl.BlockSpec((1, features, size), lambda m, i: (m, 0, i))),
        grid=(m, tokens // size),
        compiler_params=tpu_params(2),
        interpret=interpret,
        name=name,
    )
    return jnp.swapaxes(out[..., :t], 1, 2)


def _two_layers(x: Float[Array, "t d"], first: Float[Array, "d r"], second: Float[Array, "f r"]) -> Float[Array, "f t"]:
    tokens = len(x)
    if tokens == 1:  # with one token Mosaic multiplies vectors, which it cannot in 16 bits
        x = jnp.broadcast_to(x, (SUBLANES, x.shape[1]))
    inner = _gelu(matmul(x.astype(first.dtype), first, (1, 0)))
    return _gelu(matmul(second, inner.astype(second.dtype), (1, 1))[:, :tokens])


def _gelu(x: Array) -> Array:
    tpu = chip()
    if tpu is not None and tpu.generation >= 6:  # it has an instruction for erf
        return 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2)))
    # Abramowitz and Stegun, 7.1.26, for erfc: its error is 3e-7 here, and it takes fewer operations than `erf`.
    size = jnp.abs(x)
    t = 1 / (1 + (0.3275911 * math.sqrt(0.5)) * size)
    poly = jnp.zeros_like(x)
    for coefficient in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly = t * (poly + 0.5 * coefficient)
    return jnp.maximum(x, 0) - size * poly * jnp.exp(-0.5 * x * x)


def _psi(
    x: Float[Array, "t d"],
    first: Float[Array, "d r"],
    second: Float[Array, "f r"],
    mix: Callable[[Float[Array, "f t"]], Float[Array, "f t"]],
    outer_scale: Float[Array, "f 1"],
    residual_scale: Float[Array, "f 1"] | None = None,
) -> Float[Array, "f t"]:
    outer = jnp.abs(outer_scale) * _two_layers(x, first, second)
    mixed = mix(outer)
    return jnp.abs(mixed if residual_scale is None else outer + residual_scale * mixed)


def _transposed(x: Float[Array, "m r f"]) -> Float[Array, "m f r"]:
    return jnp.swapaxes(x, 1, 2)
