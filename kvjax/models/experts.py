"""Mixture of experts: MLPs of which each token uses a few."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.models.config import Mixture, ModelConfig
from kvjax.models.linear import product
from kvjax.models.mlp import DenseMlp
from kvjax.types import HEADS, SLOTS
from pallas_kernels.attention import wide
from pallas_kernels.op import platform_of

SMALLEST, LARGEST = 4, 64
"""Rows per block on a CPU, if an expert has more than one row on average; other platforms take up to `WIDEST`."""
WIDEST = 256


@struct.dataclass
class Experts:
    """MLP of several experts, of which each token uses those with the highest router logits.

    Every array of `experts` has a leading axis of experts. Every token also uses `shared`, if there is one; each device
    of a mesh that shards experts has some of its columns.
    """

    router: Float[Array, "e width"]
    experts: DenseMlp
    router_bias: Float[Array, " e"] | None = None
    shared: DenseMlp | None = None
    shared_gate: Float[Array, "1 width"] | None = None
    selection_bias: Float[Array, " e"] | None = None

    def __call__(self, x: Float[Array, "b t width"], config: ModelConfig) -> Float[Array, "b t width"]:
        assert config.mixture is not None
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = route(self.router, rows, config.mixture, self.router_bias, self.selection_bias)
        return self.combine(x, weights, chosen, config)

    def combine(
        self, x: Float[Array, "b t width"], weights: Float[Array, "n k"], chosen: Int[Array, "n k"], config: ModelConfig
    ) -> Float[Array, "b t width"]:
        """Return the sum of the outputs of each token's experts, by their weights."""
        rows, count = x.reshape(-1, x.shape[-1]), self.experts.up.weight.shape[0]
        if config.spread.experts:
            local = chosen - jax.lax.axis_index((HEADS, SLOTS)) * count
            chosen = jnp.where((local >= 0) & (local < count), local, count)  # experts of other devices get no block
        mixed = self._mix(rows, weights, chosen, config).astype(x.dtype)
        if self.shared is not None:
            outputs = self.shared.in_blocks(rows, config)
            mixed += outputs if self.shared_gate is None else outputs * jax.nn.sigmoid(product(rows, self.shared_gate))
        total = config.spread.over_devices(mixed) if config.spread.experts else mixed
        return total.reshape(x.shape)

    def _mix(
        self, x: Float[Array, "n width"], weights: Float[Array, "n k"], chosen: Int[Array, "n k"], config: ModelConfig
    ) -> Float[Array, "n width"]:
        """Sum the outputs of each row's experts, one block of rows of one expert after the other.

        A block reads the weights of its expert alone. On a CPU, XLA copies floating-point weights of a block before it
        multiplies them, which is about half of the time for one row; sums of products in one loop, or copies in tiles,
        are no faster. With 32 experts (4 used) or 128 (8), `jax.lax.ragged_dot` took 9 to 300 times as long on a CPU
        for 1 to 128 rows, since it multiplies every row by every expert, and a gather of weights 13 to 39 times for 1
        to 32 rows. On a TPU `ragged_dot` copies all weights to transpose them.
        """
        mixture, uses = config.mixture, chosen.shape[1]
        assert mixture is not None
        experts, uses_of_blocks = blocks(chosen.reshape(-1), self.experts.up.weight.shape[0], mixture.count)

        @jax.checkpoint
        def outputs(expert: Int[Array, ""], use: Int[Array, " block"]) -> Float[Array, "block width"]:
            one: DenseMlp = jax.tree.map(lambda leaf: leaf[expert], self.experts)
            inputs = x.at[use // uses].get(mode="clip")
            factors = weights.reshape(-1).at[use].get(mode="clip")[:, None]
            if mixture.weighted_inputs:
                return one.forward((inputs * factors).astype(x.dtype), config)
            return one.forward(inputs, config) * factors

        def add(
            total: Float[Array, "n width"], block: tuple[Int[Array, ""], Int[Array, " block"]]
        ) -> tuple[Float[Array, "n width"], None]:
            _, use = block
            none = jnp.zeros((len(use), x.shape[1]), total.dtype)
            rows = jax.lax.cond(use[0] < chosen.size, lambda: outputs(*block).astype(total.dtype), lambda: none)
            return total.at[use // uses].add(rows, mode="drop"), None

        return jax.lax.scan(add, jnp.zeros(x.shape, wide(x.dtype)), (experts, uses_of_blocks))[0]


def route(
    router: Float[Array, "e width"],
    x: Float[Array, "n width"],
    mixture: Mixture,
    bias: Float[Array, " e"] | None = None,
    selection_bias: Float[Array, " e"] | None = None,
) -> tuple[Float[Array, "n k"], Int[Array, "n k"]]:
    """Return the weights and the numbers of the experts that each row uses, the best ones first."""
    logits = product(x, router, wide(x.dtype))
    logits = logits if bias is None else logits + bias
    probs = jax.nn.sigmoid(logits) if mixture.probability == "sigmoid" else jax.nn.softmax(logits)
    ranks = logits if mixture.probability == "sigmoid" else probs  # a sigmoid rounds large logits to 1
    if mixture.groups > 1 or selection_bias is not None:
        ranks = in_best_groups(probs if selection_bias is None else probs + selection_bias, mixture)
    best, chosen = jax.lax.top_k(ranks, mixture.used)
    weights = best if ranks is probs else jnp.take_along_axis(probs, chosen, axis=-1)
    if mixture.renormalised:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * mixture.scale, chosen


def in_best_groups(ranks: Float[Array, "n e"], mixture: Mixture) -> Float[Array, "n e"]:
    """Return the ranks of experts in a row's best groups, and -inf for all others."""
    of_groups = ranks.reshape(len(ranks), mixture.groups, -1)
    totals = jax.lax.top_k(of_groups, mixture.best_of_group)[0].sum(-1)
    least = jax.lax.top_k(totals, mixture.used_groups)[0][:, -1:]
    return jnp.where((totals >= least)[..., None], of_groups, -jnp.inf).reshape(ranks.shape)


def blocks(
    chosen: Int[Array, " uses"], local_count: int, count: int
) -> tuple[Int[Array, " blocks"], Int[Array, "blocks block"]]:
    """Sort uses of experts into blocks, each of one expert.

    Args:
        chosen: expert of each use; `local_count` for uses that get no block.
        local_count: number of experts on this device.
        count: number of experts on all devices.

    Returns:
        The expert of each block and its uses. The number of uses stands for none: it fills blocks and whole blocks at
        the end.
    """
    total = chosen.size
    size = block_size(total / count)
    order = jnp.argsort(chosen, stable=True)
    starts = jnp.searchsorted(chosen[order], jnp.arange(local_count + 1))
    ends = jnp.cumsum(-(-jnp.diff(starts) // size))  # blocks up to each expert's last one
    number = jnp.arange(total if size == 1 else total // size + min(local_count, total))
    expert = jnp.minimum(jnp.searchsorted(ends, number, side="right"), local_count - 1)
    before = jnp.where(expert > 0, ends[expert - 1], 0)
    at = (starts[expert] + (number - before) * size)[:, None] + jnp.arange(size)
    real = (at < starts[expert + 1][:, None]) & (number < ends[-1])[:, None]
    return expert, jnp.where(real, order.at[at].get(mode="clip"), total)


def block_size(mean: float) -> int:
    """Return the rows per block for a mean number of rows per expert: the next power of two, within bounds."""
    if mean <= 1:
        return 1
    largest = LARGEST if platform_of(None) == "cpu" else WIDEST
    return min(max(2 ** math.ceil(math.log2(mean)), SMALLEST), largest)
