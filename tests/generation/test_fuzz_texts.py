"""Texts of drawn settings are the same from Python, from a stream, from a server's engine and from the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import generate
from kvjax.generation.chat import Conversation
from kvjax.generation.prompts import encode
from kvjax.generation.sampling import Sampling
from kvjax.methods import REGISTRY
from kvjax.model import Model
from kvjax.policies import Policy
from kvjax.serving.engine import Engine
from kvjax.serving.requests import Request
from tests.drawn import CHECKS
from tests.serving.test_engine import ask

PROMPTS = ("Once upon a time", " The secret number of Anna is 4921. What is", "; Lily tiger; Tom")
EVERY_R: dict[str, dict[str, Any]] = {
    "vase": {"recent": 4, "sinks": 1, "evict_every": 4, "large": 0.25},
    "rkv": {"recent": 4, "evict_every": 4},
    "keydiff": {"block": None, "evict_every": 5},
    "snapkv_decode": {"recent": 4, "evict_every": 4},
    "cur": {"projections": 20, "evict_every": 4},
    "dropkv": {"window": 5, "recent": 4, "evict_every": 4},
}
"""Policies that rank every r tokens, with settings by which they evict tokens of short texts."""
PARTS = {"codec": ("int8", "int4"), "plan": ("pyramid", "adakv"), "residual": ("less",)}
SETTINGS = {"recent": (0, 4, 0.5), "sinks": (0, 2), "positions": ("original", "cache")}


@functools.cache
def tiny() -> Model:
    """The embedded model."""
    return kvjax.load("tiny")


@dataclasses.dataclass(frozen=True)
class Wish:
    """What is asked for."""

    prompt: str
    policy: str
    every_r: bool
    parts: Mapping[str, str]
    settings: Mapping[str, Any]
    budget: int | float
    sampling: Sampling
    seed: int
    tokens: int
    stop: tuple[str, ...]

    def made(self) -> Policy:
        """The policy; ValueError where its parts do not go together."""
        return kvjax.policy(self.policy, **self.parts, **self.every)

    @property
    def every(self) -> dict[str, Any]:
        """Settings of the policy."""
        return (EVERY_R[self.policy] if self.every_r else {}) | dict(self.settings)

    def arguments(self) -> dict[str, Any]:
        """Keywords of `Model.generate`."""
        drawing = {name: value for name, value in dataclasses.asdict(self.sampling).items() if value is not None}
        told = dict(policy=self.made(), seed=self.seed, max_new_tokens=self.tokens, stop=list(self.stop))
        return drawing | told | ({"budget": self.budget} if self.bounded else {})

    @property
    def bounded(self) -> bool:
        """Whether a budget means anything, also where parts do not go with the policy."""
        return kvjax.policy(self.policy).plan.sizing.mode == "budget"

    def words(self) -> list[str]:
        """Options of `kvjax generate`."""
        words = ["--model", "tiny", "--prompt", self.prompt, "--policy", self.policy, "--seed", str(self.seed)]
        words += ["--max-new-tokens", str(self.tokens), "--temperature", str(self.sampling.temperature)]
        words += [word for text in self.stop for word in ("--stop", text)]
        words += [word for part, name in self.parts.items() for word in (f"--{part}", name)]
        words += [word for name, value in self.every.items() for word in ("--set", f"{name}={value}")]
        words += ["--budget", str(self.budget)] if self.bounded else []
        return [*words, *(["--top-k", str(self.sampling.top_k)] if self.sampling.top_k else [])]


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    """Any settings, also those that kvjax refuses."""
    some = {
        name: draw(st.sampled_from(SETTINGS[name]))
        for name in sorted(draw(st.sets(st.sampled_from(sorted(SETTINGS)), max_size=1)))
    }
    parts = {
        name: draw(st.sampled_from(PARTS[name]))
        for name in sorted(draw(st.sets(st.sampled_from(sorted(PARTS)), max_size=1)))
    }
    every_r = draw(st.sampled_from([False, False, True]))
    return Wish(
        prompt=draw(st.sampled_from(PROMPTS)),
        policy=draw(st.sampled_from(sorted(EVERY_R if every_r else REGISTRY))),
        every_r=every_r,
        parts=parts,
        settings=some,
        budget=draw(st.sampled_from([8, 12, 20, 32, 0.5])),
        sampling=Sampling(draw(st.sampled_from([0.0, 0.7, 1.3])), draw(st.sampled_from([None, 5]))),
        seed=draw(st.integers(0, 2**32 - 1)),
        tokens=draw(st.integers(1, 24)),
        stop=draw(st.sampled_from([(), (" the",), ("e", "\n")])),
    )


@pytest.mark.slow
@settings(suppress_health_check=CHECKS)
@given(wish=wishes())
def test_all_ways_to_a_text_agree(wish: Wish) -> None:
    try:
        wanted = tiny().generate(wish.prompt, **wish.arguments())[0]
    except ValueError as error:
        event("refused")
        assert "\n" not in str(error) and str(error).endswith(".")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert generate.main(wish.words()) == 2
        assert str(error) in said.getvalue()
        return
    assert "".join(tiny().stream(wish.prompt, **wish.arguments())) == wanted
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert generate.main([*wish.words(), "--json"]) == 0
    assert json.loads(said.getvalue())["text"] == wanted
    assert served(wish) in (wanted, None)


def served(wish: Wish) -> str | None:
    """What a server's engine says, or None where it has no such policy."""
    ids = encode(tiny(), wish.prompt, False, None)
    if not isinstance(wish.budget, int):
        return None
    try:
        engine = Engine(tiny(), wish.made(), wish.budget, rows=2, context=64, chunk=32, steps=4)
    except ValueError as error:
        event(f"no engine: {str(error)[:40]}")
        return None
    with engine:
        request = Request(tuple(ids), wish.tokens, wish.sampling, seed=wish.seed, stop=wish.stop)
        return ask(engine, request).text


@pytest.mark.slow
@settings(suppress_health_check=CHECKS)
@given(wish=wishes())
def test_a_conversation_goes_on_from_where_it_was_saved(wish: Wish) -> None:
    arguments = wish.arguments() if not _refused(wish) else None
    if arguments is None:
        return
    try:
        talk = Conversation(tiny(), context=96, **arguments)
        first = "".join(talk.reply(wish.prompt))
    except ValueError as error:
        event("refused")
        assert "\n" not in str(error)
        return
    with tempfile.TemporaryDirectory() as directory:
        talk.save(Path(directory) / "talk")
        other = Conversation(tiny(), context=96, **arguments)
        other.load(Path(directory) / "talk")
    assert first or not talk.text or talk.text == other.text
    assert "".join(other.reply(" And Tom?")) == "".join(talk.reply(" And Tom?"))
    assert other.use() == talk.use()


def _refused(wish: Wish) -> bool:
    try:
        wish.made()
    except ValueError:
        event("refused")
        return True
    return False
