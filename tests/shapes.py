"""Shapes and dtypes of arrays compared with annotations, in all functions of both packages.

It is on with `KVJAX_CHECK_SHAPES=1`. Only annotations with shapes are checked, as pyright checks all other types; and
not those of fields, because JAX rebuilds pytrees with leaves that are no arrays. The fields of an operation are its
arguments: they are checked when it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args, get_origin, get_type_hints

import jax
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AbstractArray, TypeCheckError, install_import_hook, jaxtyped


def check_shapes() -> None:
    """Check shapes in modules that are imported from now on."""
    install_import_hook(["kvjax", "pallas_kernels"], "tests.shapes.checked")
    from pallas_kernels.op import Op

    run = Op.run

    def run_checked(self: Op[Any], implementation: str, options: Any) -> Any:
        compare_arguments(self)
        return run(self, implementation, options)

    Op.run = run_checked


def compare_arguments(call: Any) -> None:
    """Compare the arguments of an operation's call with their annotations."""
    try:
        _arguments_of(type(call))(**vars(call))
    except TypeCheckError:
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(call)):
            raise


@functools.cache
def _arguments_of(kind: Any) -> Callable[..., Any]:
    hints = get_type_hints(kind)
    fields = [(field.name, _only_shapes(hints[field.name])) for field in dataclasses.fields(kind)]
    return jaxtyped(dataclasses.make_dataclass(kind.__name__, fields), typechecker=beartype)


def checked(signature: Callable[..., Any]) -> Callable[..., Any]:
    """Add checks to a function that jaxtyping calls with the arguments, and then with the result, of one of ours."""
    if signature.__name__ == "__init__":
        return signature
    hints = inspect.get_annotations(signature)
    signature.__annotations__ = {name: _only_shapes(hint) for name, hint in hints.items()}
    check = beartype(signature)

    @functools.wraps(signature)
    def compare(*arguments: Any, **named: Any) -> Any:
        try:
            return check(*arguments, **named)
        except BeartypeCallHintViolation:
            # Programs are also traced for the shapes of their results.
            if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((arguments, named))):
                raise

    return compare


def _only_shapes(hint: Any) -> Any:
    """Return an annotation, with `Any` where there is no array of a given shape."""
    if get_origin(hint) is tuple:
        return tuple[tuple(part if part is ... else _only_shapes(part) for part in get_args(hint))]
    return hint if _has_shape(hint) else Any


def _has_shape(hint: Any) -> bool:
    """Return whether an annotation is of arrays of a given shape, or has such parts."""
    return (inspect.isclass(hint) and issubclass(hint, AbstractArray)) or any(map(_has_shape, get_args(hint)))
