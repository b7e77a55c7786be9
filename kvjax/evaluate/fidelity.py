"""How far a policy's attention is from the full model's: Hellinger distance of whole attention rows."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kvjax import decode, policies
from kvjax.attention import alibi_bias, attend, causal_mask
from kvjax.decode import Moving, State, join_state, split_state
from kvjax.evaluate.perplexity import begin
from kvjax.model import Model
from kvjax.models import ModelConfig
from kvjax.plan import Plan
from kvjax.policies.base import Policy
from kvjax.policies.less import Less
from kvjax.policies.wrapper import Wrapper
from kvjax.types import LayerCache, NewTokens, Partial, PyTree, setting, wide


def hellinger(p: Float[Array, "*b n"], q: Float[Array, "*b n"]) -> Float[Array, "*b"]:
    """Distance of probability vectors, 0 to 1 (LESS, eq. 7)."""
    return jnp.sqrt(0.5 * jnp.sum((jnp.sqrt(p) - jnp.sqrt(q)) ** 2, axis=-1))


class ProbeState(struct.PyTreeNode):
    """What a probe remembers of a layer, beside the state of the policy that it looks at."""

    base: Any
    row: Float[Array, "b h g n"]
    """Attention of the newest query over all positions of the text, evicted ones included."""
    psi: Float[Array, "b h n R"]
    """Features of every key that has been read; R = 0 where nothing remembers evicted keys."""


@struct.dataclass(kw_only=True)
class Probe(Wrapper):
    """Any policy, unchanged, that keeps the last attention row of each head as a vector over the text.

    Only for texts that are read token by token, and for policies at original positions.

    Args:
        base: the policy.
        length: tokens of the text.
        config: the model's shape.
    """

    needs_probs: ClassVar = True

    length: int = setting(0)
    config: ModelConfig | None = setting(None)

    def inner(self, state: ProbeState) -> PyTree:
        return state.base

    def outer(self, state: ProbeState, inner: PyTree) -> ProbeState:
        return state.replace(base=inner)

    def bind(self, model: Model) -> Probe:
        return dataclasses.replace(super().bind(model), config=model.config)

    def init(self, new: NewTokens) -> ProbeState:
        rows, heads, groups = new.q.shape[:3]
        dtype = wide(new.k.dtype)
        features = self.base.rank(new) if isinstance(self.base, Less) else 0
        return ProbeState(
            self.base.init(new),
            jnp.zeros((rows, heads, groups, self.length), dtype),
            jnp.zeros((rows, heads, self.length, features), dtype),
        )

    wants = Policy.wants
    weighing = Policy.weighing

    def observe(self, cache: LayerCache, probs: Float[Array, "b h g t c"], new: NewTokens) -> LayerCache:
        seen = super().observe(cache, probs, new)
        if new.q.shape[-2] != 1:
            raise ValueError("a probe reads texts token by token: prefill with prefill_chunk=1.")
        b, h = cache.position.shape[:2]
        row, head = jnp.arange(b)[:, None, None], jnp.arange(h)[None, :, None]
        place = jnp.where(cache.position < 0, self.length, cache.position)
        of_slots = jnp.moveaxis(probs[..., 0, :], 2, 3)
        dense = jnp.zeros((b, h, self.length, probs.shape[2]), probs.dtype)
        dense = jnp.moveaxis(dense.at[row, head, place].set(of_slots, mode="drop"), 2, 3)
        psi = cache.state.psi
        if isinstance(self.base, Less):
            newest = jnp.where(new.position < 0, self.length, new.position)
            added = jnp.moveaxis(self.base.psi(new.layer, new.k), 2, 1)  # two axes of indices apart come first
            psi = psi.at[jnp.arange(b)[:, None], :, newest].set(added, mode="drop")
            dense = self._with_evicted(cache, dense, psi, new)
        return seen.replace(state=seen.state.replace(row=dense, psi=psi))

    def _with_evicted(
        self, cache: LayerCache, dense: Float[Array, "b h g n"], psi: Float[Array, "b h n R"], new: NewTokens
    ) -> Float[Array, "b h g n"]:
        # Each evicted token's phi(q) psi(k), over the denominator of equation 3.
        assert isinstance(self.base, Less)
        b, h = cache.position.shape[:2]
        row, head = jnp.arange(b)[:, None, None], jnp.arange(h)[None, :, None]
        place = jnp.where(cache.position < 0, self.length, cache.position)
        held = jnp.zeros((b, h, self.length), bool).at[row, head, place].set(True, mode="drop")
        read = jnp.arange(self.length) <= new.newest[:, None, None]
        weights = jnp.einsum("bhgr,bhnr->bhgn", self.base.phi(new.layer, new.q)[..., 0, :], psi)
        weights = jnp.where((read & ~held)[:, :, None], weights, 0.0)
        partial = self._slots(cache, new)
        highest = jnp.maximum(partial.lse, 0.0)  # both sums relative to it
        slots = jnp.exp(partial.lse - highest)
        weights = weights * jnp.exp(-highest)
        total = slots + weights.sum(-1, keepdims=True)
        return (dense * slots + weights) / total

    def _slots(self, cache: LayerCache, new: NewTokens) -> Partial:
        # The attention that has just been computed once more, for its log-sum-exp; the compiler sees it is the same.
        assert self.config is not None
        mask = causal_mask(new.position, cache.position, self.config.sliding_window)
        bias = alibi_bias(self.config, new.position[:, None], cache.position)
        return attend(new.q, cache.kv.k, cache.kv.v, mask, bias)[0]


def _rows(state: State) -> list[Array]:
    assert isinstance(state.caches, tuple)
    return [cache.state.row for cache in state.caches]


@jax.jit
def _distances(full: State, probed: State, tokens: Int[Array, "b n"]) -> Float[Array, "n b layers"]:
    (fixed, start), (fixed_probed, start_probed) = split_state(full), split_state(probed)

    def one(
        moving: tuple[Moving, Moving], token: Int[Array, " b"]
    ) -> tuple[tuple[Moving, Moving], Float[Array, "b layers"]]:
        first = decode.step(join_state(fixed, moving[0]), token)[0]
        second = decode.step(join_state(fixed_probed, moving[1]), token)[0]
        apart = [hellinger(p, q).mean((1, 2)) for p, q in zip(_rows(first), _rows(second), strict=True)]
        return (split_state(first)[1], split_state(second)[1]), jnp.stack(apart, axis=-1)

    return jax.lax.scan(one, (start, start_probed), tokens.T)[1]


def fidelity(
    model: Model,
    policy: Policy | str,
    tokens: ArrayLike,
    budget: int | float,
    *,
    plan: Plan | str | None = None,
    seed: int = 0,
) -> Float[np.ndarray, "b n layers"]:
    """Hellinger distance of every attention row to the full model's, mean over heads (LESS, eq. 7, Figure 6).

    Both models read the same text token by token, each on its own cache, so that distances of deeper layers
    include what the policy changed before. An evicted token has probability phi(q) psi(k) over the denominator of
    equation 3 where LESS remembers it, and 0 elsewhere.

    Args:
        model: from `kvjax.load`.
        policy: which tokens stay; with positions='original'.
        tokens: texts [b, n] without padding.
        budget: slots per KV head, or a fraction of n.
        plan: how the budget is spread over the layers.
        seed: of policies that draw numbers.

    Raises:
        ValueError: the policy sees other positions than the full model, or needs a prompt.
    """
    ids = np.asarray(tokens, np.int32)
    chosen = policies.policy(policy) if isinstance(policy, str) else policy
    if chosen.positions != "original":
        raise ValueError(
            f"policy {policies.name_of(chosen)!r} sees positions in its cache, so that its attention rows compare with "
            "nothing; set positions=original."
        )
    rows, length = ids.shape
    full = begin(model, Probe(base=policies.policy("full"), length=length), rows, length, 1.0, seed=seed)
    probed = begin(model, Probe(base=chosen, length=length), rows, length, budget, plan=plan, seed=seed)
    return np.moveaxis(np.asarray(_distances(full, probed, jnp.asarray(ids))), 0, 1)
