"""Dependence of a function's results on its arguments, found by tracing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.interpreters import partial_eval


def depends_on(function: Callable[..., Any], arguments: Mapping[str, Any]) -> set[str]:
    """Return the names of those arguments, trees of arrays or shapes, on which a function's results depend."""
    program = jax.make_jaxpr(lambda arguments: function(**arguments))(dict(arguments)).jaxpr
    _, used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    names = (path[0].key for path, _ in jax.tree.leaves_with_path(dict(arguments)))
    return {name for name, is_used in zip(names, used, strict=True) if is_used}
