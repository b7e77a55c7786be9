"""What the documentation shows is there, and runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvjax
from kvjax.methods import PAPERS, describe
from kvjax.models import families
from tests.compiling import fast_environment
from tests.fake_engine import FakeEngine, events, served
from tests.paths import ROOT

DOCS = ROOT / "docs"
API = (DOCS / "api.md").read_text(encoding="utf-8")
SERVING = (DOCS / "serving.md").read_text(encoding="utf-8")


FILES = [ROOT / "README.md", *DOCS.glob("*.md"), *(DOCS / "guides").glob("*.md")]
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in FILES}
GUIDES = sorted(name for name, text in PAGES.items() if "```python" in text and name not in ("api", "serving"))


@pytest.mark.parametrize("name", GUIDES)
def test_the_code_of_guides_runs(name: str) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGES[name], flags=re.DOTALL))
    exec(compile(code, name, "exec", dont_inherit=True), {"__name__": name})  # without future imports


def test_the_first_page_shows_the_figure_of_the_readme() -> None:
    assert "](docs/quality.svg)" in PAGES["README"] and "](quality.svg)" in PAGES["index"]


def test_every_public_name_is_explained() -> None:
    table = API[: API.index("## Texts")]
    named = set(re.findall(r"`(\w+)", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE))))
    assert named == set(kvjax.__all__)


def test_texts_of_reports_are_listed_with_source_and_digest() -> None:
    pages = [*DOCS.rglob("*.md"), ROOT / "kvjax" / "tiny" / "less" / "README.md"]
    names = {name for page in pages for name in re.findall(r"\b(\w+_(?:valid|train))\.txt", page.read_text("utf-8"))}
    rows = re.findall(r"^\| `(\w+)\.txt` \| (.*) \|$", PAGES["texts"], flags=re.MULTILINE)
    digests = [name for name, rest in rows if re.fullmatch(r"[\d,]+ \| `[0-9a-f]{64}`", rest)]
    sources = [name for name, rest in rows if len(re.split(r" \| ", rest)) == 3]
    assert sorted(digests) == sorted(sources) == sorted(names)


def test_readme_names_every_method() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [
        f"| {group} | {', '.join(f'`{name}` ({paper})' for name, paper in papers.items())} |"
        for group, papers in PAPERS.items()
        if papers
    ]
    table = "\n".join(["| methods | name (source) |", "| --- | --- |", *rows])
    assert table in readme, f"the README's table of methods is now\n{table}"


def families_table() -> str:
    """Names of each family's models and of their architectures, from the modules of the registry."""
    rows = ["| models | `model_type` |", "| --- | --- |"]
    for info in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{info.name}")
        if registered := vars(module).get("FAMILIES"):
            names = (module.__doc__ or "").partition(":")[0]
            rows.append(f"| {names} | {', '.join(f'`{name}`' for name in registered)} |")
    return "\n".join(rows)


def test_the_guide_names_every_family() -> None:
    table = families_table()
    assert table in (DOCS / "guides" / "own_model.md").read_text(encoding="utf-8"), f"the table is now\n{table}"


def documented() -> dict[str, Any]:
    """What has an example: public names, and methods of public classes."""
    public = {name: getattr(kvjax, name) for name in kvjax.__all__ if name != "policies"}
    methods = {
        f"{name}.{method}": value
        for name, kind in public.items()
        if inspect.isclass(kind)
        for method, value in vars(kind).items()
        if inspect.isfunction(value)
    }
    return {name: each for name, each in (public | methods).items() if ">>>" in (each.__doc__ or "")}


