"""Other libraries that kvjax is benchmarked against."""

from __future__ import annotations

import copy
import inspect
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.evaluation.bench.race import Contender
from kvjax.model import Model
from kvjax.models.checkpoints.saving import write_checkpoint


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
