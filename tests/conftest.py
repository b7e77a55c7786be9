"""Settings that every test runs under: the CPU, double precision on request, repeatable examples."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported, so that no accelerator is claimed

import hypothesis
import jax
import pytest

# Compiling dominates an example's time, hence few examples and no deadline.
hypothesis.settings.register_profile("local", deadline=None, max_examples=15)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=15, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit numbers inside the test that asks for it."""
    with jax.enable_x64(True):
        yield
