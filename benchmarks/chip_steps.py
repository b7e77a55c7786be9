"""Compilers' estimates of decode steps for TPUs without the hardware: `python -m benchmarks.aot --steps`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.aot.chips import SPECIFICATIONS
from benchmarks.aot.module import Instruction
from benchmarks.aot.tpu import Compiled, compile_traced, mesh_of, placed
from benchmarks.models import SHAPES
from kvjax.evaluation.bench import random_model, shaped_model
from kvjax.inference.decode import trace_step
from kvjax.inference.extend import prefill
from kvjax.inference.shapes import state_shapes
from kvjax.inference.state import State
from kvjax.methods.less.feature_maps import init_kernels
from kvjax.methods.registry import policy
from kvjax.models.config import ModelConfig
from kvjax.models.weights import weight_shapes
from kvjax.policies.policy import Policy

WRITTEN = 64
"""Number of tokens that the steps generate; the prompt fills the other slots."""

SCOPES = ("attention", "eviction", "scores", "residual")
"""Scopes of `jax.named_scope`; inner scopes count. Work outside of them, except products of weights, is the rest."""
CLASSES = ("products", *SCOPES, "rest")

POLICIES = ("full", "streaming", "h2o", "keyformer", "lsh_e", "less", "fastgen", "h2o, int8")


_OF_LAYER = re.compile(r"\.\w+\[\d+\]")
"""Pattern in the argument names of one layer: `decoder.weights.layers[0].mlp`."""


class Step(NamedTuple):
    """A decode step of a whole model, of which only a few layers are compiled."""

    model: str
    rows: int
    slots: int
    policy: str
    layers: int = 2
    """Number of compiled layers: a multiple of the period of different layers."""

    def __str__(self) -> str:
        return f"{self.model}, {self.rows} rows, {self.slots} slots, {self.policy}"


def steps() -> Iterator[Step]:
    """Yield the steps of the page."""
    for name in POLICIES:
        yield Step("llama_7b", 64, 204, name)
        yield Step("llama_8b", 32, 4096, name)
        for rows in (1, 64):
            yield Step("gemma3_270m", rows, 512, name, layers=6)
            yield Step("qwen3_0_6b", rows, 512, name)


def compile_step(chip: str, step: Step) -> dict[str, Any]:
    """Compile a few layers of a step, and return the distribution of seconds over the parts of all layers.

    Raises:
        RuntimeError: libtpu is not installed, or does not know the chip.
        jax.errors.JaxRuntimeError: the compiler refuses the program.
    """
    compiled, state = compiled_step(chip, step)
    known, config = SPECIFICATIONS[chip], SHAPES[step.model]
    weights, caches = traffic_of(config, step, state)
    parts: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    for kernel in compiled.kernels:
        # Pages of all layers are one pool; the grid of a layer has one step for each of its pages.
        kernel = kernel._replace(grid=kernel.grid.part(step.layers))
        parts[class_of(kernel.instruction)] += step_times(kernel.instruction, config, step) * kernel.seconds(known)
    for fusion in compiled.fusions:
        parts[class_of(fusion)] += step_times(fusion, config, step) * known.seconds(fusion.cycles)
    # No estimate includes weights that are prefetched beside other work.
    parts["products"] = max(parts["products"], known.limit(weights))
    estimate = sum(parts.values())
    return (
        dict(step._asdict(), chip=chip, weights=weights, caches=caches, limit=known.limit(weights + caches))
        | {"parts": parts, "estimate": estimate, "beside": estimate - parts["products"] - known.limit(caches)}
        | compiled.row(known, class_of)
    )


def class_of(instruction: Instruction) -> str:
    """Return one of `CLASSES`, by the scopes of an instruction."""
    names = reversed(instruction.op_name.split("/"))
    scope = next((name for name in names if name in (*SCOPES, "rope")), None)
    if instruction.op_name.endswith(".slots.score"):  # an argument whose layout changes
        return "scores"
    if scope is None:
        return "products" if instruction.output else "rest"
    return "rest" if scope == "rope" else scope


def step_times(instruction: Instruction, config: ModelConfig, step: Step) -> float:
    # Work outside of layers (embedding, last norm, logits) runs once, and so does work that all layers share, or that
    # the first layer does on the embedding alone. An instruction without a name counts as part of a layer.
    name, arguments = instruction.op_name, instruction.arguments
    inside = "layer" in name.split("/") or ".layers[" in name or not name
    inside &= arguments is None or any(map(_OF_LAYER.search, arguments))
    return config.layers / step.layers if inside else 1.0


def compiled_step(chip: str, step: Step) -> tuple[Compiled, State]:
    """Compile a few layers of a step for a chip; return the result, and the shapes of the state before the step."""
    mesh = mesh_of(chip)
    state = step_state(step)
    with jax.set_mesh(mesh):  # kernels read the target chip from the mesh
        return compile_traced(trace_step(placed(state, mesh))), state


def step_state(step: Step) -> State:
    """Return the shapes of a step's state."""
    config = _few_layers(SHAPES[step.model], step.layers)
    if step.policy == "fastgen":
        return _profiled(config, step)
    model = shaped_model(config, "bfloat16", None, None)
    given, budget = step.slots - WRITTEN, step.slots
    return state_shapes(model, _policy(step.policy, config), step.rows, given, budget, max_new_tokens=WRITTEN)


def _few_layers(config: ModelConfig, layers: int) -> ModelConfig:
    each = {
        name: value[:layers]
        for name in ("windows", "ropes", "attention_scales")
        if (value := getattr(config, name)) is not None
    }
    return dataclasses.replace(config, layers=layers, **each)


def _policy(name: str, config: ModelConfig) -> Policy:
    name, _, codec = name.partition(", ")
    kernels = {"kernels": init_kernels(jax.random.key(0), config)} if name == "less" else {}
    return policy(name, codec=codec or None, **kernels)


def _profiled(config: ModelConfig, step: Step) -> State:
    """Return FastGen's state, from a narrow model with the same heads that keeps all tokens."""
    narrow = dataclasses.replace(config, width=128, mlp_width=128, vocab_size=256)
    model = random_model(narrow, "bfloat16")
    chosen = policy("fastgen", special=(1,), punctuation=(2,), threshold=1.0)
    given = np.ones((step.rows, WRITTEN), np.int32)
    state, _ = prefill(model, chosen, given, 1.0, max_new_tokens=step.slots - WRITTEN)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return shapes.replace(weights=weight_shapes(config, jnp.bfloat16), config=config)


def traffic_of(config: ModelConfig, step: Step, state: State) -> tuple[int, int]:
    """Return the bytes that a step of the whole model moves: weights, and caches with a policy's arrays and logits."""
    weights = weight_shapes(config, jnp.bfloat16)
    read = _bytes(weights)
    if not config.tied:  # a step reads only the rows of its tokens from the embedding table
        read -= _bytes(weights.embedding) - step.rows * config.width * 2
    kept = _bytes((state.cache.memory, state.policy)) * config.layers / step.layers
    return read, round(kept + step.rows * config.vocab_size * 4)


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
