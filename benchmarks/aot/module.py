"""What the text of a compiled module says of its instructions."""

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
"""Computations whose instructions are part of another one: of fusions, reductions, copies that run beside others."""
_CUSTOM = "kind=kCustom"
"""Fusions around a gather or a scatter, for which XLA has no estimate."""
_NO_ESTIMATE = 2**63 - 1
"""What XLA says where it has no cost model: of scatters that go to a chip's sparse cores."""

_TIMELESS = frozenset(
    (
        *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "custom-call"),
        *("copy-start", "copy-done", "slice-start", "slice-done", "async-start", "async-update", "async-done"),
        *("while", "conditional", "call"),
    )
)
"""Opcodes of what takes no time, runs beside others, or has instructions of its own."""

KERNEL = 'custom_call_target="tpu_custom_call"'


class Instruction(NamedTuple):
    """One of XLA's, or a Pallas kernel."""

    name: str
    opcode: str
    op_name: str
    """The scopes and the operation that it comes from, with `/` between them; of a fusion without, its last one's."""
    cycles: int
    """As estimated; 0 for kernels, and for what has no estimate."""
    results: tuple[tuple[int, ...], ...]
    """Their shapes."""
    kernel: bool
    output: bool
    """Whether XLA fused into it what follows a product of matrices."""
    estimated: bool
    """Whether the compiler says how long it takes: not of kernels, gathers, scatters, and what only moves numbers."""
    arguments: frozenset[str] | None = None
    """Where what it needs, and what that needs, comes from among the program's arguments; None inside of loops."""

    @property
    def base(self) -> str:
        """The name without the number that tells it from others of its name."""
        return re.sub(r"\.\d+$", "", self.name)


def read_module(text: str) -> list[Instruction]:
    """The instructions of a module for TPU that take time of their own, in the order in which they run.

    Copies that run beside them (`copy-start`, `slice-start`) have no estimate and are none of these.

    Args:
        text: `compiled.as_text()`.
    """
    return list(_instructions(text))


def _instructions(text: str) -> Iterator[Instruction]:
    inside: dict[str, str] = {}  # what the last named instruction of each computation comes from
    needed: dict[str, frozenset[str]] = {}  # arguments that each instruction of the whole program needs
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
