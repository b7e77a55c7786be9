"""Benchmarks of the speed and memory of policies, which are timed in turn: `kvjax bench`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key
from rich.console import Console
from rich.table import Table

from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder
from kvjax.inference.extend import lower_prefill, prefill
from kvjax.inference.sharding import placed_shapes
from kvjax.inference.state import State, cache_bytes, slot_limits
from kvjax.methods.registry import name_of
from kvjax.model import Model, load
from kvjax.models import ModelConfig, Rope, random_weights
from kvjax.models.checkpoints.saving import write_checkpoint
from kvjax.models.linear import code_dtype, unsigned
from kvjax.models.sharding import parse_mesh, program_mesh, weight_shardings, weight_specs
from kvjax.models.weights import rounded_shapes, weight_shapes
from kvjax.policies.policy import Policy
from kvjax.utils.compilation import temporary_bytes
from pallas_kernels.common import platform_of

Carry = tuple[Cache, Int[Array, " b"]]

SYNTHETIC = ModelConfig(
    vocab_size=4096,
    width=1024,
    layers=8,
    heads=16,
    kv_heads=4,
    head_width=64,
    mlp_width=2816,
    max_positions=32768,
    rope=Rope(width=64),
)
LLAMA_7B = ModelConfig(
    vocab_size=32000,
    width=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_width=128,
    mlp_width=11008,
    max_positions=4096,
    rope=Rope(width=128),
)

TOY = dataclasses.replace(
    LLAMA_7B,
    vocab_size=512,
    width=256,
    layers=2,
    heads=4,
    kv_heads=4,
    head_width=64,
    mlp_width=704,
    rope=Rope(width=64),
)

SHAPES = {"toy": TOY, "synthetic": SYNTHETIC, "llama_7b": LLAMA_7B}
"""Shapes that `kvjax bench kernels --step-model` names."""


@dataclasses.dataclass
class Contender:
    """Benchmarked program: one row of the table."""

    name: str
    budget: str
    run: Callable[[], Any]
    cache_bytes: int | None = None
    slots: float | None = None
    """Mean slots of a head over rows, layers and heads."""
    temporary_bytes: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of the median run."""
        return statistics.median(self.seconds)


def race(contenders: list[Contender], repeats: int) -> None:
    """Time all programs in turn, so that noise affects them equally, after one warm-up run each."""
    for contender in contenders:
        contender.run()
    for _ in range(repeats):
        for contender in contenders:
            began = time.perf_counter()
            contender.run()
            contender.seconds.append(time.perf_counter() - began)


def decoder(
    model: Model, name: str | Policy, budget: int | float, tokens: np.ndarray, steps: int, **reading: Any
) -> Contender:
    """Return a benchmark of greedy decode steps in one program, after a prompt; `reading` is of `kvjax.prefill`."""
    state, logits = prefill(model, name, tokens, budget, max_new_tokens=steps, **reading)

    @jax.jit
    def run(decoder: Decoder, cache: Cache, token: Int[Array, " b"]) -> Carry:
        def one(carry: Carry, _: None) -> tuple[Carry, None]:
            cache, logits = decoder.step(*carry)
            return (cache, jnp.argmax(logits, -1).astype(jnp.int32)), None

        return jax.lax.scan(one, (cache, token), None, length=steps)[0]

    token = jnp.argmax(logits, -1).astype(jnp.int32)
    return _contender(state, budget, lambda: jax.block_until_ready(run(state.decoder, state.cache, token)))


def reader(model: Model, name: str | Policy, budget: int | float, tokens: np.ndarray) -> Contender:
    """Return a benchmark of a prefill, with the temporary memory that the compiler reports."""

    def run() -> tuple[Any, Float[Array, "b vocab"]]:
        state, logits = prefill(model, name, tokens, budget, max_new_tokens=64)
        return jax.block_until_ready((state.cache.memory, logits))

    temporary = temporary_bytes(lower_prefill(model, name, tokens, budget, max_new_tokens=64))
    state, _ = prefill(model, name, tokens, budget, max_new_tokens=64)
    return _contender(state, budget, run, temporary)


def _contender(
    state: State, budget: int | float, run: Callable[[], Any], temporary_bytes: int | None = None
) -> Contender:
    slots = float(np.mean(slot_limits(state)))
    return Contender(name_of(state.policy), str(budget), run, cache_bytes(state), slots, temporary_bytes)


def time_transformers(
    peer: Any, model: Model, tokens: Int[np.ndarray, "b n"], steps: int | None, repeats: int
) -> Contender:
    """Time greedy decode steps after a prompt, or the prompt, of which only the last logits are computed."""
    import torch
    from transformers import DynamicCache

    # transformers has called this argument `cache` since 5.24.
    name = "cache" if "cache" in inspect.signature(peer.forward).parameters else "past_key_values"
    ids, seconds, first = torch.tensor(tokens), list[float](), DynamicCache(config=peer.config)
    with torch.inference_mode():
        if steps is not None:
            peer(ids[:, :-1], **{name: first})
        for _ in range(repeats + 1):
            cache, token = copy.deepcopy(first), ids[:, -1:]
            began = time.perf_counter()
            if steps is None:
                peer(ids, logits_to_keep=1, **{name: cache})
            for _ in range(steps or 0):
                token = peer(token, **{name: cache}).logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - began)
    config = model.config
    size = 2 * tokens.size * config.layers * config.kv_heads * config.head_width * 4
    return Contender("transformers", "full", lambda: None, size, seconds=seconds[1:])


