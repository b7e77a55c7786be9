"""Initial weights, the loss and its gradient step for training the embedded model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.models import decoder
from kvjax.models.attention import Attention
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import LayerWeights, Weights
from kvjax.models.linear import Linear, Norm
from kvjax.models.mlp import DenseMlp
from kvjax.rope import rotate
from kvjax.types import TokenBatch, setting

Causal = Callable[..., Float[Array, "b h g t d"]]


@struct.dataclass
class Training:
    """Weights in float32, Adam's two moments in bfloat16 (half the bytes of a checkpoint), and the number of steps."""

    weights: Weights
    mean: Weights
    square: Weights
    step: Int[Array, ""]


def initial_weights(config: ModelConfig, key: jax.Array) -> Weights:
    """Return initial weights: matrices at 1/sqrt(fan-in), embeddings at 0.08, output projections at zero."""

    def matrix(out: int, into: int, zero: bool = False) -> Linear:
        nonlocal key
        key, now = jax.random.split(key)
        return Linear(jnp.zeros((out, into)) if zero else jax.random.normal(now, (out, into)) / into**0.5)

    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    layers = tuple(
        LayerWeights(
            attention_norm=Norm(jnp.ones(config.width)),
            mixer=Attention(
                query=matrix(queries, config.width),
                key=matrix(keys, config.width),
                value=matrix(keys, config.width),
                output=matrix(config.width, queries, zero=True),
            ),
            mlp_norm=Norm(jnp.ones(config.width)),
            mlp=DenseMlp(
                gate=matrix(config.mlp_width, config.width),
                up=matrix(config.mlp_width, config.width),
                down=matrix(config.width, config.mlp_width, zero=True),
            ),
        )
        for _ in range(config.layers)
    )
    embedding = 0.08 * jax.random.normal(key, (config.vocab_size, config.width))
    return Weights(embedding, None, layers, Norm(jnp.ones(config.width)), None)


@jax.checkpoint
def xla_causal(
    q: Float[Array, "b h g t d"], k: Float[Array, "b h t d"], v: Float[Array, "b h t d"]
) -> Float[Array, "b h g t d"]:
    """Compute causal attention by einsum; the gradient recomputes probabilities instead of storing them."""
    scores = jnp.einsum("bhgtd,bhsd->bhgts", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones((q.shape[3], q.shape[3]), bool))
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bhgts,bhsd->bhgtd", probs, v)


def cudnn_causal(
    q: Float[Array, "b h g t d"], k: Float[Array, "b h t d"], v: Float[Array, "b h t d"]
) -> Float[Array, "b h g t d"]:
    """Compute causal attention by cuDNN's fused kernel, which never writes the probabilities."""
    b, h, g, t, d = q.shape
    q = q.transpose(0, 3, 1, 2, 4).reshape(b, t, h * g, d)
    out = jax.nn.dot_product_attention(
        q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), is_causal=True, implementation="cudnn"
    )
    return out.reshape(b, t, h, g, d).transpose(0, 2, 3, 1, 4)


def forward(
    weights: Weights, config: ModelConfig, tokens: Int[Array, "b t"], causal: Causal = xla_causal
) -> Float[Array, "b t vocab"]:
    """Return logits of every position, in float32 for any dtype of weights."""
    reading = TokenBatch.of_text(tokens, jnp.full(len(tokens), tokens.shape[1]))
    x = decoder.embed(weights, config, tokens, reading.position)
    for layer in decoder.layers_of(weights, config):
        x, _ = decoder.block(layer, _Whole(causal=causal), reading, x)
    return decoder.unembed(weights, config, x)


class _Whole(LayerCache):
    """Causal attention of whole texts, which stores nothing."""

    causal: Causal = setting(None)

    def attend(
        self, tokens: MixerInput, q: Array, k: Array, v: Array, sink_logits: Array | None
    ) -> tuple[Array, _Whole]:
        rope, positions = tokens.shape.rope, tokens.reading.position
        q, k = rotate(rope, q, positions[:, None, None]), rotate(rope, k, positions[:, None])
        return self.causal(q, k, v), self


def negative_log_likelihood(logits: Float[Array, "b t vocab"], targets: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """Return the nats of each target."""
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def _optimiser(weight_decay: float) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    decay = optax.add_decayed_weights(weight_decay, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    return optax.scale_by_adam(b1=0.9, b2=0.95), decay


def start(config: ModelConfig, seed: int) -> Training:
    """Return a model before its first step."""
    weights = initial_weights(config, jax.random.key(seed))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), weights)
    return Training(weights, zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames=("config", "weight_decay", "dtype", "causal"), donate_argnums=0)
def train_steps(
    training: Training,
    tokens: Int[Array, "n b t1"],
    loss_weights: Int[Array, "n b t"],
    rates: Float[Array, " n"],
    config: ModelConfig,
    weight_decay: float,
    dtype: str,
    causal: Causal,
) -> tuple[Training, dict[str, Float[Array, " n"]]]:
    """Run n optimiser steps in one program.

    Args:
        training: state, donated.
        tokens: ids, one more than is predicted.
        loss_weights: weight of each predicted id; above 1 marks ids to recall or copy.
        rates: learning rate of each step.
        config: the model's shape.
        weight_decay: decoupled, on matrices.
        dtype: dtype of the computation; weights stay in float32.
        causal: the attention.
    """
    adam, decay = _optimiser(weight_decay)

    def loss_of(weights: Weights, ids: jax.Array, w: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        cast = jax.tree.map(lambda x: x.astype(dtype), weights)
        ids, w = ids.astype(jnp.int32), w.astype(jnp.float32)
        logits, targets = forward(cast, config, ids[:, :-1], causal), ids[:, 1:]
        nats = negative_log_likelihood(logits, targets)
        recalled, plain = w > 1, w == 1
        hit = jnp.argmax(logits, -1) == targets
        return (nats * w).sum() / jnp.maximum(w.sum(), 1), {
            "text": (nats * plain).sum() / jnp.maximum(plain.sum(), 1),
            "recalled": (hit & recalled).sum() / jnp.maximum(recalled.sum(), 1),
        }

    def step(training: Training, batch: tuple[jax.Array, ...]) -> tuple[Training, dict[str, jax.Array]]:
        ids, w, rate = batch
        weights: Any = training.weights  # optax's own type for a tree of arrays does not know this one
        (loss, seen), gradient = jax.value_and_grad(loss_of, has_aux=True)(weights, ids, w)
        gradient, _ = optax.clip_by_global_norm(1.0).update(gradient, optax.EmptyState())
        moments = optax.ScaleByAdamState(
            training.step,
            jax.tree.map(lambda x: x.astype(jnp.float32), training.mean),
            jax.tree.map(lambda x: x.astype(jnp.float32), training.square),
        )
        update, moments = adam.update(gradient, moments)
        update, _ = decay.update(update, decay.init(weights), weights)
        weights = jax.tree.map(lambda p, u: p - rate * u, weights, update)
        mean, square = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), m) for m in (moments.mu, moments.nu))  # type: ignore[attr-defined]
        return Training(weights, mean, square, training.step + 1), {"loss": loss, **seen}

    return jax.lax.scan(step, training, (tokens, loss_weights, rates))
