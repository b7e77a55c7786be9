"""Policies on meshes of eight virtual devices, held against one device: run by test_mesh in processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache import attention
from kvjax.cli import evaluate
from kvjax.generation.generate import generate_ids
from kvjax.inference import decode, decoder
from kvjax.model import Model
from kvjax.models import ModelConfig
from kvjax.models.sharding import mesh_of, weight_shardings
from kvjax.serving.engine import Engine
from kvjax.serving.requests import Finished, Piece
from pallas_kernels.prefill_attention import prefill_attention
from tests import small_models
from tests.cases import PAIRS, POLICIES, Case
from tests.compiling import compile_fast
from tests.serving.test_engine import GREEDY, Answer, Client, Letters, ask, crowd, policy_of

LENGTHS, STEPS = (41, 57, 50, 44), 20
Follow = Callable[[Model, Case], tuple[list[np.ndarray], list[np.ndarray]]]
"""What a model says, and what is held at the end."""
TEXT = np.random.default_rng(0).integers(0, 64, (4, max(LENGTHS) + STEPS + 6))


def placed(model: Model, shape: tuple[int, ...]) -> Model:
    """The model on a mesh."""
    mesh = mesh_of(jax.devices(), shape)
    weights = jax.device_put(model.weights, weight_shardings(model.config, mesh))
    return Model(weights, model.config, mesh=mesh)


def trace(model: Model, case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Logits of every step and what is held at the end, after a prompt, written tokens, a turn and more tokens."""
    reading: dict[str, Any] = dict(plan=case.plan, prefill_chunk=case.prefill_chunk, max_new_tokens=40)
    prompts = [row[:length].tolist() for row, length in zip(TEXT, LENGTHS, strict=True)]
    state, logits = kvjax.prefill(model, case.make(), prompts, case.budget, **reading)
    found = [np.asarray(logits)]
    for token in TEXT[:, -STEPS:].T:
        state, logits = kvjax.decode_step(state, token)
        found.append(np.asarray(logits))
    state, logits = kvjax.extend(state, TEXT[:, 57:62], lengths=[5, 0, 3, 1])
    found.append(np.asarray(logits))
    state, logits = kvjax.decode_step(state, TEXT[:, 0])
    found.append(np.asarray(logits))
    return found, [np.sort(layer, axis=-1) for layer in kvjax.held_positions(state)]


def comings_and_goings(model: Model, case: Case) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The same after rows were taken from a state, some of them twice, and some of these put back in others' places."""
    reading: dict[str, Any] = dict(plan=case.plan, max_new_tokens=40)
    prompts = [row[:length].tolist() for row, length in zip(TEXT, LENGTHS, strict=True)]
    state, _ = kvjax.prefill(model, case.make(), prompts, case.budget, **reading)
    taken = kvjax.take_rows(state, [3, 0, 0, 1])
    taken, logits = kvjax.decode_step(taken, TEXT[:, -1])
    found = [np.asarray(logits)]
    mixed, logits = kvjax.decode_step(kvjax.put_rows(state, [1, 2], kvjax.take_rows(taken, [2, 0])), TEXT[:, 0])
    return [*found, np.asarray(logits)], [np.sort(layer, axis=-1) for layer in kvjax.held_positions(mixed)]


def compared(name: str, model: Model, shapes: list[tuple[int, ...]], follow: Follow) -> None:
    """Print for each mesh how far its logits are from those of one device, and whether the same tokens are held.

    And how many programs its steps are, those after a turn included.
    """
    case = (POLICIES | PAIRS)[name]
    programs: Any = decoder.compiled_step
    wanted, held = follow(model, case)
    for shape in shapes:
        made, off = programs._cache_size(), 0.0
        found, holds = follow(placed(model, shape), case)
        made = programs._cache_size() - made
        for one, several in zip(wanted, found, strict=True):
            real = ~np.isnan(one)
            assert (real == ~np.isnan(several)).all(), f"{name} on {shape}: other rows are NaN"
            off = max(off, float(np.max(np.abs(one - several)[real], initial=0.0) / np.abs(one[real]).max(initial=1.0)))
        same = all(map(np.array_equal, held, holds))
        print(json.dumps({"case": name, "mesh": shape, "off": off, "same": same, "programs": made}), flush=True)


