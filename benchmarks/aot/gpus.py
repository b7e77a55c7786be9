"""GPUs that programs are compiled for without the device: data for XLA's compiler and for kernel occupancy."""

from __future__ import annotations

import dataclasses

from pallas_kernels.common import CAPABILITIES

WARP = 32
"""Threads of a warp."""
MOST_BLOCKS = 32
"""Maximum blocks of threads that are resident on a multiprocessor."""
MOST_THREADS = 2048
"""Maximum threads that are resident on a multiprocessor."""
REGISTERS = 65536
"""32-bit registers of a multiprocessor, in four equal parts."""
RESERVED = 1024
"""Bytes of shared memory that the system reserves for every block."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU's data from the CUDA C++ programming guide (compute capabilities) and its data sheet."""

    kind: str
    """Device kind, as JAX reports it."""
    multiprocessors: int
    shared: int
    """Bytes of shared memory of a multiprocessor; a block may use all but `RESERVED` of them."""
    lanes: int
    """Float32 products per multiprocessor and cycle."""
    bandwidth: int
    """Memory bandwidth in bytes per second."""
    memory: int
    """Memory in bytes."""
    cache: int
    """Level-two cache in bytes."""
    clock: float
    """Clock rate in gigahertz."""

    @property
    def configuration(self) -> str:
        """XLA's GpuTargetConfigProto in text form."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: {WARP} threads_per_core_limit: {MOST_THREADS}
              shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared - RESERVED}
              shared_memory_per_core: {self.shared} core_count: {self.multiprocessors} fpus_per_core: {self.lanes}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache} clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory} cuda_compute_capability {{ major: {CAPABILITIES[self.kind] // 10} }}
              registers_per_core_limit: {REGISTERS} registers_per_block_limit: {REGISTERS}
            }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 1 }} device_description_str: "{self.kind}"
        """

    def occupancy(self, threads: int, registers: int, shared: int) -> int:
        """Return how many blocks of a kernel are resident on a multiprocessor.

        Args:
            threads: threads of a block, from 1 to 1024.
            registers: registers of a thread.
            shared: bytes of shared memory of a block.
        """
        warps = -(-threads // WARP)
        of_warp = -(-registers * WARP // 256) * 256  # warps get registers in units of 256
        of_part = REGISTERS // 4 // of_warp if registers else MOST_BLOCKS
        by_registers = 4 * of_part // (-(-warps // 4) * 4)
        by_shared = self.shared // (-(-(shared + RESERVED) // 128) * 128)
        return min(MOST_BLOCKS, MOST_THREADS // (warps * WARP), by_registers, by_shared)


GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 108, 167_936, 64, 2_039_000_000_000, 80_000_000_000, 40 * 2**20, 1.41),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 132, 233_472, 128, 3_352_320_000_000, 84_942_979_072, 50 * 2**20, 1.98),
}
"""GPUs by name."""
