"""Features of queries and keys in the low-rank memory of LESS: two or three matmuls each, fused with their GELUs."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import Partial
from pallas_kernels.common import LANES, SUBLANES
from pallas_kernels.op import How, Limit, Op, operation

DTYPES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))


class Remembered(NamedTuple):
    """Memory that includes the evicted pairs, and attention that includes the memory."""

    h: Float[Array, "b h R e"]
    """Sum of psi(k)^T v."""
    z: Float[Array, "b h R"]
    """Sum of psi(k)."""
    out: Float[Array, "b h g e"]
    """Attention in the queries' dtype."""


def phi(
    q: Float[Array, "b h g t d"],
    first: Float[Array, "h g d r"],
    second: Float[Array, "h g r f"],
    **how: Unpack[How],
) -> Float[Array, "b h g t f"]:
    r"""Compute features of queries (LESS, equation 1) :math:`\phi(q) = |\sigma(\sigma(q W_1) W_2)|`, with exact GELU.

    Implementations: `xla` runs everywhere, in any dtype. `pallas` is for TPU and keeps the hidden layer out of device
    memory. It takes queries in float32 or bfloat16, W_1 and W_2 likewise, d a multiple of 8 up to 256, r a multiple of
    128 up to 2048, f up to 128. There is no GPU kernel, because Triton has no exact GELU.

    Args:
        q: queries, rotated.
        first: W_1, one per query head.
        second: W_2; a TPU rounds activations to bfloat16 if the weights are bfloat16.
        how: `implementation` (`auto`, `xla` or `pallas`), `interpret` and `platform`; see `pallas_kernels.op.How`.
    """
    b, h, g, t, d = q.shape
    heads = q.reshape(b, h * g, t, d)
    weights = [x.reshape(h * g, *x.shape[2:]) for x in (first, second)]
    out = QueryFeatures(_per_head(heads), weights)(**how)
    return _per_row(out, b).reshape(b, h, g, t, -1)


def psi(
    k: Float[Array, "b h t d"],
    first: Float[Array, "h d r"],
    second: Float[Array, "h r f"],
    third: Float[Array, "h f f"],
    outer_scale: Float[Array, "h f"],
    residual_scale: Float[Array, "h f"] | None = None,
    **how: Unpack[How],
) -> Float[Array, "b h t f"]:
    r"""Compute features of keys (LESS, equation 2 and section 3.2), with the exact GELU.

    .. math:: k_2 = |s_1| \, \sigma(\sigma(k W_1) W_2), \qquad \psi(k) = |k_2 + s_2 \, k_2 W_3|

    Implementations are those of `phi`.

    Args:
        k: keys, rotated.
        first: W_1, one per KV head.
        second: W_2.
        third: W_3.
        outer_scale: s_1.
        residual_scale: s_2; None for equation 2 as it is printed, :math:`|k_2 W_3|`.
        how: `implementation` (`auto`, `xla` or `pallas`), `interpret` and `platform`; see `pallas_kernels.op.How`.
    """
    weights = [first, second, third, outer_scale, residual_scale]
    return _per_row(KeyFeatures(_per_head(k), weights)(**how), len(k))


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureMap(Op[Float[Array, "m bt f"]]):
    """Features of queries or keys; see `phi` and `psi`, which lay out heads and rows."""

    x: Float[Array, "m bt d"]
    layers: Sequence[Any]
    """Arguments of `phi` or `psi` after the first."""

    backends = ("pallas_tpu",)

    def limits(self, backend: str) -> Iterator[Limit]:
        return layers_limits(self.x, self.layers[0], self.layers[1])

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        (heads, tokens, d), (first, second) = self.x.shape, self.layers[:2]
        settings = dict(m=heads, d=d, r=first.shape[-1], f=second.shape[-1])
        return dict(tokens=tokens), settings | dict(dtype=self.x.dtype.name, weights=first.dtype.name)


@jax.tree_util.register_dataclass
class QueryFeatures(FeatureMap):
    """See `phi`."""

    name = "phi"


