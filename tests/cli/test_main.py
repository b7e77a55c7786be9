"""The console script: listing, dispatch, exit codes, and what importing kvjax must not cost."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from kvjax import generate, methods
from kvjax.cli import chat, commands, env, main
from kvjax.policies.policy import Policy
from kvjax.utils.compilation import version
from tests import tokenizing
from tests.paths import ROOT
from tests.small_models import random_model, small_config

ECHO = "def main(argv=None):\n    print('echo', *argv)\n    return 7\n"


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command that exists and three that do not."""
    (tmp_path / "echo_command.py").write_text(ECHO)
    (tmp_path / "bare_directory").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    table = {
        "echo": ("echo_command", "say it again"),
        "missing": ("kvjax.no_such_module", "not there"),
        "orphan": ("kvjax.no_such_package.module", "not there either"),
        "bare": ("bare_directory", "a directory without a module"),
    }
    monkeypatch.setattr(main, "COMMANDS", table)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
@pytest.mark.usefixtures("echo")
def test_lists_only_commands_that_exist(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv) == 0
    out = capsys.readouterr().out
    assert "echo  say it again" in out
    assert not any(name in out for name in ("missing", "orphan", "bare"))


@pytest.mark.usefixtures("echo")
def test_a_directory_of_the_users_is_no_module_of_a_checkout() -> None:
    assert commands.module_exists("echo_command")
    assert not any(map(commands.module_exists, ("bare_directory", "bare_directory.report", "no_such_package.report")))


@pytest.mark.usefixtures("echo")
def test_passes_words_and_exit_code_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["echo", "--budget", "64"]) == 7
    assert capsys.readouterr().out == "echo --budget 64\n"


@pytest.mark.parametrize("name", ["missing", "nonsense", "--nonsense"])
@pytest.mark.usefixtures("echo")
def test_unknown_command_is_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"kvjax has no command {name!r}: choose one of echo.\n"


@pytest.mark.parametrize(
    ("error", "code"), [("KeyboardInterrupt", 130), ("BrokenPipeError", 141), ("SystemExit(3)", 3)]
)
def test_an_import_that_is_interrupted_ends_without_a_word(
    error: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"slow_{code}.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(main, "available", lambda: {"slow": (f"slow_{code}", "")})
    if code == 3:
        with pytest.raises(SystemExit):
            main.main(["slow"])
    else:
        assert main.main(["slow"]) == code
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("budget=0 is\n  nothing."), 2, "kvjax test: budget=0 is nothing.\n"),
        (ValueError(), 2, "kvjax test: ValueError\n"),
        (
            RuntimeError("INTERNAL: Out of memory allocating"),
            2,
            "kvjax test: there is not enough memory (INT",
        ),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 2, "kvjax test: there is not enough memory (RESOURCE_EX"),
        (MemoryError("Unable to allocate"), 2, "kvjax test: Unable to allocate\n"),
        (BrokenPipeError(), 141, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_runs_end_with_a_code_and_a_sentence(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise error

    assert commands.finish("test", run) == code
    assert capsys.readouterr().err.startswith(said)
    with pytest.raises(RuntimeError, match="a bug"):
        commands.finish("test", lambda: (_ for _ in ()).throw(RuntimeError("a bug")))


def test_a_process_whose_reader_has_gone_ends_quietly() -> None:
    script = "from kvjax.cli import commands; commands.leave(commands.finish('test', lambda: print('x')))"
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    os.close(writer)
    assert (run.returncode, run.stderr) == (141, b"")


def test_a_process_that_leaves_collects_no_garbage_of_all_its_modules() -> None:
    script = "import atexit, gc; from kvjax.cli import commands; print(len(gc.get_objects()) > 50_000); "
    script += "atexit.register(lambda: print(len(gc.get_objects()) < 1000)); commands.leave(3)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (3, "True\nTrue\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.8, 1.5, 2.5, 4.0])
