"""LightKV: fewer slots in higher layers, a lambda-shaped mask, and the strongest tokens of the middle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from kvjax.plan import Arithmetic
from kvjax.policies.base import Policy, check
from kvjax.types import Weighing, setting, wide


@struct.dataclass(kw_only=True)
class LightKV(Policy):
    r"""Sinks and streaming tokens by a mask, the middle by attention of the last queries.

    .. math::
        C_{sink} = C_{streaming} = \frac{C_l}{2 \omega} \quad \text{(eq. 5)}, \qquad
        C_k = C_l - C_{sink} - C_{streaming} \quad \text{(eq. 6)}, \qquad
        s_i = \sum_{j = n - \alpha}^{n} A_{ij} \quad \text{(eq. 4)}

    with C_l from the plan (eq. 1, 2). After a prompt s sums its last alpha queries exactly. Later it slides in memory
    of fixed size: of two sums over alpha queries each, the newer one replaces the older one every alpha tokens, so that
    the last alpha to 2 alpha - 1 queries count.

    Args:
        omega: C_l over the width of the whole mask, at least 1.
        alpha: queries of the observation window; None for C_l, as the report has it.
        middle: `rest` (eq. 6), or `mask` for as many middle tokens as there are sinks (the example of section 4).
        context_limit: length up to which nothing is evicted, in tokens; the buffers then hold as many. None for C_l.
        ratio: slots of the first layer over those of the last, in the default plan.
        offload: keep s in host memory between steps (section 3.4), which costs a transfer each way per step and layer.
    """

    needs_probs = True
    paper = "LightKV, equations 1 to 6"

    omega: float = setting(4.0)
    alpha: int | None = setting(None)
    middle: str = setting("rest")
    context_limit: int | None = setting(None)
    ratio: float = setting(3.0)
    offload: bool = setting(False)

    def __post_init__(self):
        super().__post_init__()
        check(self.omega >= 1, "omega", self.omega, "a number from 1")
        queries = self.alpha is None or (isinstance(self.alpha, int) and self.alpha >= 1)
        check(queries, "alpha", self.alpha, "a number of queries from 1, or None")
        check(self.middle in ("rest", "mask"), "middle", self.middle, "'rest' or 'mask'")
        tokens = self.context_limit is None or (isinstance(self.context_limit, int) and self.context_limit >= 1)
        check(tokens, "context_limit", self.context_limit, "a number of tokens from 1, or None")

    @property
    def offloads(self):
        """Whether s waits in host memory."""
        return self.offload

    def bind(self, model):
        """The policy itself, if there is host memory to offload to."""
        device = next(iter(model.weights.embedding.devices()))
        if self.offload and "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
            raise ValueError(
                f"offload=True needs memory of the kind 'pinned_host', which {device.platform} does not have; "
                "leave offload out."
            )
        return self

    def check_prompt(self, shortest):
        """The observation window must fit."""
        if self.alpha is not None and self.alpha > shortest:
            raise ValueError(
                f"alpha={self.alpha} queries do not fit in a prompt of {shortest} tokens; use alpha up to {shortest}."
            )

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
        """C_l, or the mask and C_sink middle tokens, beyond the context limit; everything up to it."""
        slots = limit
        if self.middle == "mask":
            slots = jnp.minimum(limit, self.sink_slots(limit) + self.recent_slots(limit) + self.mask_width(limit))
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

    def init(self, new):
        """The window that is being filled, counted in alphas from the prompt's end; none yet."""
        return jnp.full(new.k.shape[:2], -(2**30), jnp.int32)

    def _windows(self, cache, new):
        # Which window is being filled [b h], and how many windows ago each query came [b h t].
        alpha = cache.limit if self.alpha is None else jnp.full_like(cache.limit, self.alpha)
        window = (new.read - new.prompt_length)[:, None] // alpha
        return window, window[..., None] - (new.position - new.prompt_length[:, None])[:, None] // alpha[..., None]

    def weighing(self, cache, new):
        """A whole prompt's last alpha queries; the windows of chunks are two sums."""
        if new.q.shape[-2] < cache.capacity:
            return None
        back = self._windows(cache, new)[1]
        return Weighing((new.valid[:, None] & (back == 1)).astype(cache.stats[0].dtype))

    def summed(self, cache, sums, new):
        """Equation 4 at the end of the prompt: the newer window is still empty."""
        older, newer = cache.stats
        return cache.replace(stats=(older + sums.sum(2), newer), state=self._windows(cache, new)[0])

    def observe(self, cache, probs, new):
        """Equation 4."""
        window, back = self._windows(cache, new)
        turns = (window - cache.state)[..., None]
        older, newer = cache.stats
        older = jnp.where(turns == 0, older, jnp.where(turns == 1, newer, 0.0))
        newer = jnp.where(turns == 0, newer, 0.0)
        valid = new.valid[:, None]

        def attention(queries):
            return jnp.einsum("bhgtc,bht->bhc", probs, queries.astype(probs.dtype))

        def look():
            return older + attention(valid & (back == 1)), newer + attention(valid & (back == 0))

        # Most of a prompt's queries are in no window: only the blocks that are cost anything.
        counts = (valid & (back <= 1)).any()
        stats = jax.lax.cond(counts, look, lambda: (older, newer)) if probs.shape[3] > 1 else look()
        return cache.replace(stats=stats, state=window)

    def score(self, cache, new):
        """Score = s."""
        return cache.stats[0] + cache.stats[1]
