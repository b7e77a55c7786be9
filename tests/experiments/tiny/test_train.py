"""Training the embedded model, small enough for a test: data, lessons, resuming, export, recall."""

import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tiny import export, train
from experiments.tiny.curriculum import Lessons, Stage
from experiments.tiny.network import forward, start
from experiments.tiny.planted_facts import FORMS
from experiments.tiny.recipe import RECIPES, Recipe
from experiments.tiny.tokenizer import prepare, read_prepared
from experiments.tiny.train import train as run

NAMES = ["Anna", "Bruno", "Carla", "Dora", "Emil", "Fritz", "Greta", "Hanna", "Igor", "Jonas"]
THINGS = [
    "table",
    "chair",
    "house",
    "river",
    "stone",
    "bread",
    "apple",
    "window",
    "garden",
    "letter",
    "candle",
    "mirror",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    for name, documents in (("stories", 60), ("valid", 12)):
        told = []
        for _ in range(documents):
            who, what = rng.choice(NAMES), rng.sample(THINGS, 3)
            told.append(f"Once {who} saw a {what[0]} and a {what[1]}. Then {who} took the {what[2]}! 37 days passed.\n")
        (directory / f"{name}.txt").write_text("<|endoftext|>\n".join(told))
    prepare([directory / "stories.txt"], [directory / "valid.txt"], directory / "data", 400)
    return directory / "data"


def recipe(*stages: Stage) -> Recipe:
    return Recipe((400, 64, 2, 4, 2, 128, 512), stages, shares=(1.0,), warmup=10, rate=3e-3)


COPY = Stage("copy", 32, 32, 200, {"copy": 1.0}, copy_ids=16)
MIXED = Stage("mixed", 96, 4, 4, {"recall": 0.5, "chat": 0.3, "text": 0.2}, {f: 1.0 for f in FORMS if f != "chat"})


def equal(a: Any, b: Any) -> bool:
    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_prepared_ids_decode_to_the_text(data: Path) -> None:
    described, arrays = read_prepared(data)
    lessons = Lessons(data, [1.0])
    text = lessons.facts.tokenizer.decode(arrays["valid"].tolist(), skip_special_tokens=False)
    assert text == (data.parent / "valid.txt").read_text().strip()
    assert described["bytes"]["valid"] == len(text.encode())
    assert [lessons.facts.tokenizer.decode([i]) for i in lessons.encode("4921")] == ["4", "9", "2", "1"]


@pytest.mark.parametrize("form", FORMS)
def test_questions_are_tokenised_as_a_user_would_type_them(data: Path, form: str) -> None:
    lessons = Lessons(data, [1.0])
    for seed in range(20):
        for fact in lessons.facts.fact(form, random.Random(seed), set()):
            for ids in (fact.plant, fact.cue + fact.answer + fact.closing):
                text = lessons.facts.tokenizer.decode(ids, skip_special_tokens=False)
                assert lessons.encode(text) == ids


def test_batches_depend_on_seed_and_step_alone(data: Path) -> None:
    lessons, again = Lessons(data, [1.0]), Lessons(data, [1.0])
    lessons.batch(MIXED, 0, 0)
    for ours, theirs in zip(lessons.batch(MIXED, 3, 5), again.batch(MIXED, 3, 5), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    ids, weights = lessons.batch(MIXED, 3, 5)
    assert ids.shape == (4, 97) and weights.shape == (4, 96)
    assert not np.array_equal(ids, lessons.batch(MIXED, 3, 6)[0])


def test_a_case_keeps_its_distance_and_its_answer(data: Path) -> None:
    lessons, text = Lessons(data, [1.0]), read_prepared(data)[1]["stories"]
    for form in FORMS:
        ids, answer = lessons.facts.question(text, form, 150, random.Random(1), distractors=0)
        planted = " ".join(map(str, ids[: len(ids) - 100]))
        assert form in ("chat", "phrase") or " ".join(map(str, answer)) in planted
        assert len(ids) <= 150 + 60 + 60


def test_the_copying_lesson_is_learnt(data: Path, tmp_path: Path) -> None:
    lessons, copying = Lessons(data, [1.0]), recipe(COPY)
    weights = run(data, tmp_path, copying).weights
    ids, mask = lessons.batch(COPY, 9, 9)
    predicted = jnp.argmax(forward(weights, copying.model, jnp.asarray(ids[:, :-1], jnp.int32)), -1)
    assert (np.asarray(predicted) == ids[:, 1:])[mask > 0].mean() > 0.3  # the best guess without looking back: 0.1


def test_resuming_equals_going_on(data: Path, tmp_path: Path) -> None:
    lessons = recipe(Stage("copy", 32, 4, 3, {"copy": 1.0}), MIXED)
    whole = run(data, tmp_path / "whole", lessons)
    run(data, tmp_path / "parts", lessons, steps=4)
    (tmp_path / "parts" / "writing").mkdir()  # what a kill in the middle of saving leaves
    assert equal(run(data, tmp_path / "parts", lessons), whole)
    assert int(whole.step) == 7
    assert equal(run(data, tmp_path / "whole", lessons), whole)  # nothing left to do
    assert not equal(run(data, tmp_path / "other", lessons, seed=1), whole)


def test_workers_make_the_same_batches(data: Path) -> None:
    lessons = recipe(MIXED)
    here = list(train.batches(data, lessons, 0, range(3), 0))
    there = list(train.batches(data, lessons, 0, range(3), 1))
    assert all(np.array_equal(a, b) for x, y in zip(here, there, strict=True) for a, b in zip(x, y, strict=True))


def test_other_settings_are_refused(data: Path, tmp_path: Path) -> None:
    lessons = recipe(Stage("copy", 16, 2, 1, {"copy": 1.0}))
    run(data, tmp_path, lessons)
    with pytest.raises(ValueError, match="seed=0, this one has 1"):
        run(data, tmp_path, lessons, seed=1)


def test_exported_model_is_what_transformers_computes(data: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    lessons = recipe(MIXED)
    run(data, tmp_path / "run", lessons)
    assert export.main(f"--run {tmp_path}/run --data {data} --to {tmp_path}/hf --cases 2".split()) == 0
    config, weights, _, _ = export.read_run(tmp_path / "run")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Once Anna saw 37 days."}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|user|>\nOnce Anna saw 37 days.<|assistant|>\n"
    ids = tokenizer(chat)["input_ids"]
    assert ids == Lessons(data, [1.0]).encode(chat)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(forward(weights, config, jnp.asarray([ids])), theirs, atol=1e-3)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert all(word in card for word in ("valid", "chat", "50"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 400


def test_recipes_fit_the_package() -> None:
    for chosen in RECIPES.values():
        shapes = jax.eval_shape(lambda model=chosen.model: start(model, 0).weights)
        assert 2 * sum(x.size for x in jax.tree.leaves(shapes)) < 11.5e6
        assert max(stage.length for stage in chosen.stages) <= chosen.model.max_positions
        assert all(stage.steps % chosen.steps_per_dispatch == 0 for stage in chosen.stages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Nothing to do"),
        ("--out {0}/x", "No data"),
        ("--text {0}/missing.txt --out {0}/x", "missing.txt is not a file"),
        ("--data {0} --out {0}/x --resume", "no run to resume"),
        ("--data {0} --out {0}/x --require-gpu", "--require-gpu"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(arguments.format(tmp_path).split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
