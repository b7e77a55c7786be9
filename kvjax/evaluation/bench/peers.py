"""Other libraries that kvjax is benchmarked against."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.evaluation.bench.race import Contender
from kvjax.model import Model
from kvjax.models.checkpoints.saving import write_checkpoint


def transformers_decoder(model: Model, tokens: Int[np.ndarray, "b n"], steps: int) -> Contender:
    """Return a benchmark of greedy generation by transformers with the same weights, without the time of the prompt.

    Raises:
        ValueError: torch is not installed, or the model was not loaded from a directory and is not a plain Llama.
    """
    peer = _peer(model)
    import torch

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

    contender = Contender("transformers", "full", run, _bytes_held(model, tokens))
    return contender


def transformers_reader(model: Model, tokens: Int[np.ndarray, "b n"]) -> Contender:
    """Return a benchmark of a prefill by transformers with the same weights, which computes only the last logits.

    Raises:
        ValueError: in the cases of `transformers_decoder`.
    """
    peer = _peer(model)
    import torch

    ids = torch.tensor(tokens)

    def run() -> None:
        with torch.inference_mode():
            began = time.perf_counter()
            peer(ids, use_cache=True, logits_to_keep=1)
            contender.seconds.append(time.perf_counter() - began)

    contender = Contender("transformers", "full", run, _bytes_held(model, tokens))
    return contender


def _peer(model: Model) -> Any:
    try:
        import torch
    except ImportError:
        raise ValueError("--against transformers needs torch; install it with: pip install 'kvjax[parity]'.") from None
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as written:
        if model.directory is None:
            write_checkpoint(model.weights, model.config, Path(written))
        return AutoModelForCausalLM.from_pretrained(model.directory or written, dtype=torch.float32)


def _bytes_held(model: Model, tokens: Int[np.ndarray, "b n"]) -> int:
    config = model.config
    return 2 * tokens.size * config.layers * config.kv_heads * config.head_width * 4