def collectives(name: str, config: ModelConfig, shape: tuple[int, ...]) -> None:
    """Print what a step's program sends: how often, the most numbers gathered at once, and a layer's keys.

    And of a prompt how many tokens there are, and how many of their queries a device reads.
    """
    read: list[tuple[int, int]] = []

    def noted(q: Any, k: Any, *rest: Any, **settings: Any) -> Any:
        read.append((k.shape[2], q.shape[3]))
        return prefill_attention(q, k, *rest, **settings)

    attention.prefill_attention = noted
    case, model = (POLICIES | PAIRS)[name], placed(small_models.random_model(config), shape)
    prompts = TEXT[:, : max(LENGTHS)]
    state, _ = kvjax.prefill(model, case.make(), prompts, case.budget, plan=case.plan, max_new_tokens=40)
    jax.config.update("jax_disable_most_optimizations", False)  # which leave sums apart that travel together
    text = decode.lower_step(state).compile().as_text() or ""
    jax.config.update("jax_disable_most_optimizations", True)
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    calls = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text)
    shapes = [numbers for made, kind in calls if kind == "all-gather" for numbers in re.findall(r"\[([\d,]*)\]", made)]
    gathered = max((math.prod(map(int, numbers.split(","))) for numbers in shapes), default=0)
    keys = max(leaf.size for leaf in jax.tree.leaves(state.cache.memory))
    tokens, queries = read[0] if read else (0, 0)  # LSH-E reads one after another
    found = dict(calls=len(calls), gathered=gathered, keys=keys, tokens=tokens, queries=queries)
    print(json.dumps({"case": name, "mesh": shape} | found), flush=True)


FOLLOWED: dict[str, Follow] = {"compared": trace, "rows": comings_and_goings}


def reported(report: str, shape: tuple[int, ...]) -> None:
    """Print what a report of `kvjax evaluate` measures, on one device and on a mesh."""
    words = [report, "--text", __file__, "--length", "24", "--budget", "16", "--policies", "streaming", "--window", "8"]
    for mesh in ([], ["--mesh", "data={},model={}".format(*shape)]):
        with tempfile.TemporaryDirectory() as out:
            with contextlib.redirect_stdout(sys.stderr):
                assert evaluate.main([*words, "--out", out, *mesh]) == 0
            kept = json.loads((Path(out) / report / "measurements.json").read_text())
        print(json.dumps(kept["streaming"]["result"]), flush=True)


def answers(model: Model, policy: str, lossless: bool) -> tuple[list[Answer], dict[str, float]]:
    """What a crowd is told that joins a server and leaves it at different times, and what the server counts.

    Some prompts begin alike, the last one as an earlier one; a text that was cancelled is not among the answers.
    """
    model.tokenizer = Letters()
    settings = dict[str, Any](rows=4, context=128, chunk=24, steps=4, lossless=lossless)
    with Engine(model, policy_of(policy), budget=24, **settings) as engine:
        engine.warm_up()
        warm = engine.numbers()
        told, taken = list[Piece | Finished](), threading.Event()

        def cancel(news: Piece | Finished) -> None:
            taken.wait(60)
            told.append(news)
            ticket.cancel()

        ticket = engine.submit(dataclasses.replace(GREEDY, max_tokens=80), cancel)
        taken.set()
        requests = crowd(engine.device.policy.plan.sizing.mode != "unbounded")
        clients = [Client(engine, request) for request in requests[:6]]
        found = [clients[0].answer()]
        clients += [Client(engine, request) for request in requests[6:]]
        found += [client.answer() for client in clients[1:]]
        found.append(ask(engine, requests[4]))
        assert isinstance(told[0], Piece) and isinstance(told[-1], Finished) and told[-1].reason == "cancelled"
        numbers = dict(engine.numbers())
    return found, numbers | {"compiled": numbers["compilations"] - warm["compilations"]}