EXAMPLES = documented()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings(name: str) -> None:
    text = inspect.cleandoc(EXAMPLES[name].__doc__)
    example = doctest.DocTestParser().get_doctest(text, {"kvjax": kvjax}, name, None, 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(example, out=said.append).failed == 0, "".join(said)


def test_what_is_used_most_has_an_example() -> None:
    functions = {name for name in kvjax.__all__ if inspect.isfunction(getattr(kvjax, name))}
    wanted = functions - {"enable_compilation_cache"} | {"Policy", "Score", "Model.generate", "Model.stream"}
    assert wanted <= set(EXAMPLES)


def members() -> dict[str, describe.Description]:
    """Every policy and part by name."""
    policies = {name: describe.describe_policy(name) for name in kvjax.methods.REGISTRY}
    return policies | {f"{part} {e.name}": e for part, entries in describe.parts().items() for e in entries}


@pytest.mark.parametrize("name", members())
def test_every_member_says_what_its_page_needs(name: str) -> None:
    entry = members()[name]
    assert entry.summary.endswith(".") and entry.paper and entry.when.endswith(".")
    assert all(setting.kind and setting.meaning for setting in entry.settings)
    said = [describe.explanation(source) for source in entry.sources]
    assert any(".. math::" in text for text in said)
    assert not any(word in text for text in said for word in ("When: ", "From: ", "Args:"))


def commands_of(name: str) -> list[str]:
    """The command lines of a page, in blocks and within sentences, that say with what kvjax is to run."""
    found = re.findall(r"^kvjax .*$|`(kvjax [^`]* --[^`]*)`", PAGES[name], flags=re.MULTILINE)
    blocks = re.findall(r"^kvjax .*$", PAGES[name], flags=re.MULTILINE)
    return list(dict.fromkeys([*blocks, *(line for line in found if line)]))


def on_eight_devices(line: str) -> str:
    """A line of the documentation with the embedded model and as many devices as there are here, and little to do."""
    for large, small in (
        ("--model DIR", "--model tiny"),
        ("--model smollm2", "--model tiny"),
        ("data=4,model=8 --distributed", "data=4,model=2"),
        ("--model llama-70b --for v5p:2x2x4 --mesh 1x16,1x1x16", "--model toy --for cpu --mesh 1x8,1x1x8"),
        ("--batch 32 --prompt-tokens 8192", "--batch 8 --prompt-tokens 64"),
        ("--rows 32", "--rows 4"),
    ):
        line = line.replace(large, small)
    if line.startswith("kvjax generate"):
        return f"{line} --max-new-tokens 3"
    return f"{line} --port 0 --no-warmup" if line.startswith("kvjax serve -") else line


def run_lines(lines: list[str], directory: Path) -> list[dict[str, Any]]:
    """What came of lines, all in one process."""
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("One", "A cat")))
    environment = os.environ | fast_environment() | {"JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "-m", "tests.doc_lines"]
    run = subprocess.run(
        script, cwd=directory, env=environment, input="\n".join(lines), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_a_file_of_prompts_runs_on_the_devices_that_are_documented(tmp_path: Path) -> None:
    lines = [on_eight_devices(line) for line in commands_of("devices") if "--prompt-file" in line]
    (told,) = run_lines(lines, tmp_path)
    assert told["code"] == 0, told
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(each["line"], each["new_tokens"]) for each in answers] == [(1, 3), (2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["devices", "serving"])
def test_every_command_line_of_a_page_runs(name: str, tmp_path: Path) -> None:
    lines = [on_eight_devices(line) for line in commands_of(name) if "--help" not in line]
    assert len(lines) == {"devices": 8, "serving": 2}[name]
    for told in run_lines(lines, tmp_path):
        if told["line"].startswith("kvjax tune --model"):  # which is for a GPU
            assert told["code"] == 2 and "there is nothing to benchmark on cpu" in told["said"], told
        else:
            assert told["code"] == 0, told


CHAPTER = API[API.index("\n## Step by step") : API.index("\n## Your own policy")]
"""The chapter of the Python interface whose blocks continue one state."""
RESTORED = {
    "fastgen": {},
    "h2o, adakv": {"plan": "adakv"},
    "lightkv": {"offload": True},
}


def code(text: str) -> list[str]:
    """The blocks of Python in a text."""
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", RESTORED)
def test_the_recipes_for_memory_and_disk_go_for_every_storage(name: str) -> None:
    recipes = [block for block in code(CHAPTER) if "donate_argnums" in block or "orbax" in block]
    assert len(recipes) == 2
    model = kvjax.load("tiny")
    policy = kvjax.policy(name.partition(",")[0], **RESTORED[name])
    ids = model.tokenizer.encode("Once upon a time there was a girl. She had a dog, a red ball and a boat.")
    budget = 1.0 if policy.plan.sizing.mode == "profiled" else 16
    state, logits = kvjax.prefill(model, policy, [ids], budget=budget, max_new_tokens=64)
    known = {"kvjax": kvjax, "model": model, "policy": policy, "ids": ids, "state": state, "logits": logits}
    exec("\n".join(recipes).replace("budget=16", f"budget={budget}"), known)
    assert (known["restored"].position == len(ids) + 4).all()


def test_the_code_that_continues_one_state_runs() -> None:
    known: dict[str, Any] = {"kvjax": kvjax, "model": kvjax.load("tiny")}
    exec("\n".join(code(CHAPTER)), known)
    assert known["restored"].decoder.policy.name == "keyformer"


@pytest.mark.slow
def test_the_code_runs() -> None:
    exec("\n".join(code(API)), {})


@pytest.mark.slow
def test_an_engine_answers_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    exec(re.findall(r"```python\n(.*?)```", SERVING, flags=re.DOTALL)[1], {})
    assert "Held(seen=" in capsys.readouterr().out


def test_what_serving_shows_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    engine = FakeEngine()
    engine.model.name = "smollm2"
    with served(engine) as port:
        shown = SERVING.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
        lines = re.findall(r"^(curl (?:.*\\\n)*.*)$", shown, flags=re.MULTILINE)
        assert len(lines) == 6
        for line in lines:
            said = subprocess.run(["sh", "-c", f"{line} -sS --fail-with-body"], capture_output=True, text=True)
            assert said.returncode == 0, (line, said)
            if "/metrics" in line:
                assert "kvjax_tokens_total" in said.stdout
            elif "stream" in line:
                *chunks, last = events(iter(said.stdout.splitlines()))
                assert last == "[DONE]" and json.loads(chunks[-1])["kv"]["kept"] == 64
            else:
                json.loads(said.stdout)
        assert len(engine.requests) == 3
        example, _ = re.findall(r"```python\n(.*?)```", shown, flags=re.DOTALL)
        exec(example, {})
    assert "'kept': 64" in capsys.readouterr().out
    sampling = engine.requests[-1].sampling
    assert sampling is not None and (engine.requests[-1].budget, sampling.top_k) == (64, 40)
