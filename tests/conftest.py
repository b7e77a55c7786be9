"""Settings that every test runs under: the CPU, double precision on request, repeatable examples."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported, so that no accelerator is claimed
if os.environ["JAX_PLATFORMS"] != "cpu":
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # else a GPU multiplies float32 with 10 bits
os.environ["KVJAX_TUNE"] = "off"  # on an accelerator, tests would race kernels
os.environ["KVJAX_CACHE_DIR"] = ""  # a command under test would keep every later program of its process on disk

import hypothesis
import jax
import pytest

if os.environ.get("KVJAX_CHECK_SHAPES"):  # before the packages are imported
    from tests.shapes import check_shapes

    check_shapes()

from kvjax.utils.compilation import drop_programs
from tests.compiling import compile_fast

# Compiling dominates an example's time, hence few examples and no deadline.
hypothesis.settings.register_profile("local", deadline=None, max_examples=8)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=8, derandomize=True, database=None)
# Of `nox -s fuzz`: examples that differ each time, kept for the next run where they fail.
EXAMPLES = int(os.environ.get("KVJAX_FUZZ_EXAMPLES", "40"))
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=EXAMPLES, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit numbers inside the test that asks for it."""
    with jax.enable_x64(True):
        yield


compile_fast()
gc.freeze()  # imports stay, and tracing makes many objects
gc.set_threshold(50_000, 20, 100)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compile fast rather than well, unless a test is marked `compiled_well`.

    Compiling takes most of the suite's time, and so a third of it. Tests of memory, of ties and of rows that must not
    know of each other run programs as users do.
    """
    fast = item.get_closest_marker("compiled_well") is None
    if jax.config.read("jax_disable_most_optimizations") and not fast:
        jax.clear_caches()  # which hold programs of both kinds under one name
    jax.config.update("jax_disable_most_optimizations", fast)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Drop programs, of which a test may make hundreds."""
    count = item.session.stash.get(FINISHED, 0) + 1
    item.session.stash[FINISHED] = count
    if count % 8 == 0:
        drop_programs()


FINISHED = pytest.StashKey[int]()

ONE_WORKER = {
    "docs/test_docs": "docs",
    "docs/test_site": "site",
    "experiments/test_long": "transformers",
    "generation/test_chat": "prompting",
    "generation/test_generate": "transformers",
    "generation/test_prompting": "prompting",
    "models/test_models": "transformers",
    "serving/test_engine": "engine",
    "serving/test_http": "serving",
    "serving/test_page": "serving",
    "test_rope": "transformers",
    "training/less/test_train": "train_less",
}
"""Files whose tests run on one worker, for they share a slow import, many programs, a run or a server."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that share compiled programs run on one worker: those of a policy, and `ONE_WORKER`."""
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):
        # Not `--dist=loadgroup`: with pytest 9.2, xdist 3.8 forgets the groups.
        def _split_scope(self, nodeid: str) -> str:
            file = re.sub(r"^tests/|\.py::.*", "", nodeid)
            policy = re.search(r"\[(?:\d+-)?([^-+]+).*\]$", nodeid)
            if file in ("methods/test_oracles", "policies/test_contract") and policy:
                return f"{file} {policy[1]}"
            if file == "methods/less/test_less" and "algorithm_1" not in nodeid:
                return file
            return ONE_WORKER.get(file, nodeid)

    return Sharing(config, log)
