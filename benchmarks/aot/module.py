"""Instructions of a compiled module, read from its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*)$")
_OPCODE = re.compile(r" ([\w-]+)\(")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_OPERANDS = re.compile(r"%([\w.-]+)")
_CALLS = re.compile(r"calls=%([\w.-]+)")
_INNER = re.compile(r"(?:calls|to_apply)=%([\w.-]+)")
"""Computations inside of another instruction: of fusions, reductions, and asynchronous copies."""
_CUSTOM = "kind=kCustom"
"""Fusions around a gather or a scatter, which XLA does not estimate."""
_NO_ESTIMATE = 2**63 - 1
"""XLA's value if it has no cost model: for scatters on a chip's sparse cores."""

_TIMELESS = frozenset(
    (
        *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "custom-call"),
        *("copy-start", "copy-done", "slice-start", "slice-done", "async-start", "async-update", "async-done"),
        *("while", "conditional", "call"),
    )
)
"""Opcodes that take no time, run beside others, or contain other instructions."""

KERNEL = 'custom_call_target="tpu_custom_call"'


class Instruction(NamedTuple):
    """An instruction of XLA, or a Pallas kernel."""

    name: str
    opcode: str
    op_name: str
    """Source scopes and operation, joined by `/`; a fusion without a name gets that of its last instruction."""
    cycles: int
    """Estimated cycles; 0 for kernels, and for instructions without an estimate."""
    results: tuple[tuple[int, ...], ...]
    """Shapes of the results."""
    kernel: bool
    output: bool
    """True if XLA fused the operations after a matrix product into it."""
    estimated: bool
    """True if the compiler estimates it; False for kernels, gathers, scatters, and instructions that only move data."""
    arguments: frozenset[str] | None = None
    """Program arguments that it depends on, also indirectly; None inside of loops."""

    @property
    def base(self) -> str:
        """Return the name without the number that distinguishes instructions of one name."""
        return re.sub(r"\.\d+$", "", self.name)


def read_module(text: str) -> list[Instruction]:
    """Return the instructions of a TPU module that take time of their own, in execution order.

    Asynchronous copies (`copy-start`, `slice-start`) have no estimate and are not included.

    Args:
        text: `compiled.as_text()`.
    """
    return list(_instructions(text))


def _instructions(text: str) -> Iterator[Instruction]:
    inside: dict[str, str] = {}  # source of the last named instruction of each computation
    needed: dict[str, frozenset[str]] = {}  # arguments that each instruction of the program depends on
    computation, whole, parts = "", False, set(_INNER.findall(text))
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            begun = _COMPUTATION.match(line)
            if begun is not None:
                whole, computation = begun[1] is not None, begun[2]
            continue
        op_name = _OP_NAME.search(line)
        if op_name is not None:
            inside[computation] = op_name[1]
        cycles, kernel = _CYCLES.search(line), KERNEL in line
        opcode = _OPCODE.search(f" {match[2]}" if match[2].startswith("(") else match[2])
        if opcode is None:
            continue
        head, _, tail = match[2].partition(f" {opcode[1]}(")
        if whole:
            own = {op_name[1]} if opcode[1] == "parameter" and op_name is not None else ()
            needed[match[1]] = frozenset(own).union(*(needed.get(name, ()) for name in _OPERANDS.findall(tail)))
        results = tuple(_sizes(shape) for _, shape in _SHAPE.findall(head))
        told = cycles is not None or kernel or _CUSTOM in line
        if not told and (computation in parts or opcode[1] in _TIMELESS or not any(results)):
            continue
        called = _CALLS.search(line)
        name = inside.get(called[1], "") if called is not None else ""
        estimate = _NO_ESTIMATE if cycles is None else int(cycles[1])
        estimated = estimate < _NO_ESTIMATE
        yield Instruction(
            name=match[1],
            opcode=opcode[1],
            op_name=name if op_name is None else op_name[1],
            cycles=estimate if estimated else 0,
            results=results,
            kernel=kernel,
            estimated=estimated,
            output="kind=kOutput" in line or opcode[1] in ("convolution", "dot"),
            arguments=needed.get(match[1]) if whole else None,
        )


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(int(size) for size in shape.split(",") if size)
