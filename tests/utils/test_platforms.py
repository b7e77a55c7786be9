"""Platforms that JAX cannot use: one sentence in every command, and the rest of `kvjax env`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvjax.utils import platforms
from tests.paths import ROOT

COMMANDS = (
    "generate --prompt Once",
    "chat --mesh model=1",
    "serve --port 0",
    "bench kernels",
    "tune",
)
SCRIPT = f"""
from kvjax.cli.main import main
print(main(["env", "--json"]), *(main(words.split()) for words in {COMMANDS}))
"""


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ("cuda", "JAX is installed without support for it; pip install -U 'jax[cuda12]', or unset JAX_PLATFORMS."),
        ("tpv", "JAX has no platform 'tpv'; did you mean tpu?"),
    ],
)
def test_every_command_says_in_a_sentence_that_jax_lacks_a_platform(chosen: str, sentence: str) -> None:
    environment = os.environ | {"JAX_PLATFORMS": chosen}
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    facts, codes = run.stdout.splitlines()
    assert codes == " ".join(map(str, (0, *(2 for _ in COMMANDS))))
    sentences = [line for line in run.stderr.splitlines() if line != "kvjax serve: loading tiny"]
    assert len(sentences) == len(COMMANDS)
    assert all(line.endswith(f": JAX_PLATFORMS={chosen}, but {sentence}") for line in sentences)
    assert json.loads(facts)["devices"] == [f"none: JAX_PLATFORMS={chosen}, but {sentence}"]
    assert json.loads(facts)["packages"]["jax"]


ADVICE = "(set JAX_PLATFORMS='' to automatically choose an available backend)"


@pytest.mark.parametrize(
    ("chosen", "message", "installed", "sentence"),
    [
        (
            "tpu",
            f"'tpu': INTERNAL: no libtpu.so {ADVICE}",
            (),
            r"pip install -U 'jax\[tpu\]'",
        ),
        (
            "tpu",
            f"'tpu': the TPU is in use\nby process 7. {ADVICE}",
            ("libtpu",),
            r"cannot use tpu \(the TPU is in use by process 7\); check its driver, or unset JAX_PLATFORMS\.$",
        ),
        (
            "gpu",
            f"'rocm': Backend 'rocm' is not in the list of known backends: []. {ADVICE}",
            (),
            r"jax\[cuda12\]",
        ),
        ("cpu,rocn", f"'rocn': Backend 'rocn' is not in the list of known backends: [] {ADVICE}", (), "you mean rocm"),
        (
            None,
            "'tpu': it is busy (you may need to uninstall the failing plugin package)",
            ("libtpu",),
            r"^JAX cannot use its plugin for tpu \(it is busy\); uninstall it, or set JAX_PLATFORMS=cpu\.$",
        ),
    ],
)
def test_a_failure_names_what_to_install(
    chosen: str | None,
    message: str,
    installed: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platforms, "jax", SimpleNamespace(config=SimpleNamespace(values={"jax_platforms": chosen})))
    monkeypatch.setattr(platforms, "_is_installed", lambda package: package in installed)
    error = RuntimeError(f"Unable to initialize backend {message}")
    failure = platforms.platform_failure(error)
    assert failure is not None
    assert re.search(sentence, failure), failure


def test_other_errors_are_none_of_a_platform() -> None:
    for error in (RuntimeError("a bug"), AssertionError(), ValueError("Unable to initialize backend 'x': y")):
        assert platforms.platform_failure(error) is None
