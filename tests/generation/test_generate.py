"""Generating text, from Python and from the command line, with the embedded model."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import generate
from kvjax.cli import options
from kvjax.evaluation import cache_map
from kvjax.generation import loop
from kvjax.generation.generate import Stream, encode, generate_ids
from kvjax.inference import prefill
from kvjax.inference.decode import checked_token
from kvjax.inference.prepare import prepare
from kvjax.methods import describe
from kvjax.utils.settings import config_directories, parse_value, read_config, seed_number
from tests.cases import slow
from tests.compiling import fast_environment
from tests.small_models import GQA, random_model

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


@pytest.mark.compiled_well
def test_a_text_does_not_depend_on_its_batch(model: kvjax.Model) -> None:
    prompts = [STORY, "The old man said that", "Tom had a red ball."]
    arguments: dict[str, Any] = dict(
        policy="keyformer", budget=24, max_new_tokens=24, temperature=0.9, top_k=40, top_p=0.95
    )
    together = model.generate(prompts, seed=3, **arguments)
    assert together == [model.generate([prompt], seed=3, **arguments)[0] for prompt in prompts]
    assert model.generate(prompts[::-1], seed=3, **arguments) == together[::-1]
    assert model.generate(prompts, seed=4, **arguments) != together
    assert model.generate(prompts, seed=[3, 4, 5], **arguments)[0] == together[0]


def test_rows_stop_at_their_end(model: kvjax.Model) -> None:
    made = generate_ids(model, [encode(model, STORY)], max_new_tokens=40, temperature=0.0)
    first = made.tokens[0]
    ending = kvjax.Model(model.weights, dataclasses.replace(model.config, eos=(first[5],)), model.name, model.directory)
    stopped = generate_ids(ending, [made.prompts[0]], max_new_tokens=40, temperature=0.0)
    assert stopped.tokens[0] == first[: first.index(first[5])]


def test_what_varies_between_calls_compiles_nothing(model: kvjax.Model) -> None:
    ids = [encode(model, text) for text in (STORY, STORY[:70], STORY[5:], STORY[9:], STORY[20:], STORY[:60])]
    usual: dict[str, Any] = dict(policy="less", budget=32, max_new_tokens=24)
    first = generate_ids(model, ids, **usual)
    assert first.compile_seconds > 0
    programs: list[Any] = [prefill.read_together, loop.draw_many, loop.draw]
    before = [program._cache_size() for program in programs]
    changes: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=1, top_k=7, seed=3),
        dict(top_k=40, top_p=0.9, seed=[6, 5, 4, 3, 2, 1]),
        dict(top_p=np.float32(0.5), max_new_tokens=20, budget=30),
        dict(min_p=0.1, repetition_penalty=1.2, stop="qqq"),
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
    settings = dict[str, Any](env=os.environ | fast_environment(), capture_output=True, text=True, encoding="utf-8")
    return subprocess.run(command, input=stdin, check=False, **settings)


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
    wanted = "text prompt_tokens new_tokens policy budget allocated_slots cache_bytes full_cache_bytes prefill_seconds "
    wanted += "decode_tokens_per_second seed"
    assert set(wanted.split()) <= set(report)
    assert said.err.startswith(f"wrote a map of {report['prompt_tokens']} prompt tokens to {figure}\n")
    assert report["policy"] == "keyformer" and report["cache_bytes"] < report["full_cache_bytes"]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_summary_tells_of_layers_that_the_budget_is_not_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = kvjax.load("tiny")
    config = dataclasses.replace(tiny.config, windows=(16, None, None, 16))
    monkeypatch.setattr("kvjax.model.load", lambda *_, **__: kvjax.Model(tiny.weights, config, "tiny", tiny.directory))
    done = generate.main(["--prompt", STORY, "--policy", "h2o", "--budget", "24", "--max-new-tokens", "2"])
    said = capsys.readouterr().err
    assert done == 0 and "budget 24: 24 slots" in said
    assert "2 of 4 layers see 16 tokens only and hold so many under any policy" in said


class Terminal(io.StringIO):
    """What a command writes to where it can be seen."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_held_in_more_than_two_shades(monkeypatch: pytest.MonkeyPatch) -> None:
    share = np.linspace(0, 1, 9)
    for name in ("NO_COLOR", "COLORTERM", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    cache_map.print_shaded([f"word{i}" for i in range(9)], share, file)
    shown, legend, _ = file.getvalue().split("\n")
    assert len(set(re.findall(r"\x1b\[([0-9;]+)m *word", shown))) == 5
    plain = re.sub(r"\x1b\[[0-9;]*m", "", legend)
    assert plain == "share of heads that hold a token:  0%  25%  50%  75%  100% "
    monkeypatch.setenv("TERM", "dumb")
    file = Terminal()
    cache_map.print_shaded(["a", "b"], np.array([0.0, 1.0]), file)
    assert file.getvalue() == "a|b\n |#\nmarks from 0% to 100% of heads: ' .:-=+*#'\n"


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
        (["--policy", ""], "no policy ''"),
        (["--plan", "", "--policy", "h2o"], "no plan ''"),
        (["--config", ""], "no config ''"),
        (["--model", ""], "'' names no model"),
        (["--seed", "99999999999999999999"], "seed=99999999999999999999 is not a whole number from 0 to 4294967295"),
        (["--seed", "-1"], "seed=-1"),
        (["--policy", "h2o", "--budget", "1000000000000"], "budget=1000000000000 is more slots than"),
        (
            ["--policy", "h2o", "--budget", "16,16,16"],
            "budget=[16, 16, 16] is not a number of slots from 1 for each of 4",
        ),
        (["--policy", "h2o", "--budget", "16,0.5,16,16"], "budget='16,0.5,16,16'"),
        (["--policy", "full", "--budget", "16"], "budget=16 has no effect under policy full"),
        (["--policy", "h2o", "--set", "special=5"], "special=5 is not a list of whole numbers"),
        (["--policy", "h2o", "--set", "special=[99999]"], "token 99999 of a vocabulary of 2048"),
        (["--policy", "h2o", "--set", "special=[-1]"], "token -1 of a vocabulary of 2048"),
        (["--policy", "less", "--set", "features=-1"], "features=-1 is not a whole number from 0"),
        (["--policy", "keyformer", "--set", "tau_init=nan"], "tau_init='nan' is not a finite number"),
        (["--policy", "keyformer", "--set", "tau_end=1e999"], "tau_end=inf is not a finite number"),
        (["--policy", "keyformer", "--set", "shared=maybe"], "shared='maybe' is not true or false"),
        (["--policy", "keyformer", "--set", "noise=pink"], "noise='pink' is not one of"),
        (["--policy", "h2o", "--set", "recent=true"], "recent=True is not a whole number or a finite number"),
        (["--policy", "l2", "--set", "skip_layers=100"], "skip_layers=100 is not a number of the model's 4 layers"),
        (["--policy", "scissorhands", "--set", "history=1000000"], "history=1000000 is not a multiple of 32 queries"),
        (["--policy", "lsh_e", "--set", "bits=1000"], "bits=1000 is not a whole number from 1 to 256"),
        (["--policy", "less", "--set", "base=5"], "base=5"),
        (["--policy", "h2o", "--plan", "adakv", "--set", "plan.floor=low"], "floor='low' is not a finite number"),
        (["--policy", "nowhere.py:mine"], "there is no file nowhere.py"),
        (["--save-cache-map", "map.jpg"], "map.jpg is not a .png file in an existing directory"),
        (["--save-cache-map", "no/such/place/map.png"], "is not a .png file in an existing directory"),
        (["--prompt", "a\ud800b"], "character 1 is '\\ud800', half of a surrogate pair"),
        (["--help", "--policy", "nope"], "no policy 'nope'"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(prefill, "read_together", None)  # whatever is refused is refused before anything is compiled
    prompt = [] if {"--prompt-file", "--prompt"} & set(arguments) else ["--prompt", STORY]
    assert generate.main([*prompt, *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and said.startswith("kvjax generate: ") and "\n" not in said


def test_the_text_that_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prompt(*words: str) -> Any:
        return generate.prompt_of(generate.parser().parse_args(list(words)))

    file = tmp_path / "story.txt"
    file.write_bytes(b"\xef\xbb\xbfOnce upon\n\n")
    assert prompt("--prompt-file", str(file)) == "Once upon\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffOnce\n"))
    assert prompt() == "Once" and prompt("--prompt", "Once\n") == "Once\n"
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(ValueError, match="standard input is closed; give --prompt or --prompt-file"):
            prompt()


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, model: kvjax.Model) -> None:
    assert model.directory is not None
    small = kvjax.Model(model.weights, dataclasses.replace(model.config, vocab_size=100), "small", model.directory)
    with pytest.raises(ValueError, match=r"has 2048 tokens, the model 100: they do not belong together"):
        small.generate("Once")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read \(.*Model missing"):
        kvjax.Model(model.weights, model.config, "damaged", tmp_path).generate("Once")


def test_a_chat_template_that_refuses_is_one_sentence(model: kvjax.Model) -> None:
    refusing = kvjax.Model(model.weights, model.config, model.name, model.directory)
    refusing.tokenizer.chat_template = "{{ raise_exception('no questions') }}"
    with pytest.raises(ValueError, match=r"of 'tiny' \(tokenizer_config.json\) refuses the prompt: no questions"):
        refusing.generate("Once", chat=True)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([1, 2.5], {}, r"a prompt is a text or a list of token ids, not \[1, 2.5\]"),
        ([[1, True]], {}, "a prompt is a text or a list of token ids, not"),
        (np.array([[0.5]]), {}, "a prompt is a text or a list of token ids, not"),
        ([[]], {}, "a prompt is empty; give at least one token"),
        ([1, 99999], {}, "token 99999 is not in the vocabulary of 2048"),
        ([1, 2], {"system": "Be kind."}, "system='Be kind.' cannot be added to token ids"),
        (5, {}, "prompts=5 is not a text"),
        ([{"role": "user", "content": "Hi"}], {}, "not messages; give the text of a user's turn, and chat=True"),
        (None, {}, "prompts=None is not a text"),
        ([], {}, "there is no prompt"),
        ("a", {"max_tokens": 2}, r"^model\.generate has no keyword 'max_tokens'; did you mean max_new_tokens\?$"),
        ("a", {"zzz": 2}, r"no keyword 'zzz'; it takes chat, system, policy,"),
        ("a", {"max_new_tokens": True}, "max_new_tokens=True is not a whole number"),
        ("a", {"max_new_tokens": 2.5}, "max_new_tokens=2.5 is not a whole number"),
        ("a", {"seed": 0.5}, "seed=0.5 is not a whole number"),
        ("a", {"budget": True}, "budget=True is not a number of slots"),
        ("a", {"budget": None}, "budget=None is not a number of slots"),
        ("a", {"policy": "h2o", "budget": [16, 16, 16, 0.5]}, "budget=0.5 is not a whole number"),
        ("a", {"prefill_chunk": 1.5}, "prefill_chunk=1.5 is not a whole number"),
    ],
)
def test_a_mistake_in_a_call_is_one_sentence(
    model: kvjax.Model, prompts: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        model.generate(prompts, **settings)
    assert "\n" not in str(raised.value)


def test_token_ids_are_prompts(model: kvjax.Model) -> None:
    settings: dict[str, Any] = dict(max_new_tokens=8, temperature=0.0)
    ids = model.tokenizer.encode("Once upon a time")
    expected = model.generate("Once upon a time", **settings)
    for prompt in (ids, tuple(ids), [ids], np.asarray(ids), np.asarray([ids]), jnp.asarray(ids), [np.asarray(ids)]):
        assert model.generate(prompt, **settings) == expected
    assert "".join(model.stream(ids, **settings)) == expected[0]


def test_options_of_one_letter() -> None:
    options = generate.parser().parse_args(["-m", "smollm2", "-p", "Once", "-n", "3"])
    assert (options.model, options.prompt, options.max_new_tokens) == ("smollm2", "Once", 3)


def test_ids_of_no_prompt_are_refused(model: kvjax.Model) -> None:
    with pytest.raises(ValueError, match="there is no prompt; give the ids of at least one"):
        generate_ids(model, [])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, 3], r"not a list of 1; give a list for each row, as \[\[5, 17, 42\]\]"),
        (["Once"], "not a list of 'Once'; for texts there is model.generate"),
        (None, "not NoneType"),
        ([[True, False]], "tokens of type bool are no token ids"),
    ],
)
def test_prompts_are_rows_of_ids(model: kvjax.Model, tokens: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kvjax.prefill(model, "h2o", tokens, 8)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ([1], r"tokens of shape \[1\] are not one for each of 2 rows"),
        (jnp.array([1]), r"tokens of shape \[1\] are not one for each of 2 rows"),
        (5, r"tokens of shape \[\] are not one for each of 2 rows"),
        ([1, 99], "token 99 is not in the vocabulary of 64"),
        (np.array([-1, 1]), "token -1 is not in the vocabulary of 64"),
        ([1.0, 2.0], "tokens of type float64 are no token ids"),
        (jnp.array([1.0, 2.0]), "tokens of type float32 are no token ids"),
        (None, "tokens of type object are no token ids"),
    ],
)
def test_a_step_takes_one_id_for_each_row(token: Any, message: str) -> None:
    state, _ = kvjax.prefill(random_model(GQA), "h2o", [[1], [2]], 8)
    assert checked_token(state, [1, 63]).tolist() == checked_token(state, jnp.array([1, 63])).tolist() == [1, 63]
    with pytest.raises((TypeError, ValueError), match=message):
        checked_token(state, token)


