"""Programs that are compiled fast rather than well, in which tests and the processes that they start agree."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax._src import compiler

FAST = {"xla_cpu_use_fusion_emitters": False}


def compile_fast() -> None:
    """Compile so from now on, while `jax_disable_most_optimizations` is on, which this turns on."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        jax.jit(lambda x: x + 1, compiler_options=FAST)(1.0)
    except jax.errors.JaxRuntimeError:
        return  # which is a slower suite and nothing else
    usual_options = compiler.get_compile_options

    @functools.wraps(usual_options)
    def compile_options(*args: Any, **settings: Any) -> Any:
        if jax.config.read("jax_disable_most_optimizations"):
            settings["env_options_overrides"] = FAST | (settings.get("env_options_overrides") or {})
        return usual_options(*args, **settings)

    compiler.get_compile_options = compile_options  # there is no setting for all programs
