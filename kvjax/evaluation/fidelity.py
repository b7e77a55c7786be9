"""Fidelity of a model with a policy to the full one: its attention rows and its next-token distributions."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.evaluation.perplexity import begin
from kvjax.inference.cache import Cache
from kvjax.inference.state import State, cache_bytes, full_cache_bytes
from kvjax.methods.less.memory import LowRankMemory
from kvjax.methods.registry import name_of
from kvjax.methods.registry import policy as policy_by_name
from kvjax.model import Model
from kvjax.policies.allocation import Plan
from kvjax.policies.base import label_of
from kvjax.policies.policy import Policy
from kvjax.types import LayerConfig, LayerTokens, Parts, View, restored, wide
from pallas_kernels.attention import attend
from pallas_kernels.operands import values


def hellinger(p: Float[Array, "*b n"], q: Float[Array, "*b n"]) -> Float[Array, "*b"]:
    """Return the Hellinger distance of probability vectors, 0 to 1 (LESS, eq. 7)."""
    return jnp.sqrt(0.5 * jnp.sum((jnp.sqrt(p) - jnp.sqrt(q)) ** 2, axis=-1))


@struct.dataclass
class Watched(Policy):
    """Wrapper of a policy that also stores the query of each token in its slot."""

    def slots(self, new: LayerTokens, state: Parts) -> Parts:
        """Return the slot state of each new token, with its query in the residual's unused field."""
        return super().slots(new, state).replace(residual=jnp.moveaxis(new.q, 3, 2))


def watched(policy: Policy) -> Watched:
    """Return a `Watched` copy of a policy."""
    return Watched(**{field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)})  # type: ignore[arg-type]


Features = list[Float[Array, "b h n R"] | None]
"""Feature map psi of every key that has been read, for each layer; None without LESS."""

Carry = tuple[list[Cache], list[Features]]
"""State that changes at each step, for each of the two models."""


def attention_row(
    config: LayerConfig,
    policy: Policy,
    view: View,
    newest: Int[Array, " b"],
    length: int,
    psi: Float[Array, "b h n R"] | None,
) -> tuple[Float[Array, "b h g n"], Float[Array, "b h n R"] | None]:
    """Return the newest query's attention to all positions, evicted ones included, and LESS's psi of all keys."""
    is_newest = (view.position == newest[:, None, None]).astype(view.slots.residual.dtype)
    q = jnp.einsum("bhcgd,bhc->bhgd", view.slots.residual, is_newest)[:, :, :, None]
    kv = restored(config.rope, view.kv, view.position, view.state.codec, q.dtype)
    spec, place = config.spec, newest[:, None]
    mask, bias = spec.mask(place, view.position), spec.bias(place[:, None], view.position)
    keys = values(kv.k, q.dtype)
    partial, probs = attend(q, keys, values(kv.v, q.dtype), mask, spec, bias)
    dense = jnp.moveaxis(by_position(jnp.moveaxis(probs[..., 0, :], 2, 3), view.position, length), 2, 3)
    if psi is None:
        return dense, None
    # phi(q) psi(k) of each evicted token, over the denominator of equation 3.
    assert isinstance(policy.residual, LowRankMemory)
    key = jnp.einsum("bhcd,bhc->bhd", keys, is_newest)[:, :, None]
    psi = jax.vmap(lambda all_, one, at: all_.at[:, at].set(one))(
        psi, policy.residual.psi(key)[:, :, 0].astype(psi.dtype), newest
    )
    evicted = ~held_tokens(view, length) & (jnp.arange(length) <= newest[:, None, None])
    weights = jnp.einsum("bhgr,bhnr->bhgn", policy.residual.phi(q)[..., 0, :], psi)
    weights = jnp.where(evicted[:, :, None], weights, 0.0)
    highest = jnp.maximum(partial.lse, 0.0)  # both sums are relative to it
    slots, weights = jnp.exp(partial.lse - highest), weights * jnp.exp(-highest)
    return (dense * slots + weights) / (slots + weights.sum(-1, keepdims=True)), psi


class Compared(NamedTuple):
    """Differences from the full model after each token of some texts."""

    hellinger: Float[np.ndarray, "b n layers"]
    """Distance of attention rows, mean over heads (LESS, eq. 7)."""
    attention_kept: Float[np.ndarray, "b n layers"]
    """Share of the full model's attention on tokens that the policy holds, mean over heads."""
    divergence: Float[np.ndarray, "b n"]
    """Kullback-Leibler divergence of the next token's distribution from the full model's, in nats."""
    agrees: Bool[np.ndarray, "b n"]
    """True if the likeliest next token is the same."""
    cache_bytes: int
    """Bytes allocated for all rows, without the queries kept for this comparison."""
    full_cache_bytes: int
    """Bytes that `full` allocates for them."""


