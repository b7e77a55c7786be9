"""Methods and parts register themselves with a decorator in their own file."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import kvjax
from kvjax import generate
from kvjax.methods import CODECS, PAPERS, PLANS, REGISTRY, RESIDUALS, SELECTIONS, describe
from kvjax.methods.h2o import Accumulated
from kvjax.methods.notation import compared
from kvjax.methods.register import combine, register, register_part, register_score
from kvjax.methods.registry import settings_of
from kvjax.policies.allocation import Uniform
from kvjax.types import number, setting

pytestmark = pytest.mark.core
UNTYPED: Any = register

METHOD = '''
"""A method in a file of its own."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct

import kvjax
from kvjax.methods.register import combine, register
from kvjax.types import number


@struct.dataclass
class Fading(kvjax.Score):
    r"""Position and how far it fades.

    .. math:: F(i) = r i

    Args:
        rate: how fast it fades.
    """

    rate: float = number(0.5)

    def score(self, view: Any, new: Any) -> Any:
        return self.rate * view.position.astype(jnp.float32)


@register(paper="Nobody 2026, eq. 7", group="ranked by position")
def fading(*, rate: float = Fading.rate, recent: int | float = 0.25, **common: Any) -> kvjax.Policy:
    """Tokens that fade.

    When: never.
    """
    return combine(Fading(rate), recent=recent, **common)
'''


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """Put back what a test registers."""
    every = [REGISTRY, PLANS, RESIDUALS, CODECS, SELECTIONS, *PAPERS.values()]
    before = [dict(table) for table in every]
    yield
    for table, known in zip(every, before, strict=True):
        table.clear()
        table.update(known)  # type: ignore[arg-type]


@pytest.fixture
def fading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import a package of methods, as the folder of kvjax's own is imported."""
    package = tmp_path / "somebodys_methods"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "fading.py").write_text(textwrap.dedent(METHOD))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("somebodys_methods.fading")
    yield
    del sys.modules["somebodys_methods.fading"], sys.modules["somebodys_methods"]


@pytest.mark.usefixtures("fading")
def test_a_file_with_the_decorator_is_a_policy_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    made = kvjax.policy("fading", rate=0.25, codec="int8")
    assert made.name == "fading" and made.protection.recent == 0.25 and made.codec.bits == 8
    assert kvjax.methods.settings_in(made)["rate"] == 0.25 and kvjax.methods.name_of(made) == "fading"
    with pytest.raises(ValueError, match="policy 'fading' has no setting 'ratio'; did you mean rate"):
        kvjax.policy("fading", ratio=1.0)
    with pytest.raises(ValueError, match="policy 'fading' has no setting 'bits'; it takes rate, recent, sinks"):
        kvjax.policy("fading", bits=8)
    with pytest.raises(ValueError, match="did you mean fading"):
        kvjax.policy("fadin")

    entry = describe.describe_policy("fading", without_common=True)
    assert (entry.summary, entry.paper, entry.when) == ("Tokens that fade.", "Nobody 2026, eq. 7", "never.")
    assert [setting.name for setting in entry.settings] == ["rate", "recent"]
    assert entry.settings[0].meaning == "how fast it fades."
    names = [each.name for each in describe.policies()["ranked by position"]]
    assert names == sorted(names) and "fading" in names

    assert generate.main(["--policy", "list"]) == 0
    listed = capsys.readouterr().out
    assert "fading" in listed and "Nobody 2026, eq. 7" in listed
    assert generate.main(["--policy", "fading", "--help"]) == 0
    assert "how fast it fades" in capsys.readouterr().out


def package(tmp_path: Path, points: str) -> None:
    """An installed package with entry points."""
    (tmp_path / "fading_kv.py").write_text(textwrap.dedent(METHOD))
    installed = tmp_path / "fading_kv-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: fading_kv\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[kvjax.policies]\n{points}")


def test_a_method_of_an_installed_package_is_known_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package(tmp_path, "fading = fading_kv:fading\nfaded = fading_kv\nlost = nowhere_kv\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="fading_kv does not register 'faded'; decorate it"):
        kvjax.policy("faded")
    for table in (REGISTRY, PAPERS["ranked by position"]):
        table.pop("fading")
    del sys.modules["fading_kv"]
    with pytest.raises(ValueError, match="lost of nowhere_kv cannot be imported"):
        kvjax.policy("h2o", plan="lost")
    assert generate.main(["--policy", "fading", "--help"]) == 0
    assert "how fast it fades" in capsys.readouterr().out
    assert kvjax.policy("fading", rate=0.25).name == "fading"
    with pytest.raises(ValueError, match="did you mean fading"):
        kvjax.policy("fadin")
    del sys.modules["fading_kv"]


MINE = '''
import kvjax