def test_an_interrupted_process_ends_without_a_word(seconds: float) -> None:
    command = [sys.executable, "-m", "kvjax", "generate", "--prompt", "Once", "--ignore-eos", "--policy", "streaming"]
    command += ["--budget", "64", "--max-new-tokens", "20000", "--json"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == b""
    assert process.returncode == 130


def test_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvjax {main.version()}\n"


def test_shows_public_names_alone() -> None:
    import kvjax

    assert dir(kvjax) == sorted(kvjax.__all__) and all(hasattr(kvjax, name) for name in kvjax.__all__)
    assert not any(name.startswith("_") for name in dir(kvjax))
    with pytest.raises(
        AttributeError,
        match="kvjax has no 'nope'; it has AccumulatedScore, AttentionProbs, AttentionSum, Cache, Codec",
    ):
        kvjax.nope  # noqa: B018


def test_every_listed_command_has_a_main() -> None:
    import importlib

    for module, _ in main.available().values():
        assert callable(importlib.import_module(module).main), module


def test_runs_as_a_module_and_imports_nothing_heavy() -> None:
    # flax itself imports rich.
    heavy = "{'transformers', 'torch', 'matplotlib', 'flax.nnx'}"
    script = "import sys, kvjax; from kvjax.cli.main import main; main([]); "
    script += f"sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for arguments in (["-c", script], ["-m", "kvjax"]):
        run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.startswith("usage: kvjax COMMAND")


def test_env_says_what_an_issue_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "programs"
    kept.mkdir()
    (kept / "program").write_bytes(b"12345")
    for name, value in {"KVJAX_CACHE_DIR": str(kept), "KVJAX_KERNELS": "xla", "HF_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    assert main.main(["env"]) == 0
    lines = capsys.readouterr().out
    for said in (
        f"kvjax: {version()}",
        f"  jax {jax.__version__}",
        "  KVJAX_KERNELS xla",
        f"{kept} (1 files, 5 bytes)",
    ):
        assert said in lines
    assert "secret" not in lines
    assert main.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0].startswith("cpu")


def test_env_says_why_there_are_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise RuntimeError("the TPU is already in use\nby process 17")

    monkeypatch.setattr(jax, "devices", failing)
    assert env.environment()["devices"] == ["none: the TPU is already in use by process 17"]


EMOJI = "\N{GRINNING FACE}"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize(
    "words",
    [
        ["--prompt", f"{EMOJI}5", "--show-cache"],
        ["--prompt", f"{EMOJI}5", "--json", "--logprobs", "1"],
        ["--prompt", f"{EMOJI}5", "--num-samples", "2"],
        ["--prompt-file", "lines.jsonl"],
        ["--policy", "list"],
    ],
)
def test_every_character_can_be_printed(
    encoding: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(small_config(4, 2))
    model.tokenizer = tokenizing.words(letter=EMOJI)
    monkeypatch.setattr("kvjax.model.load", lambda *_, **__: model)
    monkeypatch.chdir(tmp_path)
    Path("lines.jsonl").write_text(json.dumps({"prompt": f"{EMOJI}5"}))
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    short = ["--max-new-tokens", "2", "--temperature", "0"]
    assert generate.main([*words, *([] if "list" in words else short)]) == 0
    out.flush()
    said = out.buffer.getvalue().decode(encoding)
    if "list" in words:
        assert "h2o" in said
    elif said.startswith("{"):
        assert json.loads(said)["text"].count(EMOJI) == 2
    else:
        assert said.count(r"\U0001f600") == 2 * (1 + ("--num-samples" in words))
        assert "--show-cache" not in words or "\n ?5\n###\n" in said  # as wide as its marks


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_every_character_can_be_said_in_a_chat(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(small_config(4, 2, max_positions=128))
    model.tokenizer = tokenizing.words(letter=EMOJI)
    monkeypatch.setattr("kvjax.model.load", lambda *_, **__: model)
    streams = [io.TextIOWrapper(io.BytesIO(text), encoding) for text in (b"a turn\n/save\n", b"", b"")]
    for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
        monkeypatch.setattr(f"sys.{name}", stream)
    assert chat.main(["--policy", "full", "--max-new-tokens", "2"]) == 2  # for want of a name
    streams[1].flush()
    assert streams[1].buffer.getvalue().count(rb"\U0001f600") == 2


@pytest.mark.parametrize(
    ("encoding", "errors"), [("utf-8", "strict"), ("utf-8", "surrogateescape"), ("ascii", "strict")]
)
def test_standard_input_in_another_encoding_is_one_sentence(
    encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (generate, chat):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding, errors))
        assert command.main([]) == 2
        said = capsys.readouterr().err
        assert f"standard input is not {encoding} text; give it in that encoding, or say which" in said
        assert said.count("\n") == 1


def test_a_file_in_another_encoding_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("latin.txt", b"caf\xe9"), ("wide.jsonl", '{"prompt": "a"}'.encode("utf-16"))):
        (tmp_path / name).write_bytes(content)
        assert generate.main(["--prompt-file", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert "is not UTF-8 text; save it in that encoding." in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("generate --promt x", "kvjax generate: there is no option --promt; did you mean --prompt?"),
        ("generate --max-tokens 4", "kvjax generate: there is no option --max-tokens; did you mean --max-new-tokens?"),
        ("train-less --txt x", "kvjax train_less: there is no option --txt; did you mean --text?"),
        ("calibrate --txt x", "kvjax calibrate: there is no option --txt; did you mean --text?"),
        ("serve --prot 1", "kvjax serve: there is no option --prot; did you mean --port?"),
        ("bench decod", "kvjax bench: what 'decod' is not known; did you mean decode?"),
        ("evaluate perplexty", "kvjax evaluate: TASK 'perplexty' is not known; did you mean perplexity?"),
        ("evaluate fidelity --polices h2o", "kvjax evaluate fidelity: there is no option --polices; did you mean"),
        ("generate --dtype float31", "kvjax generate: --dtype 'float31' is not known; did you mean float32?"),
        ("generate --frobnicate", "kvjax generate: there is no option --frobnicate; kvjax generate --help lists them."),
        (
            "evaluate harness --tasks copa --limit few",
            "kvjax evaluate harness: argument --limit: 'few' is neither a number of cases nor a fraction of them.",
        ),
        ("generate Once", "kvjax generate: 'Once' belongs to no option; see kvjax generate --help."),
    ],
)
def test_a_mistyped_word_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(words.split())
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith(sentence) and said.err.count("\n") == 1


def test_a_mistyped_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["generat"]) == 2
    assert capsys.readouterr().err == "kvjax has no command 'generat': did you mean generate?\n"


