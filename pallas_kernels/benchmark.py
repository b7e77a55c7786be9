"""Benchmarks of an operation's implementations on random inputs: agreement with XLA, and time per call."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import TuningTask
from pallas_kernels.fused_decode import Query, Slots

LEAST = 0.05
"""Minimum seconds of one measurement: calls are queued together, which hides the cost of starting them."""

TOLERANCES = {"bfloat16": 5e-2, "float32": 2e-2}
"""Largest difference from XLA, relative to numbers above one, of correct results. Sums run in another order, and
factors of float32 lose digits on GPU (TF32). A TPU multiplies float32 as bfloat16."""

REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Program:
    """An operation at one size."""

    op: str
    label: str
    run: Callable[..., Any]
    """Function of `shapes` by name, and of `implementation` and `platform`."""
    shapes: dict[str, Any]
    in_place: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    """Inputs that a call makes invalid, as in `Op.in_place`; the functions return those of the next call."""

    def __str__(self) -> str:
        return f"{self.op} {self.label}"

    def jit(self, implementation: str, platform: str | None = None) -> Any:
        """Return the compiled function of `shapes` by name; a call raises `Unsupported` if it cannot run."""
        run = functools.partial(self.run, implementation=implementation, platform=platform)
        return jax.jit(run, donate_argnames=tuple(self.in_place))

    def arrays(self) -> dict[str, Any]:
        """Return random inputs: every slot is live, and queries come after all slots."""
        rng, shapes = np.random.default_rng(0), dict(self.shapes)
        records = [name for name, shape in shapes.items() if isinstance(shape, Slots | Query)]
        for name in records:
            shapes |= shapes[name]._asdict()

        def fill(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
            # The argument's name, or its field's if it is a record of arguments, and the name of the last field.
            names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
            name, field = names[names[0] in records], names[-1]
            if shape.dtype in (jnp.int8, jnp.uint8):
                info = jnp.iinfo(shape.dtype)
                return jnp.asarray(rng.integers(info.min + 1, info.max, size=shape.shape, dtype=shape.dtype))
            if jnp.issubdtype(shape.dtype, jnp.floating):
                key = jax.random.key(int(rng.integers(2**31)))
                numbers = jax.random.normal(key, shape.shape, shape.dtype)
                if field == "scale":  # decoded numbers are around one
                    return (jnp.abs(numbers) + 1) / (8 if getattr(shapes[name], "bits", 8) == 4 else 128)
                if (name == "layers" or field in ("first", "second", "third")) and numbers.ndim > 2:  # linear maps
                    return numbers * numbers.shape[-2] ** -0.5
                if name == "q":  # attention that peaks at a few slots shows errors best
                    return 3 * numbers
                return jnp.abs(numbers) + 1 if field == "tau" or name in ("weights", "low_rank", "memory") else numbers
            if shape.dtype == jnp.uint32:
                return jnp.asarray(rng.integers(2**32, size=shape.shape, dtype=np.uint32))
            if shape.dtype == jnp.bool_:  # slots to keep: one in eight
                return jnp.asarray(rng.random(shape.shape) < 1 / 8)
            if name in ("owner", "pages"):  # each head's pages are adjacent, and all pages are used
                pages = shapes["position"].shape[0]
                heads = math.prod(shapes["q"].shape[:2])
                return jnp.asarray([0, pages], jnp.int32) if name == "pages" else jnp.arange(pages) * heads // pages
            if name in ("position", "key_position"):
                return jnp.broadcast_to(jnp.arange(shape.shape[-1], dtype=shape.dtype), shape.shape)
            if "key_position" in shapes and name != "places":
                # A prompt's queries are its newest tokens; one of several readers has its first tokens.
                keys, queries = shapes["key_position"].shape[-1], shapes["q"].shape[3]
                first = 0 if "query_tokens" in shapes else keys - queries
                return jnp.broadcast_to(first + jnp.arange(queries, dtype=shape.dtype), shape.shape)
            if name in ("places", "scores"):  # places, which matter only with slopes; numbers of layers and heads
                return jnp.zeros(shape.shape, shape.dtype)
            # Queries come after every slot. A head may use all of its slots; half of them are recent tokens.
            share = {"sinks": 0, "recent": 2}.get(field, 1)
            return jnp.full(shape.shape, share and shapes["position"].shape[-1] // share, shape.dtype)

        return jax.tree_util.tree_map_with_path(fill, self.shapes)


@dataclasses.dataclass
class Runner:
    """One implementation of an operation: `start` queues a call and `wait` waits for it."""

    op: str
    label: str
    name: str
    start: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    compared: bool = True
    """True if the results should equal those of the operation's other implementations."""
    bytes: int = 0
    """Bytes that a call must read and write, for a table of bandwidths."""
    error: float | None = None
    """Largest difference from the XLA reference, relative to numbers above one."""
    calls: int = 1
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds of one call."""
        return statistics.median(self.seconds)

    def measure(self) -> float:
        """Return the seconds per call over `calls` calls that are queued together."""
        began = time.perf_counter()
        for _ in range(self.calls - 1):
            self.start()
        self.wait(self.start())
        return (time.perf_counter() - began) / self.calls


class TuningResult(NamedTuple):
    """Result of the benchmark of one task bucket."""

    order: tuple[str, ...]
    """Correct implementations, fastest first."""
    microseconds: dict[str, float]
    """Microseconds per call of each implementation that ran."""
    errors: dict[str, float | None]
    """Largest differences from XLA, relative to numbers above one; None if that is not finite."""


def run_in_turn(runners: list[Runner], repeats: int) -> list[Runner]:
    """Compile all runners, set their calls per measurement, and run them in turn, so that noise affects all equally.

    A runner that fails is reported and omitted.
    """
    references, working = {}, []
    for runner in runners:
        try:
            results = runner.start()
            runner.wait(results)
        except Exception as error:  # compilers and drivers raise many types
            reason = in_one_line(error)
            print(f"{runner.op} {runner.label}, {runner.name} is left out: {reason}", file=sys.stderr)
            continue
        working.append(runner)
        if runner.compared:
            # Copied to the host: donating them to the next call frees them.
            results = jax.tree.map(lambda x: np.asarray(x, np.float32), results)
            references.setdefault((runner.op, runner.label), results)
            runner.error = difference(results, references[runner.op, runner.label])
    for runner in working:
        runner.calls = max(1, min(1000, math.ceil(LEAST / runner.measure())))
    for _ in range(repeats):
        for runner in working:
            runner.seconds.append(runner.measure())
    return working


def in_one_line(error: Exception) -> str:
    """Return the first and the last line of a message, since Triton begins with a place and ends with the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))


