"""Hyperparameters of parts: how their fields are declared, and checks of their values."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer


def values_of(kind: Any, value: Any) -> dict[str, Any]:
    """Return the values that an object has for the fields of a dataclass, such as a base class of its own."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}


class Limit(NamedTuple):
    """Values that a hyperparameter may have: a test, and their description in messages. None passes every limit."""

    fits: Callable[[Any], bool]
    expected: str


def at_least(minimum: float, what: str) -> Limit:
    """Return the limit of numbers from `minimum` on, described as `what`."""
    return Limit(lambda value: value >= minimum, f"{what} from {minimum}")


def above_zero(what: str) -> Limit:
    """Return the limit of positive numbers, described as `what`."""
    return Limit(lambda value: value > 0, f"{what} above 0")


def share(what: str) -> Limit:
    """Return the limit of fractions, described as `what`."""
    return Limit(lambda value: 0 <= value <= 1, f"{what} in [0, 1]")


def one_of(*words: str) -> Limit:
    """Return the limit of a choice of words."""
    return Limit(lambda value: value in words, " or ".join(map(repr, words)))


ODD = Limit(lambda value: value > 0 and value % 2 == 1, "an odd number from 1")
SEED = Limit(lambda value: 0 <= value < 2**32, "a whole number below 2^32")


def setting(default: Any, limit: Limit | None = None) -> Any:
    """Declare a static hyperparameter of a part: each value compiles its own program."""
    return struct.field(pytree_node=False, default=default, metadata={"setting": True, "limit": limit})


def directory(default: str) -> Any:
    """Declare a static hyperparameter that names a directory of arrays, empty for none."""
    return struct.field(pytree_node=False, default=default, metadata={"setting": True, "directory": True})


def number(default: Any, limit: Limit | None = None) -> Any:
    """Declare a traced hyperparameter: a program takes it as an argument and serves all values of one dtype."""
    return struct.field(default=default, metadata={"setting": True, "limit": limit})


def derived(default: Any) -> Any:
    """Declare a static field that users do not set: it is computed from hyperparameters, or fixed by a subclass."""
    return struct.field(pytree_node=False, default=default, metadata={"setting": False}, repr=False)


def setting_names(part: Any) -> list[str]:
    """Return the names of the hyperparameters of a part or of its class."""
    fields = dataclasses.fields(part)
    return [x.name for x in fields if x.metadata.get("setting", not x.metadata.get("pytree_node", True))]


def directories(part: Any) -> list[str]:
    """Return the directories that settings of a part, or of parts in its fields, name."""
    paths: list[str] = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.metadata.get("directory") and value:
            paths.append(value)
        elif dataclasses.is_dataclass(value):
            paths += directories(value)
    return paths


CONCRETE = (int, float, str, tuple, list, np.generic, type(None))
"""Types of hyperparameters that are no tracers or other leaves of a pytree."""


def written(*values: object) -> bool:
    """Return whether all values are concrete, rather than tracers or other leaves of a pytree."""
    return all(isinstance(value, CONCRETE) for value in values)


def is_share(value: Any) -> bool:
    """Return whether a number or its tracer is a fraction, of a floating-point dtype, rather than a count."""
    return jnp.issubdtype(jnp.result_type(value), jnp.floating)


def check(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise a ValueError with the name and value of a setting and what is expected, unless `ok`."""
    if not ok:
        raise ValueError(f"{name}={value!r} is not {expected}.")


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "float": (
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
        "a finite number",
    ),
    "str": (lambda value: isinstance(value, str), "text"),
    "None": (lambda value: value is None, "None"),
    "tuple[int, ...]": (
        lambda value: isinstance(value, tuple) and all(_KINDS["int"][0](item) for item in value),
        "a list of whole numbers such as [5]",
    ),
    "tuple[str, ...]": (
        lambda value: isinstance(value, tuple) and all(isinstance(item, str) for item in value),
        "a list of words",
    ),
}


SIMPLE = (bool, int, float, str, type(None))
"""Types of values that are equal to no value of another type with which they are confused."""


def check_kind(name: str, value: object, annotation: object) -> None:
    """Refuse a setting whose type differs from its annotation, and numbers that are NaN, infinite or too large.

    Only annotations made of `_KINDS` are checked: numbers, text, booleans, None and tuples.
    """
    check = _check_known_kind if type(value) in SIMPLE else _check_kind
    check(name, value, type(value), annotation)


def _check_kind(name: str, value: object, _: type, annotation: object) -> None:
    limit = 2**32 if name == "seed" else 2**31
    check(not isinstance(value, int) or abs(value) < limit, name, value, f"a number below {limit}")
    kinds = (annotation.__name__ if isinstance(annotation, type) else str(annotation)).split(" | ")
    if all(kind in _KINDS for kind in kinds):
        fits, expected = zip(*(_KINDS[kind] for kind in kinds), strict=True)
        check(any(test(value) for test in fits), name, value, " or ".join(expected))


# Programs rebuild their policies many times, with the same settings.
_check_known_kind = functools.cache(_check_kind)


def check_fields(record: Any, *names: str) -> None:
    """Refuse values of a dataclass, in some of its fields or in all, whose types differ from their annotations."""
    for field in dataclasses.fields(record):
        if not names or field.name in names:
            check_kind(field.name, getattr(record, field.name), field.type)


def check_limit(name: str, value: Any, field: dataclasses.Field[Any]) -> None:
    """Refuse a value outside the limit that the field of a hyperparameter declares."""
    limit: Limit | None = field.metadata.get("limit")
    if limit is not None and value is not None:
        optional = ", or None" if str(field.type).endswith("None") else ""
        check(limit.fits(value), name, value, limit.expected + optional)


def fields_line(record: Any, hidden: Sequence[str] = ()) -> str:
    """Return a dataclass as a call in one line, with the values that are not defaults, and arrays by their shapes."""
    values = {field.name: (_brief(getattr(record, field.name)), field.default) for field in dataclasses.fields(record)}
    shown = [
        f"{name}={value}"
        for name, (value, default) in values.items()
        if name not in hidden and (default is dataclasses.MISSING or value != _brief(default))
    ]
    return f"{type(record).__name__}({', '.join(shown)})"


def _brief(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        concrete = value.ndim == 0 and isinstance(value, (np.generic, np.ndarray, jax.Array))
        shown = concrete and not isinstance(value, Tracer)
        return f"{value.item():g}" if shown else f"{value.dtype}{list(value.shape)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return fields_line(value)
    arrays = [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "shape")]
    if arrays:
        return f"<{len(arrays)} arrays>"
    return reprlib.repr(value)
