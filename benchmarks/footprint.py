"""Compiler's report of a program on a mesh: bytes on each device, and the number of collectives."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import jax

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= [^=\n]*?(?<![\w%.-])({'|'.join(KINDS)})(?:-start)?\(")

_KERNEL = re.compile(r'kernel_name = "(\w+)"|, name = "(\w+)", num_stages')
"""Kernel names in programs for TPU and for GPU."""


class Footprint(NamedTuple):
    """Memory and collectives of one device."""

    weight_bytes: int
    """Bytes that a program only reads."""
    cache_bytes: int
    """Bytes that it changes in place."""
    temporary_bytes: int
    """All other bytes, including new results."""
    collectives: dict[str, int]
    """Number of collectives by kind."""
    kernels: list[str]
    """Names of the Pallas kernels that it calls."""

    @property
    def bytes(self) -> int:
        """Return the sum of all bytes."""
        return self.weight_bytes + self.cache_bytes + self.temporary_bytes


def footprint(lowered: jax.stages.Lowered) -> Footprint:
    """Compile a program, and read the compiler's report.

    Raises:
        jax.errors.JaxRuntimeError: the compiler refuses the program, mostly because it lacks memory.
    """
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    in_place = memory.alias_size_in_bytes
    return Footprint(
        weight_bytes=memory.argument_size_in_bytes - in_place,
        cache_bytes=in_place,
        temporary_bytes=memory.temp_size_in_bytes + memory.output_size_in_bytes - in_place,
        collectives=collectives(compiled.as_text() or ""),
        kernels=sorted({match[1] or match[2] for match in _KERNEL.finditer(lowered.as_text())}),
    )


def collectives(text: str) -> dict[str, int]:
    """Count the collectives of each kind in a program's HLO; an asynchronous pair counts once."""
    found = Counter(match[1] for match in _COLLECTIVE.finditer(text))
    return {kind: found[kind] for kind in KINDS if found[kind]}
