"""Chips that programs are compiled for, and the limit that their memory sets."""

from __future__ import annotations

from typing import NamedTuple

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""Names of the topologies that libtpu is asked for, of the smallest slices."""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # the metadata server of a cloud that this is not
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once: none of them has a chip
}

LATENCY = 1e-6
"""Seconds that a grid step waits for copies that it started itself, in one go: a model, nobody has measured it."""


class Chip(NamedTuple):
    """What a chip's makers say of it."""

    bandwidth: float
    """Of its memory, bytes per second."""
    clock: float
    """Cycles per second."""
    cores: int
    """That share the grid of one kernel; 1 for GPUs, whose schedules are not static."""
    source: str

    def limit(self, traffic: float) -> float:
        """Seconds that its memory takes to move so many bytes."""
        return traffic / self.bandwidth

    def seconds(self, cycles: float) -> float:
        """What so many cycles take."""
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
