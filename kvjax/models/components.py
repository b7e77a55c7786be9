"""Settings of components that some models have: experts, layers without attention, grown queries, latents."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Experts in place of the MLP of some blocks.

    Args:
        count: number of experts in a block.
        used: number of experts that each token uses.
        width: inner size of one expert.
        renormalised: True if the weights of a token's experts sum to 1.
        dense_layers: numbers of the layers that keep one MLP.
        router_bias: True if the router adds a bias to its logits (gpt-oss).
        probability: function from the router's logits to the weights of experts.
        weighted_inputs: True if weights multiply the inputs of experts, and not their outputs (Llama 4).
        shared_width: inner size of an expert that every token uses; None for none.
        shared_gate: True if the weight of that expert is the sigmoid of a projection of the input (Qwen3-Next), and
            not 1.
        scale: factor of the weights of a token's experts (DeepSeek).
        selection_bias: True if a bias is added to the weights that rank experts, but not to those they get (DeepSeek
            V3).
        groups: groups of as many adjacent experts; a token uses experts of the best `used_groups` alone.
        used_groups: number of these.
        best_of_group: number of a group's best experts whose weights are summed to rank it.
        beside_mlp: True if experts and the MLP read the same hidden states, with norms of their own, and are added
            (Gemma 4).
    """

    count: int
    used: int
    width: int
    renormalised: bool = True
    dense_layers: tuple[int, ...] = ()
    router_bias: bool = False
    probability: Literal["softmax", "sigmoid"] = "softmax"
    weighted_inputs: bool = False
    shared_width: int | None = None
    shared_gate: bool = False
    scale: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    used_groups: int = 1
    best_of_group: int = 1
    beside_mlp: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.used <= self.count:
            raise ValueError(f"a token must use between 1 and {self.count} experts, not {self.used}.")
        if self.count % self.groups or not 0 < self.used_groups <= self.groups:
            raise ValueError(
                f"{self.count} experts cannot be {self.groups} groups of which {self.used_groups} are used."
            )
        if self.used > self.count // self.groups * self.used_groups:
            raise ValueError(f"{self.used_groups} of {self.groups} groups have fewer than {self.used} experts.")

    def divides(self, devices: int) -> bool:
        """Return whether each device can have as many experts, and as many columns of the shared one."""
        return self.count % devices == 0 and (self.shared_width or 0) % devices == 0


@dataclasses.dataclass(frozen=True)
class DeltaRule:
    """Layers with the gated delta rule in place of attention; see `kvjax.models.gated_delta`.

    Args:
        layers: numbers of these layers.
        key_heads: heads of queries and keys.
        value_heads: heads of values and of the state; a multiple of `key_heads`.
        key_width: size of one query or key.
        value_width: size of one value.
        taps: tokens that the convolution reads, the newest included.
        write_scale: factor of the sigmoid that says how much of a value is written; 2 allows negative eigenvalues.
        norm_eps: constant added to the variance of outputs.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int = 4
    write_scale: float = 1.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly.")

    @property
    def groups(self) -> int:
        """Number of value heads that share one key head."""
        return self.value_heads // self.key_heads


@dataclasses.dataclass(frozen=True)
class ShortConvolution:
    """Layers with a gated convolution in place of attention; see `kvjax.models.short_conv`.

    Args:
        layers: numbers of these layers.
        taps: tokens that the convolution reads, the newest included.
        bias: True if the projections and the convolution add a bias.
    """

    layers: tuple[int, ...]
    taps: int = 3
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class QueryGrowth:
    """Factor of the query of a token at position p, 1 + slope ln(1 + floor((p + offset) / length)).

    Args:
        slope: growth for each e-fold of the position.
        length: positions at the start of a text whose queries do not grow.
        offset: number added to positions (Llama 4 counts from 1).
        unrotated: True if queries grow only in layers without RoPE (Llama 4).
    """

    slope: float
    length: int
    offset: int = 0
    unrotated: bool = False


@dataclasses.dataclass(frozen=True)
class Latent:
    """Widths of multi-head latent attention (DeepSeek-V2, 2024, section 2.1): all heads share one stored vector.

    Args:
        width: elements of the latent, of which up-projections make all heads' keys and values.
        key_width: elements of a head's key that are not rotated, before the up-projection is absorbed into queries.
        value_width: elements of a head's value, which the up-projection makes of attention to latents.
        rotated: elements of the rotated key that all heads share; they precede the latent in a slot.
        query_width: elements of the queries' own latent; None if queries are projected at once.
        norm_eps: constant added to the variance of latents.
    """

    width: int
    key_width: int
    value_width: int
    rotated: int
    query_width: int | None = None
    norm_eps: float = 1e-6

    @property
    def slot_width(self) -> int:
        """Elements of a slot: the rotated key and the latent."""
        return self.rotated + self.width
