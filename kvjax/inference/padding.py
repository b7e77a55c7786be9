"""Padded sizes of texts, batches and buffers, of which few differ, so that programs are shared."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh

from kvjax.types import ROWS, SLOTS


def bucket(tokens: int) -> int:
    """Return the padded length of a text: the next power of two or halfway point, at least 16.

    Texts of one padded length share a program.
    """
    power = 16
    while power < tokens:
        power *= 2
    return power * 3 // 4 if power > 16 and power * 3 // 4 >= tokens else power


def bucket_rows(rows: int, mesh: Mesh | None = None) -> int:
    """Return the padded rows of a batch: the next power of two or halfway point, divisible among devices."""
    devices = 1 if mesh is None else mesh.shape[ROWS]
    return -(-(bucket(16 * rows) // 16) // devices) * devices


def check_rows(rows: int, mesh: Mesh | None) -> None:
    """Refuse rows that cannot be sharded evenly over devices."""
    devices = 1 if mesh is None else mesh.shape[ROWS]
    if rows % devices:
        raise ValueError(
            f"{rows} rows cannot be sharded evenly over data={devices} devices; give a multiple of {devices} rows, "
            "or a mesh with fewer devices along data."
        )


def round_slots(slots: int) -> int:
    """Round slots up to a multiple of 16, or of 64 beyond 1024, so that blocks of attention fit the buffers."""
    unit = 16 if slots <= 1024 else 64
    return -(-slots // unit) * unit


def among_devices(capacities: Sequence[int], mesh: Mesh | None) -> tuple[int, ...]:
    """Round slots of buffers up so that they can be sharded evenly over the devices of a mesh."""
    shares = 1 if mesh is None else mesh.shape[SLOTS]
    return tuple(-(-slots // shares) * shares for slots in capacities)


def full_slots(prompt: int, new: int) -> int:
    """Return the slots per head if nothing is evicted, for the longest prompt and the tokens planned after it."""
    return round_slots(bucket(prompt) + new)