def test_numbers_of_numpy_are_numbers(model: kvjax.Model) -> None:
    arguments: dict[str, Any] = dict(max_new_tokens=np.int64(3), key=jax.random.key(0), plan=None, chunk=None)
    numbers: list[Any] = [[np.array([1, 2])], np.int32(1), np.array([9, 8, 7, 6]), [np.int64(2)]]
    prepared = prepare(model, "topk_oracle", numbers[0], numbers[1], None, **arguments)
    assert prepared.policy.selection is not None and prepared.horizon.tolist() == [3]
    limits = prepare(model, "h2o", [[1, 2]], numbers[2], numbers[3], **arguments).limits
    assert [int(limit[0, 0]) for limit in limits] == [9, 8, 7, 6]
    assert seed_number(np.uint32(7)) == 7


def test_a_policy_of_ones_own_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import kvjax\nfrom flax import struct\n@struct.dataclass\nclass Old(kvjax.Score):\n"
        "    power: float = struct.field(pytree_node=False, default=1.0)\n"
        "    def score(self, view, new): return -view.position.astype(float)\n"
        "made = kvjax.policy('streaming', sinks=2)\n"
        "def needs(depth): return made\n"
        "count = 3\n"
    )
    made = chosen("--policy", f"{file}:Old", "--set", "power=2", "recent=0", "--codec", "int8")
    assert made.score.power == 2 and made.codec.bits == 8  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="Old protects no tokens"):
        chosen("--policy", f"{file}:Old")
    assert chosen("--policy", f"{file}:made") == kvjax.policy("streaming", sinks=2)
    for words, message in (
        ((f"{file}:none",), "mine.py has no 'none'; it has Old, made, needs"),
        ((f"{file}:count",), "count in .*mine.py is not a kvjax.Policy or Score"),
        ((f"{file}:needs",), "needs cannot be constructed .*depth"),
        ((f"{file}:made", "--set", "rank=3"), "rank cannot be set: made in .*mine.py"),
        ((f"{file}:Old", "--set", "might=3", "recent=0"), "Old in .* has no setting 'might'; it takes power, sinks"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen("--policy", *words)


def test_a_word_for_nothing_is_a_word_where_words_belong() -> None:
    assert chosen("--policy", "keyformer", "--set", "noise=none") == kvjax.policy("keyformer", noise="none")
    assert chosen("--policy", "lightkv", "--set", "alpha=none") == kvjax.policy("lightkv", alpha=None)


def chosen(*words: str) -> kvjax.Policy:
    """The policy that the command line asks for."""
    return options.policy_and_budget(generate.parser().parse_args(list(words)))[0]


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
    tables = (kvjax.methods.REGISTRY, kvjax.methods.PLANS, kvjax.methods.RESIDUALS, kvjax.methods.SELECTIONS)
    assert all(name in listed for table in (*tables, kvjax.methods.CODECS) for name in table)
    assert set().union(*kvjax.methods.PAPERS.values()) == set(kvjax.methods.REGISTRY)
    assert "recent=0.5" in listed and "plan.floor=0.2" in listed and "residual.kernels='learned'" in listed


def test_help_says_what_settings_mean(capsys: pytest.CaptureFixture[str]) -> None:
    for name in kvjax.methods.REGISTRY:
        assert all(setting.meaning for setting in describe.describe_policy(name).settings), name
    assert all(
        setting.meaning for entries in describe.parts().values() for entry in entries for setting in entry.settings
    )
    assert generate.main(["--policy", "keyformer", "--help"]) == 0
    said = capsys.readouterr().out
    assert "tau_init" in said and "temperature of the prompt, above 0" in said and "0.25" in said
    assert generate.main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "adakv, arithmetic, interleaved, pyramid, uniform" in said and "(default: 128)" in said
    assert "(default: 0)" in said and "(default: False)" not in said


@pytest.mark.parametrize(
    "name", [name if name == "less" else slow(name) for name in CONFIGS if read_config(name)["policy"] == "less"]
)
def test_configs_of_less_run(name: str, model: kvjax.Model) -> None:
    # The others run in configs/test_configs.py, on a random model.
    config = read_config(name)
    if config["settings"].get("kernels") != "performer":
        from kvjax.methods.less import checkpoint

        try:
            checkpoint.find("", config["settings"]["base"])
        except ValueError as error:
            assert "checkpoint" in str(error)  # no trained kernels are shipped for this base yet
            return
    policy = kvjax.policy(config["policy"], **config["settings"])
    budget, text = config.get("budget", 1.0), " ".join([STORY] * 12)
    assert model.generate([text], policy=policy, budget=budget, plan=config.get("plan"), max_new_tokens=12)


def test_configs_say_what_is_wrong(tmp_path: Path) -> None:
    for text, message in (
        ("policy = ", "not TOML"),
        ("polisy = 'h2o'", "unknown key 'polisy'"),
        ("policy = 5", "policy=5 is not text in quotes"),
        ("budget = 'much'", "budget='much' is not a whole number of slots, a fraction"),
        ("budget = true", "budget=True is not"),
        ("budget = [8, 0.5]", r"budget=\(8, 0.5\) is not"),
        ("prefill_chunk = 1.5", "prefill_chunk=1.5 is not a whole number of tokens"),
        ("settings = 3", "settings=3 is not a table"),
        ("plan = ['adakv']", "is not text in quotes"),
    ):
        file = tmp_path / "config.toml"
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(str(file))


@pytest.mark.parametrize(
    ("written", "part", "likeliest"),
    [
        ("'residul.kernels' = 3", "residul", "residual"),
        ("plam.floor = 0.3", "plam", "plan"),
        ("codecs.a = 1", "codecs", "codec"),
    ],
)
@pytest.mark.parametrize("of_config", [True, False])
def test_a_misspelt_part_in_a_setting_is_told(
    written: str, part: str, likeliest: str, of_config: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"policy = 'h2o'\n[settings]\n{written}\n")
    others = (
        ["--config", str(file)]
        if of_config
        else ["--policy", "h2o", "--set", written.replace(" ", "").replace("'", "")]
    )
    assert generate.main(["--model", "tiny", "--prompt", "Once", *others]) == 2
    assert re.search(rf"{part}\..* is no setting of a part; did you mean {likeliest}\?", capsys.readouterr().err)


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
    assert {read_config(name)["policy"] for name in CONFIGS} <= set(kvjax.methods.REGISTRY)
    assert all(isinstance(directory, Path) for directory in config_directories())
