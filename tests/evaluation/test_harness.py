"""lm-evaluation-harness over a compressed cache: likelihoods by hand, windows, stop strings, and a task of its own."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cli import evaluate
from kvjax.evaluation.grid import RowFile
from kvjax.evaluation.harness import adapter
from kvjax.inference.padding import bucket_rows
from kvjax.models.model import SamplingDefaults

STORY = "Once upon a time there was a girl named Lily. She liked to play in the garden with her dog."
PAIRS = [
    (STORY, " One day she"),
    (STORY, " The"),
    ("Ben and Mia went to the river. The", " water was cold, and they ran home."),
    ("", "The dog"),
    (STORY + " Lily and her", " dog"),
]
"""Contexts and continuations of unequal lengths, two of one context, one of none."""
TASKS = {
    "choosing": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: [".", "\\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}
CASES = [
    {"text": "Once upon a time there was a girl named", "choices": ["Lily", "stone"], "label": 0},
    {"text": "She liked to play with her red", "choices": ["because", "ball"], "label": 1},
    {"text": "They went to the", "choices": ["park", "of of"], "label": 0},
]


@pytest.fixture(scope="module")
def model() -> kvjax.Model:
    return kvjax.load("tiny", dtype="float32")


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    return pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'kvjax[harness]'")


def asked(kind: Any, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def ids_of(model: kvjax.Model, context: str, continuation: str) -> tuple[list[int], list[int]]:
    before = model.tokenizer.encode(context) or [0]
    return before, model.tokenizer.encode(context + continuation)[len(before) if context else 0 :]


def whole(model: kvjax.Model, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """By one forward pass over the text, padded so that all share a program."""
    text = [*context, *continuation]
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(text)] = text
    likelihood = np.asarray(jax.nn.log_softmax(model.logits(padded)[0]))[len(context) - 1 : len(text) - 1]
    return float(likelihood[np.arange(len(continuation)), continuation].sum()), bool(
        (likelihood.argmax(-1) == continuation).all()
    )


def compressed(model: kvjax.Model, context: list[int], new: int, **settings: Any) -> tuple[Any, Any]:
    """A state that has read a context, all but its last token at once, and the logits for what follows."""
    read, last = (context[:-1], context[-1:]) if len(context) > 1 else (context, [])
    planned = bucket_rows(len(last) + new)
    state, logits = kvjax.prefill(model, tokens=[read], max_new_tokens=planned, key=jax.random.key(0), **settings)
    return kvjax.decode_step(state, np.asarray(last)) if last else (state, logits)


def by_hand(model: kvjax.Model, context: list[int], continuation: list[int], **settings: Any) -> tuple[float, bool]:
    """By a prefill and decode steps, of one request."""
    state, logits = compressed(model, context, len(continuation), **settings)
    total, greedy = 0.0, True
    for token in continuation:
        total += float(jax.nn.log_softmax(logits[0])[token])
        greedy &= int(logits[0].argmax()) == token
        state, logits = kvjax.decode_step(state, np.asarray([token]))
    return total, greedy


def test_it_says_what_to_install(
    model: kvjax.Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.api.model", raising=False)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks", raising=False)
    with pytest.raises(ValueError, match=re.escape("pip install 'kvjax[harness]'")):
        adapter(model)
    assert evaluate.main(["harness", "--tasks", "a", "--out", str(tmp_path)]) == 2
    assert "pip install 'kvjax[harness]'" in capsys.readouterr().err


def test_likelihoods_of_a_full_cache_are_those_of_the_text(lm_eval: Any, model: kvjax.Model) -> None:
    first = model.tokenizer.decode(
        [int(np.asarray(model.logits(np.asarray([ids_of(model, STORY, "")[0]])))[0, -1].argmax())]
    )
    pairs = [*PAIRS, (STORY, first)]
    expected = [whole(model, *ids_of(model, *pair)) for pair in pairs]
    assert {greedy for _, greedy in expected} == {True, False}
    for batch_size in (4, 1):
        found = adapter(model, batch_size=batch_size).loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
        np.testing.assert_allclose([score for score, _ in found], [score for score, _ in expected], atol=1e-4)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


@pytest.mark.parametrize(("policy", "budget"), [("h2o", 8), ("h2o", 0.5)])
def test_continuations_evict(lm_eval: Any, model: kvjax.Model, policy: str, budget: int | float) -> None:
    lm = adapter(model, policy=policy, budget=budget, batch_size=3)
    found = lm.loglikelihood(asked("loglikelihood", *PAIRS[:3]), disable_tqdm=True)
    for pair, (score, greedy) in zip(PAIRS, found, strict=False):
        ids = ids_of(model, *pair)
        assert (score, greedy) == pytest.approx(by_hand(model, *ids, policy=policy, budget=budget), abs=1e-4)
        assert abs(score - whole(model, *ids)[0]) > 1e-3
    assert 0 < lm.cache_bytes <= lm.full_cache_bytes and lm.cut == 0
    assert lm.peak_temporary_bytes and lm.prefill_seconds > 0 == lm.timed_tokens


def test_rows_that_only_fill_a_batch_do_not_count(lm_eval: Any, model: kvjax.Model) -> None:
    held = []
    for requests in (5, 6):  # five are padded to six rows
        lm = adapter(model, policy="h2o", budget=16, batch_size=6)
        lm.generate_until(asked("generate_until", *[(STORY, {"max_gen_toks": 4})] * requests), disable_tqdm=True)
        lm.loglikelihood(asked("loglikelihood", *PAIRS[:1] * requests), disable_tqdm=True)
        held.append((lm.cache_bytes / requests, lm.full_cache_bytes / requests))
    assert held[0] == held[1]


def test_rolling_predicts_each_token_once(lm_eval: Any, model: kvjax.Model) -> None:
    ids = model.tokenizer.encode(STORY)
    texts = asked("loglikelihood_rolling", (STORY,), ("",), ("The dog",))
    found = adapter(model).loglikelihood_rolling(texts, disable_tqdm=True)
    expected = [whole(model, [0], ids)[0], 0.0, whole(model, [0], model.tokenizer.encode("The dog"))[0]]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    # Windows of 16: the last is as long as the others and predicts what is left.
    (windowed,) = adapter(model, max_length=16).loglikelihood_rolling(texts[:1], disable_tqdm=True)
    expected = whole(model, [0], ids[:16])[0]
    for start in range(16, len(ids), 16):
        end = min(start + 16, len(ids))
        expected += whole(model, ids[end - 17 : start], ids[start:end])[0]
    assert windowed == pytest.approx(expected, abs=1e-4)


def test_long_contexts_lose_their_beginning(lm_eval: Any, model: kvjax.Model) -> None:
    lm = adapter(model, max_length=16)
    ((score, _),) = lm.loglikelihood(asked("loglikelihood", PAIRS[0]), disable_tqdm=True)
    context, continuation = ids_of(model, *PAIRS[0])
    kept = context[len(continuation) - 17 :]
    assert score == pytest.approx(whole(model, kept, continuation)[0], abs=1e-4) and lm.cut == 1
    with pytest.raises(ValueError, match="continuation has 0 tokens, not 1 to 16"):
        lm.loglikelihood(asked("loglikelihood", (STORY, "")), disable_tqdm=True)
    with pytest.raises(ValueError, match="max_gen_toks=16 leaves a context no room"):
        lm.generate_until(asked("generate_until", (STORY, {"max_gen_toks": 16})), disable_tqdm=True)
    with pytest.raises(ValueError, match="longer than the model's 1152 positions"):
        adapter(model, max_length=1153)


def test_answers_end_before_their_stop_string(lm_eval: Any, model: kvjax.Model) -> None:
    lm = adapter(model, max_new_tokens=20)
    prompts = [STORY, "Ben went to the river. The"]
    texts = model.generate(prompts, max_new_tokens=20, temperature=0.0)
    stop = texts[0][17:20]
    drawn = {"do_sample": True, "temperature": 1.5, "until": [], "top_k": 0}
    requests = [(prompts[1], {"until": ["zzz"]}), *[(STORY, drawn)] * 2, (STORY, {"until": stop, "do_sample": False})]
    plain, one, other, stopped = lm.generate_until(asked("generate_until", *requests), disable_tqdm=True)
    assert plain == texts[1] and stopped == texts[0][: texts[0].find(stop)]
    assert one != other
    drawn_alone = adapter(model, max_new_tokens=20, seed=1)
    assert drawn_alone.generate_until(asked("generate_until", requests[1]), disable_tqdm=True) == [other]
    with pytest.raises(ValueError, match="generates with num_beams=2, which is none of until, "):
        lm.generate_until(asked("generate_until", (STORY, {"num_beams": 2})), disable_tqdm=True)


def test_sampling_defaults_of_the_model_change_no_answer(lm_eval: Any, model: kvjax.Model) -> None:
    defaults = SamplingDefaults({"temperature": "hot", "top_k": 2, "repetition_penalty": 3.0}, "m")
    other = kvjax.Model(model.weights, model.config, model.name, model.directory, sampling_defaults=defaults)
    kinds = {"until": ["zzz"]}, {"until": [], "do_sample": True, "temperature": 1.5}
    requests = asked("generate_until", *((STORY, kind) for kind in kinds))
    plain, same = (adapter(each, max_new_tokens=20) for each in (model, other))
    assert plain.generate_until(requests, disable_tqdm=True) == same.generate_until(requests, disable_tqdm=True)


def test_answers_are_written_on_what_is_left(lm_eval: Any, model: kvjax.Model) -> None:
    requests = asked("generate_until", (STORY, {"max_gen_toks": 6}), ("", {"max_gen_toks": 6}))
    found = adapter(model, policy="h2o", budget=8).generate_until(requests, disable_tqdm=True)
    for context, text in zip((STORY, ""), found, strict=True):
        state, logits = compressed(model, ids_of(model, context, "")[0], 6, policy="h2o", budget=8)
        ids: list[int] = []
        for _ in range(6):
            ids.append(int(logits[0].argmax()))
            state, logits = kvjax.decode_step(state, np.asarray(ids[-1:]))
        assert text == model.tokenizer.decode(ids)
    assert found != adapter(model).generate_until(requests, disable_tqdm=True)


def test_texts_and_turns_as_the_model_has_them(lm_eval: Any, model: kvjax.Model) -> None:
    lm = adapter(model)
    turns = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello"}]
    assert lm.apply_chat_template(turns[:1]).endswith("<|assistant|>\n")
    assert lm.apply_chat_template(turns, add_generation_prompt=False).endswith("Hello")
    assert lm.chat_template(True) == model.tokenizer.chat_template
    assert lm.prefix_token_id == lm.eot_token_id == model.config.eos[0]
    assert lm.tok_encode("The dog") == model.tokenizer.encode("The dog") and "/" not in lm.tokenizer_name


def test_a_task_in_a_grid(
    lm_eval: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import lm_eval.tasks as tasks  # pyright: ignore[reportMissingImports]

    # The thousands that come with it take seconds to find.
    monkeypatch.setattr(tasks, "TaskManager", functools.partial(tasks.TaskManager, include_defaults=False))
    (tmp_path / "cases.jsonl").write_text("\n".join(map(json.dumps, CASES)))
    files = {"data_files": {"test": str(tmp_path / "cases.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    for name, text in TASKS.items():
        common = f"task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(files)}\ntest_split: test\n"
        (tmp_path / f"{name}.yaml").write_text(common + text)
    out = tmp_path / "out"
    words = f"harness --limit 2 --include-path {tmp_path} --out {out} --tasks".split()
    for more in ("choosing --policies streaming --budgets 6", "writing --policies full"):
        assert evaluate.main([*words, *more.split()]) == 0, capsys.readouterr().err
    assert "left out" not in capsys.readouterr().err
    choosing, streamed, writing = rows = RowFile(out / "harness.jsonl").rows
    assert [(row["task"], row["policy"]) for row in rows] == [
        *[("choosing", "full"), ("choosing", "streaming")],
        ("writing", "full"),
    ]
    for row in rows:
        assert row["cases"] == row["limit"] == 2 and row["lm_eval"] and row["contexts_cut"] == 0
        assert row["num_fewshot"] is None and row["num_fewshot_of_tasks"] == {row["task"]: 0}
        assert row["peak_temporary_bytes"] > 0 < row["prefill_seconds"]
        # Continuations are given, and a short answer is made while its program is still being compiled.
        assert row["decode_tokens_per_second"] is None
    assert choosing["acc"] == 1 and choosing["acc_standard_error"] == 0
    assert choosing["cache_bytes"] == choosing["full_cache_bytes"] == streamed["full_cache_bytes"]
    assert 0 <= writing["exact_match"] <= 1 and writing["exact_match_standard_error"] >= 0
    assert evaluate.main([*words, "nothing"]) == 2
    assert "has no task 'nothing'" in capsys.readouterr().err
