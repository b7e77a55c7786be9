"""Refusals: errors that say why a policy or a model cannot be measured, as opposed to failures of code."""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Generator

RAISING = ("kvjax", "pallas_kernels", "own_policies_")
"""Beginnings of the names of modules whose `raise` refuses; the last one is of a user's FILE.py:NAME."""


class Unsupported(ValueError):
    """A policy or a model does not support what a task or a budget asks; the message says why."""


@contextlib.contextmanager
def refusals() -> Generator[None]:
    """Raise `Unsupported` for a ValueError from a `raise` of kvjax or of a user's policy.

    Other ValueErrors pass: arrays whose shapes do not fit, or a failed unpacking, are mistakes in code.
    """
    try:
        yield
    except ValueError as error:
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        assert last is not None
        statement = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
        if statement != "RAISE_VARARGS" or not last.tb_frame.f_globals["__name__"].startswith(RAISING):
            raise
        raise Unsupported(str(error)) from error
