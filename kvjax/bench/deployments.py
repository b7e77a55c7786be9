"""What fits on chips that are not there, as their compilers say: `python -m kvjax.bench deployments --chips v5e,v6e`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from kvjax.bench.footprint import footprint
from kvjax.bench.models import SHAPES, shaped_model
from kvjax.bench.targets import GIB, MEMORY, devices_of, mesh_of
from kvjax.commands import Help, finish
from kvjax.engine.decode import lower_step
from kvjax.engine.extend import lower_prefill
from kvjax.engine.shapes import state_shapes
from kvjax.evaluate.reports.claims import table
from kvjax.evaluate.store import Store
from kvjax.files import write_text
from kvjax.model import Model
from kvjax.models.config import ModelConfig
from kvjax.models.sharding import MESH_AXES
from kvjax.policies.registry import policy
from kvjax.settings import names_of

FEW, MORE = 2, 4
"""Layers of the models that stand for whole ones."""
NEW_TOKENS = 256
CONTEXTS = (8192, 32768, 131072)
"""Tokens of prompt and continuation."""
ROWS = 8
"""Of the steps that are compiled whole."""


class Deployment(NamedTuple):
    """A model on chips, as few as its weights fit on; all of them lie along `model`."""

    model: str
    chip: str
    target: str
    devices: int
    weights: Literal["int8"] | None = None

    @property
    def name(self) -> str:
        """How the page calls it."""
        return f"{self.model} in {self.weights or 'bfloat16'} on {self.devices} {self.chip}"


DEPLOYMENTS = (
    Deployment("llama_70b", "v5e", "v5e:4x4", 16),
    Deployment("llama_70b", "v5p", "v5p:2x2x1", 4),
    Deployment("llama_70b", "v6e", "v6e:2x4", 8),
    Deployment("llama_70b", "h100", "h100", 8),
    Deployment("llama_405b", "v5e", "v5e:8x16", 128, "int8"),
    Deployment("llama_405b", "v5p", "v5p:2x2x4", 16),
    Deployment("llama_405b", "v6e", "v6e:8x8", 64),
    Deployment("llama_405b", "h100", "h100", 8, "int8"),
)


class Variant(NamedTuple):
    """What a cache holds, and how."""

    policy: str
    budget: float
    codec: str | None = None


VARIANTS = tuple(
    Variant(name, budget, codec)
    for name, budget in (("full", 1.0), ("h2o", 0.25), ("h2o", 0.05))
    for codec in (None, "int8")
)
REFERENCE = Variant("h2o", 0.25), 32768
"""The step that is also compiled with more layers, and with all of them."""


class Size(NamedTuple):
    """A decode step: how deep, how many rows, what it holds of how long a text."""

    layers: int
    rows: int
    variant: Variant
    context: int


def of_layers(deployment: Deployment, layers: int) -> ModelConfig:
    """The deployment's model with so many layers."""
    return dataclasses.replace(SHAPES[deployment.model], layers=layers)


def model_on(deployment: Deployment, layers: int) -> Model:
    """The deployment's model with so many layers, in shapes, where its weights lie."""
    mesh = mesh_of(devices_of(deployment.target, deployment.devices), (1, deployment.devices))
    return shaped_model(of_layers(deployment, layers), "bfloat16", deployment.weights, mesh)


def compiled_step(deployment: Deployment, size: Size) -> dict[str, Any]:
    """What the compiler says of a decode step."""
    return footprint(lower_step(_state(deployment, size)))._asdict()


def _state(deployment: Deployment, size: Size) -> Any:
    chosen = policy(size.variant.policy, codec=size.variant.codec)
    tokens = size.context - NEW_TOKENS
    model = model_on(deployment, size.layers)
    return state_shapes(model, chosen, size.rows, tokens, size.variant.budget, max_new_tokens=NEW_TOKENS)


def compiled_prompt(deployment: Deployment, context: int) -> dict[str, Any]:
    """What the compiler says of the programs that read a prompt of one row, those of whole models: the largest."""
    model = model_on(deployment, SHAPES[deployment.model].layers)
    tokens = np.zeros((1, context - NEW_TOKENS), np.int32)
    programs = lower_prefill(model, "h2o", tokens, 0.25, max_new_tokens=NEW_TOKENS)
    found = [footprint(program) for program in programs]
    return max(found, key=lambda each: each.temporary_bytes)._asdict() | {"programs": len(programs)}


def weight_bytes(deployment: Deployment, layers: int) -> int:
    """Of one device, from the shapes and their shardings."""
    leaves = jax.tree.leaves(model_on(deployment, layers).weights)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def row_bytes(deployment: Deployment, variant: Variant, context: int) -> float:
    """Of one device for one row of the whole model's caches, from the shapes and their shardings."""
    storage = jax.tree.leaves(_state(deployment, Size(FEW, 1, variant, context)).storage)
    each = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in storage)
    return each * SHAPES[deployment.model].layers / FEW


def first_rows(deployment: Deployment, variant: Variant, context: int) -> int:
    """Rows that fit if nothing but weights and caches took memory, at least one."""
    free = MEMORY[deployment.chip] - weight_bytes(deployment, SHAPES[deployment.model].layers)
    return max(1, int(free / row_bytes(deployment, variant, context)))


def measure(deployments: list[Deployment], parts: list[str], store: Store) -> None:
    """Compile what is not on disk."""
    for part in parts:
        for each in deployments:
            print(f"{part}: {each.name}", file=sys.stderr, flush=True)
            for name, settings, make in PARTS[part](each):
                store.measure(f"{each.name}, {name}", settings, make)


def _steps(each: Deployment) -> Iterator[tuple[str, dict[str, Any], Any]]:
    for context in CONTEXTS:
        for variant in VARIANTS:
            size = Size(FEW, first_rows(each, variant, context), variant, context)
            yield _label(size), _settings(each, size), lambda size=size: compiled_step(each, size)


def _depths(each: Deployment, depths: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    for layers in depths:
        size = Size(layers, ROWS, *REFERENCE)
        yield f"{layers} layers", _settings(each, size), lambda size=size: compiled_step(each, size)


def _prompts(each: Deployment) -> Iterator[tuple[str, dict[str, Any], Any]]:
    for context in CONTEXTS:
        settings = dict(each._asdict(), context=context, jax=jax.__version__)
        yield f"prompt of {context}", settings, lambda context=context: compiled_prompt(each, context)


PARTS: dict[str, Any] = {
    "depths": lambda each: _depths(each, (FEW, MORE)),
    "steps": _steps,
    "whole": lambda each: _depths(each, (SHAPES[each.model].layers,)),
    "prompts": _prompts,
}


def _label(size: Size) -> str:
    name, budget, codec = size.variant
    return f"{size.context}, {name} {budget}, {codec or 'bfloat16'}"


def _settings(each: Deployment, size: Size) -> dict[str, Any]:
    return dict(each._asdict(), **size._replace(variant=None)._asdict(), jax=jax.__version__) | dict(
        variant=size.variant._asdict()
    )
