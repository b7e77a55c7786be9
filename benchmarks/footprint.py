"""What a compiler says of a program on a mesh: bytes on each device, and how often devices wait for each other."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

import jax

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= [^=\n]*?(?<![\w%.-])({'|'.join(KINDS)})(?:-start)?\(")

_KERNEL = re.compile(r'kernel_name = "(\w+)"|, name = "(\w+)", num_stages')
"""As programs for TPU and those for GPU call them."""


class Footprint(NamedTuple):
    """Of one device."""

    weight_bytes: int
    """Of all that a program only reads."""
    cache_bytes: int
    """Of what it changes in place."""
    temporary_bytes: int
    """Of all else, results that are new among it."""
    collectives: dict[str, int]
    """How many of each kind are in the program."""
    kernels: list[str]
    """Of Pallas, those that it calls."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.cache_bytes + self.temporary_bytes


def footprint(lowered: jax.stages.Lowered) -> Footprint:
    """Compile a program, and ask its compiler.

    Raises:
        jax.errors.JaxRuntimeError: it refuses the program, mostly for want of memory.
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
    """How many instructions of each kind of collective are in a program's HLO; those that begin and end count once."""
    found = Counter(match[1] for match in _COLLECTIVE.finditer(text))
    return {kind: found[kind] for kind in KINDS if found[kind]}
