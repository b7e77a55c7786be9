"""transformers' side of `cpu.py`: loads a checkpoint, and reads a prompt and writes tokens for each line of input."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Serve rounds: print one line of JSON for each line of standard input."""
    directory, new_tokens = sys.argv[1], int(sys.argv[3])
    prompt = torch.tensor([json.loads(Path(sys.argv[2]).read_text())])
    torch.set_num_threads(int(sys.argv[4]))
    print("{}", flush=True)  # here the other process looks how much memory is held before loading
    input()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    print("{}", flush=True)  # ready
    for _ in sys.stdin:
        began = time.perf_counter()
        with torch.inference_mode():
            out = model(prompt, use_cache=True, logits_to_keep=1)
            read = time.perf_counter()
            for _ in range(new_tokens):
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
        print(json.dumps(dict(prompt=read - began, token=(time.perf_counter() - read) / new_tokens)), flush=True)


if __name__ == "__main__":
    main()
