"""JAX's strict modes: a user's settings of them hold in the user's code, and not in kvjax's programs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def on_the_host(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that plans on the host promote ranks and dtypes and move arrays, under all of JAX's strict modes.

    Programs that are traced inside are the same under every setting.
    """

    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.transfer_guard("allow"), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return inner


def each_on_the_host(function: Callable[P, Iterator[R]]) -> Callable[P, Iterator[R]]:
    """Let an iterator's function compute each of its values as `on_the_host` does."""

    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        values = function(*args, **kwargs)
        advance = on_the_host(lambda: list(itertools.islice(values, 1)))
        while value := advance():
            yield from value

    return inner
