"""Measurements outside of grids: attention of the full model, FastGen's choices, and sizes in bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments import lowrank_oracle
from experiments.fastgen.measurements import profile_of
from experiments.less.checkpoints import Kernels
from kvjax import methods
from kvjax.cache.buffers import allocated_bytes
from kvjax.cache.slots import empty_slots
from kvjax.methods.fastgen import Profiled
from kvjax.model import Model
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.types import LayerConfig
from pallas_kernels.attention import attend

TOP = (10, 40, 50)
"""Shares of the tokens, in per cent, for sums of attention."""
THRESHOLDS = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)
"""Shares of a query's largest score (Keyformer, A.3)."""
SINKS, NEWEST = 4, 1 / 16
"""First tokens, and the share of a text that counts as newest."""
DRAWS = 64
"""Draws of noise for the mean of the softmax."""
LATER = 30
"""Tokens after which FastGen chooses again (Figure 4)."""
THRESHOLD = 0.95
"""T of Figure 3."""


@functools.partial(jax.jit, static_argnames="config")
def _watched(weights: Weights, config: ModelConfig, tokens: Int[Array, "b n"]) -> dict[str, Array]:
    length = tokens.shape[1]
    made: list[dict[str, Array]] = []

    def attention(q: Array, k: Array, v: Array, position: Array, shape: LayerConfig) -> Array:
        spec, everyone = shape.spec, position[:, None]
        mask = spec.mask(position, everyone)
        partial, probs = attend(q, k, v, mask, spec, spec.bias(everyone, everyone))
        made.append(attention_statistics(probs[..., length // 2 :, :], mask[:, :, None, length // 2 :]))
        return partial.out

    lowrank_oracle.read(weights, config, tokens, attention)
    return {name: jnp.stack([layer[name] for layer in made], axis=-1) for name in made[0]}


def attention_statistics(probs: Float[Array, "b h g t n"], visible: Array) -> dict[str, Array]:
    """Return statistics of one layer's attention, as means over texts, heads and queries."""
    length = probs.shape[-1]
    received = jnp.sort(probs.sum(-2), axis=-1, descending=True)
    gathered = jnp.cumsum(received, axis=-1) / received.sum(-1, keepdims=True)
    largest = probs.max(-1, keepdims=True)
    counted = jnp.broadcast_to(visible, probs.shape).sum()
    newest = jnp.cumsum(visible[..., ::-1], axis=-1)[..., ::-1] <= length * NEWEST
    final = jnp.log(probs[..., -1, :])
    noise = jax.random.gumbel(jax.random.key(0), (DRAWS, length), final.dtype)
    even = jax.lax.map(lambda drawn: jax.nn.softmax(final + drawn), noise).mean(0)
    return {
        **{f"top_{share}": gathered[..., max(1, length * share // 100) - 1].mean() for share in TOP},
        "sparsity": jnp.stack([((probs <= share * largest) & visible).sum() / counted for share in THRESHOLDS]),
        "sinks": probs[..., :SINKS].sum(-1).mean(),
        "newest": jnp.where(newest & visible, probs, 0.0).sum(-1).mean(),
        "entropy": _entropy(jnp.exp(final)).mean(),
        "entropy_gumbel": _entropy(even).mean(),
    }


def _entropy(p: Float[Array, "*b n"]) -> Float[Array, "*b"]:
    return -jnp.sum(jax.scipy.special.xlogy(p, p), axis=-1)


def attention(model: Model, tokens: Int[np.ndarray, "b n"]) -> dict[str, Any]:
    """Return attention statistics of the full model's queries in the second half of texts, by layer.

    Args:
        model: that reads.
        tokens: texts without padding.

    Returns:
        `top_10`, `top_40`, `top_50`: share of a head's attention on the tokens with most of it (Keyformer, Figure
        3b); `sparsity` [thresholds][layers]: scores of visible tokens at or below a share of the query's largest
        (Keyformer, Figures 3a and 11); `sinks`, `newest`: on the first 4 tokens and on the newest 1/16 of the text
        (LightKV, Figure 1); `entropy`, `entropy_gumbel`: of the last query's softmax, and of its mean over Gumbel noise
        (Keyformer, eq. 8), in nats.
    """
    # One text after another: n x n attention of all heads is large.
    each = [jax.device_get(_watched(model.weights, model.config, jnp.asarray(row[None]))) for row in tokens]
    return {name: np.mean([one[name] for one in each], axis=0).round(6).tolist() for name in each[0]}


def profile(model: Model, tokens: Int[np.ndarray, "b n"]) -> dict[str, Any]:
    """Return FastGen's choices and recovered attention, after the first half of texts and `LATER` tokens later.

    Args:
        model: that reads.
        tokens: texts without padding, longer than twice `LATER`.
    """
    policy = methods.policy("fastgen", threshold=THRESHOLD)
    half = tokens.shape[1] // 2
    now, later = (profile_of(model, policy, tokens[:, :end]) for end in (half, half + LATER))
    assert isinstance(policy.plan, Profiled)
    return now | {f"{name}_later": value for name, value in later.items()} | {"choices": len(policy.plan.choices)}


def memory(model: Model, kernels: Kernels | None) -> dict[str, Any]:
    """Return bytes of a slot's pair and of its accumulated score, and parameters of the model and of LESS's kernels.

    Args:
        model: the model; slots of its first layer are measured.
        kernels: LESS's kernels, or None.
    """
    layer, dtype = model.config.layer_configs[0], model.weights.dtype
    accumulated = functools.partial(empty_slots, methods.policy("h2o"), layer, 0, slots=1, dtype=dtype)
    slot = jax.eval_shape(accumulated, limit=jnp.ones((1, layer.kv_heads), jnp.int32))
    count: Callable[[Any], int] = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    return {
        "pair_bytes": allocated_bytes(slot.kv),
        "score_bytes": allocated_bytes(slot.slots.score),
        "parameters": count(model.weights),
        "kernel_parameters": None if kernels is None else count(kernels.params),
    }
