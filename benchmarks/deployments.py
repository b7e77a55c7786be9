"""Models that fit on chips, by their compilers, without the hardware: `kvjax bench deployments --chips v5e`."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from benchmarks.footprint import footprint
from benchmarks.models import SHAPES
from benchmarks.targets import GIB, MEMORY, devices_of
from experiments.store import Store
from kvjax.cache.buffers import device_bytes
from kvjax.cli.bench import say
from kvjax.cli.commands import Parser, finish
from kvjax.evaluation.bench import shaped_model
from kvjax.inference.decode import lower_step
from kvjax.inference.extend import lower_prefill
from kvjax.inference.padding import full_slots, round_slots
from kvjax.inference.shapes import state_shapes
from kvjax.methods.registry import policy
from kvjax.model import Model
from kvjax.models.config import ModelConfig
from kvjax.models.sharding import mesh_of, weight_specs
from kvjax.models.weights import rounded_shapes, weight_shapes
from kvjax.types import HEADS, SLOTS
from kvjax.types import ROWS as SHARED_ROWS
from kvjax.utils.files import output_directory, write_text
from kvjax.utils.markdown import markdown_table

FEW, MORE = 2, 4
"""Numbers of layers of the small models that represent whole ones."""
NEW_TOKENS = 256
CONTEXTS = (8192, 32768, 131072)
"""Numbers of tokens of prompt and continuation."""
ROWS = 8
"""Rows of the steps that are compiled with all layers."""


class Deployment(NamedTuple):
    """A model on the fewest chips that hold its weights; all of them are along `model`."""

    model: str
    chip: str
    target: str
    devices: int
    weights: Literal["int8"] | None = None

    @property
    def name(self) -> str:
        """Return the name on the page."""
        return f"{self.model} in {self.weights or 'bfloat16'} on {self.devices} {self.chip}"


DEPLOYMENTS = (
    Deployment("llama_70b", "v5e", "v5e:4x4", 16),
    Deployment("llama_70b", "v5p", "v5p:2x2x1", 4),
    Deployment("llama_70b", "v6e", "v6e:2x4", 8),
    Deployment("llama_70b", "h100", "h100", 8),
    Deployment("llama_405b", "v5e", "v5e:8x16", 128, "int8"),
    Deployment("llama_405b", "v5e", "v5e:16x16", 256),
    Deployment("llama_405b", "v5p", "v5p:2x2x4", 16),
    Deployment("llama_405b", "v6e", "v6e:8x8", 64),
    Deployment("llama_405b", "h100", "h100", 8, "int8"),
)


class Variant(NamedTuple):
    """A policy, budget and codec of a cache."""

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
    """A decode step: its number of layers, rows, the contents of its cache, and the length of the text."""

    layers: int
    rows: int
    variant: Variant
    context: int


def config_of(deployment: Deployment, layers: int) -> ModelConfig:
    """Return the deployment's model with a number of layers."""
    return dataclasses.replace(SHAPES[deployment.model], layers=layers)


def model_on(deployment: Deployment, layers: int) -> Model:
    """Return the deployment's model with a number of layers, as shapes with shardings."""
    mesh = mesh_of(devices_of(deployment.target, deployment.devices), (1, deployment.devices))
    return shaped_model(config_of(deployment, layers), "bfloat16", deployment.weights, mesh)


def compiled_step(deployment: Deployment, size: Size) -> dict[str, Any]:
    """Return the compiler's report of a decode step."""
    return footprint(lower_step(_state(deployment, size)))._asdict() | {"rows": size.rows}


def _state(deployment: Deployment, size: Size) -> Any:
    chosen = policy(size.variant.policy, codec=size.variant.codec)
    tokens = size.context - NEW_TOKENS
    model = model_on(deployment, size.layers)
    return state_shapes(model, chosen, size.rows, tokens, size.variant.budget, max_new_tokens=NEW_TOKENS)


