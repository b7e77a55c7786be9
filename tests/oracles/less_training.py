"""What LESS's kernels learn from, and their loss: a text is read token by token, as in Algorithm 1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.oracles import basic, less
from tests.oracles.decoder import Decoder, Prompt, softmax


class _Seen(basic.Full):
    """What a layer of the frozen model sees of a text."""

    def read(self, prompt):
        self.prompt = prompt


def read(weights: Any, config: Any, tokens: list[int]) -> list[Prompt]:
    """Queries, keys and values of every layer of the plain model, in a text that is read whole."""
    shape = dict(kv_heads=config.kv_heads, groups=config.groups, layers=config.layers, recents=[0] * config.kv_heads)
    rules: dict[str, Any] = dict(sinks=0, recent=0, special=(), positions="original")
    seen = [_Seen([len(tokens)] * config.kv_heads, layer=layer, **shape, **rules) for layer in range(config.layers)]
    Decoder(weights, config, list(seen), horizon=1).prompt(tokens)
    return [oracle.prompt for oracle in seen]


def h2o(prompt: Prompt, h: int, budget: int, recent: int) -> list[int]:
    """The position that leaves head h at each step of decoding under H2O, -1 for none.

    Numbers are kvjax's: the token being read has one of the slots and is one of the recent ones.
    """
    cached: list[int] = []
    notes: dict[int, float] = {}
    left = []
    for t in range(len(prompt.tokens)):
        gone = -1
        if len(cached) == budget:
            gone = min((s for s in cached if s <= t - recent), key=lambda s: (notes[s], s))
            cached.remove(gone)
        left.append(gone)
        cached.append(t)
        notes[t] = 0.0
        for g in range(len(prompt.queries[h])):
            for s, p in zip(cached, softmax(logits(prompt, h, g, t, cached)), strict=True):
                notes[s] += p
    return left


def logits(prompt: Prompt, h: int, g: int, t: int, seen: list[int]) -> np.ndarray:
    return np.array([prompt.queries[h][g][t] @ prompt.keys[h][s] for s in seen]) / math.sqrt(prompt.keys[h].shape[1])


def loss(prompt: Prompt, left: list[list[int]], kernels: Any, output: np.ndarray) -> tuple[float, int]:
    """Squared error after the output projection (section 3.2), and of how many numbers it is the sum.

    Only positions at which something has left count: at all others equation 3 is plain attention.

    Args:
        prompt: one layer's.
        left: for each KV head the position that leaves before each step, -1 for none.
        kernels: `phi` and `psi` of the layer; None for the policy alone.
        output: the layer's output projection.
    """
    heads, groups, width = len(prompt.queries), len(prompt.queries[0]), prompt.values[0].shape[1]
    weights = {} if kernels is None else {name: _numbers(kernels[name]) for name in kernels}
    cached: list[list[int]] = [[] for _ in range(heads)]
    memory = [np.zeros((1, width + 1))] * heads
    total, numbers, evicted = 0.0, 0, False
    for t in range(len(prompt.tokens)):
        off = []
        for h in range(heads):
            if left[h][t] >= 0:
                gone, evicted = left[h][t], True
                cached[h].remove(gone)
                if kernels is not None:
                    psi = less.psi({name: weight[h] for name, weight in weights["psi"].items()}, prompt.keys[h][gone])
                    memory[h] = memory[h] + np.outer(psi, [*prompt.values[h][gone], 1.0])  # H and z, equations 4 and 5
            cached[h].append(t)
            for g in range(groups):
                shares = np.exp(logits(prompt, h, g, t, cached[h]))
                above, below = shares @ prompt.values[h][cached[h]], shares.sum()
                if memory[h].any():
                    phi = less.phi({name: w[h, g] for name, w in weights["phi"].items()}, prompt.queries[h][g][t])
                    above, below = above + phi @ memory[h][:, :-1], below + phi @ memory[h][:, -1]
                full = softmax(logits(prompt, h, g, t, list(range(t + 1)))) @ prompt.values[h][: t + 1]
                off.append(above / below - full)
        if evicted:
            error = output @ np.concatenate(off)
            total, numbers = total + float(error @ error), numbers + len(error)
    return total, numbers


def _numbers(kernel: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(weight, np.float64) for name, weight in kernel.items()}
