"""Programs that are compiled fast rather than well, in which tests and the processes that they start agree."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
from jax._src import compiler

LOOPS = ("simplify-while-loops", "while-loop-invariant-code-motion", "while-loop-constant-sinking")
"""Passes that make loops faster; those of tests are short."""

FAST: dict[str, bool | int | str] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,  # workers share the cores: parts of a program only cost more
    "xla_disable_hlo_passes": ",".join((*LOOPS, "reshape-mover", "tree_reduction_rewriter")),
}


def compile_fast() -> None:
    """Compile so from now on, while `jax_disable_most_optimizations` is on, which this turns on."""
    jax.config.update("jax_disable_most_optimizations", True)
    known, usual_options = _known(), compiler.get_compile_options

    @functools.wraps(usual_options)
    def compile_options(*args: Any, **settings: Any) -> Any:
        if jax.config.read("jax_disable_most_optimizations"):
            settings["env_options_overrides"] = known | (settings.get("env_options_overrides") or {})
        return usual_options(*args, **settings)

    compiler.get_compile_options = compile_options  # there is no setting for all programs


def fast_environment() -> dict[str, str]:
    """Return environment variables with which a process compiles so from its start."""
    flags = [f"--{name}={str(value).lower()}" for name, value in _known().items()]
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": " ".join([*filter(None, [os.environ.get("XLA_FLAGS")]), *flags]),
    }


@functools.cache
def _known() -> dict[str, bool | int | str]:
    return {name: value for name, value in FAST.items() if _is_known({name: value})}


def _is_known(options: dict[str, bool | int | str]) -> bool:
    """Return whether this version of XLA has an option; without it the suite is slower and nothing else."""
    try:
        jax.jit(lambda x: x + 1, compiler_options=options)(1.0)
    except jax.errors.JaxRuntimeError:
        return False
    return True
