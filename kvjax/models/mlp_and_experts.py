"""An MLP and a mixture of experts side by side in one block."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Float

from kvjax.models.config import ModelConfig
from kvjax.models.experts import Experts, route
from kvjax.models.linear import Norm, normalise
from kvjax.models.mlp import DenseMlp


@struct.dataclass
class MlpAndExperts:
    """MLP that every token runs through, and experts, whose normalized outputs are added (Gemma 4).

    Both read the hidden states of the block through norms of their own, and so does the router, whose norm has the
    scale `router_scale`. `expert_scales` multiply the weights of experts.
    """

    dense_norm: Norm
    dense: DenseMlp
    dense_post_norm: Norm
    router_scale: Float[Array, " width"]
    experts_norm: Norm
    experts: Experts
    experts_post_norm: Norm
    expert_scales: Float[Array, " e"]

    def __call__(self, x: Float[Array, "b t width"], config: ModelConfig) -> Float[Array, "b t width"]:
        assert config.mixture is not None
        dense = self.dense(normalise(self.dense_norm, x, config), config)
        routed = normalise(None, x, config) * (self.router_scale * config.width**-0.5).astype(x.dtype)
        weights, chosen = route(self.experts.router, routed.reshape(-1, x.shape[-1]), config.mixture)
        weights = weights * self.expert_scales[chosen]
        mixed = self.experts.combine(normalise(self.experts_norm, x, config), weights, chosen, config)
        return normalise(self.dense_post_norm, dense, config) + normalise(self.experts_post_norm, mixed, config)