def print_timings(contenders: list[Contender], tokens: int, title: str) -> list[dict[str, Any]]:
    """Print and return the medians, with ratios to the first row and to `streaming` at the same budget."""
    shown = Table(title=title)
    for heading in ("policy", "budget", "ms", "tokens/s", "cache MB", "temporary MB", "time / first", "/ streaming"):
        shown.add_column(heading, justify="left" if heading == "policy" else "right")
    rows = []
    streaming = {c.budget: c.median for c in contenders if c.name == "streaming"}
    for c in contenders:
        to_streaming = c.median / streaming[c.budget] if c.budget in streaming else None
        row = dict(
            policy=c.name,
            budget=c.budget,
            milliseconds=1e3 * c.median,
            tokens_per_second=tokens / c.median,
            cache_bytes=c.cache_bytes,
            temporary_bytes=c.temporary_bytes,
            time_over_first=c.median / contenders[0].median,
            time_over_streaming=to_streaming,
        )
        rows.append(row)
        megabytes = ["" if x is None else f"{x / 1e6:.1f}" for x in (c.cache_bytes, c.temporary_bytes)]
        last = "" if to_streaming is None else f"{to_streaming:.2f}"
        shown.add_row(
            c.name, c.budget, f"{1e3 * c.median:.1f}", f"{tokens / c.median:,.0f}", *megabytes,
            f"{row['time_over_first']:.2f}", last,
        )  # fmt: skip
    Console(width=110).print(shown)
    return rows


def model_named(
    name: str,
    dtype: str,
    revision: str | None = None,
    weights: Literal["int8", "auto"] | None = None,
    mesh: str | None = None,
) -> Model:
    """Load a model, or make `synthetic`: 8 layers of width 1024 with four query heads per KV head."""
    if name == "synthetic":
        if revision is not None or weights is not None:
            raise ValueError("--revision and --weights apply to loaded models, not to synthetic; leave them out.")
        arrays, devices = random_weights(SYNTHETIC, jax.random.key(0), jnp.dtype(dtype)), None
        if mesh is not None:
            devices = parse_mesh(mesh)
            arrays = jax.device_put(arrays, weight_shardings(SYNTHETIC, devices))
        return Model(arrays, SYNTHETIC, name, mesh=devices)
    return load(name, dtype, revision, weights, mesh)


def transformers_model(model: Model) -> Any:
    """Return the model of transformers with the same weights."""
    try:
        import torch
    except ImportError:
        raise ValueError("--against transformers needs torch; install it with: pip install 'kvjax[parity]'.") from None
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        if model.directory is None:
            write_checkpoint(model.weights, model.config, Path(directory))
        return AutoModelForCausalLM.from_pretrained(model.directory or directory, dtype=torch.float32)


def shaped_model(config: ModelConfig, dtype: DTypeLike, weights: Literal["int8"] | None, mesh: Mesh | None) -> Model:
    """Return a model whose weights are only shapes and shardings, to compile programs without running them."""
    shapes = weight_shapes(config, dtype)
    shapes = rounded_shapes(shapes) if weights == "int8" else shapes
    devices = None if mesh is None else program_mesh(config, mesh)
    shapes = placed_shapes(weight_specs(shapes, config, devices), shapes, devices)
    return Model(shapes, config, f"{config.layers} layers of width {config.width}", mesh=mesh)


def random_model(
    config: ModelConfig, dtype: str, weights: Literal["int8"] | None = None, mesh: Mesh | None = None
) -> Model:
    """Return a model with random weights, drawn on the devices because drawing billions on the host takes minutes."""
    shaped = shaped_model(config, dtype, weights, mesh)

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: Key[Array, ""], leaf: jax.ShapeDtypeStruct) -> Array:
        if leaf.dtype == jnp.int8:
            values = jax.random.randint(key, leaf.shape, -127, 128, jnp.int8)
            values = values if code_dtype(platform_of(None)) == jnp.int8 else unsigned(values)
        elif len(leaf.shape) > 1:
            values = jax.random.normal(key, leaf.shape, leaf.dtype) / math.sqrt(leaf.shape[-1])
        else:
            values = jnp.full(leaf.shape, 1.0 / config.width if leaf.dtype != dtype else 1.0, leaf.dtype)
        return values if leaf.sharding is None else jax.lax.with_sharding_constraint(values, leaf.sharding)

    leaves, tree = jax.tree.flatten(shaped.weights)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [draw(key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
    return Model(jax.tree.unflatten(tree, arrays), config, shaped.name, mesh=mesh)
