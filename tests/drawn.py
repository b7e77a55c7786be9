"""Configurations of a model, a policy and a text that hypothesis draws, for promises that hold in all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st
from jaxtyping import Array

import kvjax
from kvjax.model import Model
from kvjax.policies import Policy
from tests.cases import PAIRS, POLICIES
from tests.small_models import GQA, LEARNED, LOCAL, MHA, MQA, PARTIAL, SLOPED, sharp_model

CASES = POLICIES | PAIRS
CHECKS: Any = tuple(HealthCheck)
"""Of hypothesis, none of which matters here: an example compiles programs, and much of what is drawn is refused."""
CONFIGS = {
    "mha": MHA,
    "gqa": GQA,
    "mqa": MQA,
    "partial": PARTIAL,
    "alibi": SLOPED,
    "learned": LEARNED,
    "windows": LOCAL,
}
TEXT = np.random.default_rng(11).integers(0, GQA.vocab_size, (4, 128))


@functools.cache
def model_of(name: str) -> Model:
    """A model with sharp attention in float64, so that rounding changes nothing that a promise compares."""
    return sharp_model(CONFIGS[name])


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One configuration.

    Args:
        model: key of `CONFIGS`.
        case: key of `CASES`.
        settings: of the policy, beside those of the case.
        budget: slots, or a fraction of the text.
        lengths: tokens of each row's prompt.
        chunk: prompt tokens between two compressions; None for the policy's own.
        turn: tokens of each row that are read after the prompt.
        steps: tokens that are written after the turn.
    """

    model: str
    case: str
    settings: Mapping[str, Any]
    budget: int | float
    lengths: tuple[int, ...]
    chunk: int | None
    turn: tuple[int, ...]
    steps: int

    @property
    def prompts(self) -> list[list[int]]:
        """Ids of each row's prompt."""
        return [row[:length].tolist() for row, length in zip(TEXT, self.lengths, strict=False)]

    @property
    def turns(self) -> list[list[int]]:
        """Ids of each row's turn, some of them none."""
        return [row[60 : 60 + length].tolist() for row, length in zip(TEXT, self.turn, strict=False)]

    @property
    def written(self) -> np.ndarray:
        """Ids [steps, b] that are written after it."""
        return TEXT[: len(self.lengths), 80 : 80 + self.steps].T

    @property
    def planned(self) -> int:
        """Tokens that a prompt's cache is planned for."""
        return max(self.turn) + self.steps + 2

    def policy(self) -> Policy:
        """The policy; ValueError where its parts do not go together."""
        case = CASES[self.case]
        return case.make(**self.settings) if case.plan is None else case.make(**{"plan": case.plan, **self.settings})

    def read(self, rows: list[int] | None = None, **changes: Any) -> tuple[kvjax.State, Array]:
        """Some rows' prompts, or all, each with randomness of its own."""
        policy = changes.pop("policy", None) or self.policy()
        model = changes.pop("model", None) or model_of(self.model)
        rows = list(range(len(self.lengths))) if rows is None else rows
        profiled = policy.plan.sizing.mode != "budget"
        arguments: dict[str, Any] = {
            "budget": 1.0 if profiled else self.budget,
            "max_new_tokens": self.planned,
            "key": jax.vmap(jax.random.key)(np.array(rows)),
            "prefill_chunk": self.chunk or CASES[self.case].prefill_chunk,
        }
        return kvjax.prefill(model, policy, [self.prompts[row] for row in rows], **(arguments | changes))

    def go_on(self, state: kvjax.State, rows: list[int] | None = None) -> tuple[kvjax.State, list[np.ndarray]]:
        """Read the turn and write the tokens: the last state, and the logits of each."""
        rows = list(range(len(self.lengths))) if rows is None else rows
        logits: list[np.ndarray] = []
        if any(self.turn[row] for row in rows):
            state, last = kvjax.extend(state, [self.turns[row] for row in rows])
            logits.append(np.where(np.array([self.turn[row] for row in rows])[:, None] > 0, last, 0.0))
        for token in self.written:
            state, last = kvjax.decode_step(state, token[rows])
            logits.append(np.asarray(last))
        return state, logits


SETTINGS = {
    "sinks": st.integers(0, 4),
    "recent": st.sampled_from([0, 1, 4, 0.25, 0.5]),
    "special": st.sampled_from([(), (7,), (7, 9, 20)]),
    "positions": st.sampled_from(["original", "cache"]),
    "codec": st.sampled_from(["plain", "int8", "int4", "fp8"]),
    "plan": st.sampled_from(["uniform", "arithmetic", "pyramid", "interleaved", "adakv"]),
    "residual.kernels": st.just("performer"),
}


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Any configuration, also one that kvjax refuses."""
    names = draw(st.sets(st.sampled_from(sorted(SETTINGS)), max_size=2))
    settings = {name: draw(SETTINGS[name]) for name in sorted(names)}
    if "residual.kernels" in settings:
        settings["residual"] = "less"
    rows = draw(st.integers(1, 3))
    return Drawn(
        model=draw(st.sampled_from(sorted(CONFIGS))),
        case=draw(st.sampled_from(sorted(CASES))),
        settings=settings,
        budget=draw(st.sampled_from([6, 12, 17, 20, 24, 32, 48, 0.25, 0.5, 0.9])),
        lengths=tuple(draw(st.lists(st.sampled_from([1, 3, 9, 16, 23, 32, 41]), min_size=rows, max_size=rows))),
        chunk=draw(st.sampled_from([None, None, None, 1, 8])),
        turn=tuple(draw(st.lists(st.sampled_from([0, 1, 5]), min_size=rows, max_size=rows))),
        steps=draw(st.integers(1, 10)),
    )
