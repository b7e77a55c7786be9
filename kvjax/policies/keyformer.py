"""Keyformer: attention with Gumbel noise at a rising temperature, and the most recent tokens."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from kvjax.policies.base import Policy, check
from kvjax.types import Weighing, setting, wide
from pallas_kernels import noise
from pallas_kernels.decode_attention.types import Gumbel


@struct.dataclass(kw_only=True)
class Keyformer(Policy):
    r"""Key tokens by accumulated Gumbel softmax.

    .. math::
        f(i) \leftarrow \alpha f(i) + \sum_g
        \frac{e^{(x_{g,i} + \zeta_i) / \tau}}{\sum_j e^{(x_{g,j} + \zeta_j) / \tau}} \quad \text{(eq. 9)}, \qquad
        \tau = \tau_{init} + t \, \frac{\tau_{end} - \tau_{init}}{T} \quad \text{(eq. 10)}

    x are attention logits, g the query heads of the KV head, T the tokens to generate; a prompt has tau_init.

    Args:
        noise: `gumbel`, `gaussian` of the same mean and deviation, `constant` (which cancels) or `none`.
        tau_init: temperature of the prompt, above 0.
        tau_end: temperature of the last token to be generated, above 0; it stays there afterwards.
        recent: share of the budget for the most recent tokens, 0.2 to 0.3 in the paper.
        fresh_noise: a new draw for each query, as in the published code, instead of one for each token.
        shared: one score for all layers; they need equal budgets.
        damping: alpha, what is left of a score after each token, in (0, 1].
    """

    needs_probs = True
    normalises = True
    paper = "Keyformer, arXiv 2403.09054, equations 9 and 10, Algorithm 1"

    noise: str = setting("gumbel")
    tau_init: float = setting(1.0)
    tau_end: float = setting(2.0)
    recent: int | float = setting(0.25)
    fresh_noise: bool = setting(False)
    shared: bool = setting(False)
    damping: float = setting(1.0)

    def __post_init__(self):
        super().__post_init__()
        kinds = ("gumbel", "gaussian", "constant", "none")
        check(self.noise in kinds, "noise", self.noise, f"one of {', '.join(kinds)}")
        check(self.tau_init > 0, "tau_init", self.tau_init, "a temperature above 0")
        check(self.tau_end > 0, "tau_end", self.tau_end, "a temperature above 0")
        check(0 < self.damping <= 1, "damping", self.damping, "a factor in (0, 1]")

    @property
    def pages(self):
        """Heads may have budgets of their own, unless layers share scores."""
        return not self.shared

    @property
    def couples_layers(self):
        """Layers that share scores have to be known together."""
        return self.shared

    def stats(self, new, state):
        """f = 0; with `shared`, what the layer adds since the last token, and the score of all layers."""
        nothing = jnp.zeros(new.k.shape[:3], wide(new.k.dtype))
        return (nothing, nothing) if self.shared else nothing

    def observe(self, cache, probs, new):
        """Equation 9, from probabilities: softmax((log p + zeta)/tau) = softmax((x + zeta)/tau)."""
        weight, _ = self._damping(new)
        return self._with(cache, self._added(cache, probs, new, weight.astype(probs.dtype)), new)

    def wants(self, new):
        """Equation 9 of one token, with one draw for each key."""
        if self.fresh_noise:
            return "each"
        if self._flat and self.tau_init == self.tau_end == 1:
            return "sum"
        return Gumbel(new.seed, self.temperature(new)[:, 0], new.layer, "none" if self._flat else self.noise)

    def weighing(self, cache, new):
        """Equation 9 with one draw per token, the temperature being tau_init."""
        if self.fresh_noise:
            return None
        dtype = wide(new.q.dtype)
        weights = None if self.damping == 1 else self._damping(new)[0][:, None].astype(dtype)
        return Weighing(weights, None if self._flat else self._drawn(cache, new, dtype), self.tau_init)

    def summed(self, cache, sums, new):
        """Equation 9, given the sum over queries."""
        return self._with(cache, sums.sum(2), new)

    def _with(self, cache, added, new):
        kept = self._damping(new)[1].astype(added.dtype)[:, None, None]
        if self.shared:
            increment, total = cache.stats
            return cache.replace(stats=(kept * increment + added, total))
        return cache.replace(stats=kept * cache.stats + added)

    def _added(self, cache, probs, new, weight):
        if self._flat and self.tau_init == self.tau_end == self.damping == 1:
            return probs.sum((2, 3))
        probs, factor = self._shares(cache, probs, new)
        # p^(1/tau) e^(zeta/tau), normalised and summed, as two contractions that never exist per query and key.
        total = jnp.einsum("bhgtc,bhc->bhgt", probs, factor)
        share = jnp.where(total > 0, weight[:, None, None], 0.0) / jnp.where(total > 0, total, 1.0)
        return factor * jnp.einsum("bhgtc,bhgt->bhc", probs, share)

    def share(self, cache, probs, new):
        """The numerators of equation 9."""
        probs, factor = self._shares(cache, probs, new)
        return probs * factor[:, :, None, None]

    def gather(self, cache, shares, new):
        """Equation 9, given its fractions."""
        weight, _ = self._damping(new)
        return self._with(cache, jnp.einsum("bhgtc,bt->bhc", shares, weight.astype(shares.dtype)), new)

    def _shares(self, cache, probs, new):
        # What belongs to a query and a key, and what to a key alone: equation 9's numerators are their product.
        in_prompt = new.q.shape[-2] > 1
        tau = self.temperature(new).astype(probs.dtype)
        if not (in_prompt and self.tau_init == 1):
            probs = jnp.exp(jnp.log(probs) / tau[:, None, None, :, None])
        factor = jnp.ones(cache.position.shape, probs.dtype)
        if self._flat:
            return probs, factor
        drawn = self._drawn(cache, new, probs.dtype)
        if self.fresh_noise:
            return probs * jnp.exp(drawn / tau[:, None, :, None])[:, :, None], factor
        return probs, jnp.exp(drawn / (self.tau_init if in_prompt else tau[:, :, None]))

    @property
    def _flat(self):
        return self.noise in ("none", "constant")

    def _drawn(self, cache, new, dtype):
        # zeta [b h c], or [b h t c] where each query draws anew.
        query = new.position if self.fresh_noise else None
        uniform = noise.uniform_at(new.seed, new.layer, cache.position, query, new.head).astype(dtype)
        return {"gumbel": noise.gumbel, "gaussian": noise.gaussian}[self.noise](uniform)

    def temperature(self, new):
        """Equation 10 for each token read [b t]."""
        step = jnp.clip(new.position - new.prompt_length[:, None] + 1, 0, new.horizon[:, None])
        return self.tau_init + step * ((self.tau_end - self.tau_init) / new.horizon[:, None])

    def _damping(self, new):
        # Several queries of a prompt count as if they had come one after another.
        valid = new.valid
        age = jnp.maximum(new.position.max(1, keepdims=True) - new.position, 0)
        return jnp.where(valid, self.damping**age, 0.0), self.damping ** valid.sum(1)

    def couple(self, caches):
        """With `shared`: one score, the sum of what all layers added."""
        if not self.shared:
            return caches
        added = sum(cache.stats[0] for cache in caches)
        total = self.damping * caches[0].stats[1] + added
        return tuple(cache.replace(stats=(jnp.zeros_like(total), total)) for cache in caches)

    def score(self, cache, new):
        """Score = f."""
        return cache.stats[1] if self.shared else cache.stats
