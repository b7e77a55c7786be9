"""What kvjax is raced against."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path

import numpy as np
from jaxtyping import Int

from kvjax.evaluate.speed import Contender
from kvjax.model import Model
from kvjax.models.saving import write_checkpoint


def transformers_decoder(model: Model, tokens: Int[np.ndarray, "b n"], steps: int) -> Contender:
    """Greedy generation by transformers with the same weights, without the time it needs for the prompt.

    Raises:
        ValueError: torch is not installed, or a model that was not loaded from a directory is no plain Llama.
    """
    try:
        import torch
    except ImportError:
        raise ValueError("--against transformers needs torch; install it with: pip install 'kvjax[parity]'.") from None
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as written:
        if model.directory is None:
            write_checkpoint(model.weights, model.config, Path(written))
        peer = AutoModelForCausalLM.from_pretrained(model.directory or written, dtype=torch.float32)
    ids = torch.tensor(tokens)
    with torch.inference_mode():
        first = peer(ids[:, :-1], use_cache=True)

    def run() -> None:
        with torch.inference_mode():
            cache, token = copy.deepcopy(first.past_key_values), ids[:, -1:]
            began = time.perf_counter()
            for _ in range(steps):
                out = peer(token, past_key_values=cache, use_cache=True)
                cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
            contender.seconds.append(time.perf_counter() - began)

    bytes_held = 2 * tokens.shape[1] * len(tokens) * model.config.layers * model.config.kv_heads
    contender = Contender("transformers", "full", run, bytes_held * model.config.head_width * 4)
    return contender