def test_dashes_and_underscores_are_alike(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train-less", "--help"], ["evaluate", "Perplexity", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main.main(words)
        assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: kvjax ")
    options = generate.parser().parse_args(["--max_new_tokens=7", "--prefill_chunk", "9", "--prompt", "a --b_c"])
    assert (options.max_new_tokens, options.prefill_chunk, options.prompt) == (7, 9, "a --b_c")


OWN = "from kvjax.methods.registry import policy\n\ndef mine(recent=3):\n    return policy('h2o', recent=recent)\n"
COMMANDS = {
    "generate": "generate --prompt x",
    "chat": "chat",
    "serve": "serve --port 0 --no-warmup",
    "bench": "bench decode",
    "bench parts": "bench parts",
    "bench scale": "bench scale --model toy --mesh 1x1",
    "evaluate": "evaluate perplexity --text TEXT",
    "evaluate quality": "evaluate quality --text TEXT",
    "train_less": "train_less --text TEXT --out OUT",
    "tune": "tune",
}
"""By name, each with what it cannot do without."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_one_grammar_of_policies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Policy] = []
    real = methods.policy

    def policy(*words: Any, **settings: Any) -> Policy:
        found = real(*words, **settings)
        if found.name != "full":
            made.append(found)
            raise ValueError("made.")
        return found

    (tmp_path / "text.txt").write_text("word " * 2000)
    (tmp_path / "mine.py").write_text(OWN)
    own = f"{tmp_path / 'mine.py'}:mine"
    words = COMMANDS[name].replace("TEXT", str(tmp_path / "text.txt")).replace("OUT", str(tmp_path / "out")).split()
    coded = real("h2o", codec="int8", plan="pyramid", recent=16)
    for place in ("kvjax.methods.policy", "kvjax.methods.notation.policy"):
        monkeypatch.setattr(place, policy)
    performer: Any = {"residual": "less", "residual.kernels": "performer"}
    for asked, wanted in (
        ("--policy h2o+int8+pyramid[recent=16]", coded),
        ("--policy h2o --codec int8 --plan pyramid --set recent=16", coded),
        (
            "--policy streaming --residual less --set residual.kernels=performer",
            real("streaming", **performer),
        ),
        ("--policy h2o+topk --set sinks=2", real("h2o", selection="topk", sinks=2)),
        (f"--policy {own}+int4[recent=5]", real(own, codec="int4", recent=5)),
    ):
        made.clear()
        assert main.main([*words, *asked.split()]) == 2
        assert capsys.readouterr().err.startswith(f"kvjax {words[0]}")
        assert made == [wanted], asked
    for asked, said in (
        ("--policy h20", "there is no policy 'h20'; did you mean h2o?"),
        ("--policy H2O", "there is no policy 'H2O'; did you mean h2o?"),
        ("--policy h2o+int", "there is no part 'int'; did you mean int"),
        ("--policy h2o+int8 --codec int4", "--codec int4 does not go with int8 in the policy's name; name one codec."),
        ("--policy h2o --codec INT8", "there is no codec 'INT8'; did you mean int8?"),
    ):
        assert main.main([*words, *asked.split()]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1


@pytest.mark.parametrize("out", ["file", "file/deeper"])
@pytest.mark.parametrize(
    "command",
    [
        "evaluate perplexity --text file",
        "evaluate report --runs .",
        "calibrate --text file",
        "train_less --text file",
        "convert",
        "bench decode",
        "bench kernels",
        "train_tiny",
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(
    command: str, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("A text.")
    option, where = ("--json", f"{out}/x.json") if command.startswith("bench") else ("--out", out)
    with pytest.raises(SystemExit) as ended:
        main.main([*command.split(), option, where])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and f"{option}: " in said
    assert said.endswith("file is a file; name a directory.\n")


@pytest.mark.parametrize("command", ["bench decode", "bench kernels"])
def test_a_directory_is_no_file_for_numbers(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main([*command.split(), "--json", str(tmp_path)])
    assert f"{tmp_path} is a directory; name a file." in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "generate --prompt Hi --policy ~nosuchuser/x.py:A",
        "generate --prompt Hi --residual ~nosuchuser/x.py:A",
        "generate --prompt Hi --model ~nosuchuser/x",
        "generate --prompt Hi --policy h2o+less --budget 8 --less-checkpoint ~nosuchuser/x",
        "generate --prompt Hi --policy triattention --budget 8 --set checkpoint=~nosuchuser/x",
        "chat --load ~nosuchuser/x",
    ],
)
def test_the_home_of_an_unknown_user_is_refused_in_a_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words.split()) == 2
    said = capsys.readouterr().err
    assert "begins with the home of an unknown user" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("calibrate --text empty.txt", "empty.txt is empty; give a file with text"),
        ("calibrate --text nowhere.txt", "nowhere.txt is not a file"),
        ("calibrate --text text.txt --length 0", "--length 0 is not"),
        ("calibrate --text text.txt --tokens -5", "--tokens -5 is not"),
        ("train_less --text empty.txt", "empty.txt is empty; give a file with text"),
        ("train_less --text nowhere.txt", "nowhere.txt is not a file"),
        ("train_less --text text.txt --length -3", "--length -3 is not"),
        ("train_less --text text.txt --seed -1", "seed=-1 is not"),
        ("train_less --text text.txt --rate inf", "rate=inf"),
    ],
)
def test_texts_and_numbers_are_checked_before_a_model_is_loaded(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Once upon a time.")
    (tmp_path / "empty.txt").write_text("\n")
    assert main.main([*words.split(), "--out", "made", "--model", "/nowhere"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not (tmp_path / "made").exists()
