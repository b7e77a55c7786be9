"""Recall of the embedded model with a full cache, by form and distance, with losses and a sample."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from experiments.tiny.network import forward, negative_log_likelihood
from experiments.tiny.planted_facts import FORMS, Facts
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights

DISTANCES = (50, 200, 400, 800, 1600)


@functools.partial(jax.jit, static_argnames="config")
def _predicted(weights: Weights, config: ModelConfig, tokens: Int[Array, "b t"]) -> Int[Array, "b t"]:
    return jnp.argmax(forward(weights, config, tokens), -1)


@functools.partial(jax.jit, static_argnames="config")
def _nats(weights: Weights, config: ModelConfig, tokens: Int[Array, "b t1"]) -> Array:
    return negative_log_likelihood(forward(weights, config, tokens[:, :-1]), tokens[:, 1:]).sum()


def recall(
    weights: Weights, config: ModelConfig, facts: Facts, text: np.ndarray, cases: int = 200, seed: int = 1
) -> dict[str, dict[int, float]]:
    """Return the share of questions whose whole answer is the model's first choice, by form and distance.

    Args:
        weights: weights of the model.
        config: its shape.
        facts: generator of the questions.
        text: ids of held-out text between fact and question.
        cases: questions for each form and distance.
        seed: seed of the questions.
    """
    distances = [d for d in DISTANCES if d + 150 <= config.max_positions and d + 200 < len(text)]
    found: dict[str, dict[int, float]] = {form: {} for form in FORMS}
    for distance in distances:
        longest = distance + 150 + 60
        for form in FORMS:
            rng = random.Random(f"{seed} {form} {distance}")
            asked = [facts.question(text, form, distance, rng) for _ in range(cases)]
            right = 0
            for i in range(0, cases, rows := min(cases, 20)):
                group = asked[i : i + rows]
                tokens = np.zeros((rows, min(longest, config.max_positions)), np.int32)
                for row, (ids, answer) in zip(tokens, group, strict=False):
                    row[: len(ids) + len(answer)] = ids + answer
                predicted = np.asarray(_predicted(weights, config, jnp.asarray(tokens)))
                for row, (ids, answer) in zip(predicted, group, strict=False):
                    right += row[len(ids) - 1 : len(ids) - 1 + len(answer)].tolist() == answer
            found[form][distance] = right / cases
    return found


def text_loss(weights: Weights, config: ModelConfig, ids: np.ndarray, most: int = 400_000) -> float:
    """Return mean nats per token over windows of up to 1024 tokens of held-out text that do not overlap."""
    length = min(1024, config.max_positions, len(ids) - 1)
    windows = [ids[i : i + length + 1] for i in range(0, min(len(ids), most) - length, length)]
    rows = min(8, len(windows))
    windows = np.stack(windows[: len(windows) // rows * rows]).astype(np.int32).reshape(-1, rows, length + 1)
    total = sum(float(_nats(weights, config, jnp.asarray(group))) for group in windows)
    return total / (windows.shape[0] * rows * length)


@functools.partial(jax.jit, static_argnames=("config", "new"))
def _continue(
    weights: Weights, config: ModelConfig, tokens: Int[Array, "1 t"], length: Int[Array, ""], key: Array, new: int
) -> Int[Array, "1 t"]:
    def step(i: Array, tokens: Array) -> Array:
        logits = forward(weights, config, tokens)[0, length + i - 1]
        return tokens.at[0, length + i].set(jax.random.categorical(jax.random.fold_in(key, i), logits / 0.7))

    return jax.lax.fori_loop(0, new, step, tokens)


def sample(weights: Weights, config: ModelConfig, facts: Facts, prompt: str, new: int = 90, seed: int = 0) -> str:
    """Continue the prompt at temperature 0.7, without a cache, as a check that the output is English."""
    ids = facts.encode(prompt)
    tokens = np.zeros((1, len(ids) + new), np.int32)
    tokens[0, : len(ids)] = ids
    done = _continue(weights, config, jnp.asarray(tokens), jnp.asarray(len(ids)), jax.random.key(seed), new)
    made = np.asarray(done)[0].tolist()
    ends = [i for i in range(len(ids), len(made)) if made[i] == facts.end]
    return facts.tokenizer.decode(made[: ends[0]] if ends else made)
