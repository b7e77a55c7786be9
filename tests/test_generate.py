"""Generating text, from Python and from the command line, with the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax import generate
from kvjax.engine import extend
from kvjax.sampling import loop
from kvjax.sampling.texts import Stream, encode, generate_ids
from kvjax.settings import config_directories, parse_value, read_config

CONFIGS = sorted({file.stem for directory in config_directories() for file in directory.glob("*.toml")})
STORY = "Once upon a time there was a girl named Lily. She liked to play in the garden with her dog."


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    return kvjax.load("tiny")


def test_greedy_text_equals_the_plain_forward(model: kvjax.Model) -> None:
    made = generate_ids(model, [encode(model, STORY)], max_new_tokens=20, temperature=0.0)
    ids = made.prompts[0] + made.tokens[0]
    best = np.argmax(np.asarray(model.logits([ids])[0]), axis=-1)
    start = len(made.prompts[0])
    assert made.tokens[0] == best[start - 1 : start - 1 + len(made.tokens[0])].tolist()


def test_a_text_does_not_depend_on_its_batch(model: kvjax.Model) -> None:
    prompts = [STORY, "The old man said that", "Tom had a red ball."]
    arguments = dict(policy="keyformer", budget=24, max_new_tokens=24, temperature=0.9, top_k=40, top_p=0.95, seed=3)
    together = model.generate(prompts, **arguments)
    assert together == [model.generate([prompt], **arguments)[0] for prompt in prompts]
    assert model.generate(prompts[::-1], **arguments) == together[::-1]
    assert model.generate(prompts, **{**arguments, "seed": 4}) != together
    assert model.generate(prompts, **{**arguments, "seed": [3, 4, 5]})[0] == together[0]


def test_rows_stop_at_their_end(model: kvjax.Model) -> None:
    made = generate_ids(model, [encode(model, STORY)], max_new_tokens=40, temperature=0.0)
    first = made.tokens[0]
    import dataclasses

    ending = kvjax.Model(model.weights, dataclasses.replace(model.config, eos=(first[5],)), model.name, model.directory)
    stopped = generate_ids(ending, [made.prompts[0]], max_new_tokens=40, temperature=0.0)
    assert stopped.tokens[0] == first[: first.index(first[5])]


@pytest.mark.usefixtures("compiled_fast")
def test_what_varies_between_calls_compiles_nothing(model: kvjax.Model) -> None:
    ids = [encode(model, text) for text in (STORY, STORY[:70], STORY[5:], STORY[9:], STORY[20:], STORY[:60])]
    usual: dict[str, Any] = dict(policy="less", budget=32, max_new_tokens=24)
    first = generate_ids(model, ids, **usual)
    assert first.compile_seconds > 0
    programs: list[Any] = [extend._read_prompts, loop._many, loop.draw]
    before = [program._cache_size() for program in programs]
    changes: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=1, top_k=7, seed=3),
        dict(top_k=40, top_p=0.9, seed=[6, 5, 4, 3, 2, 1]),
        dict(top_p=np.float32(0.5), max_new_tokens=20, budget=30),
    ]
    for change in changes:
        made = generate_ids(model, ids, **usual | change)
        assert made.compile_seconds == 0 and made.timed_tokens == 6 * (made.padded.horizon[0] - 1), change
    five = generate_ids(model, [row[:-1] for row in ids[:5]], **usual)
    # LESS among them: the loop is given its own results, and what is read from disk must not be bound to a device.
    assert [program._cache_size() for program in programs] == before and five.compile_seconds == 0
    assert five.tokens == generate_ids(model, [*(row[:-1] for row in ids[:5]), ids[5][:1]], **usual).tokens[:5]
    assert [len(positions) for positions in five.cache_positions] == [5] * model.config.layers
    assert len(five.state.position) == 5 and kvjax.cache_bytes(five.state) == 5 * kvjax.cache_bytes(first.state) // 6


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvjax.generate", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, encoding="utf-8", check=False)


def test_command_line_prints_text_and_a_summary() -> None:
    done = run("--policy", "h2o", "--budget", "32", "--max-new-tokens", "40", "--show-cache", stdin=STORY)
    assert done.returncode == 0, done.stderr
    assert "marks from 0% to 100% of heads" in done.stdout
    assert "cache:" in done.stderr and "full cache" in done.stderr


def test_json_and_cache_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "map.png"
    settings = ["--config", "keyformer", "--set", "recent=4"]
    done = generate.main(["--prompt", STORY, *settings, "--json", "--save-cache-map", str(figure)])
    said = capsys.readouterr()
    assert done == 0, said.err
    report = json.loads(said.out)
    wanted = "text prompt_tokens new_tokens policy budget cache_bytes full_cache_bytes prefill_seconds "
    wanted += "decode_tokens_per_second seed"
    assert set(wanted.split()) <= set(report)
    assert report["policy"] == "keyformer" and report["cache_bytes"] < report["full_cache_bytes"]
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--policy", "nope"], "no policy 'nope'"),
        (["--policy", "h2o", "--set", "foo=1"], "no setting 'foo'"),
        (["--policy", "h2o", "--plan", "adakv", "--set", "plan.foo=1"], "no setting 'foo'"),
        (["--policy", "h2o", "--codec", "int7"], "no codec 'int7'"),
        (["--policy", "h2o", "--residual", "more"], "no residual 'more'"),
        (["--policy", "tova", "--plan", "adakv"], "needs the same slots in every head"),
        (["--policy", "l2", "--residual", "less"], "no kernels are shipped for policy 'l2'"),
        (["--policy", "h2o", "--budget", "0"], "budget=0"),
        (["--policy", "full", "--budget", "0"], "budget=0"),
        (["--policy", "h2o", "--budget", "-3"], "budget=-3"),
        (["--policy", "h2o", "--budget", "much"], "budget='much'"),
        (["--policy", "streaming", "--budget", "3"], "sinks + recent"),
        (["--policy", "lsh_e", "--set", "bits=0"], "bits=0"),
        (["--policy", "h2o", "--budget", "2", "--plan", "pyramid"], "no slot"),
        (["--config", "nope"], "no config 'nope'"),
        (["--prompt-file", "does-not-exist"], "is not a file"),
        (["--model", "does/not/exist"], "does/not/exist"),
        (["--max-new-tokens", "100000"], "positions"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    prompt = [] if "--prompt-file" in arguments else ["--prompt", STORY]
    assert generate.main([*prompt, *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and said.startswith("kvjax generate: ") and "\n" not in said


def chosen(*words: str) -> kvjax.Policy:
    """The policy that the command line asks for."""
    return generate._choice(generate.parser().parse_args(list(words)))[0]


def test_parts_are_chosen_by_name_and_set_after_a_dot() -> None:
    words = "--policy keyformer --residual less --codec int8 --plan adakv"
    settings = "--set recent=8 residual.kernels=performer residual.features=4 plan.floor=0.3"
    dotted: dict[str, Any] = {"residual.kernels": "performer", "residual.features": 4, "plan.floor": 0.3}
    wanted = kvjax.policy("keyformer", residual="less", codec="int8", plan="adakv", recent=8, **dotted)
    assert chosen(*words.split(), *settings.split()) == wanted
    strongest: dict[str, Any] = {"selection.k": 8}
    top = chosen("--policy", "h2o", "--selection", "topk", "--set", "selection.k=8")
    assert top == kvjax.policy("h2o", selection="topk", **strongest)
    less = chosen("--policy", "h2o", "--residual", "less", "--less-checkpoint", "h2o_5")
    assert less == chosen("--policy", "less", "--less-checkpoint", "h2o_5")


def test_a_config_names_parts_which_options_override() -> None:
    config = read_config("parts")
    assert config["settings"] == {"recent": 0.25, "plan.floor": 0.3, "residual.kernels": "performer"}
    dotted: dict[str, Any] = {"residual.kernels": "performer", "plan.floor": 0.3}
    parts = dict(residual="less", codec="int8", plan="adakv")
    assert chosen("--config", "parts") == kvjax.policy("keyformer", **parts, recent=0.25, **dotted)
    # Settings go with what they are of.
    assert chosen("--config", "parts", "--policy", "h2o") == kvjax.policy("h2o", **parts, **dotted)
    del dotted["plan.floor"]
    other = kvjax.policy("keyformer", **(parts | {"plan": "pyramid"}), recent=0.25, **dotted)
    assert chosen("--config", "parts", "--plan", "pyramid") == other


@pytest.mark.usefixtures("compiled_fast")
def test_parts_write_text_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--policy keyformer --residual less --plan adakv --budget 24"
    settings = "--max-new-tokens 24 --ignore-eos --json"
    reports = []
    for codec in ("plain", "int8"):
        assert generate.main(["--prompt", STORY, "--codec", codec, *words.split(), *settings.split()]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    plain, coded = reports
    assert plain["new_tokens"] == coded["new_tokens"] == 24 and coded["cache_bytes"] < 0.7 * plain["cache_bytes"]


def test_an_empty_prompt_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--prompt", "  "]) == 2
    assert "empty" in capsys.readouterr().err


def test_policies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--policy", "list"]) == 0
    listed = capsys.readouterr().out
    tables = (kvjax.policies.REGISTRY, kvjax.policies.PLANS, kvjax.policies.RESIDUALS, kvjax.policies.SELECTIONS)
    assert all(name in listed for table in (*tables, kvjax.policies.CODECS) for name in table)
    assert "recent=0.5" in listed and "plan.floor=0.2" in listed and "residual.kernels='learned'" in listed


@pytest.mark.parametrize("name", [name for name in CONFIGS if read_config(name)["policy"] == "less"])
def test_configs_of_less_run(name: str, model: kvjax.Model) -> None:
    # The others run in test_configs.py, on a random model.
    config = read_config(name)
    if config["settings"].get("kernels") != "performer":
        from kvjax.policies.residuals import checkpoint

        try:
            checkpoint.find("", config["settings"]["base"])
        except ValueError as error:
            assert "checkpoint" in str(error)  # no trained kernels are shipped for this base yet
            return
    policy = kvjax.policy(config["policy"], **config["settings"])
    budget, text = config.get("budget", 1.0), " ".join([STORY] * 12)
    assert model.generate([text], policy=policy, budget=budget, plan=config.get("plan"), max_new_tokens=12)


def test_configs_say_what_is_wrong(tmp_path: Path) -> None:
    for text, message in (("policy = ", "not TOML"), ("polisy = 'h2o'", "unknown key 'polisy'")):
        file = tmp_path / "config.toml"
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(str(file))


@pytest.mark.parametrize(
    "text, value",
    [("4", 4), ("0.5", 0.5), ("true", True), ("None", None), ("[1, 2]", (1, 2)), ("gumbel", "gumbel"), ("a b", "a b")],
)
def test_values_are_parsed_as_written(text: str, value: Any) -> None:
    assert parse_value(text) == value


def test_a_stream_shows_whole_characters(model: kvjax.Model) -> None:
    shown: list[str] = []
    stream = Stream(model.tokenizer, shown.append)
    ids = model.tokenizer("naïve café – 東")["input_ids"]
    for token in ids:
        stream(np.array([[token]]), np.array([[True]]))
    assert "".join(shown) == model.tokenizer.decode(ids) and not any("\ufffd" in part for part in shown)


def test_shipped_configs_are_found() -> None:
    assert set(kvjax.policies.REGISTRY) <= {read_config(name)["policy"] for name in CONFIGS}
    assert all(isinstance(directory, Path) for directory in config_directories())
