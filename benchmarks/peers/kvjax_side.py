"""kvjax on the cases of `cases.py`."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

import kvjax

METHODS: dict[str, kvjax.Policy] = {
    "snapkv": kvjax.policy("snapkv", recent=64, kernel=5),
    "tova": kvjax.policy("tova"),
    "streaming_llm": kvjax.policy("lambda_mask"),  # keys keep the positions of the text, as in kvpress
    "knorm": kvjax.policy("l2"),
    "observed_attention": kvjax.policy("h2o", recent=0),
    "h2o": kvjax.policy("h2o"),
    "random": kvjax.policy("random"),
}
"""Policies by kvpress's names, and H2O as published."""
FULL = kvjax.policy("window")
"""A full cache with one slot for each context token; `full` would also have slots for the following tokens."""


def roomier(held: kvjax.State, roomy: kvjax.State) -> kvjax.State:
    """Copy the tokens that `held` kept of a context into the slots of `roomy`, which evicts no later token.

    Args:
        held: a state under any policy whose keys keep the positions of the text.
        roomy: a state under `window`, which stores no data per slot, after a context of the same length.
    """
    layers = []
    for few, many in zip(held.cache.slots, roomy.cache.slots, strict=True):
        empty = many.capacity - few.capacity

        def padded(leaf: jax.Array, fill: int, empty: int = empty) -> jax.Array:
            widths = [(0, 0), (0, 0), (0, empty), *[(0, 0)] * (leaf.ndim - 3)]
            return jax.numpy.pad(leaf, widths, constant_values=fill)

        kv = jax.tree.map(lambda leaf: padded(leaf, 0), few.kv)
        layers.append(many.replace(kv=kv, position=padded(few.position, -1)))
    return roomy.replace(layers=tuple(layers))


def logits_of(state: kvjax.State, ids: list[int], asked: int) -> tuple[kvjax.State, Float[np.ndarray, "n vocab"]]:
    """Read tokens; return the state and the logits after each token. One program serves up to `asked` tokens."""
    padded = np.pad(np.asarray(ids), (0, asked - len(ids)))
    state, logits = kvjax.extend(state, padded[None], lengths=[len(ids)], logits="all")
    return state, np.asarray(logits)[0, : len(ids)]


def kept(state: kvjax.State, slots: int) -> Int[np.ndarray, "layers h slots"]:
    """Return the cached positions, in order."""
    return np.stack([np.sort(layer[0], axis=-1)[:, -slots:] for layer in kvjax.held_positions(state)])


def averaged(state: kvjax.State, slots: int) -> Int[np.ndarray, "layers h slots"]:
    """Return the positions with the highest mean attention over the queries that see them, from H2O's sums.

    Args:
        state: a state under `h2o`, whose cache holds the whole context.
        slots: number of positions.
    """
    found = []
    for view in state.cache.slots:
        position, sums = np.asarray(view.position)[0], np.asarray(view.slots.score)[0]
        seen_by = int(position.max()) + 1 - position
        worth = np.where(position >= 0, sums / seen_by, -np.inf)
        best = np.argsort(-worth, axis=-1, kind="stable")[:, :slots]
        found.append(np.sort(np.take_along_axis(position, best, axis=-1), axis=-1))
    return np.stack(found)


def best(run: Callable[[], Any], times: int = 3) -> float:
    """Return the processor seconds of the cheapest of several runs, after one warm-up run."""
    found: list[float] = []
    for _ in range(times + 1):
        began = time.process_time()  # other processes on the machine hardly matter
        jax.block_until_ready(run())
        found.append(time.process_time() - began)
    return min(found[1:])


