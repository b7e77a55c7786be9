"""llama.cpp's side of `cpu.py`: loads a GGUF file, and reads a prompt and writes tokens for each line of input.

It runs in an environment with xllamacpp and without kvjax.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import xllamacpp


def main() -> None:
    """Serve rounds: print one line of JSON for each line of standard input."""
    file, new_tokens, threads = sys.argv[1], int(sys.argv[3]), int(sys.argv[4])
    prompt = json.loads(Path(sys.argv[2]).read_text())
    print("{}", flush=True)  # here the other process looks how much memory is held before loading
    input()
    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_parallel, settings.verbosity = len(prompt) + new_tokens + 64, 1, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    asked = dict(prompt=prompt, n_predict=new_tokens, temperature=0, cache_prompt=False, ignore_eos=True)
    print("{}", flush=True)  # ready
    for _ in sys.stdin:
        answer = server.handle_completions(asked)
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        row = dict(prompt=timings["prompt_ms"] / 1e3, token=timings["predicted_ms"] / 1e3 / timings["predicted_n"])
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