def difference(results: Any, expected: Any) -> float:
    """Return the largest difference, relative to numbers above one; equal infinities do not differ."""

    def of_leaves(x: np.ndarray, y: np.ndarray) -> float:
        with np.errstate(invalid="ignore"):
            differences = np.where(x == y, 0.0, np.abs(x - y) / np.maximum(1.0, np.abs(y)))
        return float(np.max(differences, initial=0.0))

    return max(map(of_leaves, jax.tree.leaves(results), jax.tree.leaves(expected)))


def benchmark_runners(runners: list[Runner], tolerance: float) -> TuningResult | None:
    """Benchmark one operation's implementations on the same inputs, and warn about those that differ from XLA.

    `xla` is the first runner, and all are `compared`. Return None if XLA itself fails and there is no reference.
    """
    working = run_in_turn(runners, REPEATS)
    if not working or working[0].name != "xla":
        return None
    times = {runner.name: round(1e6 * runner.median, 3) for runner in working}
    errors: dict[str, float | None] = {}
    correct: list[str] = []
    for runner in working:
        error = math.nan if runner.error is None else runner.error
        errors[runner.name] = error if math.isfinite(error) else None
        if error <= tolerance:
            correct.append(runner.name)
        else:
            warnings.warn(
                f"{runner.op} {runner.label} as {runner.name!r} differs from 'xla' by {error:.2g}, more than "
                f"{tolerance:g}, and is not used on this kind of device; please report it.",
                stacklevel=2,
            )
    return TuningResult(tuple(sorted(correct, key=times.__getitem__)), times, errors)


def benchmark_task(task: TuningTask) -> TuningResult | None:
    """Benchmark the candidates for a task on random inputs of its shapes; see `benchmark_runners`."""
    program = program_of(task)
    floats = {x.dtype.name for x in jax.tree.leaves(program.shapes)} & TOLERANCES.keys()
    tolerance = max((TOLERANCES["bfloat16" if jax.default_backend() == "tpu" else name] for name in floats), default=0)
    try:
        arrays = program.arrays()
        return benchmark_runners([runner_of(program, name, arrays) for name in task.candidates], tolerance)
    except jax.errors.JaxRuntimeError as error:  # most likely the inputs do not fit in memory
        print(f"{program} is not raced: {in_one_line(error)}", file=sys.stderr)
        return None


def runner_of(program: Program, name: str, arrays: dict[str, Any]) -> Runner:
    """Return one implementation of a program, on these inputs."""
    run = program.jit(name)
    # The first call donates its own copy, later calls the results of the call before.
    donated = {name: jax.tree.map(jnp.copy, arrays[name]) for name in program.in_place}

    def start() -> Any:
        results = run(**(arrays | donated))
        donated.update({name: find(results) for name, find in program.in_place.items()})
        return results

    return Runner(program.op, program.label, name, start)


def program_of(task: TuningTask) -> Program:
    """Return a task as a program of its arrays alone, in place if a decode step works in place."""
    (op, _, label), call = task.bucket.partition(" "), task.call
    shapes = {name: jax.tree.map(lambda x: x if _is_shape(x) else None, tree) for name, tree in vars(call).items()}
    shapes = {name: tree for name, tree in shapes.items() if jax.tree.leaves(tree)}

    def run(implementation: str, platform: str | None = None, **arrays: Any) -> Any:
        def substitute(x: Any, array: Any) -> Any:
            return array if _is_shape(x) else x

        filled = {name: jax.tree.map(substitute, getattr(call, name), tree) for name, tree in arrays.items()}
        return dataclasses.replace(call, **filled)(implementation=implementation, platform=platform)

    in_place = {name: find for name, find in call.in_place.items() if name in shapes}
    return Program(op, label, run, shapes, in_place)


def _is_shape(x: object) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