class Mine(kvjax.Score):
    """Rank by nothing.

    Args:
        rate: of nothing.
    """

    rate: float = 0.5

    def score(self, view, new):
        return view.position.astype("float32")


def make(*, depth: int = 3):
    """Return a policy."""
    return kvjax.Policy(Mine())


READY = kvjax.policy("h2o", sinks=4)
'''


def test_names_and_settings_in_a_file_are_suggested(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("Mne", {}, "has no 'Mne'; did you mean Mine?"),
        ("nothing", {}, "has no 'nothing'; it has Mine, make, READY."),
        ("Mine", {"rte": 1}, "has no setting 'rte'; did you mean rate?"),
        ("Mine", {"recnt": 1}, "has no setting 'recnt'; did you mean recent?"),
        ("make", {"dpth": 1}, "has no setting 'dpth'; did you mean depth?"),
    ]
    for name, settings, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            kvjax.policy(f"{file}:{name}", **settings)
    with pytest.raises(ValueError, match="did you mean Mine"):
        kvjax.policy("h2o", plan=f"{file}:Mne")
    misspelt: dict[str, Any] = {"plan": "adakv", "plan.flor": 1.0}
    with pytest.raises(ValueError, match="did you mean floor"):
        kvjax.policy("h2o", **misspelt)
    with pytest.raises(ValueError, match="did you mean recent"):
        kvjax.policy("h2o", recnt=1)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Mine", ["Rank by nothing.", "rate", "0.5", "of nothing."]),
        ("make", ["Return a policy.", "depth", "3"]),
        ("READY", ["Policy(score=Accumulated(), protection=Protection(sinks=4", "sinks 4"]),
        ("Mine+int8", ["rate", "int8: 8-bit codes"]),
    ],
)
def test_help_explains_a_policy_of_a_file(
    name: str, shown: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    assert generate.main(["--policy", f"{tmp_path / 'mine.py'}:{name}", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(text in said for text in [*shown, "evict_every"])


@pytest.mark.usefixtures("fading")
def test_a_registered_policy_runs_and_can_be_a_base() -> None:
    model, tokens = kvjax.load("tiny"), np.arange(1, 25)[None]
    state, _ = kvjax.prefill(model, "fading", tokens, 8)
    expected, _ = kvjax.prefill(model, "window", tokens, 8)
    for mine, oldest in zip(kvjax.held_positions(state), kvjax.held_positions(expected), strict=True):
        np.testing.assert_array_equal(np.sort(mine), np.sort(oldest))
    wider = kvjax.policy("baseline_plus", base="fading", rate=0.25)
    assert wider.plan.extra_slots == 4 and wider.name == "fading"


def test_a_class_of_scores_registers_with_its_settings_and_those_of_every_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @register_score("scaled", paper="Nobody 2026", group="ranked by position", recent=0.25, positions="cache")
    @struct.dataclass
    class Scaled(kvjax.Score):
        """Tokens that scale.

        When: never.

        Args:
            rate: how far they scale.
            sinks: first tokens, which the score knows, too.
        """

        rate: float = number(0.5)
        sinks: int = setting(3)

        def score(self, view: Any, new: Any) -> Any:
            return self.rate * view.position.astype(jnp.float32)

    made = kvjax.policy("scaled", rate=2.0, sinks=1)
    assert isinstance(made.score, Scaled) and (made.score.rate, made.score.sinks, made.name) == (2.0, 1, "scaled")
    assert (made.protection.sinks, made.protection.recent, made.codec.positions) == (1, 0.25, "cache")
    usual = {"recent": 0.25, "positions": "cache", "special": (), "evict_every": 1}
    assert settings_of("scaled") == {"rate": 0.5, "sinks": 3} | usual
    with pytest.raises(ValueError, match="policy 'scaled' has no setting 'bits'; it takes rate, sinks, recent"):
        kvjax.policy("scaled", bits=1.0)
    with pytest.raises(ValueError, match="rate='fast' is not a finite number"):
        kvjax.policy("scaled", rate="fast")
    entry = describe.describe_policy("scaled", without_common=True)
    assert (entry.summary, entry.when, entry.sources) == ("Tokens that scale.", "never.", [Scaled])
    assert entry.settings[0].meaning == "how far they scale."
    assert generate.main(["--policy", "scaled", "--help"]) == 0
    assert "how far they scale" in capsys.readouterr().out


def test_nothing_is_left_of_what_a_test_registered() -> None:
    assert "fading" not in REGISTRY
    with pytest.raises(ValueError, match="there is no policy 'fading'"):
        kvjax.policy("fading")


def test_parts_register_by_their_kind(capsys: pytest.CaptureFixture[str]) -> None:
    @register_part("level")
    @struct.dataclass
    class Level(Uniform):
        """As many slots for every layer."""

    assert PLANS["level"] is Level and list(PLANS) == sorted(PLANS)
    assert isinstance(kvjax.policy("h2o", plan="level").plan, Level)
    assert generate.main(["--policy", "list"]) == 0
    assert "level" in capsys.readouterr().out
    with pytest.raises(TypeError, match="Accumulated is no Plan, Residual, Quantizer or Selection"):
        register_part("score")(Accumulated)  # type: ignore[type-var]


def test_a_name_has_one_owner_and_a_group_that_exists() -> None:
    def h2o(**common: Any) -> kvjax.Policy:
        return combine(Accumulated(), **common)

    group = "ranked by attention at every token"
    with pytest.raises(ValueError, match=r"policy 'h2o' is already registered by kvjax\.methods\.h2o"):
        register(paper="mine", group=group)(h2o)
    with pytest.raises(ValueError, match="there is no group 'attention'"):
        UNTYPED(paper="mine", group="attention")

    def mine(**common: Any) -> kvjax.Policy:
        return combine(Accumulated(), **common)

    for where in (group, "over another policy"):  # again, as a notebook's cell that is run twice
        register(paper="mine", group=where)(mine)  # type: ignore[arg-type]
    assert [name for name, papers in PAPERS.items() if "mine" in papers] == ["over another policy"]


def test_every_registered_name_has_one_paper() -> None:
    of_papers = [name for papers in PAPERS.values() for name in papers]
    assert sorted(of_papers) == list(REGISTRY) == sorted(REGISTRY)


def test_settings_of_a_comparison_reach_every_policy_that_has_them() -> None:
    made = compared("less,lsh_e,full,less[base=tova]", {}, {"recent": 5, "bits": 8})
    assert list(made) == ["less[recent=5]", "lsh_e[recent=5,bits=8]", "full", "less[base=tova,recent=5]"]
    assert all(policy.protection.recent == 5 for label, policy in made.items() if label != "full")
    with pytest.raises(ValueError, match="policy 'full' has no setting 'nope'"):
        compared("full[nope=3]", {}, {})
    with pytest.raises(ValueError, match="--set bits: none of the policies less has this setting"):
        compared("less", {}, {"bits": 8})


@pytest.mark.parametrize("written", ["h2o+int8", "h2o[recent=16]", "h2o+less[recent=16]"])
def test_the_form_of_commands_is_refused_with_that_of_python(written: str) -> None:
    with pytest.raises(ValueError, match=r"arguments: kvjax.policy\('h2o', codec='int8', recent=16\)"):
        kvjax.prefill(kvjax.load("tiny"), written, [[1, 2, 3]])
    kvjax.policy("h2o", codec="int8", recent=16)
