"""Races between implementations of an operation: who computes what XLA does, and how long each takes."""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import Asked, Unsupported
from pallas_kernels.programs import IMPLEMENTATIONS, Program

LEAST = 0.05
"""Seconds that one measurement takes at least: calls are queued up, so that starting them costs nothing."""

TOLERANCES = {"bfloat16": 5e-2, "float32": 2e-2}
"""Largest difference from XLA, relative to numbers above one, of results that are right: sums go in another order, and
factors of float32 lose digits on GPU (TF32). A TPU multiplies float32 as bfloat16."""

REPEATS = 3


IN_PLACE: dict[str, dict[str, Callable[[Any], Any]]] = {
    "evict": {"position": operator.itemgetter(3), "buffers": operator.itemgetter(4)},
    "decode_step": {name: operator.attrgetter(name) for name in ("position", "k", "v", "buffers")},
}
"""Arguments of operations whose memory their results take, and where these are among the results."""


@dataclasses.dataclass
class Runner:
    """One way to do an operation, queued by `start` and awaited by `wait`."""

    op: str
    label: str
    name: str
    bytes: int
    start: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    compared: bool = False
    """Whether the results are those of the other implementations of the operation."""
    error: float | None = None
    """Largest difference from the XLA reference, relative to numbers above one."""
    calls: int = 1
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of one call."""
        return statistics.median(self.seconds)

    def measure(self) -> float:
        """Seconds of one call, of as many as are queued together."""
        began = time.perf_counter()
        for _ in range(self.calls - 1):
            self.start()
        self.wait(self.start())
        return (time.perf_counter() - began) / self.calls


class Verdict(NamedTuple):
    """How a race for one bucket of tasks ended."""

    order: tuple[str, ...]
    """Those whose results are right, the fastest first."""
    microseconds: dict[str, float]
    """Of one call, of all that ran."""
    errors: dict[str, float | None]
    """Largest differences from XLA, relative to numbers above one; None where results are no numbers."""


def race(runners: list[Runner], repeats: int) -> list[Runner]:
    """Run all in turn, so that noise hits all alike, after they are compiled and their calls counted.

    Who fails is named and left out: an unattended run goes on.
    """
    wanted, able = {}, []
    for runner in runners:
        try:
            results = runner.start()
            runner.wait(results)
        except Exception as error:  # whatever a compiler or a driver raises
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            print(f"{runner.op} {runner.label}, {runner.name} is left out: {reason}", file=sys.stderr)
            continue
        able.append(runner)
        if runner.compared:
            # In host memory: what is donated to the next call is gone then.
            results = jax.tree.map(lambda x: np.asarray(x, np.float32), results)
            wanted.setdefault((runner.op, runner.label), results)
            runner.error = difference(results, wanted[runner.op, runner.label])
    for runner in able:
        runner.calls = max(1, min(1000, math.ceil(LEAST / runner.measure())))
    for _ in range(repeats):
        for runner in able:
            runner.seconds.append(runner.measure())
    return able


def difference(results: Any, wanted: Any) -> float:
    """The largest, relative to numbers above one; equal infinities do not differ."""

    def of_leaves(x: np.ndarray, y: np.ndarray) -> float:
        with np.errstate(invalid="ignore"):
            apart = np.where(x == y, 0.0, np.abs(x - y) / np.maximum(1.0, np.abs(y)))
        return float(np.max(apart, initial=0.0))

    return max(map(of_leaves, jax.tree.leaves(results), jax.tree.leaves(wanted)))


def judge(runners: list[Runner], tolerance: float) -> Verdict | None:
    """Race the implementations of one operation on the same inputs; who differs from XLA is told in a warning.

    Args:
        runners: `xla` first, all of them compared.
        tolerance: difference up to which results are right, see `difference`.

    Returns:
        The verdict, or None where XLA itself fails, so that nothing can be told from it.
    """
    able = race(runners, REPEATS)
    if not able or able[0].name != "xla":
        return None
    times = {runner.name: round(1e6 * runner.median, 3) for runner in able}
    errors: dict[str, float | None] = {}
    right: list[str] = []
    for runner in able:
        error = math.nan if runner.error is None else runner.error
        errors[runner.name] = error if math.isfinite(error) else None
        if error <= tolerance:
            right.append(runner.name)
        else:
            warnings.warn(
                f"{runner.op} {runner.label} as {runner.name!r} differs from 'xla' by {error:.2g}, more than "
                f"{tolerance:g}, and is not used on this kind of device; please report it.",
                stacklevel=2,
            )
    return Verdict(tuple(sorted(right, key=times.__getitem__)), times, errors)


def ways(program: Program) -> Iterator[Runner]:
    """Each implementation that runs here."""
    arrays = program.arrays()
    for name in IMPLEMENTATIONS:
        try:
            program.jit(name).trace(**arrays)
        except Unsupported:
            continue
        yield _runner(program, name, arrays)


def settle(asked: Asked) -> Verdict | None:
    """Race who can do a task, on random inputs of its shapes; see `judge`."""
    program = program_of(asked)
    floats = {x.dtype.name for x in jax.tree.leaves(program.shapes)} & TOLERANCES.keys()
    tolerance = max((TOLERANCES["bfloat16" if jax.default_backend() == "tpu" else name] for name in floats), default=0)
    try:
        arrays = program.arrays()
        return judge([_runner(program, name, arrays) for name in asked.candidates], tolerance)
    except jax.errors.JaxRuntimeError as error:  # most likely there is no memory for the inputs
        print(f"{program} is not raced: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def _runner(program: Program, name: str, arrays: dict[str, Any]) -> Runner:
    run = program.jit(name)
    # What a call takes the memory of is its own copy, and then the results of the call before.
    own = {name: jax.tree.map(jnp.copy, arrays[name]) for name in program.donated}

    def start() -> Any:
        results = run(**(arrays | own))
        own.update(program.again(results))
        return results

    return Runner(program.op, program.label, name, program.bytes, start, compared=True)


def program_of(asked: Asked) -> Program:
    """A task as a program of its arrays alone, which works in place where a decode step does."""
    op, _, label = asked.task.bucket.partition(" ")
    given = asked.task.arguments
    shapes = {name: jax.tree.map(lambda x: x if _is_shape(x) else None, tree) for name, tree in given.items()}
    settings = {name: jax.tree.map(lambda x: None if _is_shape(x) else x, tree) for name, tree in given.items()}

    def run(implementation: str, platform: str | None = None, **arrays: Any) -> Any:
        whole = {
            name: jax.tree.map(_either, tree, arrays.get(name, tree), is_leaf=lambda x: x is None)
            for name, tree in settings.items()
        }
        return asked.task.run(**whole, implementation=implementation, platform=platform)

    made = Program(op, label, run, {name: tree for name, tree in shapes.items() if jax.tree.leaves(tree)})
    found = {name: find for name, find in IN_PLACE.get(op, {}).items() if name in made.shapes}
    return dataclasses.replace(
        made, donated=tuple(found), again=lambda results: {name: find(results) for name, find in found.items()}
    )


def _is_shape(x: object) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _either(setting: Any, array: Any) -> Any:
    return array if setting is None else setting