def served(case: str, config: ModelConfig, shapes: list[tuple[int, ...]]) -> None:
    """Print for each mesh whether a server on it answers as one on one device, and what it counts.

    A case is a policy, or `NAME drafts` for a server that is lossless.
    """
    policy, _, drafts = case.partition(" ")
    model = small_models.sharp_model(config)
    wanted, _ = answers(model, policy, bool(drafts))
    for shape in shapes:
        spread = placed(model, shape)
        found, numbers = answers(spread, policy, bool(drafts))
        if shape[0] > 1:
            with pytest.raises(ValueError, match=f"3 rows cannot be sharded evenly over data={shape[0]} devices"):
                Engine(spread, rows=3)
        several, one = ([(each.text, each.tokens, each.end.reason) for each in some] for some in (found, wanted))
        after, before = ([of.logprob for each in some for of in each.logprobs] for some in (found, wanted))
        off = max(abs(x - y) for x, y in zip(after, before, strict=True))
        told = {"same": several == one, "off": off, "reused": found[-1].end.reused, **numbers}
        print(json.dumps({"case": case, "mesh": shape} | told), flush=True)


def lossless(case: str, config: ModelConfig, shapes: list[tuple[int, ...]]) -> None:
    """Print for each mesh whether a policy that drafts there writes the full cache's texts of one device.

    A case is a policy, or `NAME refreshed` for a draft whose slots are chosen anew.
    """
    model = small_models.sharp_model(config)
    prompts = [row[:length].tolist() for row, length in zip(TEXT, LENGTHS, strict=True)]
    settings = dict[str, Any](max_new_tokens=STEPS, temperature=0.8, seed=3, stop_at_eos=False)
    whole = generate_ids(model, prompts, policy="full", **settings)
    for shape in shapes:
        drafts = dict[str, Any](policy=policy_of(case.split()[0]), budget=24, lossless=True, draft_tokens=3)
        drafts["refresh"] = case.endswith(" refreshed")
        texts = generate_ids(placed(model, shape), prompts, **drafts, **settings)
        per_round = texts.tokens_per_round
        print(json.dumps({"mesh": shape, "same": texts.tokens == whole.tokens, "per_round": per_round}), flush=True)


def checkpoint(name: str) -> Model:
    """A random checkpoint of one of `MODELS`, as it is loaded."""
    with tempfile.TemporaryDirectory() as directory:
        small_models.random_checkpoint(name, Path(directory))
        return kvjax.load(directory, "float64")


def main(what: str, cases: list[str], kv_heads: int, meshes: list[list[int]], model: str | None = None) -> None:
    """Run what test_mesh asks for; `model` is the name of a config or of a checkpoint."""
    shapes = [tuple(mesh) for mesh in meshes]
    if model is not None and model in small_models.MODELS:
        for name in cases:
            compared(name, checkpoint(model), shapes, FOLLOWED[what])
        return
    config = getattr(small_models, model) if model else small_models.small_config(2 * kv_heads, kv_heads)
    for name in cases:
        if what in FOLLOWED:
            compared(name, small_models.sharp_model(config), shapes, FOLLOWED[what])
        elif what == "served":
            served(name, config, shapes)
        elif what == "lossless":
            lossless(name, config, shapes)
        elif what == "reported":
            reported(name, shapes[0])
        else:
            for shape in shapes:
                collectives(name, dataclasses.replace(config, layers=2), shape)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    several = json.loads(sys.argv[1])
    jax.config.update("jax_enable_x64", all(told["what"] in (*FOLLOWED, "served", "lossless") for told in several))
    compile_fast()
    for told in several:
        main(**told)
