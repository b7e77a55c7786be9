"""Runs of several processes: connecting them, choosing the one that writes, and gathering arrays."""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import Any

import jax
import numpy as np

WAIT = 60
"""Seconds for all processes to connect, and until a silent process counts as lost."""


def join(where: str = "") -> None:
    """Connect to the other processes of this run; only the first one prints from then on.

    If they are not connected after `WAIT` seconds, this process prints a message and ends with status 2.

    Args:
        where: `HOST:PORT,PROCESSES,NUMBER`: address of the first process, number of processes, and this process's
            number from 0. Empty for the settings of Cloud TPU, SLURM, Kubernetes or Open MPI.

    Raises:
        ValueError: if `where` has another form, or JAX finds no address or cannot connect.
    """
    settings: dict[str, Any] = {}
    if where:
        parts = re.fullmatch(r"([^,\s]+:\d+),(\d+),(\d+)", where)
        if parts is None or not int(parts[3]) < int(parts[2]):
            raise ValueError(
                f"--distributed {where} is not HOST:PORT,PROCESSES,NUMBER, such as 10.0.0.1:9000,2,0, with numbers "
                "from 0; leave it empty where Cloud TPU, SLURM or Kubernetes start the processes."
            )
        settings = dict(coordinator_address=parts[1], num_processes=int(parts[2]), process_id=int(parts[3]))
    # JAX's own timeout ends the process with an internal traceback; ours is shorter and comes first.
    settings |= dict(initialization_timeout=2 * WAIT, heartbeat_timeout_seconds=WAIT, shutdown_timeout_seconds=WAIT)
    limit = threading.Timer(WAIT, _give_up)
    limit.daemon = True
    limit.start()
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(**settings)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if "coordinator_address" in reason or "should be defined" in reason:
            reason = "nothing says where they are; give --distributed HOST:PORT,PROCESSES,NUMBER"
        raise ValueError(f"the processes of this run cannot connect: {reason[:300]}.") from None
    finally:
        limit.cancel()
    # Collectives print to standard output: send that to the null device.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(nowhere, 1)
    stdout, first = sys.stdout, jax.process_index() == 0
    sys.stdout = open(output if first else nowhere, "w", encoding=stdout.encoding, errors=stdout.errors)  # noqa: SIM115
    if jax.process_index() > 0:
        sys.stderr = sys.stdout


def _give_up() -> None:
    print(
        f"kvjax: the other processes of this run did not connect within {WAIT} seconds; start all of them, with the "
        "same HOST:PORT and PROCESSES, where that address can be reached.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def writes() -> bool:
    """Return whether this process prints and writes files: it is the first of its run, or the only one."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def on_host(array: Any) -> np.ndarray:
    """Gather an array from all devices, including those of other processes, which must make the same call."""
    if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
        from jax.experimental import multihost_utils

        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)
