"""The console script: listing, dispatch, exit codes, and what importing kvjax must not cost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax import cli

ECHO = "def main(argv=None):\n    print('echo', *argv)\n    return 7\n"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command that exists and three that do not."""
    (tmp_path / "echo_command.py").write_text(ECHO)
    (tmp_path / "bare_directory").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    table = (
        cli.Command("echo", "echo_command", "say it again"),
        cli.Command("missing", "kvjax.no_such_module", "not there"),
        cli.Command("orphan", "kvjax.no_such_package.module", "not there either"),
        cli.Command("bare", "bare_directory", "a directory without a module"),
    )
    monkeypatch.setattr(cli, "COMMANDS", table)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
@pytest.mark.usefixtures("commands")
def test_lists_only_commands_that_exist(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "echo  say it again" in out
    assert not any(name in out for name in ("missing", "orphan", "bare"))


@pytest.mark.usefixtures("commands")
def test_passes_words_and_exit_code_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["echo", "--budget", "64"]) == 7
    assert capsys.readouterr().out == "echo --budget 64\n"


@pytest.mark.parametrize("name", ["missing", "nonsense", "--nonsense"])
@pytest.mark.usefixtures("commands")
def test_unknown_command_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"kvjax has no command {name!r}: choose one of echo.\n"


def test_every_listed_command_has_a_main() -> None:
    import importlib

    for command in cli.available():
        assert callable(importlib.import_module(command.module).main), command.module


def test_runs_as_a_module_and_imports_nothing_heavy() -> None:
    # flax itself imports rich.
    heavy = "{'transformers', 'torch', 'matplotlib', 'flax.nnx'}"
    script = f"import sys, kvjax, kvjax.cli; kvjax.cli.main([]); sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    root = Path(__file__).parent.parent
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for arguments in (["-c", script], ["-m", "kvjax"]):
        run = subprocess.run([sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith("usage: kvjax COMMAND")
