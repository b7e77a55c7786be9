"""The one table of kernels, put together from a list for each operation."""

from __future__ import annotations

from tests.kernels import Case

CASES: tuple[Case, ...] = ()
