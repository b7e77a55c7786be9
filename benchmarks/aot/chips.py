"""Chips to compile programs for, and the limit set by their memory."""

from __future__ import annotations

from typing import NamedTuple

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""Topology names for libtpu, of the smallest slices."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server of a cloud here
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile in parallel: none of them has a chip
}

LATENCY = 1e-6
"""Seconds that a grid step waits for one batch of its own copies: an assumption, not a measurement."""


class Chip(NamedTuple):
    """Specification of a chip, from its maker."""

    bandwidth: float
    """Memory bandwidth in bytes per second."""
    clock: float
    """Cycles per second."""
    cores: int
    """Cores that share the grid of one kernel; 1 for GPUs, whose schedules are not static."""
    source: str

    def limit(self, traffic: float) -> float:
        """Return the seconds that the memory takes to move a number of bytes."""
        return traffic / self.bandwidth

    def seconds(self, cycles: float) -> float:
        """Return the seconds of a number of cycles."""
        return cycles / self.clock


_CLOUD = "https://cloud.google.com/tpu/docs/"
_PEAK = "clock: its peak of {} Tflop/s in bfloat16 over {} MXUs of {}²"
SPECIFICATIONS = {
    "v4": Chip(1228e9, 1.05e9, 2, f"[Cloud TPU]({_CLOUD}v4); {_PEAK.format(275, 8, 128)}"),
    "v5e": Chip(819e9, 1.5e9, 1, f"[Cloud TPU]({_CLOUD}v5e); {_PEAK.format(197, 4, 128)}"),
    "v5p": Chip(2765e9, 1.75e9, 2, f"[Cloud TPU]({_CLOUD}v5p); {_PEAK.format(459, 8, 128)}"),
    "v6e": Chip(1640e9, 1.75e9, 1, f"[Cloud TPU]({_CLOUD}v6e); {_PEAK.format(918, 4, 256)}, their number assumed"),
    "a100": Chip(2039e9, 1.41e9, 1, "NVIDIA's data sheet of A100 80GB SXM"),
    "h100": Chip(3352e9, 1.98e9, 1, "NVIDIA's data sheet of H100 SXM"),
}
"""All chips; `CHIPS` are those whose compiler is libtpu."""
