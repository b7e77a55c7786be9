"""Host memory that devices copy from directly."""

from __future__ import annotations

from typing import Any

KIND = "pinned_host"


def check_host_memory(weights: Any, setting: str, name: str) -> None:
    """Refuse a setting, written as in the call, on a backend without host memory; `name` is what to leave out."""
    device = next(iter(weights.table.weight.devices()))
    if KIND not in {memory.kind for memory in device.addressable_memories()}:
        raise ValueError(
            f"{setting} needs memory of the kind '{KIND}', which {device.platform} does not have; leave {name} out."
        )
