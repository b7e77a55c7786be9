"""Mixtures of experts: their settings, and the layouts of their tensors."""

from __future__ import annotations

from kvjax.models.config import Mixture
from kvjax.models.families.family import LoadError, Settings, Source
from kvjax.models.families.settings import integer
from kvjax.models.families.sources import gates_and_ups


def read_mixture(settings: Settings, width: str, renormalised: bool, dense_layers: tuple[int, ...] = ()) -> Mixture:
    """Return the experts of a model.

    Args:
        settings: settings of the model; `num_local_experts` replaces `num_experts` in configs of transformers 5.
        width: name of the setting of one expert's inner size.
        renormalised: True if the weights of a token's experts sum to 1.
        dense_layers: numbers of the layers without experts.
    """
    count = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    experts, used = integer(settings, count), integer(settings, "num_experts_per_tok")
    if used > experts:
        raise LoadError(f"num_experts_per_tok is {used}, but {count} is {experts}.")
    return Mixture(experts, used, integer(settings, width), renormalised, dense_layers)


def expert_sources(block: str, maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, Source]:
    """Return the sources of the router and of all experts.

    Three layouts are known: one tensor for each map of each expert, all experts' gates and up projections in one
    tensor (transformers 5 in memory), and one tensor for each map (GGUF).

    Args:
        maps: names of an expert's gate, up and down projection.
    """
    fused = fused_experts(block)
    sources = {
        f"layers.mlp.experts.{ours}.weight": Source(
            f"{block}.experts.{{expert}}.{theirs}.weight",
            others=(fused[ours], Source(f"{block}.experts.{theirs}.weight")),
        )
        for ours, theirs in zip(fused, maps, strict=True)
    }
    return {"layers.mlp.router": Source(f"{block}.gate.weight"), **sources}


def fused_experts(block: str) -> dict[str, Source]:
    """Return the sources of gate, up and down of all experts, of which gate and up are concatenated in one tensor."""
    fused = gates_and_ups(f"{block}.experts.gate_up_proj", axis=1)
    return {**fused, "down": Source(f"{block}.experts.down_proj")}
