"""Grids of measurements: named combinations of parts, rows that outlive what made them, and the tasks."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import kvjax
from kvjax.cli import evaluate
from kvjax.evaluation.grid import RowFile, entries
from kvjax.evaluation.summary import Measure
from kvjax.evaluation.tasks import TASKS
from kvjax.generation.generate import generate_ids
from kvjax.generation.questions import answer_each
from kvjax.methods.adakv import AdaKV
from kvjax.methods.less.memory import LowRankMemory
from kvjax.methods.notation import combination
from kvjax.tiny import WEIGHTS

WORDS = "The old man went down to the river with his dog and a lamp, for it was late. " * 12


def test_a_name_says_which_parts() -> None:
    made = combination("keyformer+less+int8+adakv[noise=none, recent=9, special=(3,4), residual.kernels=performer]")
    assert made.name == "keyformer" and made.codec.bits == 8 and isinstance(made.plan, AdaKV)
    assert isinstance(made.residual, LowRankMemory) and made.residual.kernels == "performer"
    assert made.protection.recent == 9 and made.protection.special == (3, 4)
    compared = [(each.label, each.budget) for each in entries("h2o,snapkv[kernel=5,recent=4],fastgen,full", "8,0.5")]
    assert compared == [
        *[("full", 1.0), ("h2o", 8), ("h2o", 0.5)],
        *[("snapkv[kernel=5,recent=4]", 8), ("snapkv[kernel=5,recent=4]", 0.5), ("fastgen", 1.0)],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h2o+int5", "there is no part 'int5'; did you mean int"),
        ("h2o+int8+int4", "two parts of one kind, int8 and int4"),
        ("h2o]", "not of the form"),
        ("nobody", "nobody"),
        ("h2o[sinks]", "sinks"),
        ("h2o[colour=3]", "colour"),
    ],
)
def test_other_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combination(text)


def test_rows_outlive_a_cut(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = RowFile(file)
    rows.add({"policy": "h2o", "length": 3, "found": [1, 2]})
    rows.add({"policy": "h2o", "length": 4, "found": [3], "refused": "no"})
    with file.open("a") as stream:
        stream.write('{"policy": "h2o", "le')
    again = RowFile(file)
    assert again.of({"policy": "h2o", "length": 4}) == {"policy": "h2o", "length": 4, "found": [3], "refused": "no"}
    assert again.of({"policy": "h2o", "length": 5}) is None
    again.add({"policy": "tova", "length": 4})
    assert [json.loads(line)["policy"] for line in file.read_text().splitlines()] == ["h2o", "h2o", "tova"]
    with again.write_csv().open(newline="") as stream:
        assert list(csv.DictReader(stream))[1] == {"policy": "h2o", "length": "4", "refused": "no"}
    for line in ("nothing", "[1]", "5"):
        file.write_text(f'{{"policy": "h2o"}}\n{line}\n{{}}\n')
        with pytest.raises(ValueError, match="line 2, is no row"):
            RowFile(file)


def test_a_grid_goes_on_where_it_was_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "words.txt", tmp_path / "out"
    text.write_text(WORDS)
    words = f"perplexity --text {text} --rows 2 --lengths 32 32 --policies h2o,h2o --out {out} --budgets".split()
    assert evaluate.main([*words, "8,8"]) == 0
    file = out / "perplexity.jsonl"
    first = file.read_text().splitlines()
    assert evaluate.main([*words, "8,40"]) == 0, capsys.readouterr().err
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.read_text().splitlines()[:2] == first and len(rows) == 3
    assert [row["budget"] for row in rows] == [1.0, 8, 40]
    # Where everything has room h2o is the full cache.
    assert rows[2]["nats_per_token"] == pytest.approx(rows[0]["nats_per_token"], rel=1e-4)
    assert rows[1]["nats_per_token"] != pytest.approx(rows[0]["nats_per_token"], rel=1e-4)
    assert rows[1]["cache_bytes"] < rows[0]["cache_bytes"] == rows[0]["full_cache_bytes"]
    assert rows[0]["cases"] == len(rows[0]["of_cases"]) == 2
    assert rows[0]["agreement"] == rows[2]["agreement"] == 1 > rows[1]["agreement"] > 0.5


MINE = """
import flax
import kvjax