def compiled_prompt(deployment: Deployment, context: int) -> dict[str, Any]:
    """Return the compiler's report of the largest program that reads a prompt of one row, for whole models."""
    model = model_on(deployment, SHAPES[deployment.model].layers)
    tokens = np.zeros((1, context - NEW_TOKENS), np.int32)
    programs = lower_prefill(model, "h2o", tokens, 0.25, max_new_tokens=NEW_TOKENS)
    found = [footprint(program) for program in programs]
    return max(found, key=lambda each: each.cache_bytes + each.temporary_bytes)._asdict() | {"programs": len(programs)}


def row_bytes(deployment: Deployment, variant: Variant, context: int) -> float:
    """Return the bytes on one device for one row of the whole model's caches, from the shapes and their shardings."""
    each = device_bytes(_state(deployment, Size(FEW, 1, variant, context)).cache.memory)
    return each * SHAPES[deployment.model].layers / FEW


def first_rows(deployment: Deployment, variant: Variant, context: int) -> int:
    """Return the rows that fit if only weights and caches took memory, at least one."""
    free = MEMORY[deployment.chip] - _spread_bytes(deployment.model, deployment.weights, deployment.devices)
    return max(1, int(free / row_bytes(deployment, variant, context)))


def measure(deployments: list[Deployment], parts: list[str], contexts: list[int], directory: Path) -> None:
    """Compile the missing results, with one file for each chip."""
    for part in parts:
        for each in deployments:
            say(f"{part}: {each.name}")
            store = Store(directory / f"{each.chip}.json", show=say)
            for name, settings, make in PARTS[part](each, contexts):
                store.measure(f"{each.name}, {name}", settings, lambda make=make: _or_refusal(make))


