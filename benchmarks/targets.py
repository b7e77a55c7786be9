"""Devices to compile for: local ones, virtual ones, and those that only a compiler supports."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.aot import CHIPS, ENVIRONMENT
from benchmarks.aot.gpus import GPUS

HERE, VIRTUAL, H100 = "here", "cpu", "h100"
GIB = 2**30
MEMORY = {"v5e": 15.75 * GIB, "v5p": 95.74 * GIB, "v6e": 31.25 * GIB, H100: GPUS[H100].memory}
"""Bytes available to programs on a chip; for TPUs from the compiler's message when a program needs more."""


def mesh_shape(text: str) -> tuple[int, int, int]:
    """Parse `2x4` as two devices along `data` and four along `model`, and `1x2x4` with four more along `slots`.

    Raises:
        ValueError: it is not of this form.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?", text)
    if found is None:
        raise ValueError(
            f"mesh {text!r} is not of the form 2x4 or 2x2x2: devices along data, along model and along slots, from 1 "
            "each."
        )
    return int(found[1]), int(found[2]), int(found[3] or 1)


def devices_of(target: str, count: int) -> list[Any]:
    """Return devices to compile for.

    Args:
        target: `here`; `cpu` for virtual ones, in a process that has not used devices yet; a TPU with or without
            its topology, `v5e:4x4`; or `h100`.
        count: required number; exactly this number of virtual devices or H100 is created.

    Raises:
        ValueError: the target does not exist, has no compiler here, or has too few devices.
    """
    chip, _, topology = target.partition(":")
    if target == HERE:
        devices: Sequence[Any] = jax.devices()
    elif target == VIRTUAL:
        devices = _virtual(count)
    elif chip in CHIPS:
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        devices = _known_to_compiler(target, "jax[tpu]", f"{chip}:{topology}" if topology else CHIPS[chip], "tpu")
    elif target == H100:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        settings = dict(topology=f"1x1x{count}", target_config=GPUS[H100].configuration)
        devices = _known_to_compiler(target, "jax-cuda12-plugin and nvidia-cuda-nvcc-cu12", H100, "cuda", **settings)
    else:
        known = ", ".join((HERE, VIRTUAL, *CHIPS, H100))
        raise ValueError(f"{target!r} is no device to compile for: give one of {known}, TPUs also as v5e:4x4.")
    if len(devices) < count:
        remedy = "name a larger topology" if chip in CHIPS else f"give smaller meshes, or --for {VIRTUAL}"
        raise ValueError(f"a mesh of {count} devices is more than the {len(devices)} of {target}; {remedy}.")
    return list(devices)


def _virtual(count: int) -> list[Any]:
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # this process has already created its devices, perhaps enough of them
    return jax.devices("cpu")


@functools.cache
def _known_to_compiler(target: str, package: str, name: str, platform: str, **settings: Any) -> Sequence[Any]:
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")  # a plugin would look for missing devices
    try:
        return topologies.get_topology_desc(platform=platform, topology_name=name, **settings).devices
    except Exception as error:  # plugins raise many types
        reason = (str(error).splitlines() or [repr(error)])[0].rstrip(".")
        raise ValueError(f"there is no compiler for {target} here ({reason}); pip install {package}.") from error
