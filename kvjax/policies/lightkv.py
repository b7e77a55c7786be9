"""LightKV: fewer slots in higher layers, a lambda-shaped mask, and the strongest tokens of the middle."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from kvjax.plan import Arithmetic
from kvjax.policies.base import Policy, check
from kvjax.types import setting, wide


@struct.dataclass(kw_only=True)
class LightKV(Policy):
    r"""Sinks and streaming tokens by a mask, the middle by attention of the last queries.

    .. math::
        C_{sink} = C_{streaming} = \frac{C_l}{2 \omega} \quad \text{(eq. 5)}, \qquad
        C_k = C_l - C_{sink} - C_{streaming} \quad \text{(eq. 6)}, \qquad
        s_i = \sum_{j = n - \alpha}^{n} A_{ij} \quad \text{(eq. 4)}

    with C_l from the plan (eq. 1, 2). After a prompt s sums its last alpha queries; in decoding it sums the last alpha
    to 2 alpha: two sums are kept, and every alpha tokens the newer one replaces the older one.

    Args:
        omega: C_l over the width of the whole mask, at least 1.
        alpha: queries of the observation window; None for C_l, as the report has it.
        middle: `rest` (eq. 6), or `mask` for as many middle tokens as the mask is wide (the example of section 4).
        context_limit: length up to which nothing is evicted, in tokens; the buffers then hold as many. None for C_l.
        ratio: slots of the first layer over those of the last, in the default plan.
    """

    needs_probs = True
    paper = "LightKV, equations 1 to 6"

    omega: float = setting(4.0)
    alpha: int | None = setting(None)
    middle: str = setting("rest")
    context_limit: int | None = setting(None)
    ratio: float = setting(3.0)

    def __post_init__(self):
        super().__post_init__()
        check(self.omega >= 1, "omega", self.omega, "a number from 1")
        check(self.alpha is None or self.alpha >= 1, "alpha", self.alpha, "a number of queries from 1, or None")
        check(self.middle in ("rest", "mask"), "middle", self.middle, "'rest' or 'mask'")
        positive = self.context_limit is None or self.context_limit >= 1
        check(positive, "context_limit", self.context_limit, "a number of tokens from 1, or None")

    def default_plan(self):
        """Equations 1 and 2."""
        return Arithmetic(self.ratio)

    def mask_width(self, limit):
        """Equation 5: slots of the sinks, and as many of the streaming tokens."""
        return jnp.maximum(1, jnp.floor(limit / (2 * self.omega) + 1e-6)).astype(jnp.int32)

    def sink_slots(self, limit):
        """C_sink, or `sinks` if that is more."""
        return jnp.maximum(self.mask_width(limit), self.sinks)

    def recent_slots(self, limit):
        """C_streaming, or `recent` if that is more."""
        return jnp.maximum(self.mask_width(limit), super().recent_slots(limit))

    @property
    def shrinks(self):
        """Whether a cache gets smaller once the context limit is passed."""
        return self.context_limit is not None

    def allowed(self, limit, read):
        """C_l or twice the mask beyond the context limit, everything up to it."""
        slots = limit
        if self.middle == "mask":
            slots = jnp.minimum(limit, 2 * (self.sink_slots(limit) + self.recent_slots(limit)))
        if self.context_limit is None:
            return slots
        return jnp.where(read[:, None] <= self.context_limit, jnp.maximum(self.context_limit, slots), slots)

    def buffer_slots(self, limit):
        """Room for the context limit."""
        return max(limit, self.context_limit or 0)

    def check_budget(self, smallest):
        """The mask must fit."""
        mask = max(1, int(smallest / (2 * self.omega) + 1e-6))
        recent = int(self.recent * smallest + 1e-6) if isinstance(self.recent, float) else self.recent
        if max(mask, self.sinks) + max(mask, recent) > smallest:
            raise ValueError(
                f"sinks + streaming tokens = {max(mask, self.sinks)} + {max(mask, recent)} do not fit in a budget of "
                f"{smallest} slots per head; use a larger budget or a larger omega."
            )

    def stats(self, new, state):
        """Attention in the older and in the newer window, none yet."""
        nothing = jnp.zeros(new.k.shape[:3], wide(new.k.dtype))
        return nothing, nothing

    def observe(self, cache, probs, new):
        """Equation 4."""
        alpha = cache.limit if self.alpha is None else jnp.full_like(cache.limit, self.alpha)
        older, newer = cache.stats
        in_prompt = new.position < new.prompt_length[:, None]
        last = new.valid[:, None] & (new.position[:, None] >= new.read[:, None, None] - alpha[..., None])
        prompt = (last & in_prompt[:, None]).astype(probs.dtype)
        summed = probs.sum(2)
        older = older + jnp.einsum("bhtc,bht->bhc", summed, prompt)
        if probs.shape[3] > 1:
            return cache.replace(stats=(older, newer))
        step = (new.position - new.prompt_length[:, None])[:, :1]
        turn = ((step > 0) & (step % alpha == 0))[..., None]
        older, newer = jnp.where(turn, newer, older), jnp.where(turn, 0.0, newer)
        generated = (~in_prompt & new.valid).astype(probs.dtype)
        return cache.replace(stats=(older, newer + jnp.einsum("bhtc,bt->bhc", summed, generated)))

    def score(self, cache, new):
        """Score = s."""
        return cache.stats[0] + cache.stats[1]
