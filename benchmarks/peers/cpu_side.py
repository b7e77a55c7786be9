"""kvjax's side of `cpu.py`: loads a GGUF file, and reads a prompt and writes tokens for each line of input."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

import kvjax
from kvjax.evaluation.bench import decoder
from kvjax.utils.settings import parse_budget


def main() -> None:
    """Serve rounds: print one line of JSON for each line of standard input."""
    file, prompt, steps, policy, weights, slots, chunk = sys.argv[1:]
    jax.devices()
    tokens, new_tokens, budget = np.array([json.loads(Path(prompt).read_text())]), int(steps), parse_budget(slots)
    print("{}", flush=True)  # here the other process looks how much memory is held before loading
    input()
    model = kvjax.load(file, weights="int8" if weights == "int8" else None)
    read = int(chunk) if chunk else None
    contender = decoder(model, policy, budget, tokens, new_tokens, prefill_chunk=read)
    contender.run()
    print("{}", flush=True)  # ready
    for _ in sys.stdin:
        began = time.perf_counter()
        made = kvjax.prefill(model, policy, tokens, budget, max_new_tokens=new_tokens, prefill_chunk=read)
        jax.block_until_ready(made[1])
        del made
        done = time.perf_counter()
        contender.run()
        print(json.dumps(dict(prompt=done - began, token=(time.perf_counter() - done) / new_tokens)), flush=True)


if __name__ == "__main__":
    main()
