"""A model and a policy bound to it, and each of its layers: the arguments that programs share."""

from __future__ import annotations

from typing import Self

from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from kvjax.models.config import ModelConfig
from kvjax.models.decoder import LayerWeights, Weights
from kvjax.models.sharding import on_device
from kvjax.policies.policy import Policy
from kvjax.types import Kernels, LayerConfig, setting


class Bound(struct.PyTreeNode):
    """Weights, a policy bound to them, and static settings; no program changes them."""

    weights: Weights
    policy: Policy
    config: ModelConfig = setting(None)
    kernels: Kernels = setting(Kernels())
    mesh: Mesh | None = setting(None)
    """Devices that shard the arrays, from `kvjax.models.sharding.program_mesh`; None for one device."""

    def here(self, *, shares_slots: bool = False) -> Self:
        """Return the same for the program of one device; see `on_device`."""
        return self.replace(config=on_device(self.config, self.mesh, shares_slots=shares_slots))

    @property
    def layers(self) -> list[Layer]:
        """All layers, each with the policy as it uses it."""
        like = [self.config.layer_configs.index(shape) for shape in self.config.layer_configs]
        return [
            Layer(weights, self.policy.layer(number), number, self.config, like[number])
            for number, weights in enumerate(self.weights.layers)
        ]


class Layer(struct.PyTreeNode):
    """One layer of a model, and the policy as the layer uses it."""

    weights: LayerWeights
    policy: Policy
    number: int | Int[Array, ""]
    """Index in the model; an array in programs that equal layers share."""
    config: ModelConfig = setting(None)
    like: int = setting(0)
    """Index of the first layer of the same shape."""

    @property
    def shape(self) -> LayerConfig:
        """Attention of the layer."""
        return self.config.layer(self.like)
