"""Keyformer (arXiv 2403.09054, Algorithm 1): attention with Gumbel noise at a rising temperature."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.h2o import Accumulated
from kvjax.methods.register import register_score
from kvjax.policies import AttentionSum, Noise, Requirements
from kvjax.types import Heads, LayerTokens, Limit, above_zero, derived, number, setting, written

_NOISES = ("gumbel", "gaussian", "constant", "none")


@register_score("keyformer", paper="Keyformer, eq. 9, 10", group="ranked by attention at every token", recent=0.25)
class GumbelSoftmax(Accumulated):
    r"""Key tokens by accumulated Gumbel softmax.

    .. math::
        f(i) \leftarrow \alpha f(i) + \sum_g
        \frac{e^{(x_{g,i} + \zeta_i) / \tau}}{\sum_j e^{(x_{g,j} + \zeta_j) / \tau}} \quad \text{(eq. 9)}, \qquad
        \tau = \tau_{init} + t \, \frac{\tau_{end} - \tau_{init}}{T} \quad \text{(eq. 10)}

    x are attention logits, g the query heads of the KV head, and T the number of tokens to generate; prompts and turns
    have tau_init. A constant zeta cancels in equation 9, so `constant` and `none` are the same policy, although Table 4
    reports different numbers for them.

    When: as an alternative to `h2o` at a quarter of the slots or more, where both have a perplexity of 14.9 (SmolLM2 on
    WikiText-2); with a tenth it is worse, 20.5 against 18.0.

    Args:
        noise: `gumbel`, `gaussian` of the same mean and deviation, `constant` (which cancels) or `none`.
        tau_init: temperature of the prompt, above 0.
        tau_end: temperature of the last planned token and of all later ones, above 0.
        fresh_noise: True to draw noise for each query, as in the published code, instead of once for each token.
        shared: True for one score for all layers, which then need equal budgets.
        damping: alpha, factor of each score per new token, in (0, 1].
    """

    noise: str = setting("gumbel", Limit(lambda noise: noise in _NOISES, f"one of {', '.join(_NOISES)}"))
    tau_init: float = setting(1.0, above_zero("a temperature"))
    tau_end: float = number(2.0, above_zero("a temperature"))
    fresh_noise: bool = setting(False)
    shared: bool = setting(False)
    damping: float = number(1.0, Limit(lambda alpha: 0 < alpha <= 1, "a factor in (0, 1]"))
    steady: bool = derived(False)
    """True if the temperature is constant, which makes programs smaller."""
    damped: bool = derived(False)

    def __post_init__(self) -> None:
        if written(self.tau_end, self.damping):
            object.__setattr__(self, "steady", self.tau_init == self.tau_end)
            object.__setattr__(self, "damped", self.damping != 1)

    @property
    def requires(self) -> Requirements:
        """Layers that share a score hold the same tokens."""
        return Requirements(shared_slots="layers" if self.shared else "none")

    def attention_stats(self, heads: Heads, new: LayerTokens) -> AttentionSum:
        """Request the fractions of equation 9; queries of a block are damped as if they had been read one by one."""
        weights = None
        if self.damped and new.position.shape[1] > 1:
            weights = jnp.where(new.valid, self.damping**new.age, 0.0)[:, None]
        noise = None if self.noise in ("none", "constant") else Noise(self.noise, self.fresh_noise)
        return AttentionSum(weights, self._temperature(new), noise, over="model" if self.shared else "group")

    def _temperature(self, new: LayerTokens) -> float | Float[Array, "b t"]:
        # Equation 10.
        if new.given or self.steady:
            return float(self.tau_init)
        step = jnp.clip(new.position - new.prompt_length[:, None] + 1, 0, new.horizon[:, None])
        return self.tau_init + step * ((self.tau_end - self.tau_init) / new.horizon[:, None])

    def retained(self, new: LayerTokens) -> Float[Array, " b"] | None:
        return self.damping ** new.valid.sum(1) if self.damped else None
