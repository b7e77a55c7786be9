"""Models to benchmark: kvjax's, and the same model in transformers."""

from __future__ import annotations

import copy
import inspect
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.evaluation.bench.race import Contender
from kvjax.model import Model, load
from kvjax.models import ModelConfig, Rope, random_weights
from kvjax.models.checkpoints.saving import write_checkpoint
from kvjax.models.sharding import parse_mesh, weight_shardings

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
        made, devices = random_weights(SYNTHETIC, jax.random.key(0), jnp.dtype(dtype)), None
        if mesh is not None:
            devices = parse_mesh(mesh)
            made = jax.device_put(made, weight_shardings(SYNTHETIC, devices))
        return Model(made, SYNTHETIC, name, mesh=devices)
    return load(name, dtype, revision, weights, mesh)


def transformers_model(model: Model) -> Any:
    """Return the model of transformers with the same weights."""
    try:
        import torch
    except ImportError:
        raise ValueError("--against transformers needs torch; install it with: pip install 'kvjax[parity]'.") from None
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as written:
        if model.directory is None:
            write_checkpoint(model.weights, model.config, Path(written))
        return AutoModelForCausalLM.from_pretrained(model.directory or written, dtype=torch.float32)


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
    held = 2 * tokens.size * config.layers * config.kv_heads * config.head_width * 4
    return Contender("transformers", "full", lambda: None, held, seconds=seconds[1:])
