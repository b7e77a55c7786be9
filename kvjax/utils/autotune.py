"""Autotuning: on untuned accelerators `auto` benchmarks the implementations once and caches the results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kvjax.utils.compilation import cache_directory, version
from kvjax.utils.files import write_text
from pallas_kernels import benchmark, common, op
from pallas_kernels.benchmark import TuningResult
from pallas_kernels.common import Survey, Tuned, TuningTask

VARIABLE = "KVJAX_TUNE"
"""Environment variable: `off` disables benchmarks and cached results, so that `auto` uses a fixed order."""

FILE = "kernels.json"


class Autotuner(Tuned):
    """An `implementation` that benchmarks operations before programs are traced; `auto` with the winners."""

    survey: Survey
    """Tasks of all programs so far."""

    def __new__(cls, device: str) -> Autotuner:
        file = verdicts_file()
        verdicts = {} if file is None else read(file).get(device, {})
        tuner = super().__new__(cls, device, {bucket: verdict.order for bucket, verdict in verdicts.items()})
        tuner.survey = Survey()
        return tuner

    def settle(
        self,
        workloads: Iterable[TuningTask],
        *,
        by: Callable[[TuningTask], TuningResult | None] = benchmark.benchmark_task,
        again: bool = False,
    ) -> dict[str, TuningResult]:
        """Benchmark tasks that have several implementations, remember and store the results, and return the new ones.

        `by` benchmarks one task, or returns None if it cannot. `again` repeats tasks that have a result.
        """
        todo = [x for x in workloads if len(x.candidates) > 1 and (again or x.bucket not in self.orders)]
        if not todo:
            return {}
        _say(
            f"benchmarking kernels on {self.device}, once, for {len(todo)} shapes ({VARIABLE}=off disables this, kvjax "
            "tune --show prints the results)"
        )
        results = {x.bucket: by(x) for x in todo}
        verdicts = {bucket: verdict for bucket, verdict in results.items() if verdict is not None}
        # Tasks that cannot be benchmarked are not tried again.
        self.orders.update({bucket: () if verdict is None else verdict.order for bucket, verdict in results.items()})
        file = verdicts_file()
        if file is not None and verdicts:
            try:
                keep(file, self.device, verdicts)
            except OSError as error:
                _say(f"{file} cannot be written ({error.strerror}), so benchmarks will be repeated.")
        return verdicts


def automatic() -> str:
    """Return what `auto` stands for on this machine: an `Autotuner` if benchmarks decide, else `auto`."""
    device = tuned_device()
    return "auto" if device is None else Autotuner(device)


def tuned_device() -> str | None:
    """Return the kind of this machine's devices if `auto` depends on benchmarks there, else None.

    It does on GPUs and on TPU generations that are not `LISTED`, unless several processes run one program, because
    their benchmarks could disagree.
    """
    switch = os.environ.get(VARIABLE) or "on"
    if switch not in ("on", "off"):
        raise ValueError(f"{VARIABLE}={switch} is neither on nor off.")
    platform = op.platform_of(None)
    if switch == "off" or platform not in ("gpu", "tpu") or jax.process_count() > 1:
        return None
    kind = op.kind_of_device(platform)
    return None if kind in common.LISTED else kind


def settle_before(trace: Callable[[Survey], Any], implementation: str) -> None:
    """Benchmark the operations of a program that have no result yet, before the program is traced.

    Return at once if benchmarks do not decide what runs, or inside another traced program. `trace` traces the program
    with another `implementation`, by `eval_shape`.
    """
    overruled = os.environ.get(common.VARIABLE) or "auto"
    if not isinstance(implementation, Autotuner) or overruled != "auto" or isinstance(jnp.zeros(()), Tracer):
        return
    trace(implementation.survey)
    implementation.settle(implementation.survey.requests.values())


def verdicts_file() -> Path | None:
    """Return the file of cached results, beside compiled programs; None if there is no cache directory."""
    directory = cache_directory()
    return None if directory is None else directory / FILE


def read(file: Path) -> dict[str, dict[str, TuningResult]]:
    """Read the results in a file, by kind of device and bucket of tasks; return none if the file does not exist.

    A broken file, or one written by other versions, is reported on standard error and ignored.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        versions = {name: str(content[name]) for name in _versions()}
        verdicts = {
            device: {bucket: _verdict(**entry) for bucket, entry in entries.items()}
            for device, entries in content["devices"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        _say(f"{file} does not hold tuning results ({reason}) and is ignored; the next benchmark replaces it anew.")
        return {}
    if versions != _versions():
        stored, ours = (" and ".join(f"{name} {number}" for name, number in x.items()) for x in (versions, _versions()))
        _say(f"{file} is of {stored}, not of {ours}, and is ignored; the next benchmark replaces it.")
        return {}
    return verdicts


def keep(file: Path, device: str, verdicts: dict[str, TuningResult]) -> None:
    """Add results to a file, under a lock, so that concurrent processes keep each other's results."""
    import fcntl  # not on Windows, where JAX has no accelerators

    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stored = read(file)
        devices = stored | {device: stored.get(device, {}) | verdicts}
        entries = {
            kind: {bucket: verdict._asdict() for bucket, verdict in sorted(of_kind.items())}
            for kind, of_kind in sorted(devices.items())
        }
        write_text(file, json.dumps(_versions() | {"devices": entries}, indent=1) + "\n")


def _say(text: str) -> None:
    print(f"kvjax: {text}", file=sys.stderr)


def _verdict(order: list[str], microseconds: dict[str, float], errors: dict[str, float | None]) -> TuningResult:
    if not isinstance(order, list) or not set(order) <= set(common.IMPLEMENTATIONS):
        raise ValueError(f"order={order!r} does not name implementations")
    return TuningResult(tuple(order), dict(microseconds), dict(errors))


def _versions() -> dict[str, str]:
    return {"kvjax": version(), "jax": jax.__version__}