def _or_refusal(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return make()
    except jax.errors.JaxRuntimeError as error:
        said = str(error).splitlines()[0]
        if not said.startswith("RESOURCE_EXHAUSTED"):
            raise
        return {"refused": said}


def measured(directory: Path) -> dict[str, Any]:
    """Read the compiled results of all chips."""
    return {name: it for file in sorted(directory.glob("*.json")) for name, it in Store(file).results().items()}


def _steps(each: Deployment, contexts: list[int]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    for context in contexts:
        for variant in VARIANTS:
            size = Size(FEW, first_rows(each, variant, context), variant, context)
            yield _label(size), _settings(each, size), lambda size=size: compiled_step(each, size)


def _depths(each: Deployment, depths: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    for layers in depths:
        size = Size(layers, ROWS, *REFERENCE)
        yield f"{layers} layers", _settings(each, size), lambda size=size: compiled_step(each, size)


def _prompts(each: Deployment, contexts: list[int]) -> Iterator[tuple[str, dict[str, Any], Any]]:
    for context in contexts:
        settings = dict(each._asdict(), context=context, jax=jax.__version__)
        yield f"prompt of {context}", settings, lambda context=context: compiled_prompt(each, context)


PARTS: dict[str, Any] = {
    "depths": lambda each, _: _depths(each, (FEW, MORE)),
    "steps": _steps,
    "prompts": _prompts,
    "whole": lambda each, _: _depths(each, (SHAPES[each.model].layers,)),
}


def _label(size: Size) -> str:
    name, budget, codec = size.variant
    return f"{size.context}, {name} {budget}, {codec or 'bfloat16'}"


def _settings(each: Deployment, size: Size) -> dict[str, Any]:
    return dict(each._asdict(), **size._replace(variant=None)._asdict(), jax=jax.__version__) | dict(
        variant=size.variant._asdict()
    )


class Fit(NamedTuple):
    """A decode step of a whole model, in bytes of one device."""

    weights: float
    row: float
    """Bytes of the caches of one row."""
    temporary: float
    """Bytes of temporaries for the number of rows that fit."""
    rows: int
    """Number of rows that fit."""
    compiled: bool
    """True if a step with these slots was compiled, and not only one with the slots of the reference's context."""


def slots_of(variant: Variant, context: int) -> int:
    """Return the slots of each head's buffers."""
    if variant.policy == "full":
        return full_slots(context - NEW_TOKENS, NEW_TOKENS)
    return round_slots(int(variant.budget * context))


def fit(each: Deployment, kept: dict[str, Any], variant: Variant, context: int) -> Fit | None:
    """Extrapolate from a few layers to all of them; None if they have not been compiled.

    Layers are alike: weights and caches grow by a constant per layer, and caches by a constant per slot. The growth of
    temporaries with depth comes from the reference. Under scores it is proportional to rows and slots, because the
    logits of all layers wait for the end of the step.
    """
    layers = SHAPES[each.model].layers
    few, more, whole = (_accepted(kept, f"{each.name}, {depth} layers") for depth in (FEW, MORE, layers))
    steps = {c: _accepted(kept, f"{each.name}, {_label(Size(FEW, 1, variant, c))}") for c in (context, REFERENCE[1])}
    step = steps[context] or steps[REFERENCE[1]]
    if few is None or more is None or step is None:
        return None
    slots, of_step = slots_of(variant, context), slots_of(variant, context if steps[context] else REFERENCE[1])
    weights = few["weight_bytes"] + (layers - FEW) * (more["weight_bytes"] - few["weight_bytes"]) / (MORE - FEW)
    row = step["cache_bytes"] / step["rows"] * layers / FEW * slots / of_step
    shallow = step["temporary_bytes"] * max(1, of_step / slots)
    growth = (more["temporary_bytes"] - few["temporary_bytes"]) * (layers - FEW) / (MORE - FEW)
    growth = max(0, growth if whole is None else whole["temporary_bytes"] - few["temporary_bytes"])
    of_row = 0.0 if variant.policy == "full" else growth / ROWS * slots / slots_of(*REFERENCE)
    free = MEMORY[each.chip] - weights - shallow
    # The larger of the reference's growth and the bytes of each row.
    rows = max(0, int(min((free - growth) // row, free // (row + of_row))))
    return Fit(weights, row, shallow + max(growth, rows * of_row), rows, steps[context] is not None)


def _accepted(kept: dict[str, Any], name: str) -> dict[str, Any] | None:
    found = kept.get(name)
    return None if found is None or "refused" in found else found


def page(kept: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    text = [
        "# Models on many chips",
        "Decode steps and prompts with the shapes of Llama 3.1, compiled ahead of time for chips that were not "
        "available. All bytes are those that the compiler reports for one device. Nothing here has run: the page "
        "shows what fits in memory, not how fast it is. Made by `kvjax bench deployments`, with `--chips "
        "v5e,v5p,v6e` where `jax[tpu]` is installed, and with `--chips h100` where the CUDA plugin of jax is. Results "
        "on disk are not compiled again; each names its version of jax.",
        f"All devices lie along the mesh axis `model`: up to 8 split the KV heads, and more split the slots of each "
        f"head. The last {NEW_TOKENS} tokens of each context are generated, the others are the prompt. `h2o` keeps a "
        "share of the context. Slots in int8 have a scale for each key and each value. The memory for programs is "
        + ", ".join(f"{size / GIB:.2f} GiB on {chip}" for chip, size in MEMORY.items())
        + ". For TPUs that is the compiler's own number. For the H100 it is the device's memory, of which jax "
        "reserves three quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.",
        "## Weights",
        "GB per device. Devices that split the slots of a KV head each hold its whole query, key and value weights. "
        f"With more than 8 devices, only the other weights become smaller. {_floor()}",
        _weights(),
        "## Decode steps",
        f"For each line, steps of {FEW} layers were compiled with about the largest batch that fits, and extrapolated "
        "to all layers: every layer adds the same weights and caches. Temporary memory includes the new results. It "
        f"is that of {FEW} layers, plus the difference to the whole model from the table of whole models below, which "
        "under `h2o` is scaled with rows and slots. (On the H100 that difference is the logits of each layer, from "
        "which the compiler computes scores only at the end of the step. On TPUs a part of it is copies of weights, so "
        "the estimate is high.) Contexts that were not compiled (≈) are scaled from that of "
        f"{REFERENCE[1] // 1024}k by their slots. The number of rows is the largest batch for which weights, caches "
        "and temporary memory fit; without a number, the model does not fit. On TPUs, attention runs in Pallas kernels "
        "inside `shard_map`, and so does eviction where a device has whole heads. On the H100 everything is compiled "
        "by XLA, which is what `auto` chooses.",
    ]
    for each in DEPLOYMENTS:
        text += _section(each, kept)
    text += ["## Whole models", *_whole(kept), "## Prompts", *_prompt_table(kept)]
    return "\n\n".join(part.rstrip("\n") for part in text if part) + "\n"


def _section(each: Deployment, kept: dict[str, Any]) -> list[str]:
    fits = {(v, c): fit(each, kept, v, c) for v in VARIANTS for c in CONTEXTS}
    known = [found for found in fits.values() if found is not None]
    if not known:
        return []
    rows = [
        [
            "full" if variant.budget == 1.0 else f"{variant.policy}, {variant.budget:.0%}",
            variant.codec or "bfloat16",
            *(cell for context in CONTEXTS for cell in _cells(fits[variant, context])),
        ]
        for variant in VARIANTS
    ]
    headings = [
        f"{context // 1024}k: {what}" for context in CONTEXTS for what in ("MB per row", "temporary MB", "rows")
    ]
    reference = {
        depth: _accepted(kept, f"{each.name}, {depth} layers") for depth in (FEW, MORE, SHAPES[each.model].layers)
    }
    return [
        f"### {each.name}",
        f"{known[0].weights / 1e9:.2f} GB of weights per device. {_each_layer(reference)}{_depth(each, kept)}",
        markdown_table(["cache", "slots", *headings], rows),
    ]


def _depth(each: Deployment, kept: dict[str, Any]) -> str:
    if _accepted(kept, f"{each.name}, {SHAPES[each.model].layers} layers"):
        return ""
    return f" The whole model was not compiled: the growth of temporary memory is that from {FEW} to {MORE} layers."


def _cells(found: Fit | None) -> list[Any]:
    if found is None:
        return [None, None, None]
    about = "" if found.compiled else "≈ "
    return [f"{found.row / 1e6:,.1f}", f"{about}{found.temporary / 1e6:,.0f}", f"{about}{found.rows:,}"]


def _each_layer(reference: dict[int, Any]) -> str:
    # From the deepest, because the compiler's work around the layers varies.
    counts = {depth: row["collectives"] for depth, row in reference.items() if row is not None}
    if len(counts) < 2:
        return ""
    least, most = min(counts), max(counts)
    kinds = {kind: round((count - counts[least].get(kind, 0)) / (most - least)) for kind, count in counts[most].items()}
    return f"Collectives per layer under `h2o`: {', '.join(f'{n} {kind}' for kind, n in kinds.items() if n) or 'none'}."


def _whole(kept: dict[str, Any]) -> list[str]:
    variant, context = REFERENCE
    rows = []
    for each in DEPLOYMENTS:
        layers = SHAPES[each.model].layers
        few, more, whole = (_accepted(kept, f"{each.name}, {depth} layers") for depth in (FEW, MORE, layers))
        if few is None or more is None or whole is None:
            continue
        cells: list[Any] = [each.name]
        for name in ("weight_bytes", "cache_bytes", "temporary_bytes"):
            guessed = few[name] + (layers - FEW) * (more[name] - few[name]) / (MORE - FEW)
            cells += [f"{guessed / 1e6:,.1f}", f"{whole[name] / 1e6:,.1f}"]
        kinds = ", ".join(f"{count} {kind}" for kind, count in whole["collectives"].items())
        rows.append([*cells, kinds])
    if not rows:
        return []
    headings = [f"{what}, {how}" for what in ("weights", "caches", "temporary") for how in ("extrapolated", "whole")]
    return [
        f"Steps of {variant.policy} at {variant.budget:.0%} of {context} tokens, {ROWS} rows, compiled with all layers "
        f"and extrapolated from {FEW} and {MORE} layers; MB per device.",
        markdown_table(["deployment", *headings, "collectives per step"], rows),
    ]


def _prompt_table(kept: dict[str, Any]) -> list[str]:
    rows = []
    for each in DEPLOYMENTS:
        found = [kept.get(f"{each.name}, prompt of {context}") for context in CONTEXTS]
        if any(found):
            sizes = [_prompt_cell(it) for it in found]
            rows.append([each.name, *sizes])
    if not rows:
        return []
    return [
        "A prompt is read layer by layer, by programs that all layers share, so these numbers hold for whole models: "
        "MB of the largest program beside the weights, for one row under `h2o` at 25%, including hidden states and the "
        "slots of its layer. Every device holds all hidden states; `prefill_chunk` makes them smaller.",
        markdown_table(["deployment", *(f"{context // 1024}k" for context in CONTEXTS)], rows),
    ]


def _prompt_cell(found: dict[str, Any] | None) -> str | None:
    if found is None:
        return None
    return "too large" if "refused" in found else f"{(found['cache_bytes'] + found['temporary_bytes']) / 1e6:,.0f}"


COUNTS = (4, 8, 16, 32, 64, 128, 256)


def _weights() -> str:
    rounded: tuple[Literal["int8"] | None, ...] = (None, "int8")
    rows = [
        [name, weights or "bfloat16", *(f"{_spread_bytes(name, weights, count) / 1e9:.2f}" for count in COUNTS)]
        for name in ("llama_70b", "llama_405b")
        for weights in rounded
    ]
    return markdown_table(["model", "weights", *(f"{count} devices" for count in COUNTS)], rows)


def _floor() -> str:
    few, most = (_spread_bytes("llama_405b", None, count) for count in (8, COUNTS[-1]))
    return (
        f"llama_405b in bfloat16 takes {few / 1e9:.1f} GB on each of 8 devices, more than an H100 has, so there it is "
        f"in int8. On {COUNTS[-1]} devices it takes {most / 1e9:.1f} GB."
    )


def _spread_bytes(name: str, weights: Literal["int8"] | None, devices: int) -> int:
    """Return the bytes of the weights on one of several devices along `model`."""
    config = SHAPES[name]
    heads = math.gcd(config.kv_heads, devices)
    mesh: Any = AbstractMesh((1, heads, devices // heads), (SHARED_ROWS, HEADS, SLOTS))

    def of_layers(layers: int) -> int:
        shapes = weight_shapes(dataclasses.replace(config, layers=layers), "bfloat16")
        shapes = shapes if weights is None else rounded_shapes(shapes)

        def of_device(leaf: Any, spec: PartitionSpec) -> int:
            return math.prod(NamedSharding(mesh, spec).shard_shape(leaf.shape)) * leaf.dtype.itemsize

        return sum(jax.tree.leaves(jax.tree.map(of_device, shapes, weight_specs(shapes, config, mesh))))

    return of_layers(1) + (config.layers - 1) * (of_layers(2) - of_layers(1))


def run(options: argparse.Namespace) -> None:
    """Compile the missing results, and write `scale.md`.

    Raises:
        ValueError: there is no such chip or part, or no compiler for the chip.
    """
    chips, parts, contexts = (each.split(",") for each in (options.chips, options.parts, options.contexts))
    texts = [str(context) for context in CONTEXTS]
    for given, known, what in ((chips, MEMORY, "chip"), (parts, PARTS, "part"), (contexts, texts, "context")):
        for name in given:
            if name not in known:
                raise ValueError(f"there is no {what} {name!r}; choose of {', '.join(known)}.")
    directory = options.out / "scale"
    try:
        if not options.page:
            for chip in chips:
                devices_of(chip, 1)
            measure([each for each in DEPLOYMENTS if each.chip in chips], parts, list(map(int, contexts)), directory)
    finally:
        write_text(options.out / "scale.md", page(measured(directory)))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = Parser(prog="kvjax bench deployments", description=__doc__)
    options.add_argument("--chips", default=",".join(MEMORY), help="whose compilers are installed here, with commas")
    options.add_argument("--parts", default=",".join(PARTS), help="what to compile, with commas")
    options.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="tokens of texts, with commas")
    options.add_argument("--page", action="store_true", help="compile nothing: write the page of what is on disk")
    options.add_argument("--out", type=output_directory, default="docs/results", help="where scale.md and its rows are")
    return finish("bench deployments", lambda: run(options.parse_args(argv)))