@jax.tree_util.register_dataclass
class KeyFeatures(FeatureMap):
    """See `psi`."""

    name = "psi"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Remember(Op[Remembered]):
    r"""Add evicted pairs to LESS's memory, and merge attention to it, in a decode step (equations 3 to 5).

    .. math:: H \leftarrow H + \psi(k)^\top v, \quad z \leftarrow z + \psi(k), \qquad
        a = \frac{\phi(q) H + e^{l} o}{\phi(q) z^\top + e^{l}}

    The update is in place if the caller donates the memory.

    Implementations: `xla` runs everywhere, with the requested form of `phi` and `psi`. `pallas` is for TPU and makes
    one pass over the memory. It takes what `phi` and `psi` take, h a multiple of 8, up to 128 rows, and b g up to 256.

    Args:
        memory: H and z.
        evicted: one pair of each head, the key rotated, and its position; -1 to add nothing.
        q: queries, rotated; the g queries of a group share one memory.
        attended: o and l, attention over the slots [b h g e] and the logarithm of its sum [b h g].
        of_phi: weights of `phi`, by the names of its arguments.
        of_psi: weights of `psi`, likewise.
        how: `implementation` (`auto`, `xla` or `pallas`), `interpret` and `platform`; see `pallas_kernels.op.How`.
    """

    memory: tuple[Float[Array, "b h R e"], Float[Array, "b h R"]]
    evicted: tuple[Float[Array, "b h d"], Float[Array, "b h e"], Int[Array, "b h"]]
    q: Float[Array, "b h g d"]
    attended: Partial
    of_phi: Mapping[str, Array]
    of_psi: Mapping[str, Array]

    name = "less_remember"
    backends = ("pallas_tpu",)
    in_place = MappingProxyType({"memory": operator.attrgetter("h", "z")})

    def limits(self, backend: str) -> Iterator[Limit]:
        yield from layers_limits(self.q, self.of_phi["first"], self.of_phi["second"])
        (b, h, g, _), k = self.q.shape, self.evicted[0]
        yield k.dtype in DTYPES, f"it takes keys in float32 or bfloat16, not {k.dtype}"
        yield h % SUBLANES == 0, f"h={h} KV heads are not a multiple of {SUBLANES}"
        fits = b <= LANES and b * g <= 2 * LANES
        yield fits, f"b={b} rows of g={g} queries are more than {LANES}, or {2 * LANES} in all"

    def workload(self) -> tuple[dict[str, int], dict[str, Any]]:
        (b, h, g, d), first, second = self.q.shape, self.of_phi["first"], self.of_phi["second"]
        settings = dict(h=h, g=g, d=d, r=first.shape[-1], f=second.shape[-1])
        return dict(b=b), settings | dict(dtype=self.q.dtype.name, weights=first.dtype.name)


remember = operation(Remember)


def layers_limits(x: Array, first: Array, second: Array) -> Iterator[Limit]:
    """Yield the kernels' limits on an MLP of two layers."""
    d, hidden, features = x.shape[-1], first.shape[-1], second.shape[-1]
    yield x.size > 0, "there are no tokens"
    yield x.dtype in DTYPES, f"it takes float32 or bfloat16, not {x.dtype}"
    yield first.dtype in DTYPES, f"its weights are float32 or bfloat16, not {first.dtype}"
    yield 8 <= d <= 256 and d % 8 == 0, f"d={d} is not a multiple of 8 up to 256"
    yield hidden % 128 == 0 and hidden <= 2048, f"hidden={hidden} is not a multiple of 128 up to 2048"
    yield features <= 128, f"features={features} are more than 128"


def _per_head(x: Float[Array, "b m t d"]) -> Float[Array, "m bt d"]:
    # A head's weights are most of a decode step's traffic, so all rows share one read of them.
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, x.shape[3])


def _per_row(x: Float[Array, "m bt f"], b: int) -> Float[Array, "b m t f"]:
    return jnp.swapaxes(x.reshape(x.shape[0], b, -1, x.shape[2]), 0, 1)