@flax.struct.dataclass
class Mine(kvjax.Score):
    def score(self, view, new):
        return {sign}view.position.astype("float32")
"""


def test_results_are_told_as_they_come_and_beside_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out, mine = tmp_path / "words.txt", tmp_path / "out", tmp_path / "mine.py"
    text.write_text(WORDS)
    mine.write_text(MINE.format(sign=""))
    words = ["compare", "--text", str(text), "--rows", "2", "--lengths", "32", "--budgets", "8", "--out", str(out)]
    words += ["--policies", f"{mine}:Mine,h2o,lightkv[context_limit=3]"]
    with pytest.warns(UserWarning, match="Mine protects no tokens"):
        assert evaluate.main(words) == 0
    found = capsys.readouterr()
    rows = {task: RowFile(out / f"{task}.jsonl").rows for task in ("perplexity", "fidelity")}
    full, h2o = (next(row for row in rows["perplexity"] if row["policy"] == name) for name in ("full", "h2o"))
    change = f"{h2o['perplexity']:.4g} ({h2o['perplexity'] / full['perplexity'] - 1:+.1%})"
    (line,) = (line for line in found.err.splitlines() if "h2o at 8: perplexity" in line)
    assert line.startswith("[3/4") and change in line and f"{h2o['cache_bytes'] / h2o['full_cache_bytes']:.0%}" in line
    assert "lightkv[context_limit=3] at 8: left out: " in found.err
    (shown,) = (line for line in found.out.splitlines() if line.startswith("h2o"))
    agreement = next(row["agreement"] for row in rows["fidelity"] if row["policy"] == "h2o")
    assert change in shown and f"{agreement:.4g} ({agreement - 1:+.3f})" in shown
    assert any(line.startswith(f"{mine}:Mine") for line in found.out.splitlines())
    # What has been measured is found again, but for a policy whose file has changed.
    mine.write_text(MINE.format(sign="-"))
    with pytest.warns(UserWarning, match="Mine protects no tokens"):
        assert evaluate.main(["perplexity", *words[1:]]) == 0
    again = RowFile(out / "perplexity.jsonl").rows
    assert [row["policy"] for row in again[len(rows["perplexity"]) :]] == [f"{mine}:Mine"]


def test_a_text_without_words_has_no_nats_per_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "lines.txt"
    text.write_text("Tom ran" + "\n" * 200)
    words = f"perplexity --model tiny --text {text} --rows 1 --lengths 12 --policies full --out {tmp_path}"
    assert evaluate.main(words.split()) == 0, capsys.readouterr().err
    (row,) = RowFile(tmp_path / "perplexity.jsonl").rows
    assert row["nats_per_word"] is None and row["nats_per_byte"] > 0 < row["decode_tokens_per_second"]


def test_rows_are_of_the_files_that_they_were_measured_with(tmp_path: Path) -> None:
    folder = tmp_path / "a+b=c"
    folder.mkdir()
    mine, part = folder / "mine.py", tmp_path / "part.py"
    mine.write_text("import kvjax\n\ndef made():\n    return kvjax.policy('h2o')\n")
    part.write_text("from kvjax.methods.pyramidkv import Pyramid\n")
    kernels = tmp_path / "trained" / "arrays"
    kernels.parent.mkdir()
    kernels.write_text("arrays")
    for names, parts, files in (
        (f"{mine}:made", {}, [mine]),
        (f"criticalkv[base={mine}:made]", {}, [mine]),
        (f"{mine}:made[recent=3]", {"plan": f"{part}:Pyramid"}, [mine, part]),
        ("h2o", {"plan": f"{part}:Pyramid"}, [part]),
        ("h2o+int8", {}, []),
        (f"less[checkpoint={kernels.parent}]", {}, [kernels]),
        (f"h2o+less[residual.checkpoint={kernels.parent}]", {}, [kernels]),
        (f"triattention[checkpoint={kernels.parent}]", {}, [kernels]),
    ):
        entry = entries(names, "8", parts)[1]
        assert sorted(entry.sources) == sorted(files), entry.label
        before = entry.cell(kvjax.load("tiny"))
        for file in files:
            file.write_text(f"{file.read_text()}#")
            assert entry.cell(kvjax.load("tiny")) != before


def test_another_text_of_the_same_name_is_another_hay(tmp_path: Path) -> None:
    texts = [tmp_path / name / "hay.txt" for name in ("one", "two")]
    words = [
        "retrieval",
        "--families",
        "single",
        "--lengths",
        "200",
        "--depths",
        "0.5",
        "--cases",
        "1",
        "--hay",
        "essay",
    ]
    words += ["--policies", "full", "--out", str(tmp_path), "--max-new-tokens", "2"]
    for number, text in enumerate(texts, 1):
        text.parent.mkdir()
        text.write_text(WORDS * number)
        for _ in range(2):
            assert evaluate.main([*words, "--text", str(text)]) == 0
        assert len(RowFile(tmp_path / "retrieval.jsonl").rows) == number


def test_questions_are_asked_after_the_context_was_compressed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = f"retrieval --families pass_key,frequent_words --lengths 400 --depths 0.5 --cases 2 --out {out}".split()
    words += ["--policies", "streaming", "--budgets", "32", "--max-new-tokens", "4"]
    for more in ([], ["--query-aware"], ["--chat"]):
        assert evaluate.main([*words, *more]) == 0, capsys.readouterr().err
    assert "left out" not in capsys.readouterr().err
    rows = RowFile(out / "retrieval.jsonl").rows
    assert len(rows) == 3 * 2 * 2 and {row["family"] for row in rows} == {"pass_key", "frequent_words"}
    assert [(row["query_aware"], row["chat"]) for row in rows[::4]] == [(False, False), (True, False), (False, True)]
    for row in rows:
        assert len(row["answers"]) == row["cases"] == 2 and 0 <= row["string_match"] <= 1
        assert (row["cache_bytes"] < row["full_cache_bytes"]) == (row["policy"] != "full")


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"retrieval --families frequent_words --lengths 200 --policies full --out {tmp_path}".split()
    assert evaluate.main(words) == 0
    assert "left out: length=" in capsys.readouterr().err
    (row,) = RowFile(tmp_path / "retrieval.jsonl").rows
    assert "too short for frequent_words" in row["refused"]


def test_only_what_is_raised_on_purpose_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, mine, out = tmp_path / "words.txt", tmp_path / "mine.py", tmp_path / "out"
    text.write_text(WORDS)
    words = f"perplexity --text {text} --rows 1 --lengths 32 --budgets 8 --out {out} --set recent=2 --policies".split()
    for fault, code in (('raise ValueError("no positions")', 0), ("a, b = 1, 2, 3", 2), ("[].index(new)", 2)):
        mine.write_text(MINE.format(sign="").replace("return", f"{fault}\n        return"))
        sys.modules.pop("own_policies_mine", None)
        assert evaluate.main([*words, f"{mine}:Mine"]) == code, fault
    assert "left out: no positions" in capsys.readouterr().err
    assert [row.get("refused") for row in RowFile(out / "perplexity.jsonl").rows] == [None, "no positions"]


def test_answers_of_a_file_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rouge_score")
    file, out = tmp_path / "asked.jsonl", tmp_path / "out"
    file.write_text(
        json.dumps({"context": WORDS, "question": "Where did he go?", "answer": ["river", "the dog"]}) + "\n"
    )
    words = f"generation --file {file} --policies h2o --budgets 24 --max-new-tokens 4 --out {out}".split()
    assert evaluate.main(words) == 0, capsys.readouterr().err
    for row in RowFile(out / "generation.jsonl").rows:
        assert {"rouge-1", "rouge-2", "rouge-l", "f1", "exact_match"} <= set(row) and row["cases"] == 1
    shutil.copytree(WEIGHTS, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"temperature": "hot", "repetition_penalty": 9.0}')
    assert evaluate.main([*words, "--model", str(tmp_path / "m")]) == 0, capsys.readouterr().err
    answers = [row["answers"] for row in RowFile(out / "generation.jsonl").rows]
    assert len(answers) == 4 and answers[:2] == answers[2:]
    file.write_text("{}\n")
    assert evaluate.main(words) == 2
    assert "line 1" in capsys.readouterr().err


def test_one_question_each_equals_one_text() -> None:
    """With room for everything an answer is what follows the prompt and the question."""
    model = kvjax.load("tiny")
    prompts = [list(range(5, 40)), list(range(60, 80)), list(range(9, 33))]
    questions = [[7, 8, 9], [11, 12], [40, 41, 42, 43]]
    settings: dict[str, Any] = dict(max_new_tokens=6, temperature=0.0, stop_at_eos=False)
    found = [ids for made in answer_each(model, prompts, questions, batch_size=2, **settings) for ids in made.tokens]
    whole = generate_ids(model, [p + q for p, q in zip(prompts, questions, strict=True)], **settings).tokens
    assert found == whole
    with pytest.raises(ValueError, match="2 questions"):
        next(answer_each(model, prompts, questions[:2]))


def test_rows_of_several_runs_are_joined_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, out = tmp_path / "first", tmp_path / "second", tmp_path / "page"
    bytes_of = {"full": 200, "h2o": 50}
    common: dict[str, Any] = {"model": "tiny", "dtype": "float32", "length": 400, "cases": 4, "prefill_seconds": 2.0}
    common |= {"full_cache_bytes": 200, "decode_tokens_per_second": None}
    for policy, right in (("full", 1.0), ("h2o", 0.25)):
        row = common | {"policy": policy, "budget": 1.0 if policy == "full" else 16, "cache_bytes": bytes_of[policy]}
        for depth in (0.1, 0.9):
            asked = {"family": "single", "depth": depth, "chat": False, "query_aware": False}
            RowFile(first / "retrieval.jsonl").add(row | asked | {"string_match": right * depth})
        read = {"text": "books", "prefix": 200, "nats_per_token": 5 - right, "perplexity": 2.5}
        read |= {"passages": "a", "of_cases": [4 - right, 6 - right, 5 - 2 * right, 5]}
        RowFile(second / "perplexity.jsonl").add(row | read)
        RowFile(second / "perplexity.jsonl").add(row | read | {"length": 800, "refused": "too long"})
        scored = {"task": "quiz", "limit": 5, "acc": right, "acc_standard_error": 0.1, "f1": 0.3}
        RowFile(second / "harness.jsonl").add(row | scored | {"f1_standard_error": None})
        layers = {"divergence": 1 - right, "hellinger_of_layers": [0.1, 0.2 * right]}
        RowFile(second / "fidelity.jsonl").add(row | {"text": "books", "prefix": 200} | layers)
    notes = tmp_path / "notes.md"
    notes.write_text("What to see: nothing & all.\n")
    words = ["report", "--runs", str(first), str(second), "--out", str(out), "--name", "toy", "--title", "A toy"]
    assert evaluate.main([*words, "--notes", str(notes)]) == 0, capsys.readouterr().err
    page = (out / "toy.md").read_text()
    assert page.startswith("# A toy\n") and "\nWhat to see: nothing & all.\n" in page and page.count("## ") == 5
    # Beside the full cache: 0.75, 0.75, 1.5 and 0.0 more, whose standard error is 0.3062.
    assert "| h2o | 16 | 25.0% | 4 | 4.7500 | 0.7500 | 0.3062 | 2.5000 |" in page
    assert "| h2o | 16 | 25.0% | 8 | 0.1250 | – | – |" in page and "| full | 1 | 100.0% | 8 | 0.5000 | – | – |" in page
    assert "| h2o | 16 | 25.0% | 4 | 0.2500 | 0.3000 |" in page
    assert sorted(file.name for file in (out / "toy").iterdir()) == [
        "fidelity_tiny_float32_books_400_200.png",
        "fidelity_tiny_float32_books_400_200_layers.png",
        "harness_tiny_float32_quiz_5.png",
        "needles_tiny_float32.png",
        "perplexity_tiny_float32_books_400_200.png",
        "retrieval_tiny_float32_400.png",
    ]
    whole = (out / "toy.html").read_text()
    assert whole.count("data:image/png;base64,") == 6 and "nothing &amp; all" in whole and "<td>0.125</td>" in whole
    assert evaluate.main(["report", "--runs", str(tmp_path / "nothing"), "--out", str(out)]) == 2
    assert "there are no rows" in capsys.readouterr().err
    for name in ("../toy", "a/b", "..", ""):
        with pytest.raises(SystemExit, match="2"):
            evaluate.main([*words[:-4], "--name", name])
        assert f"{name!r} is not a name without directories" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("retrieval --families nothing", "'nothing' is not one of single"),
        ("retrieval --depths 2", "--depths 2.0 is not from"),
        ("retrieval --hay essay", "give both or none"),
        ("retrieval --cases 0", "--cases 0"),
        ("retrieval --batch-size 0", "--batch-size 0"),
        ("retrieval --system Be_kind", "--system"),
        ("generation --file {text}", "line 1"),
        ("perplexity --text NOWHERE.txt", "NOWHERE.txt is not a file"),
        ("perplexity --text {text} --policies h2o+nothing", "there is no part 'nothing'"),
        ("perplexity --text {text} --budgets many", "budget='many'"),
        ("perplexity --text {text} --budgets 0", "budget=0 is not a number of slots from 1"),
        ("perplexity --text {text} --budgets 8,7.5", "budget=7.5"),
        ("perplexity --text {text} --prefix 1.0", "--prefix 1.0 is not a share"),
        ("perplexity --text {text} --prefix 0.99 --lengths 4", "--prefix 0.99 of 4 tokens leaves none to predict"),
        ("perplexity --text {text} {text}", "two texts have the same name"),
        ("compare --text {empty}", "is empty"),
        ("retrieval --hay essay --text {empty}", "is empty"),
        ("retrieval --lengths -5", "--lengths=-5"),
        ("perplexity --text {text} --lengths 1", "nothing to predict"),
        ("harness --tasks copa --limit 2.5", "--limit 2.5 is neither a number of cases from 1, nor a share between"),
        ("harness --tasks copa --limit 0", "--limit 0 is neither"),
    ],
)
def test_wrong_grids_are_refused_before_anything_is_loaded(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "load_model", None)
    text, empty = tmp_path / "words.txt", tmp_path / "empty.txt"
    text.write_text(WORDS)
    empty.write_text("\n")
    assert evaluate.main(words.format(text=text, empty=empty).split()) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_rows_without_set_columns_show_what_has_a_standard_error() -> None:
    row = {"policy": "h2o", "cases": 3, "acc": 0.5, "acc_standard_error": 0.1, "f1": 0.2, "f1_standard_error": 0.1}
    columns = TASKS["harness"].columns_of([{"policy": "tova", "refused": "no"}, row])
    assert columns.printed == columns.figure == Measure("acc", "acc") and columns.also == ("f1",)
    assert TASKS["harness"].columns_of([]).printed.key == ""
