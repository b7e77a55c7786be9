"""The papers' claims: what each needs can be measured, each can come out either way, and the page says which."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.papers.attention import attention_statistics
from experiments.papers.paper import (
    EqualBytes,
    Measured,
    PaperClaim,
    Trained,
    Wanted,
    alike,
    better,
    no_worse,
)
from experiments.papers.report import PAPERS, write_page
from experiments.papers.subject import Subject, equal_name, learned
from kvjax.cli import evaluate
from kvjax.evaluation.grid import RowFile
from kvjax.methods.notation import combination

CLAIMS = [claim for paper in PAPERS.values() for claim in paper.claims]
NEEDED = list(dict.fromkeys(wanted for claim in CLAIMS for wanted in claim.check.needs))
NOTHING = Measured({}, {})
OURS, THEIRS = Wanted("h2o", 0.5), Wanted("window", 0.5)


def made_up(rng: np.random.Generator) -> Measured:
    """Measurements of any kind, similar ones and very different ones."""

    def number() -> float:
        return float(np.exp(rng.normal() * spread))

    def row(wanted: Wanted) -> dict[str, Any]:
        level = 3 + rng.normal() * rng.choice([0.001, 0.3])
        cases = (level + noise * rng.normal(size=8)).tolist()
        return {
            **{name: number() for name in ("cache_bytes", "full_cache_bytes", "prefill_seconds")},
            **{name: number() for name in ("decode_tokens_per_second", "attention_loss_ratio")},
            "score_correlation": rng.normal(),
            "hellinger_of_layers": rng.random(3).tolist(),
            "cases": 8,
            "of_cases": cases,
            "string_match_of_cases": cases,
        }

    def layers(*shape: int) -> Any:
        return (lowest + (1 - lowest) * rng.random((*shape, 4))).tolist()

    spread, noise = rng.choice([0.01, 1.0, 4.0]), rng.choice([0.001, 0.1])
    lowest = rng.choice([0.0, 0.95])
    sparsity = np.asarray(layers(6))
    choices = [np.full((4, 2, 2), rng.integers(5)), rng.integers(0, 5, (4, 2, 2))]
    recovered = [np.sort(rng.random((4, 2, 2, 4)), axis=-1) for _ in range(2)]
    same = rng.random() < 0.5
    choice = choices[rng.integers(2)]
    names = ("top_10", "top_40", "top_50", "sinks", "newest", "entropy", "entropy_gumbel")
    special = {
        "attention": {name: layers() for name in names}
        | {"sparsity": (np.sort(sparsity, axis=0) if same else sparsity).tolist()},
        "profile": {
            "choices": 5,
            "choice": choice.tolist(),
            "choice_later": (choice if same else choices[1]).tolist(),
            "recovered": recovered[0].tolist(),
            "recovered_later": recovered[0 if same else 1].tolist(),
        },
        "memory": {name: number() for name in ("pair_bytes", "score_bytes", "parameters", "kernel_parameters")},
    }
    return Measured({wanted: row(wanted) for wanted in NEEDED}, special)


@pytest.fixture(scope="module")
def worlds() -> list[Measured]:
    rng = np.random.default_rng(0)
    return [made_up(rng) for _ in range(300)]


def test_the_table_is_whole() -> None:
    assert len(CLAIMS) >= 40 and len({paper.letter for paper in PAPERS.values()}) == len(PAPERS) == 5
    for paper in PAPERS.values():
        assert len({claim.what for claim in paper.claims}) == len(paper.claims)
    assert all(claim.place and claim.number and (claim.check.needs or claim.check.special) for claim in CLAIMS)


def test_policies_can_be_made() -> None:
    for policy in {wanted.policy for wanted in NEEDED}:
        assert combination(policy).residual is None or learned(policy) or "performer" in policy


@pytest.mark.parametrize("name", PAPERS)
def test_claims_may_come_out_either_way(name: str, worlds: list[Measured]) -> None:
    for claim in PAPERS[name].claims:
        undecided = claim.against(NOTHING)
        assert undecided.shown is None and undecided.verdict == "not measured"
        found: dict[bool | None, PaperClaim] = {}
        for world in worlds:
            verdict = claim.against(world)
            assert verdict.numbers
            found[None if verdict.shown is None else bool(verdict.shown)] = claim
            if {True, False} <= set(found):
                break
        assert set(found) == {True, False}, f"{claim.what}: only {set(found)}"


@given(gain=st.floats(-1, 1), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_better_worse_and_alike_leave_nothing_out(gain: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours = (3 + rng.normal(size=6)).tolist()
    theirs = (np.asarray(ours) + gain + 0.2 * rng.normal(size=6)).tolist()
    measured = Measured({OURS: {"of_cases": ours}, THEIRS: {"of_cases": theirs}}, {})

    def shown(check: Any) -> bool:
        return bool(check.judge(measured).shown)

    assert [shown(better(OURS, THEIRS)), shown(better(THEIRS, OURS)), shown(alike(OURS, THEIRS))].count(True) == 1
    assert shown(no_worse(OURS, THEIRS)) == (not shown(better(THEIRS, OURS)))
    assert shown(better(OURS, THEIRS, higher=True)) == shown(better(THEIRS, OURS))


def test_one_passage_decides_nothing() -> None:
    measured = Measured({OURS: {"of_cases": [1.0]}, THEIRS: {"of_cases": [2.0]}}, {})
    assert all(check(OURS, THEIRS).judge(measured).shown is None for check in (better, alike, no_worse))


def test_models_that_find_nothing_decide_nothing() -> None:
    measured = Measured({OURS: {"of_cases": [0.0, 0.0]}, THEIRS: {"of_cases": [0.0, 0.0]}}, {})
    assert all(check(OURS, THEIRS).judge(measured).shown is None for check in (better, alike, no_worse))


def test_refusals_are_said() -> None:
    claim = PaperClaim("beats it", "there", "1", better(OURS, THEIRS))
    found = claim.against(Measured({OURS: {"refused": "it has no room."}}, {}))
    assert found.shown is None and found.numbers == "it has no room."


def test_budgets_of_a_model() -> None:
    subject = Subject("tiny", 1, "a.txt", 4, 100, trained=114)
    slots = [subject.budget(Wanted("h2o", Trained(times))) for times in (1, 2, 0.5, 0.2, 0.001)]
    assert slots == [114, 228, 56, 22, 2]
    assert Subject("other", 1, "a.txt", 4, 100).budget(Wanted("h2o", Trained())) is None
    wanted = Wanted("h2o", EqualBytes("fastgen"))
    assert subject.budget(wanted) is None
    assert Subject("tiny", 1, "a.txt", 4, 100, equal={equal_name(wanted): 7}).budget(wanted) == 7


def test_the_page_joins_the_models_whose_rows_are_there(tmp_path: Path) -> None:
    pair = Wanted("keyformer", 0.1), Wanted("h2o", 0.1)
    for name, parameters, gain in (("large", 20, -0.5), ("small", 10, 0.5)):
        directory = tmp_path / "claims" / name
        subject = Subject(name, parameters, "a.txt", 2, 64, trained=None)
        subject.write(directory)
        assert Subject.read(directory) == subject
        rows = RowFile(directory / "perplexity.jsonl")
        for wanted, nats in zip(pair, (3.0, 3.0 + gain), strict=True):
            rows.add(subject.cell(wanted) | {"of_cases": [nats, nats + 0.01]})
    (tmp_path / "claims" / "remarks.md").write_text("Little is known.\n")
    write_page(tmp_path)
    page = (tmp_path / "claims.md").read_text()
    assert page.startswith("# What five papers claim, on small and large\n")
    assert page.count("\nLittle is known.\n\n## Keyformer") == 1
    (line,) = (line for line in page.splitlines() if "beats H2O with 20% of the prompt" in line)
    assert line.count("**shows**") == line.count("**does not show**") == 1 and line.index("**shows**") < line.index(
        "**does not show**"
    )
    assert page.count("**not measured**") == 2 * (len(CLAIMS) - 1)
    assert '--policies "h2o,keyformer" --budgets 0.1`' in page
    assert f"| all | {len(CLAIMS)} | 1 of 1 | 0 of 1 |" in page
    assert all(f"| {paper.letter}{len(paper.claims)} |" in page for paper in PAPERS.values())


def test_commands_are_read_as_they_stand() -> None:
    equal = {equal_name(wanted): 9 for wanted in NEEDED if isinstance(wanted.budget, EqualBytes)}
    subject, parser = Subject("tiny", 1, "a.txt", 4, 64, trained=114, equal=equal), evaluate.parser()
    for needs in dict.fromkeys(claim.check.needs for claim in CLAIMS if claim.check.needs):
        asked: dict[str, set[tuple[str, int | float]]] = {}
        for line in subject.commands(needs):
            options = parser.parse_args(_arguments(line))
            made = evaluate.entries(options.policies, options.budgets)
            asked.setdefault(options.report, set()).update((entry.label, entry.budget) for entry in made)
        for wanted in needs:
            assert learned(wanted.policy) or (wanted.policy, subject.budget(wanted)) in asked[wanted.task]


def _arguments(line: str) -> list[str]:
    """What a shell makes of a evaluate."""
    for name, value in {"MODEL": "tiny", "TEXT": "a.txt", "ROWS": "4", "LENGTH": "64", "KERNELS": "h2o_10"}.items():
        line = line.replace(f"${name}", value).replace(name, value)
    line = re.sub(r"\$\(\([\d */]+\)\)", "32", line)
    assert "$" not in line
    return shlex.split(line)[2:]


@pytest.mark.parametrize("even", [True, False])
def test_attention_is_summed_up(even: bool) -> None:
    visible = jnp.tril(jnp.ones((64, 64), bool))
    seen = visible if even else jnp.eye(64, dtype=bool)
    probs = (seen / seen.sum(-1, keepdims=True))[None, None, None, 32:]
    found = {
        name: np.asarray(value).tolist()
        for name, value in attention_statistics(probs, visible[None, None, None, 32:]).items()
    }
    if even:
        assert found["sinks"] == pytest.approx(found["newest"]) and found["sparsity"] == [0.0] * 6
        assert found["entropy"] == pytest.approx(np.log(64)) and found["entropy_gumbel"] <= found["entropy"]
        assert 0.1 < found["top_10"] < found["top_40"] < found["top_50"] < 1
    else:
        assert found["sinks"] == 0 and found["newest"] == 1 and found["entropy"] == 0
        assert found["top_50"] == 1 and found["sparsity"] == pytest.approx([1 - 32 / (64 * 65 - 32 * 33) * 2] * 6)


@pytest.mark.slow
def test_measuring_fills_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "fox.txt"
    text.write_text("Once upon a time there was a fox, who wondered what the story was about.\n" * 60)
    words = ["claims", "--text", str(text), "--out", str(tmp_path), "--rows", "2", "--length", "160"]
    assert evaluate.main([*words, "--only", "lightkv"]) == 0
    assert "lightkv at" in capsys.readouterr().err
    page = (tmp_path / "claims.md").read_text()
    lines = [line for line in page.splitlines() if re.match(r"\| V\d", line)]
    assert len(lines) == len(PAPERS["lightkv"].claims)
    undecided = [line for line in lines if "**not measured**" in line]
    assert all("nothing is found" in line and "needles" in line for line in undecided)
    assert evaluate.main([*words, "--only", "lightkv"]) == 0
    assert "lightkv at" not in capsys.readouterr().err and (tmp_path / "claims.md").read_text() == page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--redo", "--only", "less"], "--redo measures everything again"),
        (["--text", "SECOND"], "on one text, not on 2"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("A fox. " * 20)
    texts = [str(file) for file in (files if "SECOND" in words else files[:1])]
    more = [] if "SECOND" in words else words
    assert evaluate.main(["claims", "--text", *texts, "--out", str(tmp_path / "out"), *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