class Side:
    """A model that reads contexts of one length.

    Args:
        model: a model from `kvjax.load`.
        length: tokens of each context.
        plan: the first line of the cases.
    """

    def __init__(self, model: kvjax.Model, length: int, plan: dict[str, Any]) -> None:
        self.model, self.length, self.asked, self.new_tokens = model, length, plan["asked"], plan["new_tokens"]
        self.later = self.asked + self.new_tokens
        self.slots = {ratio: int(length * (1 - ratio)) for ratio in (0.0, *plan["ratios"])}

    def room(self, slots: int) -> kvjax.State:
        """Return a state with a number of slots, plus slots for the tokens after a context."""
        blank, budget = [[0] * self.length], slots + self.later
        return kvjax.prefill(self.model, "window", blank, budget, max_new_tokens=self.later)[0]

    def read(self, policy: kvjax.Policy | str, case: dict[str, Any], ratio: float, number: int) -> kvjax.State:
        """Read a context and evict a share of it."""
        settings: dict[str, Any] = dict(max_new_tokens=self.later, key=jax.random.key(number))
        return kvjax.prefill(self.model, policy, [case["context"]], self.slots[ratio], **settings)[0]

    def answer(self, state: kvjax.State, question: list[int]) -> list[int]:
        """Return the greedy answer to a question."""
        state, logits = logits_of(state, question, self.asked)
        made = [int(logits[-1].argmax())]
        while len(made) < self.new_tokens:
            state, following = kvjax.decode_step_in_place(state, made[-1:])
            made.append(int(following[0].argmax()))
        return made

    def row(self, state: kvjax.State, case: dict[str, Any]) -> tuple[dict[str, Any], Float[np.ndarray, "n vocab"]]:
        """Return the row of a case under a state with enough slots, and the logits after each token."""
        question, expected = case["question"], case["answer"]
        logits = logits_of(state, [*question, *expected], self.asked)[1]
        chances = np.asarray(jax.nn.log_softmax(logits[len(question) - 1 : -1], axis=-1))
        made = self.answer(state, question) if case["expected"] else []
        return {
            "family": case["family"],
            "nats": -float(chances[np.arange(len(expected)), expected].mean()),
            "expected": case["expected"],
            "answer": self.model.tokenizer.decode(made),
        }, logits

    def timings(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """Return processor seconds: for a context by method at ratio 0.5, for a question and its answer by ratio."""
        rows = list[dict[str, Any]]()
        for name, policy in {"full": FULL, **METHODS}.items():
            ratio = 0.0 if name == "full" else 0.5
            seconds = best(lambda policy=policy, ratio=ratio: self.read(policy, case, ratio, 0))
            rows.append({"kind": "context", "method": name, "seconds": seconds})
        for ratio in (0.0, 0.75):
            state = roomier(self.read(METHODS["knorm"], case, ratio, 0), self.room(self.slots[ratio]))
            seconds = best(lambda state=state: self.answer(state, case["question"]))
            rows.append({"kind": "answer", "ratio": ratio, "seconds": seconds})
        return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--cases", type=Path, required=True, help="from cases.py")
    parser.add_argument("--out", type=Path, required=True, help="a folder for kvjax.jsonl and kvjax.npz")
    options = parser.parse_args()
    plan, *cases = [json.loads(line) for line in options.cases.read_text().splitlines()]
    options.out.mkdir(parents=True, exist_ok=True)
    side = Side(kvjax.load(options.model), len(cases[0]["context"]), plan)
    roomy, arrays = side.room(side.length), dict[str, Any]()
    with (options.out / "kvjax.jsonl").open("w") as file:

        def write(row: dict[str, Any]) -> None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10  # Linux counts in KiB
            print(json.dumps(row | {"peak_bytes": peak}), file=file, flush=True)

        versions = {name: importlib.metadata.version(name) for name in ("jax", "kvjax")}
        write({"kind": "run", "versions": versions})
        for row in side.timings(cases[0]):
            write(row)
        whole = {("full", 0.0): FULL}
        ways = {(name, ratio): policy for ratio in plan["ratios"] for name, policy in METHODS.items()}
        for number, case in enumerate(cases):
            for (name, ratio), policy in (whole | ways).items():
                state, slots = side.read(policy, case, ratio, number), side.slots[ratio]
                found, logits = side.row(roomier(state, roomy), case)
                costs = {"kept": slots, "cache_bytes": kvjax.cache_bytes(state)}
                write({"kind": "case", "case": number, "method": name, "ratio": ratio, **found, **costs})
                arrays[f"{number}/{name}/{ratio}"] = kept(state, slots).astype(np.uint16)
                if name == "full":
                    arrays[f"{number}/logits"] = logits
            sums = side.read(METHODS["observed_attention"], case, 0.0, number)
            for ratio in plan["ratios"]:
                arrays[f"{number}/averaged/{ratio}"] = averaged(sums, side.slots[ratio]).astype(np.uint16)
            np.savez(options.out / "kvjax.npz", **arrays)


if __name__ == "__main__":
    main()