@jax.jit
def _compared(full: State, probed: State, tokens: Int[Array, "b n"]) -> tuple[Array, Array, Array, Array]:
    config, length = full.config, tokens.shape[1]
    states = (full, probed)

    def features(state: State) -> Features:
        if state.policy.residual is None:
            return [None] * len(config.storing)
        normalizers = (heads.state.residual.z for heads in state.cache.attending)
        return [jnp.zeros((*z.shape[:2], length, z.shape[-1]), z.dtype) for z in normalizers]

    def one(carry: Carry, token: Int[Array, " b"]) -> tuple[Carry, tuple[Array, Array, Array, Array]]:
        caches, features_after, rows, masks, says = [], [], [], [], []
        for state, before, psi in zip(states, *carry, strict=True):
            after, logits = state.decoder.step(before, token)
            masks.append([held_tokens(view, length) for view in after.slots])
            says.append(jax.nn.log_softmax(logits.astype(wide(logits.dtype))))
            layers = zip(config.storing, after.slots, psi, strict=True)
            rows_and_features = [
                attention_row(config.layer(layer), state.policy.layer(layer), view, before.position, length, features)
                for layer, view, features in layers
            ]
            caches.append(after)
            rows.append([row for row, _ in rows_and_features])
            features_after.append([of_layer for _, of_layer in rows_and_features])
        distances = [hellinger(p, q).mean((1, 2)) for p, q in zip(*rows, strict=True)]
        attention_kept = [
            jnp.where(mask[:, :, None], p, 0.0).sum(-1).mean((1, 2)) for p, mask in zip(rows[0], masks[1], strict=True)
        ]
        divergence = jnp.sum(jnp.exp(says[0]) * (says[0] - says[1]), axis=-1)
        agrees = jnp.argmax(says[0], axis=-1) == jnp.argmax(says[1], axis=-1)
        distance, share = (jnp.stack(layers, axis=-1) for layers in (distances, attention_kept))
        return (caches, features_after), (distance, share, divergence, agrees)

    start = [state.cache for state in states], [features(state) for state in states]
    return jax.lax.scan(one, start, tokens.T)[1]


def held_tokens(view: View, length: int) -> Bool[Array, "b h n"]:
    """Return a mask of the positions of a text that have a slot."""
    return by_position(view.live, view.position, length)


def by_position(slots: Shaped[Array, "b h c *r"], position: Int[Array, "b h c"], length: int) -> Array:
    """Scatter values of slots to the positions of their tokens [b h n *r]; a position without a slot gets 0."""
    rows, heads = position.shape[:2]
    row, head = jnp.arange(rows)[:, None, None], jnp.arange(heads)[:, None]
    place = jnp.where(position >= 0, position, length)
    return jnp.zeros((rows, heads, length, *slots.shape[3:]), slots.dtype).at[row, head, place].set(slots, mode="drop")


def fidelity(
    model: Model,
    policy: Policy | str,
    tokens: ArrayLike,
    budget: int | float,
    *,
    plan: Plan | str | None = None,
    seed: int = 0,
) -> Compared:
    """Compare a model with a policy to the full one after each token of the same texts (LESS, eq. 7, Figure 6).

    Both models read the text token by token, each on its own cache. Distances of deeper layers therefore include
    the changes of earlier layers. An evicted token has probability phi(q) psi(k) over the denominator of equation 3
    with LESS, and 0 without. The arguments are those of `perplexity`.
    """
    ids, chosen = np.asarray(tokens, np.int32), policy_by_name(policy)
    if chosen.codec.positions != "original":
        raise ValueError(
            f"policy {name_of(chosen)!r} rotates keys by positions in its cache, so its attention is not comparable; "
            "set positions=original."
        )
    if chosen.selection is not None:
        raise ValueError(
            f"policy {name_of(chosen)!r} attends to a selection of its tokens, which its attention rows would not "
            "show; leave the selection out."
        )
    if not isinstance(chosen.residual, LowRankMemory | None):
        raise ValueError(f"residual {label_of(chosen.residual)} does not tell evicted tokens apart; use less.")
    rows, length = ids.shape
    full = begin(model, watched(policy_by_name("full")), rows, length, 1.0, seed=seed)
    probed = begin(model, watched(chosen), rows, length, budget, plan=plan, seed=seed)
    plain = begin(model, chosen, rows, length, budget, plan=plan, seed=seed)
    measured = (np.moveaxis(np.asarray(array), 0, 1) for array in _compared(full, probed, jnp.asarray(ids)))
    distances, attention_kept, divergence, agrees = measured
    return Compared(distances, attention_kept, divergence, agrees, cache_bytes(plain), full_cache_bytes(plain))
