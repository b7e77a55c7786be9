"""Shapes of the embedded model and the order of its lessons.

A model of this size does not learn recall without a curriculum. It first learns to copy short sequences of few ids,
then of the whole vocabulary. Adjacent keys and values in running text follow, then sentences, questions and longer
contexts with an increasing share of text.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from experiments.tiny.curriculum import Stage
from kvjax.models.config import ModelConfig, Rope


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All settings besides text and seed that determine the trained weights.

    Args:
        shape: shape of the model, the arguments of `llama`.
        stages: the curriculum.
        shares: share of plain text from each training text.
        rate: peak learning rate.
        rates: share of it at the beginning and at the end of each stage, a line between; None holds the peak until the
            last stage and comes down to a twentieth there.
        warmup: steps until the peak.
        weight_decay: decoupled, on matrices.
        steps_per_dispatch: optimiser steps compiled into one program; divides the steps of every stage.
    """

    shape: tuple[int, int, int, int, int, int, int]
    stages: tuple[Stage, ...]
    shares: tuple[float, ...] = (0.4, 0.6)
    rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.05
    steps_per_dispatch: int = 1
    rates: tuple[tuple[float, float], ...] | None = None

    @property
    def model(self) -> ModelConfig:
        """Return the model's configuration."""
        return llama(*self.shape)

    @property
    def steps(self) -> int:
        """Return the optimiser steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def scaled(self, scale: float) -> Recipe:
        """Return the same lessons with every stage after the copying ones `scale` times as long."""
        whole = self.steps_per_dispatch
        stages = [
            s
            if set(s.mix) == {"copy"}
            else dataclasses.replace(s, steps=max(1, round(s.steps * scale / whole)) * whole)
            for s in self.stages
        ]
        return dataclasses.replace(self, stages=tuple(stages))


def llama(vocab_size: int, width: int, layers: int, heads: int, kv_heads: int, mlp: int, positions: int) -> ModelConfig:
    """Return a Llama with tied embeddings and heads of width / heads; token 0 ends a text."""
    head = width // heads
    return ModelConfig(
        vocab_size=vocab_size,
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head,
        mlp_width=mlp,
        max_positions=positions,
        rope=Rope(width=head),
        eos=(0,),
    )


_PAIRS = {"pair": 1.0}
_EASY = {"pair": 5.0, "sentence": 2.0, "question": 1.0, "list": 1.0, "phrase": 1.0}
_ALL = {"pair": 3.0, "sentence": 3.0, "question": 4.0, "list": 2.0, "phrase": 1.0}
_CHAT = {"recall": 0.45, "chat": 0.1, "copy": 0.05, "text": 0.4}

BASE = Recipe(
    shape=(4096, 256, 6, 8, 4, 704, 2048),
    stages=(
        Stage("copy 64 ids", 64, 512, 200, {"copy": 1.0}, copy_ids=64),
        Stage("copy 400 ids", 64, 512, 200, {"copy": 1.0}, copy_ids=400),
        Stage("copy all ids", 128, 512, 400, {"copy": 1.0}),
        Stage("pairs", 128, 512, 1000, {"copy": 0.3, "recall": 0.6, "text": 0.1}, _PAIRS, facts=(1, 8)),
        Stage(
            "forms", 512, 128, 2400, {"copy": 0.1, "recall": 0.75, "text": 0.15}, _EASY, facts=(1, 16), text_weight=0
        ),
        Stage("far", 1024, 80, 2400, {"copy": 0.05, "recall": 0.6, "chat": 0.1, "text": 0.25}, _ALL, facts=(1, 24)),
        Stage("farther", 2048, 40, 2400, _CHAT, _ALL, facts=(1, 32), answer_weight=3),
    ),
    shares=(0.25, 0.75),
    weight_decay=0.1,
    steps_per_dispatch=8,
)

_TALK = {"copy": 0.05, "recall": 0.6, "chat": 0.15, "text": 0.2}
_LATE = {"recall": 0.5, "chat": 0.15, "text": 0.35}

# Train every form until it is learnt at 256 tokens, because a CPU is fast there; longer contexts follow.
CPU = Recipe(
    shape=(2048, 128, 4, 4, 2, 384, 1152),
    stages=(
        Stage("copy 64 ids", 48, 128, 150, {"copy": 1.0}, copy_ids=64),
        Stage("copy all ids", 128, 48, 150, {"copy": 1.0}),
        Stage("pairs", 128, 48, 300, {"copy": 0.3, "recall": 0.6, "text": 0.1}, _PAIRS, facts=(1, 6)),
        Stage("forms", 256, 24, 800, {"copy": 0.1, "recall": 0.7, "text": 0.2}, _EASY, facts=(1, 10)),
        Stage("end", 256, 24, 800, {"copy": 0.1, "recall": 0.7, "text": 0.2}, _ALL, facts=(1, 10)),
        Stage("farther", 512, 12, 250, _TALK, _ALL, facts=(1, 14)),
        Stage("far", 1152, 6, 500, _LATE, _ALL, facts=(1, 20), answer_weight=3),
    ),
    rates=((1, 1), (1, 1), (1, 1), (1, 1), (1, 0.05), (0.5, 0.5), (0.5, 0.05)),
)

RECIPES = {"base": BASE, "cpu": CPU}


def name_of(stages: list[dict[str, Any]]) -> str | None:
    """Return the name of the recipe with these stages, as stored in a run's settings."""
    for name, recipe in RECIPES.items():
        if json.dumps([dataclasses.asdict(stage) for stage in recipe.stages]) == json.dumps(stages):
            return name
    return None
