"""What `auto` stands for on an accelerator whose kernels nobody has timed: races decide, and verdicts are kept."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kvjax.types import Kernels
from kvjax.utils.compilation import cache_directory, version
from kvjax.utils.files import write_text
from pallas_kernels import common, race
from pallas_kernels.common import Asked, Survey
from pallas_kernels.race import Verdict

VARIABLE = "KVJAX_TUNE"
"""Environment variable: `off` leaves races and their verdicts out, so that `auto` goes by a fixed order."""

FILE = "kernels.json"

Verdicts = dict[str, dict[str, Verdict]]
"""For each kind of device the verdicts on buckets of tasks."""

_SURVEY = Survey()
_loaded = False


def tuned_device() -> str | None:
    """The kind of this machine's devices, where races decide what `auto` is on them; None where they do not.

    They do on GPU, and on a TPU of a generation that is not `LISTED`. Several processes run one program, and could
    come to different verdicts: there they do not.

    Raises:
        ValueError: `KVJAX_TUNE` is neither `on` nor `off`.
    """
    said = os.environ.get(VARIABLE) or "on"
    if said not in ("on", "off"):
        raise ValueError(f"{VARIABLE}={said} is neither on nor off.")
    platform = common.platform_of(None)
    if said == "off" or platform not in ("gpu", "tpu") or jax.process_count() > 1:
        return None
    kind = common.kind_of_device(platform)
    return None if kind in common.LISTED else kind


def settle_before(trace: Callable[[Kernels], Any], kernels: Kernels) -> None:
    """Race what a program is going to ask and no verdict is there for, before the program is traced.

    Nothing is raced, and nothing traced, where `auto` is not decided by races, nor while a program is being traced.

    Args:
        trace: gives the shapes of what the program returns under some kernels, by `eval_shape`.
        kernels: under which the program is going to run.
    """
    device = tuned_device()
    overruled = os.environ.get(common.VARIABLE) or "auto"
    if device is None or kernels != Kernels() or overruled != "auto" or _is_traced():
        return
    load(device)
    trace(Kernels(_SURVEY))
    settle(_SURVEY.asked.values(), device)


def load(device: str) -> None:
    """Let `auto` know the verdicts on a kind of device that are on disk, once in the life of a process."""
    global _loaded
    file = verdicts_file()
    if not _loaded and file is not None:
        _publish(read(file).get(device, {}), device)
    _loaded = True


def settle(
    asked: Iterable[Asked],
    device: str,
    *,
    by: Callable[[Asked], Verdict | None] = race.settle,
    again: bool = False,
) -> dict[str, Verdict]:
    """Race tasks that more than one implementation can do, let `auto` know the verdicts, and keep them on disk.

    Args:
        asked: from a `Survey`.
        device: its kind.
        by: comes to the verdict on a task, or None where it cannot.
        again: race those, too, that there are verdicts for.

    Returns:
        The new verdicts, by bucket.
    """
    known = common.WINNERS.get(device, {})
    todo = [each for each in asked if len(each.candidates) > 1 and (again or each.task.bucket not in known)]
    if not todo:
        return {}
    print(
        f"kvjax: shapes whose kernels are raced on {device}, once: {len(todo)} ({VARIABLE}=off leaves it out, kvjax "
        "tune --show tells how races ended)",
        file=sys.stderr,
    )
    found = {each.task.bucket: by(each) for each in todo}
    verdicts = {bucket: verdict for bucket, verdict in found.items() if verdict is not None}
    # What cannot be raced is not tried again in this process.
    common.WINNERS.setdefault(device, {}).update(dict.fromkeys(found, ()))
    _publish(verdicts, device)
    file = verdicts_file()
    if file is not None and verdicts:
        try:
            keep(file, device, verdicts)
        except OSError as error:
            print(f"kvjax: {file} cannot be written ({error.strerror}), so races are run again.", file=sys.stderr)
    return verdicts


def verdicts_file() -> Path | None:
    """Where verdicts are kept, beside compiled programs; None where nothing is."""
    directory = cache_directory()
    return None if directory is None else directory / FILE


def read(file: Path) -> Verdicts:
    """The verdicts that a file holds; none if it is not there.

    A file that is broken or of other versions is told on standard error, and holds none.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        versions = {name: str(content[name]) for name in _versions()}
        found = {
            device: {bucket: _verdict(**entry) for bucket, entry in entries.items()}
            for device, entries in content["devices"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(
            f"kvjax: {file} does not hold verdicts on kernels ({reason}) and is not used; the next race writes it "
            "anew.",
            file=sys.stderr,
        )
        return {}
    if versions != _versions():
        theirs, ours = (" and ".join(f"{name} {number}" for name, number in x.items()) for x in (versions, _versions()))
        print(
            f"kvjax: {file} is of {theirs}, not of {ours}, and is not used; the next race writes it anew.",
            file=sys.stderr,
        )
        return {}
    return found


def keep(file: Path, device: str, verdicts: dict[str, Verdict]) -> None:
    """Add verdicts to those that a file holds, whatever other processes add at the same time.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with _locked(file):
        held = read(file)
        devices = held | {device: held.get(device, {}) | verdicts}
        entries = {
            kind: {bucket: verdict._asdict() for bucket, verdict in sorted(of_kind.items())}
            for kind, of_kind in sorted(devices.items())
        }
        write_text(file, json.dumps(_versions() | {"devices": entries}, indent=1) + "\n")


def _verdict(order: list[str], microseconds: dict[str, float], errors: dict[str, float | None]) -> Verdict:
    if not isinstance(order, list) or not set(order) <= set(common.IMPLEMENTATIONS):
        raise ValueError(f"order={order!r} does not name implementations")
    return Verdict(tuple(order), dict(microseconds), dict(errors))


def _versions() -> dict[str, str]:
    return {"kvjax": version(), "jax": jax.__version__}


def _publish(verdicts: dict[str, Verdict], device: str) -> None:
    orders = {bucket: verdict.order for bucket, verdict in verdicts.items()}
    common.WINNERS.setdefault(device, {}).update(orders)


def _is_traced() -> bool:
    """Whether what is computed now goes into a program that is being traced."""
    return isinstance(jnp.zeros(()), Tracer)


@contextlib.contextmanager
def _locked(file: Path) -> Generator[None]:
    import fcntl  # not on Windows, where JAX has no accelerators

    with file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
